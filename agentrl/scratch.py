"""Temporary folders that are removed with their process: at exit, or by the next process that creates one."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Self

PREFIX = "agentrl-"
_ALIVE = ".alive"
"""A file that the owner keeps locked; the kernel releases the lock however the owner ends."""


class ScratchFolder:
    """A folder for large or many temporary files, of which nothing may remain when a process is killed."""

    def __init__(self, kind: str) -> None:
        sweep(tempfile.gettempdir())
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-"))
        self._lock = (self.path / f"{_ALIVE}-soon").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        (self.path / f"{_ALIVE}-soon").rename(self.path / _ALIVE)  # never there without its lock

    def close(self) -> None:
        """Remove it; idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@cache
def sweep(place: str) -> None:
    """Remove this user's folders whose owners are gone; once per process."""
    for file in Path(place).glob(f"{PREFIX}*/{_ALIVE}"):
        try:
            if file.parent.lstat().st_uid != os.geteuid():
                continue
            with file.open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(file.parent, ignore_errors=True)
        except OSError:
            continue  # its owner is alive, or it is already gone
