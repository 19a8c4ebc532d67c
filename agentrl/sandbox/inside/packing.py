"""A tree of files as one stream of bytes, written on one side of the wall and read on the other.

Not tar: that knows devices, hard links, sparse files and sizes in many spellings, and its module imports others.
Here there are a head for each entry, the content of files in pieces, and an end that counts.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

HEAD = struct.Struct(">BHqHH")
"""Kind, mode, time of change in nanoseconds (-1: that of writing), bytes of the name, bytes of a link's target."""
PIECE = struct.Struct(">I")
"""Bytes of a piece of content, which follows; 0: the file is complete. After END: the number of entries."""
END, FILE, FOLDER, LINK, MORE = range(5)
"""MORE continues a file that an earlier stream has begun."""
MAX_NAME, MAX_PIECE = 4096, 1 << 20
MAX_DEPTH = 100
"""Folders within folders."""
OVERHEAD = HEAD.size + 2 * PIECE.size
"""Bytes that an entry takes beside its name, its target and its content, up to the first piece."""

Entry = tuple[int, int, int, bytes, bytes]
"""Kind, mode, time, name, target."""


def head(kind: int, mode: int, mtime: int, name: bytes, target: bytes = b"") -> bytes:
    """The beginning of an entry."""
    return HEAD.pack(kind, mode, mtime, len(name), len(target)) + name + target


def piece(data: bytes) -> bytes:
    """Some of a file's content; nothing: its end."""
    return PIECE.pack(len(data)) + data


def end(count: int) -> bytes:
    """The end of a stream of so many entries."""
    return head(END, 0, 0, b"") + PIECE.pack(count)


def entries(read: Callable[[int], bytes]) -> Iterator[tuple[Entry, Iterator[bytes]]]:
    """Each entry with the pieces of its content, which must be taken before the next entry.

    Args:
        read: returns exactly as many bytes as it is asked for, or raises.

    Raises:
        ValueError: the stream is none of ours.
    """
    count = 0
    while True:
        kind, mode, mtime, named, targeted = HEAD.unpack(read(HEAD.size))
        if kind == END:
            (told,) = PIECE.unpack(read(PIECE.size))
            if told != count:
                raise ValueError(f"a tree of {count} entries says that it has {told}")
            return
        if kind > MORE or mode > 0o7777 or not 0 < named <= MAX_NAME or targeted > MAX_NAME:
            raise ValueError(f"no entry of a tree: kind {kind}, mode {mode:o}, name of {named} bytes")
        name, target = read(named), read(targeted)
        check_name(name)
        count += 1
        if kind in (FILE, MORE):
            left = _pieces(read)
            yield (kind, mode, mtime, name, target), left
            for _ in left:
                pass
        else:
            yield (kind, mode, mtime, name, target), iter(())


def _pieces(read: Callable[[int], bytes]) -> Iterator[bytes]:
    while size := PIECE.unpack(read(PIECE.size))[0]:
        if size > MAX_PIECE:
            raise ValueError(f"a piece of {size} bytes")
        yield read(size)


def check_name(name: bytes) -> None:
    """ValueError unless the name is relative, in its shortest form, and stays below where it begins."""
    parts = name.split(b"/")
    if (
        len(parts) > MAX_DEPTH
        or b"\0" in name
        or any(part in (b"", b".", b"..") or len(part) > 255 for part in parts)
    ):
        raise ValueError(f"{name[:200]!r} is no name of an entry below a directory")
