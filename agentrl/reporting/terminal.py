"""A live screen's terminal, protected from output of others: child processes, C libraries.

While the guard is open, file descriptors 1 and 2 lead to a file, and each new line of it is shown above the
screen. The screen itself writes to a copy of the terminal's descriptor. A file and not a pipe: a child that
outlives the guard can still write.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from typing import TextIO

POLL_S = 0.25


class TerminalGuard:
    """Open from `start` until `stop`, which gives the terminal back.

    Args:
        tell: shows a line printed by other code; called from a thread of the guard.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._saved: dict[int, int] = {}
        self._ended = threading.Event()

    def start(self) -> TextIO | None:
        """Take the descriptors that lead to a terminal; returns a stream that still does, None without any."""
        terminals = [fd for fd in (1, 2) if os.isatty(fd)]
        if not terminals:
            return None
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        self._saved = {fd: os.dup(fd) for fd in terminals}
        for fd in terminals:
            os.dup2(self._file.fileno(), fd)
        self._read = 0
        self._thread = threading.Thread(target=self._follow, name="agentrl-terminal", daemon=True)
        self._thread.start()
        return os.fdopen(os.dup(self._saved[terminals[0]]), "w", encoding="utf-8", errors="replace")

    def stop(self) -> None:
        """Show what is left and put the descriptors back; idempotent."""
        if not self._saved:
            return
        self._ended.set()
        self._thread.join()
        self._show(whole=False)
        for fd, saved in self._saved.items():
            os.dup2(saved, fd)
            os.close(saved)
        self._saved = {}
        self._file.close()

    def _follow(self) -> None:
        while not self._ended.wait(POLL_S):
            self._show(whole=True)

    def _show(self, *, whole: bool) -> None:
        """Tell the lines since the last time; with `whole` one that is still being written waits."""
        data = os.pread(self._file.fileno(), 1 << 20, self._read)
        end = data.rfind(b"\n") + 1 if whole and len(data) < 1 << 20 else len(data)
        self._read += end
        for line in data[:end].decode(errors="replace").splitlines():
            if line.strip():
                self._tell(line.rpartition("\r")[2])
