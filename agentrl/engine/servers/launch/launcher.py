"""Inference servers as child processes: started on a free loopback port, and reliably stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentrl.errors import EngineError

STOP_S = 15.0
"""Seconds a guard has to end its server; longer than the guard's own wait."""
_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
_GUARD = Path(__file__).with_name("guard.py")


class ServerProcess:
    """One running server under its guard (see `guard.py`); its output goes to `log`."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process, self.log = process, log

    @classmethod
    async def start(
        cls, command: Sequence[str], *, environment: Mapping[str, str] | None = None, log: Path
    ) -> ServerProcess:
        """Start `command` with `environment` added to the inherited one, minus variables for Python's module
        search.

        Raises:
            EngineError: the program does not exist.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(command[0], os.X_OK):
            raise EngineError(f"the server cannot be started: {command[0]} is not a program that can be run")
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                str(_GUARD),
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={k: v for k, v in os.environ.items() if k not in _OURS} | dict(environment or {}),
                start_new_session=True,  # Ctrl-C is for the run, which saves first
            )
        return cls(process, log)

    @property
    def alive(self) -> bool:
        """Whether the server is running."""
        return self._process.returncode is None

    @property
    def pid(self) -> int:
        """Process id of the guard."""
        return self._process.pid

    async def wait(self) -> int:
        """The exit code, once the server has ended."""
        return await self._process.wait()

    async def stop(self) -> None:
        """Stop the server and everything it has started; idempotent."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(STOP_S):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    def last_words(self, lines: int = 12) -> str:
        """Return the end of the log, for an error message."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - 8192))
                text = file.read().decode(errors="replace")
        except OSError:
            return "(no log)"
        said = [line for line in text.splitlines() if line.strip()]
        return "\n".join(said[-lines:]) or "(it said nothing)"
