"""The lock of a run folder: one process holds it, and its file says which."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
from pathlib import Path
from typing import IO
from weakref import WeakSet

from agentrl.errors import CheckpointError, ConfigError
from agentrl.run_folder.files import read_bounded

LOCK = ".lock"
_held: WeakSet[IO[str]] = WeakSet()


def _let_go() -> None:
    """Close the lock files in a forked child, so that the lock is released when the run ends."""
    for file in _held:
        file.close()


os.register_at_fork(after_in_child=_let_go)


def lock_folder(path: Path, instead: str = "give this run another `name`") -> IO[str]:
    """Hold the folder until the file is closed or the process ends, however it ends.

    Args:
        instead: what else to do if it is held, for the error.

    Raises:
        ConfigError: another process holds it, or it cannot be written.
    """
    try:
        file = (path / LOCK).open("a+", encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"{path}: cannot write into the run folder: {e.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        if e.errno not in (errno.EACCES, errno.EAGAIN):
            raise ConfigError(f"{path}: cannot lock the run folder: {e.strerror}") from None
        text = f"{path}: held by {holder}; wait for it to end, stop it, or {instead}"
        raise ConfigError(text) from None
    try:
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
    except OSError as e:
        with contextlib.suppress(OSError):
            file.close()
        e.filename = e.filename or str(path)
        raise
    _held.add(file)
    return file


def lock_holder(path: Path) -> tuple[int, str] | None:
    """The process and the machine that last locked the folder; None if the file does not say."""
    try:
        said = read_bounded(path / LOCK).decode("utf-8", "replace")
    except (OSError, CheckpointError):
        return None
    match = re.fullmatch(r"process ([0-9]{1,9}) on (\S+)\s*", said)
    return None if match is None else (int(match[1]), match[2])
