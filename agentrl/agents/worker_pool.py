"""Long-running programs that each play many episodes, one at a time: `agent.workers`.

Each line is a JSON object. A worker writes `{"ready": true}` once it has started, reads
`{"id", "task", "environment"}` on its standard input for each episode, and answers on its standard output with
`{"id", "outcome"}`, or `{"id", "error"}` if the agent failed. Other lines are ignored.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import secrets
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.agents.program import (
    MAX_CRASH,
    Access,
    AgentCrashedError,
    AgentTask,
    end_group,
    end_leftovers,
    how_ended,
    without_proxy,
)
from agentrl.errors import ConfigError, InfraError

HELPER = Path(__file__).parent / "for_workers"
START_S = 300.0
"""Time limit of a start."""
LINE_BYTES = 64 << 20
"""Longest line of a worker."""
EXIT_S = 2.0
"""How long a worker that closed its output may take to end."""


class _WorkerEnded(Exception):
    """The process ended or closed its output; the text says how."""


class _Worker:
    """One process; `mark` is in its environment and in that of what it starts."""

    def __init__(self, process: asyncio.subprocess.Process, mark: str) -> None:
        self.process, self._mark = process, mark
        self._said = collections.deque[str](maxlen=1)
        self._listener = asyncio.create_task(self._listen())

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process.returncode is None

    async def read(self) -> dict[str, object]:
        """The next JSON object. Raises _WorkerEnded."""
        assert self.process.stdout is not None
        while True:
            try:
                line = await self.process.stdout.readline()
            except ValueError:
                raise _WorkerEnded(f"it wrote a line of more than {LINE_BYTES:,} bytes") from None
            if not line:
                raise _WorkerEnded(await self._how_it_ended())
            with contextlib.suppress(ValueError, RecursionError):
                if isinstance(found := json.loads(line), dict):
                    return found
            await asyncio.sleep(0)  # lines without end must not hold up other episodes

    async def send(self, message: dict[str, object]) -> None:
        """Write a line. A worker that has ended is noticed when it is read."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(json.dumps(message, default=str).encode() + b"\n")
            await self.process.stdin.drain()

    async def end(self) -> None:
        """End the process group and, on Linux, what left it; idempotent."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        await end_group(self.process)
        await asyncio.to_thread(end_leftovers, self._mark)
        self._listener.cancel()
        await asyncio.gather(self._listener, return_exceptions=True)
        vars(self.process)["_transport"].close()  # what hid from that may still hold the outputs open

    async def _how_it_ended(self) -> str:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), EXIT_S)
            await asyncio.wait_for(asyncio.shield(self._listener), EXIT_S)
        code = self.process.returncode
        how = "it closed its output" if code is None else how_ended(code)
        return how + (f": {self._said[-1][:300]}" if self._said else "")

    async def _listen(self) -> None:
        assert self.process.stderr is not None
        kept = b""
        while chunk := await self.process.stderr.read(1 << 16):
            *lines, kept = (kept + chunk)[-(64 << 10) :].split(b"\n")
            self._said.extend(text for line in [*lines, kept] if (text := line.decode("utf-8", "replace").strip()))


@dataclass(slots=True)
class WorkerAgent:
    """Plays episodes on `num` workers.

    A worker that ends, fails to answer, or is cut off in the middle of an episode is replaced.
    """

    command: Sequence[str]
    num: int
    cwd: str | None = None
    _free: asyncio.Queue[_Worker | None] = field(default_factory=asyncio.Queue)
    _all: set[_Worker] = field(default_factory=set)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start the workers; they run during the block.

        Raises:
            ConfigError: one does not start.
        """
        try:
            starts = await asyncio.gather(*[self._start() for _ in range(self.num)], return_exceptions=True)
            for started in starts:
                if isinstance(started, InfraError):
                    raise ConfigError(f"agent.command: {started}")
                if isinstance(started, BaseException):
                    raise started
                self._free.put_nowait(started)
            yield
        finally:
            await asyncio.gather(*[worker.end() for worker in self._all])

    async def run(self, task: AgentTask, access: Access) -> str:
        """Have a worker play the episode.

        Raises:
            AgentCrashedError: the agent failed, or its worker ended.
            InfraError: no worker can be started.
        """
        worker, kept = await self._free.get(), False
        try:
            if worker is None or not worker.alive:
                await self._drop(worker)
                worker = await self._start()
            id = secrets.token_hex(8)  # what an earlier episode left behind in the worker cannot guess it
            await worker.send({"id": id, "task": task.data(), "environment": access.environment})
            answer = await worker.read()
            while answer.get("id") != id:
                answer = await worker.read()
            kept = True
        except _WorkerEnded as e:
            raise AgentCrashedError(f"its worker ended: {e}") from None
        finally:
            self._free.put_nowait(worker if kept else None)
            if not kept:
                await self._drop(worker)
                await asyncio.to_thread(end_leftovers, access.api_key)
        if "error" in answer:
            raise AgentCrashedError(str(answer["error"])[:MAX_CRASH])
        outcome = answer.get("outcome")
        return outcome if isinstance(outcome, str) else "" if outcome is None else json.dumps(outcome)

    async def _drop(self, worker: _Worker | None) -> None:
        """End a worker. What it left half done cannot reach another episode."""
        if worker is not None:
            await asyncio.shield(worker.end())
            self._all.discard(worker)

    async def _start(self) -> _Worker:
        """Raises InfraError if the process does not get ready."""
        words = [sys.executable, *self.command[1:]] if self.command[0] == "python" else list(self.command)
        known = os.environ.get("PYTHONPATH")
        path = os.pathsep.join([*([known] if known else []), str(HELPER)])
        pipe, mark = asyncio.subprocess.PIPE, secrets.token_hex(16)
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                cwd=self.cwd,
                env={**os.environ, **without_proxy(), "PYTHONPATH": path, "AGENTRL_WORKER": mark},
                start_new_session=True,
                limit=LINE_BYTES,
            )
        except OSError as e:
            raise InfraError(f"cannot start the worker {words[0]}: {e.strerror}") from None
        worker = _Worker(process, mark)
        self._all.add(worker)
        try:
            await self._ready(worker)
        except BaseException:
            await self._drop(worker)
            raise
        return worker

    async def _ready(self, worker: _Worker) -> None:
        """Wait until the worker says that it is ready. Raises InfraError."""
        hint = "a worker writes lines of JSON (docs/agents.md#workers)"
        try:
            async with asyncio.timeout(START_S):
                while "ready" not in await worker.read():
                    pass
        except TimeoutError:
            raise InfraError(f'the worker did not write {{"ready": true}} within {START_S:g} s; {hint}') from None
        except _WorkerEnded as e:
            raise InfraError(f"the worker ended before it was ready: {e}; {hint}") from None
