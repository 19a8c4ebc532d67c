"""Sources of servers: launched by the run, or given by address."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.address import without_credentials
from agentrl.engine.servers.client import InferenceServer
from agentrl.engine.servers.http import ServerRefused
from agentrl.engine.servers.launch.launcher import ServerProcess
from agentrl.errors import EngineError
from agentrl.ports import reserved_port
from agentrl.reachable import unreachable

Connect = Callable[[str], InferenceServer]
ASK_EVERY_S = 0.25
"""Interval for checking whether a starting server responds."""
SAY_AFTER_S = 3.0
"""How long an external server may be silent before the user reads that it is waited for."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to start a server: `command(port)`, and additional environment variables."""

    command: Callable[[int], Sequence[str]]
    environment: Mapping[str, str]


class LaunchedHost:
    """A server that the run starts on this machine, on a free port, and stops."""

    def __init__(self, name: str, recipe: Recipe, connect: Connect, *, log: Path, start_timeout_s: float) -> None:
        self.name, self._recipe, self._connect = name, recipe, connect
        self._log, self._start_timeout_s = log, start_timeout_s
        self._kept: Path | None = None
        self.process: ServerProcess | None = None

    async def start(self) -> InferenceServer:
        """Launch it and wait until it responds; see `Host.start`."""
        with reserved_port() as port:
            return await self._start(port)

    async def ended(self) -> str:
        """Wait for the process to end."""
        assert self.process is not None
        return f"its process ended with exit code {await self.process.wait()}; {self._said(3)}"

    async def stop(self) -> None:
        """End the process and its descendants."""
        if self.process is not None:
            await self.process.stop()

    def keep_log(self) -> Path:
        """Give the log a second name outside the folder that the run removes at its end; return where it is."""
        if self._kept is None:
            kept = Path(tempfile.gettempdir()) / f"agentrl-{uuid.uuid4().hex[:8]}-{self._log.name}"
            try:
                self._log.chmod(0o600)  # the folder, too, is closed to others
                kept.hardlink_to(self._log)
            except OSError:  # no log, or no such links here
                return self._log
            self._kept = kept
        return self._kept

    async def _start(self, port: int) -> InferenceServer:
        command = self._recipe.command(port)
        process = await ServerProcess.start(command, environment=self._recipe.environment, log=self._log)
        self.process = process
        server = self._connect(f"http://127.0.0.1:{port}")
        ended = asyncio.ensure_future(process.wait())
        try:
            async with asyncio.timeout(self._start_timeout_s):
                while not await _answers(server, ended):
                    if ended.done():
                        raise EngineError(
                            f"{self.name} ended with exit code {ended.result()} while it started; {self._said()}"
                        )
        except TimeoutError:
            await self._give_up(server)
            raise EngineError(
                f"{self.name} did not answer within {self._start_timeout_s:g} s (engine.server.start_timeout_s); "
                + self._said()
            ) from None
        except BaseException:
            await self._give_up(server)
            raise
        finally:
            ended.cancel()
            await asyncio.gather(ended, return_exceptions=True)
        return server

    async def _give_up(self, server: InferenceServer) -> None:
        await self.stop()
        await server.close()

    def _said(self, lines: int = 12) -> str:
        assert self.process is not None
        return f"the end of {self.keep_log()}:\n{self.process.last_words(lines)}"


class GivenHost:
    """An external server: waited for, but never started or stopped."""

    def __init__(
        self, url: str, connect: Connect, *, start_timeout_s: float, tell: Callable[[str], None] = warnings.warn
    ) -> None:
        self._url, self.name = url, without_credentials(url)
        self._connect, self._start_timeout_s, self._tell = connect, start_timeout_s, tell

    async def start(self) -> InferenceServer:
        """Wait until it responds; see `Host.start`."""
        server = self._connect(self._url)
        try:
            async with asyncio.timeout(self._start_timeout_s):
                started, told = time.monotonic(), False
                while not await _answers_unpaused(server):
                    if not told and time.monotonic() - started >= SAY_AFTER_S:
                        told = True
                        self._tell(
                            f"{self.name} does not answer{await _why(self._url)}; waiting for it, at most "
                            f"{self._start_timeout_s:g} s (engine.server.start_timeout_s)"
                        )
        except TimeoutError:
            await server.close()
            raise EngineError(
                f"{self.name} did not answer within {self._start_timeout_s:g} s (engine.server.start_timeout_s)"
            ) from None
        except BaseException:
            await server.close()
            raise
        return server

    async def ended(self) -> str:
        """Never return, because the end of an external server is not reported."""
        await asyncio.Event().wait()
        raise AssertionError

    async def stop(self) -> None:
        """Do nothing, because the server is not ours to stop."""

    def keep_log(self) -> None:
        """Its log is not ours either."""


async def _why(url: str) -> str:
    why = await unreachable(url, through_proxy=False)
    return f" ({why})" if why else ""


async def _answers_unpaused(server: InferenceServer) -> bool:
    """Return whether the server responds, also if a run that was killed during an update has left it paused."""
    with contextlib.suppress(EngineError):  # it is not there yet, or cannot be paused
        await server.unpause()
    return await _answers(server, None)


async def _answers(server: InferenceServer, ended: asyncio.Future[int] | None) -> bool:
    """Return whether the server responds; waits briefly if it does not."""
    try:
        await server.check(timeout_s=60.0)
    except ServerRefused as e:
        raise EngineError(f"{server.url} is not a server of the configured engine.kind: {e}") from e
    except EngineError:
        if ended is None:
            await asyncio.sleep(ASK_EVERY_S)
        else:
            await asyncio.wait([ended], timeout=ASK_EVERY_S)
        return False
    return True
