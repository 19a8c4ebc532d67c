"""Build the root of a namespace jail and drop every privilege: the first steps of its PID 1."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

from . import kernel

BOX_ID = 1000
"""User and group id inside a jail that has a user namespace."""

DEVICES = ("null", "zero", "full", "random", "urandom")
TERMINALS = 16
"""Pseudo-terminals per jail; the kernel also limits their total."""


def namespaces(*, privileged: bool, network: bool) -> int:
    """Return the clone flags of a jail. `network` shares the host's network."""
    flags = kernel.CLONE_NEWPID | kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    if not network:
        flags |= kernel.CLONE_NEWNET
    if not privileged:
        flags |= kernel.CLONE_NEWUSER
    return flags


def map_user(uid: int, gid: int) -> None:
    """In a new user namespace, become BOX_ID, which is `uid` and `gid` outside."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{BOX_ID} {uid} 1"), ("gid_map", f"{BOX_ID} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as f:
            f.write(text)


def build(
    binds: list[str],
    *,
    uid: int,
    gid: int,
    disk_mb: int,
    inodes: int,
    writable: list[str],
    hostname: str = "sandbox",
) -> int:
    """Replace the root with a read-only tmpfs with read-only binds, one bounded disk, /proc and a few devices.

    Args:
        binds: host paths mounted read-only at the same place; links appear as links.
        uid: owner of the disk, as seen from inside.
        gid: its group.
        disk_mb: size of the single tmpfs behind /workspace, /tmp, /dev/shm and the home directory.
        inodes: maximum number of files on it.
        writable: further folders on it, by their absolute paths.

    Returns:
        A directory descriptor of /proc through which only the caller can still write to it.
    """
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    sources = [_source(path) for path in binds]
    names = [*DEVICES, *(["tty"] if os.path.exists("/dev/tty") else [])]  # opening it fails without a terminal
    devices = [(name, os.open(f"/dev/{name}", os.O_PATH | os.O_CLOEXEC)) for name in names]
    root = "/tmp"
    quiet = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("sandbox", root, "tmpfs", quiet, "mode=755,size=4m,nr_inodes=2000")
    _disk(root, uid, gid, disk_mb, inodes, writable)
    for path, link, fd in sources:  # after the disk: some may be below /tmp
        target = root + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if link is not None:
            os.symlink(link, target)
            continue
        _bind(fd, target)
        kernel.make_readonly(target)
    os.makedirs(f"{root}/dev", exist_ok=True)
    for name, fd in devices:
        _bind(fd, f"{root}/dev/{name}")
    os.mkdir(f"{root}/dev/pts")
    terminals = f"newinstance,ptmxmode=0666,mode=0620,max={TERMINALS}"
    kernel.mount("devpts", f"{root}/dev/pts", "devpts", kernel.MS_NOSUID | kernel.MS_NOEXEC, terminals)
    os.symlink("pts/ptmx", f"{root}/dev/ptmx")
    os.mkdir(f"{root}/dev/mqueue")
    kernel.mount("mqueue", f"{root}/dev/mqueue", "mqueue", quiet | kernel.MS_NOEXEC)
    for name, link in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(link, f"{root}/dev/{name}")
    os.makedirs(f"{root}/proc")
    kernel.mount("proc", f"{root}/proc", "proc", quiet | kernel.MS_NOEXEC)
    writable_proc = _lock_proc(f"{root}/proc", f"{root}/dev/null")
    _etc(root, uid, gid)
    kernel.pivot_root(root)
    kernel.mount("none", "/", None, kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | quiet)
    kernel.check(kernel.libc.sethostname(hostname.encode(), len(hostname)), "sethostname")
    return writable_proc


def loopback_up() -> None:
    """Bring up `lo` of a new network namespace, so that servers inside can be reached from inside."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        request = struct.pack("16sh14x", b"lo", 0x1 | 0x40)  # IFF_UP | IFF_RUNNING
        fcntl.ioctl(s, 0x8914, request)  # SIOCSIFFLAGS


def _source(path: str) -> tuple[str, str | None, int]:
    """Return (path, link target or None, descriptor) of something to bind."""
    if os.path.islink(path):
        return path, os.readlink(path), -1
    return path, None, os.open(path, os.O_PATH | os.O_CLOEXEC)


def _bind(fd: int, target: str) -> None:
    source = f"/proc/self/fd/{fd}"
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        with open(target, "w"):
            pass
    kernel.mount(source, target, None, kernel.MS_BIND | kernel.MS_REC)
    os.close(fd)


def _disk(root: str, uid: int, gid: int, disk_mb: int, inodes: int, writable: list[str]) -> None:
    """Mount one tmpfs behind /workspace, /tmp, /dev/shm and `writable`, so that one limit covers all of them."""
    quiet = kernel.MS_NOSUID | kernel.MS_NODEV
    disk = f"{root}/disk"
    os.mkdir(disk)
    kernel.mount("disk", disk, "tmpfs", quiet, f"mode=755,size={disk_mb}m,nr_inodes={inodes + 5 + len(writable)}")
    for name, place, mode in (
        ("workspace", "workspace", 0o755),
        ("tmp", "tmp", 0o1777),
        ("shm", "dev/shm", 0o1777),
        *((f"more{number}", path.lstrip("/"), 0o755) for number, path in enumerate(writable)),
    ):
        os.mkdir(f"{disk}/{name}")
        os.chmod(f"{disk}/{name}", mode)
        os.chown(f"{disk}/{name}", uid, gid)
        os.makedirs(f"{root}/{place}", exist_ok=True)
        kernel.mount(f"{disk}/{name}", f"{root}/{place}", None, kernel.MS_BIND)
    kernel.check(kernel.libc.umount2(disk.encode(), kernel.MNT_DETACH), "umount of the disk's first place")
    os.rmdir(disk)


def _etc(root: str, uid: int, gid: int) -> None:
    etc = f"{root}/etc"
    os.makedirs(etc, exist_ok=True)
    for name, text in (
        ("passwd", f"root:x:0:0:root:/root:/bin/sh\nagent:x:{uid}:{gid}:agent:/workspace:/bin/bash\n"),
        ("group", f"root:x:0:\nagent:x:{gid}:\n"),
        ("hosts", "127.0.0.1 localhost sandbox\n::1 localhost\n"),
        ("resolv.conf", ""),
        ("nsswitch.conf", "passwd: files\ngroup: files\nhosts: files\n"),
    ):
        if not os.path.lexists(f"{etc}/{name}"):
            with open(f"{etc}/{name}", "w") as f:
                f.write(text)


def _lock_proc(proc: str, null: str) -> int:
    """Make /proc read-only, hide host details in it, and return the old, writable view as a descriptor."""
    fd = os.open(proc, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    kernel.mount(proc, proc, None, kernel.MS_BIND)
    kernel.mount("none", proc, None, kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | flags)
    for name in ("kcore", "keys", "timer_list", "sched_debug", "kpagecount", "kpageflags", "kpagecgroup"):
        if os.path.exists(f"{proc}/{name}"):
            kernel.mount(null, f"{proc}/{name}", None, kernel.MS_BIND)
    return fd
