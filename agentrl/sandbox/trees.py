"""Validate the answers and data of file operations before anything is trusted.

A process inside the sandbox does the work. If untrusted code tampers with it, its answer may contain anything: the
operation then fails with an OSError, which is neither a crash nor a sandbox failure.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.sandbox.contract import ExecResult, FileInfo
from agentrl.sandbox.inside import packing
from agentrl.sandbox.inside.files import DIGEST_BYTES

ENTRY_BYTES = 512
"""Average bytes allowed for names and headers per permitted file."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One file, folder or link in a tree."""

    kind: int
    """packing.FILE, FOLDER or LINK."""
    name: str
    content: bytes = b""
    mode: int = 0o644
    mtime_ns: int = -1
    target: bytes = b""


def answer_of(result: ExecResult, order: Mapping[str, Any], sent: bytes, came: bytes) -> dict[str, Any]:
    """Return a file operation's answer, after verifying that no data was added or removed in transit.

    Raises:
        OSError: the operation reported an error, or its answer is invalid.
    """
    op, path = order["op"], order["path"]
    try:
        said = json.loads(result.stderr)
    except (ValueError, RecursionError):
        said = None
    if result.outcome == "output_limit":
        raise OSError(errno.EFBIG, f"{op}: the sandbox sent more than was requested", path)
    if type(said) is not dict:
        text = result.error_text()[-500:]
        raise OSError(errno.ENOMEM, f"{op} ended with {result.outcome}: {text}", path)
    if "errno" in said:
        code, text, place = said["errno"], str(said.get("error"))[:500], said.get("path")
        known = type(code) is int and code in errno.errorcode
        raise OSError(code if known else errno.EIO, text, place if place and isinstance(place, str) else path)
    if not result.ok or said.get("taken") != _told(sent) or said.get("sent") != _told(came):
        raise OSError(errno.EIO, f"{op}: the data did not arrive as they were sent", path)
    return said


def _told(data: bytes) -> list[Any]:
    """See `files.ByteStream.told`."""
    return [len(data), hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()]


def file_info(name: str, said: Any) -> FileInfo:
    """Parse one entry as described by a sandbox.

    Raises:
        OSError: the description is invalid.
    """
    if isinstance(said, dict) and said.get("kind") in ("file", "directory", "link", "other"):
        size, mode, mtime = said.get("size"), said.get("mode"), said.get("mtime")
        if isinstance(size, int) and isinstance(mode, int) and isinstance(mtime, (int, float)):
            fits = 0 <= size < 1 << 63 and 0 <= mode <= 0o7777 and abs(mtime) < 1 << 63
            if fits and math.isfinite(mtime):
                return FileInfo(name, said["kind"], size, mode, float(mtime))
    raise OSError(errno.EBADMSG, "the sandbox sent no description of a file", name)


def listing(answer: Mapping[str, Any], path: str, max_entries: int) -> list[FileInfo]:
    """Parse the entries of a directory.

    Raises:
        OSError: the answer is not a list of up to `max_entries` distinct names.
    """
    entries = answer.get("entries")
    if type(entries) is list and len(entries) <= max_entries:
        pairs = [e for e in entries if type(e) is list and len(e) == 2 and type(e[0]) is str and "/" not in e[0]]
        if len({name for name, _ in pairs}) == len(entries):
            return [file_info(name, info) for name, info in pairs]
    raise OSError(errno.EBADMSG, "the sandbox sent no list of files", path)


def of_files(files: Mapping[str, bytes | str]) -> list[Entry]:
    """Pack files, keyed by relative name, as a tree.

    Raises:
        ValueError: a name is invalid or would leave the directory.
    """
    entries = []
    for name, data in files.items():
        raw = os.fsencode(os.path.normpath(name)) if ".." not in name.split("/") else b".."
        try:
            packing.check_name(raw)
        except ValueError:
            raise ValueError(f"put_tree: {name!r} would leave the directory, or is not a file name") from None
        entries.append(Entry(packing.FILE, os.fsdecode(raw), data.encode() if isinstance(data, str) else data))
    return entries


def stream_limit(max_bytes: int, max_files: int) -> int:
    """Return the maximum number of bytes to transfer for a tree within both limits."""
    pieces = max_bytes // packing.MAX_PIECE + 1
    return max_bytes + (max_files + 1) * ENTRY_BYTES + pieces * packing.PIECE.size


def read(data: bytes, *, max_bytes: int, max_files: int) -> list[Entry]:
    """Return the entries of a packed tree received from a sandbox.

    Raises:
        OSError: it is malformed, exceeds a limit, repeats a name, or has an entry below one that is not a folder.
    """
    found: list[Entry] = []
    kinds: dict[bytes, int] = {}
    total = 0
    try:
        take = _taker(data)
        for (kind, mode, mtime, name, target), pieces in packing.entries(take):
            parent = name.rpartition(b"/")[0]
            if kind == packing.MORE or name in kinds or (parent and kinds.get(parent) != packing.FOLDER):
                raise ValueError(f"{name[:200]!r} comes twice, or without its folder")
            if (kind == packing.LINK) != bool(target):
                raise ValueError(f"{name[:200]!r} is a link without a target, or the other way round")
            kinds[name] = kind
            content = b"".join(pieces)
            total += len(content)
            if len(kinds) > max_files or total > max_bytes:
                raise OSError(errno.EFBIG, f"tree has more than {max_files} files or {max_bytes} bytes")
            found.append(Entry(kind, os.fsdecode(name), content, mode, mtime, target))
        if take(0, True) != b"":
            raise ValueError("something follows the end of the tree")
    except ValueError as error:
        raise OSError(errno.EBADMSG, f"the sandbox sent no tree of files: {error}") from None
    return found


def _taker(data: bytes) -> Callable[..., bytes]:
    """Return a `read` function for `packing.entries`; with `rest`, it can also return all remaining data."""
    place = 0

    def take(count: int, rest: bool = False) -> bytes:
        nonlocal place
        if rest:
            return data[place : place + 1]
        begin, place = place, place + count
        if place > len(data):
            raise ValueError("it ends too early")
        return data[begin:place]

    return take


def portions(entries: Iterable[Entry], size: int) -> Iterator[bytes]:
    """Split into packed trees of about `size` bytes each, cutting large files; unreadable folders are locked
    last."""
    buffer, count = bytearray(), 0
    closed = []
    for entry in entries:
        mode = entry.mode
        if entry.kind == packing.FOLDER:
            closed.append(entry)
            mode |= 0o700
        for kind, part, last in _cut(entry, size):
            name = os.fsencode(entry.name)
            final = mode if last else mode | 0o600
            buffer += packing.head(kind, final, entry.mtime_ns if last else -1, name, entry.target)
            if kind in (packing.FILE, packing.MORE):
                for begin in range(0, len(part), packing.MAX_PIECE):
                    buffer += packing.piece(part[begin : begin + packing.MAX_PIECE])
                buffer += packing.piece(b"")
            count += 1
            if len(buffer) > size:
                yield bytes(buffer + packing.end(count))
                buffer, count = bytearray(), 0
    for entry in reversed(closed):  # the contents have been written by now
        buffer += packing.head(packing.FOLDER, entry.mode, entry.mtime_ns, os.fsencode(entry.name))
        count += 1
    if count:
        yield bytes(buffer + packing.end(count))


def _cut(entry: Entry, size: int) -> Iterator[tuple[int, bytes, bool]]:
    """Yield (kind, content, whether it is the last) for the chunks that make up an entry."""
    content = entry.content
    for begin in range(0, len(content) or 1, size):
        last = begin + size >= len(content)
        yield (entry.kind if begin == 0 else packing.MORE), content[begin : begin + size], last
