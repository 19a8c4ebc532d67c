"""Programs that try to get out, get at others, or take more than their share.

Each says STARTED first (so that a program which never ran is not taken for one that was stopped), then tries, and
says ESCAPED where it succeeds. The box must work afterwards.
"""

from __future__ import annotations

import secrets
import textwrap
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from agentrl.sandbox import Box, ExecResult
from agentrl.testing.sandbox_suite.stage import Check, Stage, expect

PRELUDE = """
import ctypes, errno, json, mmap, os, resource, signal, socket, subprocess, sys, threading, time
order = json.loads(sys.stdin.read())
libc = ctypes.CDLL(None, use_errno=True)
ARM = os.uname().machine == "aarch64"
def escaped(what=""):
    print("ESCAPED", what, flush=True)
def syscall(x86, arm, *args):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(arm if ARM else x86), *[ctypes.c_long(a) for a in args])
    return result, ctypes.get_errno()
def attempt(action, what=""):
    try:
        result = action()
    except (OSError, ValueError, MemoryError) as error:
        print("stopped:", type(error).__name__, error, flush=True)
        return None
    escaped(what or result)
def contains_secret(path):
    with open(path, "rb") as f:
        data = f.read(1 << 16)
    if order["secret"].encode() not in data:
        raise ValueError("not there")
    return path
def connect(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.settimeout(2)
        s.connect(address)
    return address
print("STARTED", flush=True)
"""

After = Callable[[Stage, Box, ExecResult, str], Awaitable[None]]


@dataclass(frozen=True)
class Hostile:
    """One program: its text, the promise it attacks, and what to look at afterwards."""

    name: str
    promise: str | None
    code: str
    after: After | None = None
    wall_s: float = 3.0
    escapes_outside: bool = False
    """Run without a sandbox (as an ordinary program of this user) it succeeds, and harms nothing."""


async def _victim_lives(stage: Stage, box: Box, result: ExecResult, token: str) -> None:
    expect(stage.victim.poll() is None, "the process outside has been killed")


async def _no_token(stage: Stage, box: Box, result: ExecResult, token: str) -> None:
    await stage.nothing_left(token)


async def _timed_out(stage: Stage, box: Box, result: ExecResult, token: str) -> None:
    expect(result.outcome == "timeout", f"outcome {result.outcome}, not timeout")
    # Half a second is the promise; the other half is for a machine whose cores are all taken by others.
    expect(result.wall_s <= 1.5 + 1.0, f"ended after {result.wall_s:.2f} s of 1.5")
    await stage.nothing_left(token)


async def _quick(stage: Stage, box: Box, result: ExecResult, token: str) -> None:
    expect(result.outcome == "exit", f"outcome {result.outcome}")
    expect(result.wall_s < 1.5, f"the call took {result.wall_s:.2f} s")
    await stage.nothing_left(token)


async def _output_is_bounded(stage: Stage, box: Box, result: ExecResult, token: str) -> None:
    expect(result.outcome == "exit", f"outcome {result.outcome}")
    expect(result.stdout_total >= 100 << 20, f"only {result.stdout_total} bytes were taken")
    expect(len(result.stdout) <= stage.spec.stdout_bytes + 64, f"{len(result.stdout)} bytes were kept")
    expect(result.truncated, "the cut is not reported")
    expect(result.stdout.startswith(b"STARTED"), "the beginning is lost")
    expect(result.stdout.endswith(b"END\n"), "the end is lost")


async def _link_leads_nowhere(stage: Stage, box: Box, result: ExecResult, token: str) -> None:
    for path in ("link", "sub/answer.txt", "root/" + stage.marker.lstrip("/")):
        try:
            data = await box.read_file(path)
        except OSError:
            continue
        expect(stage.secret.encode() not in data, f"read_file({path!r}) left the sandbox")
    tree = await box.get_tree()
    expect(all(stage.secret.encode() not in data for data in tree.values()), "get_tree left the sandbox")


async def _fifo_does_not_hold(stage: Stage, box: Box, result: ExecResult, token: str) -> None:
    for operation in (box.read_file("trap"), box.write_file("trap", b"x"), box.read_file("/dev/zero")):
        try:
            await operation
        except OSError:
            continue
        raise AssertionError("a pipe or device was taken for a file")
    expect("trap" not in await box.get_tree(), "get_tree took the pipe for a file")


async def _nothing_written(stage: Stage, box: Box, result: ExecResult, token: str) -> None:
    import os

    for folder in (stage.folder, "/", "/etc", "/usr", "/usr/local", "/root", "/home", "/var/tmp"):
        path = os.path.join(folder, token)
        if os.path.lexists(path):
            os.unlink(path)
            raise AssertionError(f"{path} was written outside")


async def _truth_after_forgery(stage: Stage, box: Box, result: ExecResult, token: str) -> None:
    expect(result.exit_code == 3, f"the forged frame was believed: {result}")
    again = await box.run(["sh", "-c", "echo real; exit 7"])
    expect((again.exit_code, again.stdout) == (7, b"real\n"), f"the next call got {again}")


def _p(name: str, promise: str | None, code: str, after: After | None = None, **more: object) -> Hostile:
    return Hostile(name, promise, textwrap.dedent(code).strip() + "\n", after, **more)  # type: ignore[arg-type]


FILES = [
    _p("read_shadow", "files", 'attempt(lambda: open("/etc/shadow").read()[:9])'),
    _p("read_host_file", "files", 'attempt(lambda: contains_secret(order["marker"]))', escapes_outside=True),
    _p("read_harness_root", "files", """
        for pid in (order["harness"], order["victim"], os.getppid(), 1):
            for place in ("root", "cwd"):
                attempt(lambda: contains_secret("/proc/%d/%s%s" % (pid, place, order["marker"])))
    """, escapes_outside=True),
    _p("write_outside", "files", """
        for folder in (order["folder"], "/", "/etc", "/usr", "/usr/local", "/root", "/home", "/var/tmp"):
            try:
                open(os.path.join(folder, order["token"]), "w").close()
                print("wrote to", folder)
            except OSError as error:
                print("stopped:", error)
    """, _nothing_written, escapes_outside=True),
    _p("read_other_episode", "files", """
        import itertools
        places = [order["peer_home"], "/workspace", "/tmp", "/dev/shm"]
        for pid in [p for p in os.listdir("/proc") if p.isdigit()] if os.path.exists("/proc/self") else []:
            places += ["/proc/%s/cwd" % pid, "/proc/%s/root%s" % (pid, order["peer_home"])]
        for place in places:
            attempt(lambda: contains_secret(os.path.join(place, "peer.txt")))
    """, escapes_outside=True),
    _p("symlink_escape", None, """
        os.symlink(order["marker"], "link")
        os.symlink(order["folder"], "sub")
        os.symlink("/", "root")
    """, _link_leads_nowhere),
    _p("hardlink_escape", "files", """
        attempt(lambda: os.link(order["marker"], "hard") or contains_secret("hard"))
        attempt(lambda: os.link("/etc/passwd", "/etc/passwd2"))
    """),
    _p("fifo_trap", None, 'os.mkfifo("trap")', _fifo_does_not_hold),
    _p("swap_race", None, """
        def swap():
            while True:
                for make in (lambda: open("race", "w").close(), lambda: os.symlink(order["marker"], "race")):
                    try:
                        os.unlink("race")
                    except OSError:
                        pass
                    try:
                        make()
                    except OSError:
                        pass
        threading.Thread(target=swap, daemon=True).start()
        for _ in range(300):
            try:
                contains_secret("race")
            except (OSError, ValueError):
                pass
    """, _link_leads_nowhere),
]  # fmt: skip

SECRETS = [
    _p("env_secret", "environment", """
        for name, value in os.environ.items():
            if order["secret"] in value:
                escaped(name)
    """),
    _p("proc_environ_host", "processes", """
        for pid in (order["victim"], order["harness"]):
            attempt(lambda: contains_secret("/proc/%d/environ" % pid))
    """, escapes_outside=True),
    _p("proc_environ_all", "processes", """
        for pid in [p for p in os.listdir("/proc") if p.isdigit()] if os.path.exists("/proc/self") else []:
            if int(pid) != os.getpid():
                try:
                    contains_secret("/proc/%s/environ" % pid)
                    escaped(pid)
                except (OSError, ValueError):
                    pass
    """, escapes_outside=True),
    _p("see_host_procs", "processes", """
        def look():
            with open("/proc/%d/cmdline" % order["victim"], "rb") as f:
                if b"sleep\\x001000" not in f.read():
                    raise ValueError("somebody else")
        attempt(look)
    """, escapes_outside=True),
    _p("inherited_fd", None, """
        for fd in range(3, 4096):
            try:
                os.fstat(fd)
            except OSError:
                continue
            escaped(fd)
    """),
    _p("sysv_shm", "processes", """
        identifier = libc.shmget(order["shm_key"], 4096, 0o666)
        escaped(identifier) if identifier >= 0 else print("stopped")
    """, escapes_outside=True),
    _p("dmesg", "privileges", """
        buffer = ctypes.create_string_buffer(4096)
        escaped() if libc.klogctl(3, buffer, 4096) > 0 else print("stopped")
        attempt(lambda: os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK))
    """),
]  # fmt: skip

RESOURCES = [
    _p("fork_bomb", "pids", """
        count = 0
        try:
            while count < order["pids"] + 300:
                if os.fork() == 0:
                    time.sleep(60)
                    os._exit(0)
                count += 1
            escaped(count)
        except OSError as error:
            print("stopped after", count, error)
    """, escapes_outside=True),
    _p("thread_bomb", "pids", """
        count = 0
        try:
            while count < order["pids"] + 300:
                threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
                count += 1
            escaped(count)
        except RuntimeError as error:
            print("stopped after", count, error, flush=True)
        os._exit(0)
    """, escapes_outside=True),
    _p("memory_bomb", "memory", """
        held = []
        try:
            while len(held) < order["memory_mb"] * 2:
                held.append(bytearray(b"x" * (1 << 20)))
            escaped(len(held))
        except MemoryError:
            print("stopped at", len(held))
    """, escapes_outside=True),
    _p("memory_bomb_many", "memory", """
        each = order["memory_mb"] // 6
        reader, writer = os.pipe()
        for _ in range(20):
            if os.fork() == 0:
                try:
                    held = bytearray(each << 20)
                    held[::4096] = b"x" * (each << 8)
                except MemoryError:
                    os._exit(1)
                os.write(writer, b"%d " % os.getpid())
                time.sleep(60)
                os._exit(0)
        time.sleep(2)
        os.set_blocking(reader, False)
        try:
            holders = {int(pid) for pid in os.read(reader, 4096).split()}
        except BlockingIOError:
            holders = set()
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except OSError:
                break
            if pid == 0:
                break
            holders.discard(pid)
        escaped(holders) if len(holders) * each > order["memory_mb"] * 1.2 else print("holding:", len(holders))
    """, wall_s=6.0, escapes_outside=True),
    _p("memory_shm", "memory", """
        area = mmap.mmap(-1, order["memory_mb"] * 2 << 20)
        for begin in range(0, len(area), 1 << 20):
            area[begin:begin + (1 << 20)] = b"x" * (1 << 20)
        escaped()
    """, escapes_outside=True),
    _p("memfd", "memory", """
        descriptors = []
        def fill():
            total = 0
            while total < order["memory_mb"] * 2:
                fd = os.memfd_create("x")
                descriptors.append(fd)
                for _ in range(32):
                    os.write(fd, b"x" * (1 << 20))
                total += 32
            return total
        attempt(fill)
    """, escapes_outside=True),
    _p("memory_full_disk", "disk", """
        try:
            with open("full", "wb") as f:
                while True:
                    f.write(b"x" * (1 << 20))
        except OSError as error:
            print("disk:", error, flush=True)
        held = []
        try:
            while len(held) < order["memory_mb"] * 2:
                held.append(bytearray(b"x" * (1 << 20)))
            escaped()
        except MemoryError:
            pass
    """),
    _p("disk_fill", "disk", """
        def fill():
            with open("big", "wb") as f:
                for _ in range(order["workspace_mb"] * 2):
                    f.write(b"x" * (1 << 20))
        attempt(fill)
    """),
    _p("disk_fill_many", "disk", """
        def fill():
            for i in range(order["workspace_mb"]):
                with open(["", "/tmp/", "/dev/shm/"][i % 3] + "part%d" % i, "wb") as f:
                    f.write(b"x" * (2 << 20))
        attempt(fill)
    """),
    _p("inode_fill", "disk", """
        def fill():
            for i in range(order["inodes"] + 100):
                os.close(os.open("f%d" % i, os.O_CREAT))
        attempt(fill)
    """, wall_s=8.0),
    _p("sparse_file", None, """
        with open("sparse", "wb") as f:
            attempt(lambda: f.truncate(order["file_mb"] * 4 << 20))
    """),
    _p("zip_bomb", "disk", """
        import zlib
        packer, bomb = zlib.compressobj(9), b""
        for _ in range(order["workspace_mb"] * 2):
            bomb += packer.compress(bytes(1 << 20))
        bomb += packer.flush()
        def unpack():
            unpacker = zlib.decompressobj()
            with open("bomb", "wb") as f:
                data = bomb
                while data:
                    f.write(unpacker.decompress(data, 1 << 20))
                    data = unpacker.unconsumed_tail
        attempt(unpack)
    """),
    _p("raise_rlimit", "privileges", """
        for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE):
            _, hard = resource.getrlimit(which)
            attempt(lambda: resource.setrlimit(which, (hard * 2, hard * 2)))
    """),
    _p("output_100MB", None, """
        for _ in range(100):
            sys.stdout.write("x" * (1 << 20))
        print("END")
    """, _output_is_bounded, wall_s=10.0),
]  # fmt: skip

TIME = [
    _p("cpu_loop", None, "while True: pass", _timed_out, wall_s=1.5),
    _p("cpu_all_cores", None, """
        for _ in range(8):
            if os.fork() == 0:
                break
        while True: pass
    """, _timed_out, wall_s=1.5),
    _p("sigterm_ignored", None, """
        for number in range(1, 32):
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        while True: time.sleep(1)
    """, _timed_out, wall_s=1.5),
    _p("stopped_process", None, "os.kill(os.getpid(), signal.SIGSTOP)", _timed_out, wall_s=1.5),
    _p("timeout_grandchild", None, """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execvp("sleep", [order["token"], "100"])
            os._exit(0)
        time.sleep(100)
    """, _timed_out, wall_s=1.5),
    _p("fork_tree", None, """
        def grow(depth):
            if depth:
                for _ in range(2):
                    if os.fork() == 0:
                        os.setsid()
                        grow(depth - 1)
            time.sleep(100)
        grow(4)
    """, _timed_out, wall_s=1.5),
    _p("background_daemon", None, """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for fd in range(3):
                    os.close(fd)
                os.execvp("sleep", [order["token"], "100"])
            os._exit(0)
        os.wait()
    """, _quick),
    _p("daemon_holds_stdout", None, """
        if os.fork() == 0:
            os.setsid()
            os.execvp("sleep", [order["token"], "100"])
    """, _quick),
    _p("nohup_loop", None, """
        subprocess.Popen(["nohup", "sh", "-c", "while :; do sleep 0.1; : %s; done" % order["token"]],
                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    """, _quick),
    _p("stdin_read", None, "sys.stdin.read(); os.read(0, 10); print('read')", _quick),
    _p("closed_stdout", None, "os.close(1); os.close(2); time.sleep(0.05)", _quick),
]  # fmt: skip

OTHERS = [
    _p("kill_parent", None, """
        for pid in (1, os.getppid()):
            if pid != order["harness"] and pid > 0:
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGSTOP):
                    try:
                        os.kill(pid, number)
                    except OSError as error:
                        print("stopped:", error)
    """),
    _p("kill_host_proc", "processes", """
        try:
            os.kill(order["victim"], signal.SIGKILL)
        except OSError as error:
            print("stopped:", error)
    """, _victim_lives),
    _p("kill_everybody", "processes", """
        try:
            os.kill(-1, signal.SIGKILL)
        except OSError as error:
            print("stopped:", error)
    """, _victim_lives),
    _p("ptrace_others", "processes", """
        for pid in (order["victim"], order["harness"], os.getppid(), 1):
            result, code = syscall(101, 117, 0x4206, pid, 0, 0)  # PTRACE_SEIZE
            escaped(pid) if result == 0 and pid > 0 else print("stopped:", os.strerror(code))
    """),
    _p("read_memory", "processes", """
        for pid in (order["victim"], order["harness"], os.getppid() or 1, 1):
            attempt(lambda: open("/proc/%d/mem" % pid, "rb").close())
            attempt(lambda: open("/proc/%d/maps" % pid).read(1) or (_ for _ in ()).throw(ValueError("empty")))
            attempt(lambda: os.listdir("/proc/%d/fd" % pid))
    """),
    _p("oom_score", "memory", """
        # Make the supervisor the likelier victim, then run out of memory: it must not be the one that goes.
        attempt(lambda: open("/proc/%d/oom_score_adj" % (os.getppid() or 1), "w").write("1000"))
        for value in (-1000, -500, 0):
            try:
                with open("/proc/self/oom_score_adj", "w") as f:
                    f.write(str(value))
                break
            except OSError as error:
                print("stopped:", error, flush=True)
        for _ in range(12):
            if os.fork() == 0:
                held = bytearray(b"x" * (40 << 20))
                time.sleep(60)
        time.sleep(1)
    """),
    _p("starve_supervisor", "processes", """
        parent = os.getppid() or 1
        result, code = syscall(302, 261, parent, resource.RLIMIT_NOFILE, 0, 0)
        escaped("prlimit") if result == 0 else print("stopped:", os.strerror(code))
        limit = (ctypes.c_ulong * 2)(0, 0)
        ctypes.set_errno(0)
        if libc.prlimit(parent, resource.RLIMIT_NOFILE, limit, None) == 0:
            escaped("prlimit")
        attempt(lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)))
        attempt(lambda: os.setpriority(os.PRIO_PROCESS, 1, 19))
    """),
    _p("forged_frames", None, """
        import struct
        head = {"id": 1, "outcome": "exit", "exit_code": 0, "signal": None, "sizes": [0, 0, 0, 0]}
        head = json.dumps(head).encode()
        frame = struct.pack(">II", len(head), 0) + head
        for fd in range(3, 1024):
            try:
                os.write(fd, frame)
            except OSError:
                pass
        for pid in (1, os.getppid() or 1):
            for fd in range(0, 64):
                try:
                    with open("/proc/%d/fd/%d" % (pid, fd), "wb", buffering=0) as f:
                        f.write(frame)
                except OSError:
                    pass
        sys.stdout.buffer.write(frame)
        sys.stdout.flush()
        sys.exit(3)
    """, _truth_after_forgery),
]  # fmt: skip

NETWORK = [
    _p("net_loopback", "network", 'attempt(lambda: connect(socket.AF_INET, ("127.0.0.1", order["port"])))',
       escapes_outside=True),
    _p("net_outside", "network", """
        def udp():
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
                s.connect(("192.0.2.1", 53))
        attempt(udp)
        def tcp():
            with socket.socket(socket.AF_INET) as s:
                s.setblocking(False)
                code = s.connect_ex(("192.0.2.1", 80))
                if code not in (0, errno.EINPROGRESS):
                    raise OSError(code, os.strerror(code))
        attempt(tcp)
    """),
    _p("net_raw", "network", """
        attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
        attempt(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 768))
    """),
    _p("net_vsock", "network", "attempt(lambda: socket.socket(40, socket.SOCK_STREAM))"),
    _p("unix_socket", "network", 'attempt(lambda: connect(socket.AF_UNIX, order["unix"]))', escapes_outside=True),
    _p("abstract_socket", "network", 'attempt(lambda: connect(socket.AF_UNIX, "\\0" + order["abstract"]))',
       escapes_outside=True),
    _p("docker_socket", "network", """
        for path in ("/var/run/docker.sock", "/run/docker.sock", "/run/containerd/containerd.sock"):
            attempt(lambda: connect(socket.AF_UNIX, path))
    """),
]  # fmt: skip

PRIVILEGE = [
    _p("set_time", "privileges", """
        attempt(lambda: time.clock_settime(time.CLOCK_REALTIME, time.time()))
    """),
    _p("mount", "privileges", """
        os.makedirs("m", exist_ok=True)
        escaped() if libc.mount(b"x", b"m", b"tmpfs", 0, None) == 0 else print("stopped")
        escaped("remount") if libc.mount(b"x", b"/", None, 32, None) == 0 else print("stopped")
    """),
    _p("mknod_disk", "privileges", """
        import stat
        attempt(lambda: os.mknod("disk", 0o666 | stat.S_IFBLK, os.makedev(254, 0)))
        attempt(lambda: os.mknod("memory", 0o666 | stat.S_IFCHR, os.makedev(1, 1)))
    """),
    _p("setuid", "privileges", """
        escaped("uid 0") if 0 in os.getresuid() else None
        attempt(lambda: os.setuid(0))
        attempt(lambda: os.setresuid(0, 0, 0))
        attempt(lambda: os.setgroups([0]))
    """),
    _p("setuid_binary", "privileges", """
        libc.prctl.restype = ctypes.c_int
        escaped("no_new_privs is off") if libc.prctl(39, 0, 0, 0, 0) != 1 else print("stopped")
        for path in ("/bin/su", "/usr/bin/passwd", "/usr/bin/mount", "/usr/bin/newgrp"):
            if os.path.exists(path) and os.stat(path).st_mode & 0o4000 and not os.statvfs(path).f_flag & 2:
                print("a set-uid program is there, without effect:", path)
    """),
    _p("capabilities", "privileges", """
        class Header(ctypes.Structure):
            _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]
        data = (ctypes.c_uint32 * 6)()
        libc.capget(ctypes.byref(Header(0x20080522, 0)), data)
        escaped(list(data)) if any(data) else print("none")
        bounding = [cap for cap in range(41) if libc.prctl(23, cap, 0, 0, 0) == 1]
        if bounding and libc.prctl(39, 0, 0, 0, 0) != 1:  # without effect under no_new_privs
            escaped(bounding)
    """),
    _p("userns_caps", "syscalls", """
        escaped("unshare") if libc.unshare(0x10000000) == 0 else print("stopped")
        escaped("unshare mount") if libc.unshare(0x00020000) == 0 else print("stopped")
        result, code = syscall(56, 220, 0x10000000 | 17, 0, 0, 0, 0)
        if result == 0:
            os._exit(0)
        escaped("clone") if result > 0 else print("stopped:", os.strerror(code))
        escaped("setns") if libc.setns(0, 0) == 0 else print("stopped")
    """),
    _p("kernel_surface", "syscalls", """
        calls = {"bpf": (321, 280), "perf_event_open": (298, 241), "io_uring_setup": (425, 425),
                 "userfaultfd": (323, 282), "keyctl": (250, 219), "add_key": (248, 217), "kexec_load": (246, 104),
                 "init_module": (175, 105), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262),
                 "move_mount": (429, 429), "fsopen": (430, 430), "pidfd_getfd": (438, 438), "swapon": (167, 224),
                 "reboot": (169, 142), "acct": (163, 89), "sethostname": (170, 161)}
        for name, (x86, arm) in calls.items():
            result, code = syscall(x86, arm, 0, 0, 0, 0, 0, 0)
            if result >= 0 or code not in (errno.EPERM, errno.ENOSYS):
                escaped("%s: %d %s" % (name, result, errno.errorcode.get(code)))
    """),
    _p("x32_table", "syscalls", """
        if not ARM:
            result, code = syscall(0x40000000 + 39, 0)
            escaped() if result > 0 else print("stopped:", os.strerror(code))
    """),
    _p("proc_sys_write", "privileges", """
        for name in ("kernel/core_pattern", "kernel/hostname", "vm/drop_caches", "kernel/modprobe"):
            attempt(lambda: open("/proc/sys/" + name, "w").write("3"))
        attempt(lambda: open("/proc/sysrq-trigger", "w").write("h"))
    """),
    _p("tty_inject", None, """
        import fcntl
        for path in ("/dev/tty", "/dev/console", "/dev/pts/0"):
            attempt(lambda: fcntl.ioctl(os.open(path, os.O_RDWR), 0x5412, b"x"))
        attempt(lambda: fcntl.ioctl(0, 0x5412, b"x"))
    """),
    _p("devices", "privileges", """
        for name in ("mem", "kmem", "port", "vda", "sda", "kvm", "fuse", "loop-control", "mapper/control"):
            attempt(lambda: os.open("/dev/" + name, os.O_RDWR))
    """),
]  # fmt: skip

PROGRAMS = [*FILES, *SECRETS, *RESOURCES, *TIME, *OTHERS, *NETWORK, *PRIVILEGE]


async def play(stage: Stage, program: Hostile) -> ExecResult:
    """Run one program in a fresh box, look at what it did, and see that the box still works."""
    token = "agentrl-" + secrets.token_hex(8)
    async with stage.box() as box, stage.box() as peer:
        await peer.write_file("peer.txt", stage.secret)
        order = stage.order(token=token, peer_home=peer.home)
        result = await box.python(PRELUDE + program.code, stdin=order, wall_s=program.wall_s)
        expect(b"STARTED" in result.stdout, f"did not start: {result}")
        expect(b"ESCAPED" not in result.stdout, f"{program.name}: {result.text()[-800:]}")
        if program.after is not None:
            await program.after(stage, box, result, token)
        again = await box.python("print(6 * 7)")
        expect((again.outcome, again.stdout) == ("exit", b"42\n"), f"the box is not usable afterwards: {again}")
    return result


def checks() -> list[Check]:
    """One check a program."""

    def make(program: Hostile) -> Check:
        async def run(stage: Stage) -> None:
            await play(stage, program)

        return Check(f"hostile_{program.name}", "hostile", run, program.promise, isolating=program not in TIME)

    return [make(program) for program in PROGRAMS]
