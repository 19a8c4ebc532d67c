"""What file operations say and bring: nothing is believed before it has been looked at.

A file operation is done by a process inside. Should foreign code have got at it, its answer may be anything: that
is an OSError of the operation, and neither a crash nor trouble of the sandbox.
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
"""What names and heads may take for each of the files that are allowed, on average."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One file, folder or link of a tree."""

    kind: int
    """packing.FILE, FOLDER or LINK."""
    name: str
    content: bytes = b""
    mode: int = 0o644
    mtime_ns: int = -1
    target: bytes = b""


def answer_of(result: ExecResult, order: Mapping[str, Any], sent: bytes, came: bytes) -> dict[str, Any]:
    """What a file operation answered, once it is sure that nobody took or added some of the data on their way.

    Raises:
        OSError: the error that it met, or that its answer is none.
    """
    op, path = order["op"], order["path"]
    try:
        said = json.loads(result.stderr)
    except (ValueError, RecursionError):
        said = None
    if result.outcome == "output_limit":
        raise OSError(errno.EFBIG, f"{op}: more came from the sandbox than was asked for", path)
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
    """One entry as a sandbox describes it.

    Raises:
        OSError: the description is none.
    """
    if isinstance(said, dict) and said.get("kind") in ("file", "directory", "link", "other"):
        size, mode, mtime = said.get("size"), said.get("mode"), said.get("mtime")
        if isinstance(size, int) and isinstance(mode, int) and isinstance(mtime, (int, float)):
            fits = 0 <= size < 1 << 63 and 0 <= mode <= 0o7777 and abs(mtime) < 1 << 63
            if fits and math.isfinite(mtime):
                return FileInfo(name, said["kind"], size, mode, float(mtime))
    raise OSError(errno.EBADMSG, "the sandbox sent no description of a file", name)


def listing(answer: Mapping[str, Any], path: str, max_entries: int) -> list[FileInfo]:
    """The entries of a directory.

    Raises:
        OSError: the answer is no list of at most `max_entries` different names.
    """
    entries = answer.get("entries")
    if type(entries) is list and len(entries) <= max_entries:
        pairs = [e for e in entries if type(e) is list and len(e) == 2 and type(e[0]) is str and "/" not in e[0]]
        if len({name for name, _ in pairs}) == len(entries):
            return [file_info(name, info) for name, info in pairs]
    raise OSError(errno.EBADMSG, "the sandbox sent no list of files", path)


def of_files(files: Mapping[str, bytes | str]) -> list[Entry]:
    """Files by relative name as a tree.

    Raises:
        ValueError: a name would leave the directory, or is none.
    """
    entries = []
    for name, data in files.items():
        raw = os.fsencode(os.path.normpath(name)) if ".." not in name.split("/") else b".."
        try:
            packing.check_name(raw)
        except ValueError:
            raise ValueError(f"put_tree: {name!r} would leave the directory, or is no name of a file") from None
        entries.append(Entry(packing.FILE, os.fsdecode(raw), data.encode() if isinstance(data, str) else data))
    return entries


def files_of(entries: Iterable[Entry]) -> dict[str, bytes]:
    """The regular files of a tree by relative name."""
    return {entry.name: entry.content for entry in entries if entry.kind == packing.FILE}


def stream_limit(max_bytes: int, max_files: int) -> int:
    """Bytes that a tree within both limits may take on its way."""
    pieces = max_bytes // packing.MAX_PIECE + 1
    return max_bytes + (max_files + 1) * ENTRY_BYTES + pieces * packing.PIECE.size


def read(data: bytes, *, max_bytes: int, max_files: int) -> list[Entry]:
    """The entries of a packed tree that came from a sandbox.

    Raises:
        OSError: it is malformed, breaks a limit, names something twice, or puts something below what is no folder.
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
    """A `read` for `packing.entries`; with `rest`, whatever is left."""
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
    """Packed trees of about `size` bytes each, large files cut; folders that nobody may enter are closed last."""
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
    for entry in reversed(closed):  # what is inside is written by now
        buffer += packing.head(packing.FOLDER, entry.mode, entry.mtime_ns, os.fsencode(entry.name))
        count += 1
    if count:
        yield bytes(buffer + packing.end(count))


def _cut(entry: Entry, size: int) -> Iterator[tuple[int, bytes, bool]]:
    """(kind, content, whether it is the last) of the pieces in which an entry travels."""
    content = entry.content
    for begin in range(0, len(content) or 1, size):
        last = begin + size >= len(content)
        yield (entry.kind if begin == 0 else packing.MORE), content[begin : begin + size], last
