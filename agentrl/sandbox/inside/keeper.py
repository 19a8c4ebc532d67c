"""The keeper: a small separate process that forks sandboxes for the main program and cleans up after them.

Forking here instead of in the main program is much cheaper (a large process is slow to fork and may have threads),
shares the interpreter's memory among all sandboxes, and keeps a process alive to clean up if the main program is
killed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pwd
import select
import signal
import socket
import sys
import time
from typing import Any, NoReturn

from . import cgroups, child, frames, jail, kernel, leftovers, sessions, supervisor, tree

SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/alternatives", "/etc/ld.so.cache",
    "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/mime.types", "/etc/services", "/etc/protocols", "/etc/ssl/certs",
)  # fmt: skip
"""The parts of the host that a sandbox sees by default: programs and libraries, but no user data."""

MANY = 1 << 15
"""Processes of a user whose sandboxes are limited by their control groups."""
UID_BASE, UIDS = 0x40000000, 4096
"""The first user id for sandboxes, and how many each keeper has."""
PRELOADED = (sessions,)
"""Modules that children use; loaded here once."""


def site_paths() -> list[str]:
    """Where programs find modules: the standard library and the interpreter's installed packages."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    paths = [path for path in sys.path if path]
    for place in (f"{sys.base_prefix}/lib/{version}/site-packages", "/usr/lib/python3/dist-packages"):
        if os.path.isdir(place) and place not in paths and (sys.base_prefix == "/usr" or "dist" not in place):
            paths.append(place)
    return paths


def interpreter_paths() -> list[str]:
    """Where the interpreter is installed. If that is a home directory or its `.local`, where user data is as well,
    only its programs and libraries."""
    prefix = sys.base_prefix
    real = os.path.realpath(prefix)
    homes = []
    for uid in (os.stat(real).st_uid, os.getuid()):
        with contextlib.suppress(KeyError):
            homes.append(os.path.realpath(pwd.getpwuid(uid).pw_dir))
    if not any(real == f"{home}/.local" or os.path.commonpath([real, home]) == real for home in homes):
        return [prefix]
    places = (os.path.join(prefix, name) for name in ("bin", "include", "lib", "lib64"))
    return [place for place in places if os.path.lexists(place)]


def base_env(home: str, tmp: str, extra: dict[str, str]) -> dict[str, str]:
    """The complete environment of a program: nothing is inherited from the host."""
    path = "/usr/local/bin:/usr/bin:/bin"
    if sys.base_prefix != "/usr":
        path = f"{sys.base_prefix}/bin:{path}"
    return {
        "PATH": path, "HOME": home, "TMPDIR": tmp, "USER": "agent", "LOGNAME": "agent", "SHELL": "/bin/bash",
        "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "TZ": "UTC", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUTF8": "1", "TERM": "dumb", **extra,
    }  # fmt: skip


class KeptBox:
    """What the keeper knows about one sandbox."""

    def __init__(
        self, name: str, pid: int, uid: int, group: cgroups.ControlGroup | None, folder: str | None
    ) -> None:
        self.name, self.pid, self.uid, self.group, self.folder = name, pid, uid, group, folder
        self.ungrouped_kills = cgroups.KillCount() if group is None else None
        self.pidfd = os.pidfd_open(pid)


class Keeper:
    """Serve `spawn` and `kill` on a seqpacket socket until it closes or the parent is gone."""

    def __init__(self, control: socket.socket, parent: int) -> None:
        self.control = control
        self.parent_fd = os.pidfd_open(parent)
        self.privileged = os.geteuid() == 0
        self.groups = cgroups.Groups()
        self.interpreter = interpreter_paths()
        self.boxes: dict[int, KeptBox] = {}
        self.garbage: list[cgroups.ControlGroup] = []
        self.cleaners: dict[int, tuple[int, dict[str, Any]]] = {}
        """Processes that delete the folders of ended sandboxes, by pidfd: their ids, and what to report then."""
        self.count = 0
        self.folder: str | None = None
        self.poll = select.poll()
        self.poll.register(control.fileno(), select.POLLIN)
        self.poll.register(self.parent_fd, select.POLLIN)
        uid = os.geteuid()
        self.uid_base = UID_BASE + (os.getpid() % (1 << 18)) * UIDS if self.privileged else uid

    def run(self) -> None:
        """Run the event loop."""
        self.tell({"ready": True, "controllers": self.groups.controllers, "why_no_cgroup": self.groups.why_not})
        try:
            while True:
                for fd, _ in self.poll.poll(50 if self.garbage else None):
                    if fd == self.parent_fd:
                        return
                    if fd in self.boxes:
                        self.end(self.boxes[fd])
                    elif fd in self.cleaners:
                        self.cleaned(fd)
                    elif not self.receive():
                        return
                self.garbage = [group for group in self.garbage if not group.remove()]
        except (BrokenPipeError, ConnectionResetError):
            return
        finally:
            self.close()

    def tell(self, message: dict[str, Any]) -> None:
        """Send one message to the main program."""
        self.control.send(json.dumps(message).encode())

    def receive(self) -> bool:
        """Handle one order; return False when no more will come."""
        data, fds, _, _ = socket.recv_fds(self.control, 1 << 20, 2)
        if not data:
            return False
        order = json.loads(data)
        failure = None
        if order["op"] == "spawn":
            try:
                self.spawn(order, fds[0])
            except OSError as error:
                failure = {"box": order["box"], "error": str(error)}
        elif order["op"] == "kill":
            for box in self.boxes.values():
                if box.name == order["box"]:
                    signal.pidfd_send_signal(box.pidfd, signal.SIGKILL)
        for fd in fds:
            os.close(fd)
        if failure is not None:
            self.tell(failure)
        return True

    def spawn(self, order: dict[str, Any], link: int) -> None:
        """Fork a sandbox; it reports success or failure on its own link. An error here leaves nothing of it."""
        namespaced = order["mode"] == "namespace"
        order["interpreter"] = self.interpreter  # found here: a sandbox has other user ids
        group = folder = None
        with contextlib.ExitStack() as undo:
            if self.groups.controllers and order["mode"] != "process":
                group = self.groups.create(
                    order["box"],
                    memory_mb=order["memory_mb"] + order["reserve_mb"],
                    pids=order["pids"] + 2,
                    cpus=order["cpus"],
                )
                undo.callback(self.garbage.append, group)
                undo.callback(group.close)
            uid, gid = (self.free_uid(),) * 2 if self.privileged else (os.getuid(), os.getgid())
            if order["mode"] == "process":
                uid, gid = os.getuid(), os.getgid()
            if not namespaced:
                folder = os.path.join(self.run_folder(order["folders"]), order["box"])
                undo.callback(leftovers.remove_tree, folder)
                make_folder(folder, uid, gid)
            go_r, go_w = os.pipe2(os.O_CLOEXEC)
            undo.callback(os.close, go_w)
            flags = jail.namespaces(privileged=self.privileged, network=order["network"])
            try:
                pid = kernel.clone(flags) if namespaced else os.fork()
                if pid == 0:
                    become(order, link, go_r, group, folder, uid, gid)
            finally:
                os.close(go_r)
            undo.callback(os.waitpid, pid, 0)
            undo.callback(os.kill, pid, signal.SIGKILL)
            box = KeptBox(order["box"], pid, uid, group, folder)
            undo.callback(os.close, box.pidfd)
            if group is not None:
                group.add(pid)
            os.write(go_w, b".")
            undo.pop_all()
        os.close(go_w)
        self.boxes[box.pidfd] = box
        self.poll.register(box.pidfd, select.POLLIN)
        self.tell({"box": box.name, "pid": pid})

    def free_uid(self) -> int:
        """Return the next user id in rotation that no live sandbox uses.

        Raises:
            OSError: all ids are taken.
        """
        taken = {box.uid for box in self.boxes.values()}
        for _ in range(UIDS):
            self.count += 1
            uid = self.uid_base + self.count % UIDS
            if uid not in taken:
                return uid
        raise OSError(f"{UIDS} sandboxes are running: no user id is left for another one")

    def run_folder(self, place: str) -> str:
        """Return the directory of the sandboxes that have no separate file system."""
        if self.folder is None:
            folder = leftovers.run_folder(place)
            leftovers.sweep_folders(place)
            os.mkdir(folder, 0o711)
            self.folder = folder
        return self.folder

    def end(self, box: KeptBox) -> None:
        """Handle the end of a sandbox. Whatever it left behind, the keeper keeps serving the others."""
        try:
            self.bury(box)
        except (BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:
            os.write(2, f"sandbox {box.name}: could not be cleaned up: {type(error).__name__}: {error}\n".encode())
            self.tell({"box": box.name, "exit": 0, "oom_kills": 0, "at_limit": True})

    def bury(self, box: KeptBox) -> None:
        """Reap a sandbox that has ended and remove its resources."""
        _, status = os.waitpid(box.pid, 0)
        self.poll.unregister(box.pidfd)
        del self.boxes[box.pidfd]
        os.close(box.pidfd)
        others = [other.pid for other in self.boxes.values()] + [pid for pid, _ in self.cleaners.values()]
        if box.folder is not None:
            # Without a pid namespace, descendants of a killed supervisor are reparented to this process.
            tree.kill_except(others, others)
        oom_kills, at_limit = self.oom_kills(box)
        if box.group is not None:
            box.group.close()
            if not box.group.remove():
                self.garbage.append(box.group)
        report = {"box": box.name, "exit": status, "oom_kills": oom_kills, "at_limit": at_limit}
        if box.folder is not None:
            self.clean(box.folder, report)
        else:
            self.tell(report)

    def clean(self, folder: str, report: dict[str, Any]) -> None:
        """Delete a folder in another process, as it may hold millions of files, and then report."""
        try:
            pid = os.fork()
        except OSError:  # no process can be started now: the others wait
            leftovers.remove_tree(folder)
            self.tell(report)
            return
        if pid == 0:
            try:
                self.control.close()  # so that the main program notices at once when the keeper dies
                leftovers.remove_tree(folder)
            except Exception as error:
                os.write(2, f"{folder} could not be removed: {type(error).__name__}: {error}\n".encode())
            finally:
                os._exit(0)
        fd = os.pidfd_open(pid)
        self.cleaners[fd] = pid, report
        self.poll.register(fd, select.POLLIN)

    def cleaned(self, fd: int) -> None:
        """Report a sandbox whose folder has been deleted."""
        pid, report = self.cleaners.pop(fd)
        self.poll.unregister(fd)
        os.close(fd)
        os.waitpid(pid, 0)
        self.tell(report)

    def oom_kills(self, box: KeptBox) -> tuple[int, bool]:
        """Return (processes killed by the OOM killer, whether the sandbox's own limit may be the cause).

        Without a control group, the count covers everything in the keeper's own group.
        """
        if box.group is not None:
            return box.group.oom_kills()
        return box.ungrouped_kills.now() if box.ungrouped_kills is not None else 0, True

    def close(self) -> None:
        """End every sandbox and remove everything."""
        for box in self.boxes.values():
            signal.pidfd_send_signal(box.pidfd, signal.SIGKILL)
        for box in self.boxes.values():
            os.waitpid(box.pid, 0)
            if box.group is not None:
                self.garbage.append(box.group)
        tree.kill_except([], [])  # orphans of sandboxes without a pid namespace
        deadline = time.monotonic() + 5
        while self.garbage and time.monotonic() < deadline:
            self.garbage = [group for group in self.garbage if not group.remove()]
            time.sleep(0.01 if self.garbage else 0)
        self.groups.close()
        if self.folder is not None:
            leftovers.remove_tree(self.folder)


def make_folder(folder: str, uid: int, gid: int) -> None:
    """Create the directory of a sandbox."""
    os.mkdir(folder, 0o700)
    for part in ("workspace", "tmp"):
        os.mkdir(f"{folder}/{part}", 0o700)
        os.chown(f"{folder}/{part}", uid, gid)
    os.chown(folder, uid, gid)


def become(
    order: dict[str, Any],
    link: int,
    go: int,
    group: cgroups.ControlGroup | None,
    folder: str | None,
    uid: int,
    gid: int,
) -> NoReturn:
    """In the new process: build the jail, drop all privileges, supervise. Reports failures on the link."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        oom_fd, usage_fd = (group.oom_fd, group.usage_fd) if group is not None else (-1, -1)
        close_others([fd for fd in (link, go, oom_fd, usage_fd) if fd >= 0])
        if os.read(go, 1) != b".":
            os._exit(1)
        os.close(go)
        order["counted"] = group is not None
        order["pids_counted"] = group is not None and "pids" in group.places
        build = build_jail if order["mode"] == "namespace" else build_folder
        confinement, place = build(order, folder or "", uid, gid)
        meter = tree.Meter(order["memory_mb"], oom_fd, usage_fd, place)
        meter.must_watch = meter.must_watch and order["mode"] != "process"
        gc.freeze()
        server = supervisor.Supervisor(
            link, link, confinement, owns_all=order["mode"] == "namespace", meter=meter, ttl_s=order["ttl_s"]
        )
    except BaseException as error:
        frames.write_all(link, frames.pack({"hello": 0, "error": f"{type(error).__name__}: {error}"}))
        os._exit(1)
    server.run()


def close_others(keep: list[int]) -> None:
    """Close every descriptor above 3 but these."""
    last = 3
    for fd in sorted(keep):
        os.closerange(last + 1, fd)
        last = fd
    os.closerange(last + 1, 1 << 20)


def build_jail(order: dict[str, Any], folder: str, uid: int, gid: int) -> tuple[child.Confinement, str]:
    """Namespaces: a private root, no capabilities, and the system call filter on PID 1 and all its descendants."""
    privileged = os.geteuid() == 0
    inner_uid, inner_gid = uid, gid
    if not privileged:
        jail.map_user(uid, gid)
        inner_uid = inner_gid = jail.BOX_ID
    binds = [path for path in SYSTEM if os.path.lexists(path)]
    if not any(sys.base_prefix == path or sys.base_prefix.startswith(path + "/") for path in binds):
        binds += [path for path in order["interpreter"] if path not in binds]
    binds += [path for path in order["readonly"] if path not in binds]
    proc = jail.build(
        binds,
        uid=inner_uid,
        gid=inner_gid,
        disk_mb=order["workspace_mb"],
        inodes=order["inodes"],
        writable=order["writable"],
    )
    if not order["network"]:
        jail.loopback_up()
    oom_fd = os.open("self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC, dir_fd=proc)
    os.close(proc)
    kernel.drop_privileges(inner_uid, inner_gid)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if order["network"]:
        kernel.fence_abstract_sockets()
    counted = order["counted"]
    kernel.install_seccomp(kernel.seccomp_filter(network=True, shared_memory=counted))
    limits = dict(order["rlimits"])
    if not counted:
        limits["DATA"] = order["memory_mb"] << 20
    os.chdir("/workspace")
    return child.Confinement(
        home="/workspace",
        env=base_env("/workspace", "/tmp", order["env"]),
        limits=limits,
        oom_fd=oom_fd,
        site=site_paths() + order["python_path"],
    ), "/workspace"


def build_folder(order: dict[str, Any], folder: str, uid: int, gid: int) -> tuple[child.Confinement, str]:
    """No namespaces: a directory, limits, and for Landlock the filters that each child applies."""
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    home, tmp = f"{folder}/workspace", f"{folder}/tmp"
    limits = dict(order["rlimits"])
    filters, seccomp, foreign_seccomp, oom_fd, user_limit = None, b"", b"", -1, None
    env = dict(order["env"])
    if order["mode"] == "landlock":
        env.setdefault("GIT_CONFIG_NOSYSTEM", "1")  # git fails if it may not read the system's configuration
        system = (*SYSTEM, "/etc/passwd", "/etc/group", "/etc/hosts", "/etc/nsswitch.conf")
        readable = [path for path in (*system, *order["interpreter"], *order["readonly"]) if os.path.exists(path)]
        devices = [f"/dev/{name}" for name in jail.DEVICES]
        filters = (readable, [folder, *devices], order["network"])
        seccomp = kernel.seccomp_filter(network=order["network"], shared_memory=False, unix=False)
        if not order["counted"]:
            limits["DATA"] = order["memory_mb"] << 20
        if os.geteuid() != 0 and not order["pids_counted"]:
            user_limit = tree.UserLimit(limits.pop("NPROC"), os.path.dirname(folder))
        elif os.geteuid() != 0:
            limits["NPROC"] = MANY
        foreign_seccomp = kernel.shared_user_filter(own_user=os.geteuid() == 0)
        oom_fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
        kernel.drop_privileges(uid, gid)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    else:
        limits.pop("NPROC", None)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    os.chdir(home)
    return child.Confinement(
        home=home,
        env=base_env(home, tmp, env),
        limits=limits,
        oom_fd=oom_fd,
        landlock=filters,
        seccomp=seccomp,
        foreign_seccomp=foreign_seccomp,
        user_limit=user_limit,
        site=site_paths() + order["python_path"],
    ), home


def main(control_fd: int, parent: int) -> None:
    """Entry point: descriptors 0 to 3 become /dev/null; the control socket has a higher number."""
    control = os.dup(control_fd) if control_fd > 3 else control_fd
    while control <= 3:
        control = os.dup(control)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in range(4):
        os.dup2(null, fd)
    os.closerange(control + 1, 1 << 20)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setsid()
    os.umask(0o022)  # the users of sandboxes must be able to enter what this one builds for them
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    gc.collect()
    gc.freeze()
    gc.disable()
    Keeper(socket.socket(fileno=control), parent).run()
