"""File operations, done by a child with the rights of the sandbox's own programs, so that no path can lead
outside.

The answer is a JSON object on stderr; data goes over stdin and stdout. The answer reports the number of bytes in
each direction and their digest, so that the host notices if another process took or added some. Nothing here
blocks: FIFOs and devices are opened without blocking and refused. Nothing here imports: all modules are loaded
before the fork.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from typing import Any

from . import frames, leftovers, packing

try:
    from _blake2 import blake2b  # without loading everything `hashlib` loads
except ImportError:  # pragma: no cover - an interpreter built without it
    from hashlib import blake2b

CHUNK = 1 << 18
DIGEST_BYTES = 16


class ByteStream:
    """One of the two data streams, counted."""

    def __init__(self, fd: int) -> None:
        self.fd, self.total = fd, 0
        self._digest = blake2b(digest_size=DIGEST_BYTES)

    def read(self, count: int) -> bytes:
        """Read up to that many bytes; empty at the end."""
        data = os.read(self.fd, count)
        self._count(data)
        return data

    def read_exactly(self, count: int) -> bytes:
        """Read exactly that many bytes; raises ValueError if there are fewer."""
        try:
            data = frames.read_exactly(self.fd, count)
        except EOFError:
            raise ValueError("the data end too early") from None
        self._count(data)
        return data

    def write(self, data: bytes) -> None:
        """Write all of the data."""
        frames.write_all(self.fd, data)
        self._count(data)

    def _count(self, data: bytes) -> None:
        self.total += len(data)
        self._digest.update(data)

    def told(self) -> list[object]:
        """Return what the other side compares: byte count and digest."""
        return [self.total, self._digest.hexdigest()]


def perform(order: dict[str, Any]) -> int:
    """Run one operation; the exit status is 0 if the answer on stderr is not an error."""
    answer: dict[str, object]
    taken, sent = ByteStream(0), ByteStream(1)
    try:
        answer = OPERATIONS[order["op"]](order, taken, sent)
        answer["taken"], answer["sent"] = taken.told(), sent.told()
        status = 0
    except OSError as error:
        answer = {
            "errno": error.errno or 0,
            "error": error.strerror or str(error),
            "path": os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else "",
        }
        status = 1
    except (ValueError, RecursionError) as error:
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


def read(order: dict[str, Any], taken: ByteStream, sent: ByteStream) -> dict[str, object]:
    """Write bytes `offset` to `offset + max_bytes` of a regular file to stdout."""
    fd = _open_regular(order["path"], os.O_RDONLY)
    size = os.fstat(fd).st_size
    os.lseek(fd, order["offset"], os.SEEK_SET)
    left = order["max_bytes"]
    while left > 0:
        part = os.read(fd, min(left, CHUNK))
        if not part:
            break
        left -= len(part)
        sent.write(part)
    return {"size": size}


def write(order: dict[str, Any], taken: ByteStream, sent: ByteStream) -> dict[str, object]:
    """Write stdin to a regular file at `offset`, which must also be the file's current length."""
    path, offset = order["path"], order["offset"]
    if order["parents"] and os.path.dirname(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    fd = _open_regular(path, os.O_WRONLY | (0 if offset else os.O_CREAT), order["mode"] | 0o200)
    if offset == 0:
        os.ftruncate(fd, 0)
    elif os.fstat(fd).st_size != offset:
        raise OSError(5, "the file has changed while it was written", path)
    os.lseek(fd, offset, os.SEEK_SET)
    while part := taken.read(CHUNK):
        frames.write_all(fd, part)
    if order["last"]:
        os.fchmod(fd, order["mode"])
    os.close(fd)
    return {"size": taken.total}


def _describe(path: str) -> dict[str, object]:
    info = os.lstat(path)
    kinds = ((stat.S_ISREG, "file"), (stat.S_ISDIR, "directory"), (stat.S_ISLNK, "link"))
    kind = next((name for test, name in kinds if test(info.st_mode)), "other")
    return {"kind": kind, "size": info.st_size, "mode": stat.S_IMODE(info.st_mode), "mtime": info.st_mtime}


def describe(order: dict[str, Any], taken: ByteStream, sent: ByteStream) -> dict[str, object]:
    """Describe the entry at the path; links are not followed."""
    return _describe(order["path"])


def entries(order: dict[str, Any], taken: ByteStream, sent: ByteStream) -> dict[str, object]:
    """List a directory in sorted order, up to `max_entries` entries."""
    names = sorted(os.listdir(order["path"]))
    shown = names[: order["max_entries"]]
    return {"entries": [[n, _describe(os.path.join(order["path"], n))] for n in shown], "total": len(names)}


def remove(order: dict[str, Any], taken: ByteStream, sent: ByteStream) -> dict[str, object]:
    """Delete a file, or a directory and its contents."""
    path = order["path"]
    if stat.S_ISDIR(os.lstat(path).st_mode):
        if not order["recursive"]:
            os.rmdir(path)
        else:
            leftovers.remove_whole(path)
    else:
        os.unlink(path)
    return {}


def make_directory(order: dict[str, Any], taken: ByteStream, sent: ByteStream) -> dict[str, object]:
    """Create a directory and its parents."""
    os.makedirs(order["path"], exist_ok=True)
    return {}


def pack_tree(order: dict[str, Any], taken: ByteStream, sent: ByteStream) -> dict[str, object]:
    """Write the regular files, directories and links below `path` to stdout, within both limits; see `packing`.

    Entries that their owner has made unreadable are unlocked, read, and locked again.
    """
    most_files, most_bytes = order["max_files"], order["max_bytes"]
    too_much = OSError(27, f"tree has more than {most_files} files or {most_bytes} bytes", order["path"])
    locked: list[tuple[bytes, int]] = []
    # "." cannot be looked up in a locked folder, its path can.
    place = os.getcwd() if order["path"] == "." else order["path"]
    if not os.path.isdir(place):
        raise NotADirectoryError(20, os.strerror(20), order["path"])
    root, mode = _open_folder(os.path.realpath(place), None)
    if mode is not None:
        locked.append((b"", mode))
    count, size, pending = 0, 0, [b""]
    while pending:
        folder = pending.pop()
        fd, mode = _enter(root, folder)
        if mode is not None:
            locked.append((folder, mode))
        below = []
        for name in sorted(map(os.fsencode, os.listdir(fd))):
            inside = folder + b"/" + name if folder else name
            info = os.stat(name, dir_fd=fd, follow_symlinks=False)
            mode, mtime = stat.S_IMODE(info.st_mode), info.st_mtime_ns
            if not (stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode) or stat.S_ISLNK(info.st_mode)):
                continue
            count += 1
            if count > most_files:
                raise too_much
            if len(inside) > packing.MAX_NAME or inside.count(b"/") >= packing.MAX_DEPTH:
                raise OSError(36, f"more than {packing.MAX_DEPTH} folders within each other", order["path"])
            if stat.S_ISDIR(info.st_mode):
                sent.write(packing.head(packing.FOLDER, mode, mtime, inside))
                below.append(inside)
            elif stat.S_ISLNK(info.st_mode):
                sent.write(packing.head(packing.LINK, 0o777, mtime, inside, os.readlink(name, dir_fd=fd)))
            else:
                sent.write(packing.head(packing.FILE, mode, mtime, inside))
                size += _send_content(fd, name, mode, most_bytes - size, sent, too_much)
        pending += reversed(below)
        if fd != root:
            os.close(fd)
    for folder, mode in reversed(locked):
        fd, _ = _enter(root, folder)
        os.fchmod(fd, mode)
    sent.write(packing.end(count))
    return {"files": count, "bytes": size}


def _unlock(name: bytes | str, fd: int | None, bits: int) -> int:
    """Give the owner rights to the entry itself, not to the target of a link; return the previous mode."""
    path_only = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
    try:
        mode = stat.S_IMODE(os.fstat(path_only).st_mode)
        os.chmod(f"/proc/self/fd/{path_only}", mode | bits)
    finally:
        os.close(path_only)
    return mode


def _send_content(fd: int, name: bytes, mode: int, most: int, sent: ByteStream, too_much: OSError) -> int:
    """Send a file's content in chunks, however long it turns out to be; return its size."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        file = os.open(name, flags, dir_fd=fd)
    except PermissionError:
        _unlock(name, fd, 0o400)
        file = os.open(name, flags, dir_fd=fd)
        os.fchmod(file, mode)
    size = 0
    if stat.S_ISREG(os.fstat(file).st_mode):
        while part := os.read(file, CHUNK):
            size += len(part)
            if size > most:
                raise too_much
            sent.write(packing.piece(part))
    os.close(file)
    sent.write(packing.piece(b""))
    return size


def unpack_tree(order: dict[str, Any], taken: ByteStream, sent: ByteStream) -> dict[str, object]:
    """Write the tree on stdin below `path`. No entry is written through a link, and existing entries are
    replaced."""
    os.makedirs(order["path"], exist_ok=True)
    root = os.open(order["path"], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    os.umask(0)
    count = 0
    for (kind, mode, mtime, name, target), pieces in packing.entries(taken.read_exactly):
        folder, _, last = name.rpartition(b"/")
        fd, _ = _enter(root, folder, make=True)
        try:
            if kind == packing.FOLDER:
                _make_folder(fd, last, mode, mtime)
            elif kind == packing.LINK:
                _clear(fd, last)
                os.symlink(target, last, dir_fd=fd)
                _set_time(last, mtime, fd)
            else:
                _write_content(fd, last, kind, mode, mtime, pieces)
        except OSError as error:
            raise OSError(error.errno, error.strerror, os.path.join(os.fsencode(order["path"]), name)) from None
        finally:
            if fd != root:
                os.close(fd)
        count += 1
    return {"files": count}


FOLDER_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""Without O_DIRECTORY, with which gVisor follows links."""


def _open_directory(name: bytes | str, fd: int | None) -> int:
    own = os.open(name, FOLDER_FLAGS, dir_fd=fd)
    if not stat.S_ISDIR(os.fstat(own).st_mode):
        os.close(own)
        raise NotADirectoryError(20, os.strerror(20), name)
    return own


def _open_folder(name: bytes | str, fd: int | None) -> tuple[int, int | None]:
    """Open a directory for reading and entering; return the descriptor, and the old mode if it was changed."""
    mode = None
    try:
        own = _open_directory(name, fd)
    except PermissionError:
        mode = _unlock(name, fd, 0o500)
        own = _open_directory(name, fd)
    info = os.fstat(own)
    if info.st_uid == os.getuid() and info.st_mode & 0o500 != 0o500:
        mode = stat.S_IMODE(info.st_mode)
        os.fchmod(own, mode | 0o500)
    return own, mode


def _enter(root: int, folder: bytes, make: bool = False) -> tuple[int, int | None]:
    """Like `_open_folder`, for a directory below `root` that is not reached through a link.

    Args:
        make: create missing directories, and do not unlock locked ones.
    """
    fd, mode = root, None
    for part in folder.split(b"/") if folder else ():
        try:
            if make:
                try:
                    below = _open_directory(part, fd)
                except FileNotFoundError:
                    os.mkdir(part, 0o755, dir_fd=fd)
                    below = _open_directory(part, fd)
            else:
                below, mode = _open_folder(part, fd)
        except OSError as error:
            if error.errno not in (20, 40):  # ENOTDIR, ELOOP
                raise
            raise OSError(20, "a link, or no directory, is in the way", folder) from None
        finally:
            if fd != root:
                os.close(fd)
        fd = below
    return fd, mode


def _clear(fd: int, name: bytes) -> None:
    """Remove the entry of that name, unless it is a directory."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=fd)


def _make_folder(fd: int, name: bytes, mode: int, mtime: int) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=fd)
    own = _open_directory(name, fd)
    try:
        os.fchmod(own, mode)
        _set_time(own, mtime)
    finally:
        os.close(own)


def _write_content(fd: int, name: bytes, kind: int, mode: int, mtime: int, pieces: Any) -> None:
    if kind == packing.FILE:
        _clear(fd, name)
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=fd)
    else:
        file = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
    try:
        length = os.lseek(file, 0, os.SEEK_END)
        for part in pieces:
            length += len(part)
            if part.count(0) == len(part):
                os.lseek(file, len(part), os.SEEK_CUR)  # keep holes sparse
            else:
                frames.write_all(file, part)
        if os.fstat(file).st_size != length:
            os.ftruncate(file, length)
        os.fchmod(file, mode)
        _set_time(file, mtime)
    finally:
        os.close(file)


def _set_time(what: int | bytes, mtime: int, fd: int | None = None) -> None:
    if mtime >= 0:
        if fd is None:
            os.utime(what, ns=(mtime, mtime))
        else:
            os.utime(what, ns=(mtime, mtime), dir_fd=fd, follow_symlinks=False)


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
