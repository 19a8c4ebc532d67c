"""File operations, done by a child with the rights of the sandbox's own programs: no path can lead outside.

The answer is a JSON object on stderr, data go over stdin and stdout. Nothing here waits: FIFOs and devices are
opened without blocking and refused.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from typing import Any

from . import frames

CHUNK = 1 << 18


def perform(order: dict[str, Any]) -> int:
    """Do one operation; the exit status is 0 when the answer on stderr is not an error."""
    answer: dict[str, Any]
    try:
        answer = OPERATIONS[order["op"]](order)
        status = 0
    except OSError as error:
        answer = {
            "errno": error.errno or 0,
            "error": error.strerror or str(error),
            "path": str(error.filename or ""),
        }
        status = 1
    except ValueError as error:
        answer = {"errno": 22, "error": str(error), "path": order.get("path", "")}
        status = 1
    frames.write_all(2, json.dumps(answer).encode())
    return status


def _open_regular(path: str, flags: int, mode: int = 0o644) -> int:
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, mode)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        if stat.S_ISDIR(os.stat(path).st_mode):
            raise IsADirectoryError(21, os.strerror(21), path)
        raise OSError(22, "not a regular file", path)
    return fd


def read(order: dict[str, Any]) -> dict[str, Any]:
    """Bytes `offset` to `offset + max_bytes` of a regular file on stdout."""
    fd = _open_regular(order["path"], os.O_RDONLY)
    size = os.fstat(fd).st_size
    os.lseek(fd, order["offset"], os.SEEK_SET)
    left = order["max_bytes"]
    while left > 0:
        part = os.read(fd, min(left, CHUNK))
        if not part:
            break
        left -= len(part)
        frames.write_all(1, part)
    return {"size": size}


def write(order: dict[str, Any]) -> dict[str, Any]:
    """Write stdin to a regular file; `append` continues it."""
    path = order["path"]
    if order["parents"] and os.path.dirname(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    fd = _open_regular(path, os.O_WRONLY | os.O_CREAT | (os.O_APPEND if order["append"] else 0), order["mode"])
    if not order["append"]:
        os.ftruncate(fd, 0)
    total = 0
    while part := os.read(0, CHUNK):
        frames.write_all(fd, part)
        total += len(part)
    os.fchmod(fd, order["mode"])
    os.close(fd)
    return {"size": total}


def _describe(path: str) -> dict[str, Any]:
    info = os.lstat(path)
    kinds = ((stat.S_ISREG, "file"), (stat.S_ISDIR, "directory"), (stat.S_ISLNK, "link"))
    kind = next((name for test, name in kinds if test(info.st_mode)), "other")
    return {"kind": kind, "size": info.st_size, "mode": stat.S_IMODE(info.st_mode), "mtime": info.st_mtime}


def describe(order: dict[str, Any]) -> dict[str, Any]:
    """What is at the path; links are not followed."""
    return _describe(order["path"])


def entries(order: dict[str, Any]) -> dict[str, Any]:
    """The sorted entries of a directory, at most `max_entries` of them."""
    names = sorted(os.listdir(order["path"]))
    shown = names[: order["max_entries"]]
    return {"entries": [[n, _describe(os.path.join(order["path"], n))] for n in shown], "total": len(names)}


def remove(order: dict[str, Any]) -> dict[str, Any]:
    """Delete a file, or a directory with all that is in it."""
    path = order["path"]
    if stat.S_ISDIR(os.lstat(path).st_mode):
        if not order["recursive"]:
            os.rmdir(path)
        else:
            _remove_tree(path)
    else:
        os.unlink(path)
    return {}


def _remove_tree(path: str) -> None:
    os.chmod(path, 0o700)
    with os.scandir(path) as found:
        inside = list(found)
    for entry in inside:
        if entry.is_dir(follow_symlinks=False):
            _remove_tree(entry.path)
        else:
            os.unlink(entry.path)
    os.rmdir(path)


def make_directory(order: dict[str, Any]) -> dict[str, Any]:
    """Create a directory and its parents."""
    os.makedirs(order["path"], exist_ok=True)
    return {}


def pack_tree(order: dict[str, Any]) -> dict[str, Any]:
    """A tar of regular files, directories and links below `path` on stdout, within both limits."""
    import tarfile

    root, count, size = order["path"], 0, 0
    if not os.path.isdir(root):
        raise NotADirectoryError(20, os.strerror(20), root)
    with tarfile.open(fileobj=os.fdopen(1, "wb", closefd=False), mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for folder, directories, names in os.walk(root):
            links = [d for d in directories if os.path.islink(os.path.join(folder, d))]
            for name in sorted([*directories, *names]):
                path = os.path.join(folder, name)
                info = os.lstat(path)
                if not (stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode) or stat.S_ISLNK(info.st_mode)):
                    continue
                count += 1
                size += info.st_size if stat.S_ISREG(info.st_mode) else 0
                if count > order["max_files"] or size > order["max_bytes"]:
                    raise OSError(
                        27, f"tree has more than {order['max_files']} files or {order['max_bytes']} bytes", root
                    )
                tar.add(path, arcname=os.path.relpath(path, root), recursive=False)
            directories[:] = sorted(d for d in directories if d not in links)
    return {"files": count, "bytes": size}


def unpack_tree(order: dict[str, Any]) -> dict[str, Any]:
    """Unpack the tar on stdin below `path`."""
    import tarfile

    os.makedirs(order["path"], exist_ok=True)
    count = 0
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as tar:
        for member in tar:
            if member.isreg() or member.isdir() or member.issym():
                member.uid, member.gid = os.getuid(), os.getgid()
                member.uname = member.gname = ""
                tar.extract(member, order["path"], set_attrs=not member.issym())
                count += 1
    return {"files": count}


OPERATIONS = {
    "read": read,
    "write": write,
    "stat": describe,
    "list": entries,
    "remove": remove,
    "mkdir": make_directory,
    "pack": pack_tree,
    "unpack": unpack_tree,
}
