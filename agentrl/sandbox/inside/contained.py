"""The supervisor as a container's entry point: the engine provides the isolation, and this process is PID 1 in
it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from typing import Any

from . import child, frames, keeper, kernel, supervisor, tree  # keeper imports sessions

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
    """Entry point: `text` is the order as JSON; the link is the door it names, or stdin and stdout."""
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
    with contextlib.suppress(OSError):  # without Landlock, a program can lower its OOM score below that of PID 1
        kernel.write_only_below([home, tmp, "/dev", *order["writable"]])  # not in /proc
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    alone = bool(order["own_kernel"])  # gVisor: shared memory is not counted, and PID 1 can be killed
    kernel.install_seccomp(kernel.seccomp_filter(network=True, shared_memory=not alone, mortal_init=alone))
    meter = tree.Meter(order["memory_mb"], _open_first(OOM_FILES), _open_first(USAGE_FILES), home)
    return child.Confinement(
        home=home, env=env, limits=order["rlimits"], oom_fd=oom_fd, site=keeper.site_paths() + order["python_path"]
    ), meter


def _link(door: str) -> tuple[int, int]:
    """Return the descriptors for reading orders and for answering."""
    if door:
        with socket.socket(socket.AF_UNIX) as caller, contextlib.suppress(OSError):
            caller.connect(door)  # an engine may mount the socket but block connections
            link = _above(caller.fileno())
            return link, link
    return _above(0), _above(1)


def _above(fd: int) -> int:
    """Return a copy of a descriptor, numbered above 3."""
    import fcntl

    assert sys.platform == "linux"
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
