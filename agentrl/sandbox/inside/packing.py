"""A file tree as one byte stream, written on one side of the sandbox boundary and read on the other.

Tar is not used because it supports devices, hard links, sparse files and many encodings of sizes, and its module
has further imports. This format has a header per entry, file content in chunks, and an end marker with a count.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

HEAD = struct.Struct(">BHqHH")
"""Kind, mode, modification time in ns (-1: time of writing), bytes of the name, bytes of the link target."""
PIECE = struct.Struct(">I")
"""Length of the content chunk that follows; 0: the file is complete. After END: the number of entries."""
END, FILE, FOLDER, LINK, MORE = range(5)
"""MORE continues a file started in an earlier stream."""
MAX_NAME, MAX_PIECE = 4096, 1 << 20
MAX_DEPTH = 100
"""Maximum nesting of folders."""

Entry = tuple[int, int, int, bytes, bytes]
"""Kind, mode, time, name, target."""


def head(kind: int, mode: int, mtime: int, name: bytes, target: bytes = b"") -> bytes:
    """Encode the header of an entry."""
    return HEAD.pack(kind, mode, mtime, len(name), len(target)) + name + target


def piece(data: bytes) -> bytes:
    """Encode a chunk of a file's content; an empty chunk ends the file."""
    return PIECE.pack(len(data)) + data


def end(count: int) -> bytes:
    """Encode the end of a stream with this many entries."""
    return head(END, 0, 0, b"") + PIECE.pack(count)


def entries(read: Callable[[int], bytes]) -> Iterator[tuple[Entry, Iterator[bytes]]]:
    """Yield each entry with its content chunks, which must be consumed before the next entry.

    Args:
        read: returns exactly as many bytes as requested, or raises.

    Raises:
        ValueError: the stream is not in this format.
    """
    count = 0
    while True:
        kind, mode, mtime, named, targeted = HEAD.unpack(read(HEAD.size))
        if kind == END:
            (told,) = PIECE.unpack(read(PIECE.size))
            if told != count:
                raise ValueError(f"a tree of {count} entries claims to have {told}")
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
    """Raise ValueError unless the name is relative, normalized, and stays below its starting directory."""
    parts = name.split(b"/")
    if (
        len(parts) > MAX_DEPTH
        or b"\0" in name
        or any(part in (b"", b".", b"..") or len(part) > 255 for part in parts)
    ):
        raise ValueError(f"{name[:200]!r} is not a valid path below a directory")
