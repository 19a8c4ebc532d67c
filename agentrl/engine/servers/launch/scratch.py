"""A temporary folder that is removed with its process: at exit, or by the next process that creates one."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from pathlib import Path

PREFIX = "agentrl-engine-"
_ALIVE = ".alive"
"""A file that the owner keeps locked; the kernel releases the lock however the owner ends."""


class ScratchFolder:
    """Holds logs, and weights in transit to servers; they are large, so nothing of a killed run may remain."""

    def __init__(self) -> None:
        sweep()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = (self.path / _ALIVE).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        """Remove it; idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def sweep() -> None:
    """Remove the folders whose owners are gone."""
    for file in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{_ALIVE}"):
        try:
            with file.open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(file.parent, ignore_errors=True)
        except OSError:
            continue  # its owner is alive, it is already gone, or it is not ours
