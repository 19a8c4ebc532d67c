"""The supervisor as the entry point of a container: the engine has built the walls, we are PID 1 within them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from typing import Any

from . import child, frames, keeper, kernel, supervisor, tree  # keeper brings sessions along

OOM_FILES = ("/sys/fs/cgroup/memory/memory.oom_control", "/sys/fs/cgroup/memory.events")
USAGE_FILES = ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "/sys/fs/cgroup/memory.current")


def _open_first(paths: tuple[str, ...]) -> int:
    for path in paths:
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
    return -1


def main(text: str) -> None:
    """Entry point: `text` is the order as JSON; the link is the door that it names, or stdin and stdout."""
    order: dict[str, Any] = json.loads(text)
    link_in, link_out = _link(order["door"])
    null = os.open("/dev/null", os.O_RDWR)
    for fd in range(4):
        os.dup2(null, fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        confinement, meter = _confine(order)
        server = supervisor.Supervisor(
            link_in, link_out, confinement, owns_all=os.getpid() == 1, meter=meter, ttl_s=order["ttl_s"]
        )
    except BaseException as error:
        frames.write_all(link_out, frames.pack({"hello": 0, "error": f"{type(error).__name__}: {error}"}))
        os._exit(1)
    server.run()


def _confine(order: dict[str, Any]) -> tuple[child.Confinement, tree.Meter]:
    home, tmp = order["home"], "/tmp"
    os.umask(0o022)
    os.makedirs(home, exist_ok=True)
    os.chdir(home)
    try:
        oom_fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        oom_fd = -1
    env = keeper.base_env(home, tmp, order["env"])
    if os.environ.get("PATH"):
        env["PATH"] = os.environ["PATH"]
    kernel.drop_privileges(os.getuid(), os.getgid())
    with contextlib.suppress(OSError):  # without Landlock, a program can make itself a later victim than PID 1
        kernel.write_only_below([home, tmp, "/dev"])  # not in /proc
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    alone = bool(order["own_kernel"])  # gVisor: it counts no shared memory, and lets PID 1 be killed
    kernel.install_seccomp(kernel.seccomp_filter(network=True, shared_memory=not alone, mortal_init=alone))
    meter = tree.Meter(order["memory_mb"], _open_first(OOM_FILES), _open_first(USAGE_FILES), home)
    return child.Confinement(
        home=home,
        env=env,
        limits=order["rlimits"],
        oom_fd=oom_fd,
        site=keeper.site_paths() + order["python_path"],
    ), meter


def _link(door: str) -> tuple[int, int]:
    """Descriptors to read orders from and to answer on."""
    if door:
        with socket.socket(socket.AF_UNIX) as caller, contextlib.suppress(OSError):
            caller.connect(door)  # an engine may show the socket and let nobody through
            link = _above(caller.fileno())
            return link, link
    return _above(0), _above(1)


def _above(fd: int) -> int:
    """A copy of a descriptor above 3."""
    import fcntl

    assert sys.platform == "linux"
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
