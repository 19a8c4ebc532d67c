"""Files of a run folder: whole or absent when written, regular and bounded when read."""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import zstandard

from agentrl.errors import CheckpointError

MAX_FILE = 64 << 20
"""Bytes of a file that is read as a whole, such as results.json."""


def at_home(path: str | os.PathLike[str]) -> Path:
    """A path that a user names, with the home folder for `~`."""
    return Path(os.path.expanduser(path))


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Pipes, devices and sockets, which could block or never end, are refused.

    Raises:
        FileNotFoundError: `path` does not exist.
        PermissionError: it may not be read.
        CheckpointError: it is not a regular file.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (FileNotFoundError, PermissionError):
        raise
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read: {e.strerror}") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise CheckpointError(f"{path}: is not a regular file")
    return os.fdopen(handle, "rb")


def read_bounded(path: Path, limit: int = MAX_FILE) -> bytes:
    """The content of a regular file of at most `limit` bytes.

    Raises:
        FileNotFoundError: `path` does not exist.
        CheckpointError: it is not a regular file, or is larger.
    """
    with open_regular(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise CheckpointError(f"{path}: has more than {limit >> 20} MiB")
    return data


MAX_BYTES = 64 << 20
"""What a compressed file may hold uncompressed, however small it is; a larger one may hold more."""
MAX_RATIO = 200
"""How often its size a larger file may hold; episodes shrink to a tenth or so."""
_PIECE = 1 << 10
"""Bytes decompressed at once: they can become 32 MiB."""


def decompressed(path: Path) -> Iterator[bytes]:
    """The content of a compressed file, piece by piece.

    Raises:
        FileNotFoundError: `path` does not exist.
        CheckpointError: it is not a regular file.
        zstandard.ZstdError: it is damaged.
        EOFError: it was cut, or holds more than a run writes.
    """
    stream = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj()
    total = 0
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        limit = max(MAX_BYTES, MAX_RATIO * size)
        while piece := file.read(_PIECE):
            data = stream.decompress(piece)
            if (total := total + len(data)) > limit:
                raise EOFError(f"it holds more than {limit >> 20} MiB in {size:,} bytes")
            yield data
    if not stream.eof:
        raise EOFError("the file was cut")
    if stream.unused_data:
        raise EOFError("more data follows its end")


def fsync_dir(path: Path) -> None:
    """Make the names in a folder survive a power cut."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_error(error: Exception, path: Path | None = None) -> Exception:
    """The file-system error that safetensors and tokenizers report as text, as an OSError; any other error itself.

    An OSError without a file name, which is what a full disk gives, gets that of `path`.
    """
    if isinstance(error, OSError) and error.filename is None and path is not None:
        error.filename = str(path)
    of_rust = type(error) is Exception or type(error).__name__ == "SafetensorError"
    match = re.search(r"\(os error (\d+)\)", str(error)) if of_rust else None
    if match is None:
        return error
    number = int(match[1])
    return OSError(number, os.strerror(number), None if path is None else str(path))


def write_atomic(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Put `data` (or its pieces) at `path`: a reader sees the old content or all of the new."""
    temp = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}.tmp")
    try:
        with temp.open("wb") as file:
            for piece in (data,) if isinstance(data, bytes) else data:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        temp.replace(path)
    except OSError as e:
        e.filename = str(path)  # not that of the temporary file; a full disk has none
        raise
    finally:
        temp.unlink(missing_ok=True)
    fsync_dir(path.parent)


def share_weights(folder: Path) -> None:
    """Give the weights in a folder and below it the mode of any other new file: safetensors creates them for their
    owner alone, so that nobody with whom the folder is shared could read them."""
    probe = folder / ".mode"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for path in folder.rglob("*.safetensors"):
        path.chmod(mode)


def append(path: Path, data: bytes, *, sync: bool = False) -> None:
    """Add `data` to the end of a file; with `sync`, it survives a power cut."""
    try:
        with path.open("ab") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
    except OSError as e:
        e.filename = e.filename or str(path)  # a full disk has none
        raise
