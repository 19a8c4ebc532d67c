"""Inference servers that only take time, and the clock that they take it on.

A server decodes up to `slots` sequences at once, each token in `step_s`, and prefills `PREFILL` tokens a second,
one prompt after another. It keeps the blocks of what it computed, as servers with a prefix cache do. It pauses for
new weights, and fails as its `Failures` say. Everything around it is real: the pool of servers, routing, retries.

The clock is the CPU time of the thread plus the waits, which are skipped, so other work does not count.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import selectors
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar
from unittest import mock

from torch import Tensor

from agentrl.engine.servers.client import Description, GroupPlace, Listener, Scored, ServerAnswer
from agentrl.engine.servers.http import ServerLost
from agentrl.engine.servers.reported_routes import RoutesAsked
from agentrl.types import Completion, Sampling

PREFILL = 60_000.0
BLOCK, BLOCKS = 64, 1 << 16
"""Tokens of a block of the prefix cache, and blocks in a server's cache."""
MAX_CONTEXT = 32_768
UPDATE_S, RESTART_S = 0.5, 30.0

T = TypeVar("T")


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock counts the CPU time of its thread, and jumps where there is only waiting to do."""

    def __init__(self) -> None:
        self.skipped = 0.0
        super().__init__(_SkippingSelector(self))

    def time(self) -> float:
        """Seconds of computing and of skipped waits."""
        return time.thread_time() + self.skipped


class _SkippingSelector(selectors.DefaultSelector):
    def __init__(self, loop: SkippingLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready now; the wait for the next timer is skipped."""
        # A moment for threads at work, whose time the clock does not count; it must not jump ahead of them.
        ready = super().select(None if timeout is None else min(timeout, 0.002))
        if not ready and timeout:
            self._loop.skipped += timeout
        return ready


def run_skipping(work: Coroutine[None, None, T]) -> T:
    """Run on a loop that skips waits; `time.monotonic` follows its clock, also inside agentrl."""
    with (
        asyncio.Runner(loop_factory=SkippingLoop) as runner,
        mock.patch.object(time, "monotonic", runner.get_loop().time),
    ):
        return runner.run(work)


@dataclass(frozen=True)
class Failures:
    """How servers fail: seconds between two deaths of one of them (None: never), and the share of requests cut."""

    death_every_s: float | None = None
    cut: float = 0.0


@dataclass
class Load:
    """What the servers did, from which the bound follows. Times are seconds of one slot."""

    slots: int = 0
    sampled: int = 0
    prefilled: int = 0
    answers: int = 0
    decoded_s: float = 0.0
    """Decoding, and prefilling what is not in the cache."""
    lost_s: float = 0.0
    """Decoding that was under way when its server died or its connection was cut."""
    down_s: float = 0.0
    """Slots of servers that restarted or loaded weights."""
    deaths: int = 0
    cuts: int = 0
    cpu_s: float = 0.0

    def bound_s(self, wall_s: float, servers: int) -> float:
        """Seconds below which no schedule can be, with the same failures and updates."""
        up = self.slots - self.down_s / wall_s
        return max((self.decoded_s + self.lost_s) / up, self.prefilled / PREFILL / servers)


@dataclass(eq=False)
class _Running:
    answer: asyncio.Future[None]
    need_s: float
    left_s: float
    until: float = 0.0
    timer: asyncio.TimerHandle | None = None


@dataclass(eq=False)
class SimulatedServer:
    """Answers with written completions after the time that a real server of these rates would take."""

    url: str
    completions: Sequence[Completion]
    slots: int
    step_s: float
    load: Load
    failures: Failures
    rng: random.Random
    alive: bool = True
    _paused: float | None = None
    _prefill_free: float = 0.0
    _running: set[_Running] = field(default_factory=set)
    _known: OrderedDict[int, None] = field(default_factory=OrderedDict)
    _version: int = 0

    async def describe(self) -> Description:
        return Description(max_context=MAX_CONTEXT, seeds=True)

    async def check(self, *, timeout_s: float) -> None:
        if not self.alive:
            raise ServerLost(f"{self.url}: gone")

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        request: str,
        listener: Listener | None = None,
        structure: str | None = None,
        routes: RoutesAsked | None = None,
    ) -> ServerAnswer:
        cpu, loop = time.thread_time(), asyncio.get_running_loop()
        await self.check(timeout_s=0.0)
        assert len(self._running) < self.slots, "the pool sent more than the server has slots"
        now = loop.time()
        completion = self.completions[random.Random(sampling.seed).randrange(len(self.completions))]
        tokens = completion.ids[: sampling.max_tokens]
        prefill_s = self._unknown([*ids, *tokens], len(ids)) / PREFILL
        self._prefill_free = max(now, self._prefill_free) + prefill_s
        need_s, wait_s = prefill_s + len(tokens) * self.step_s, self._prefill_free - prefill_s - now
        cut = self.rng.random() < self.failures.cut
        need_s *= self.rng.random() if cut else 1.0
        run = _Running(loop.create_future(), need_s, wait_s + need_s)
        self._running.add(run)
        if self._paused is None:
            self._resume(run)
        self.load.cpu_s += time.thread_time() - cpu
        try:
            await run.answer
        finally:
            self._running.discard(run)
            if run.timer is not None:
                run.timer.cancel()
        if cut:
            self.load.cuts += 1
            self.load.lost_s += need_s
            raise ServerLost(f"{self.url}: the connection was cut")
        self.load.decoded_s += need_s
        self.load.sampled += len(tokens)
        self.load.answers += 1
        finish: Literal["stop", "length"] = "stop" if len(tokens) == len(completion.ids) else "length"
        return ServerAnswer(tokens, completion.logprobs[: len(tokens)], (self._version,) * len(tokens), finish)

    def _unknown(self, ids: Sequence[int], prompt: int) -> int:
        """How many tokens of the prompt are not in the cache; afterwards, all tokens are."""
        found, key, known = 0, 0, self._known
        for start in range(0, len(ids) - BLOCK, BLOCK):
            key = hash((key, *ids[start : start + BLOCK]))
            if key in known:
                known.move_to_end(key)
                found = start + BLOCK if found == start else found
            else:
                known[key] = None
        while len(known) > BLOCKS:
            known.popitem(last=False)
        self.load.prefilled += (new := max(1, prompt - found))
        return new

    def _resume(self, run: _Running) -> None:
        loop = asyncio.get_running_loop()
        run.until = loop.time() + run.left_s
        run.timer = loop.call_at(run.until, _set, run.answer)

    @contextlib.asynccontextmanager
    async def updating(self, *, by_tensor: bool) -> AsyncIterator[None]:
        await self.check(timeout_s=0.0)
        loop = asyncio.get_running_loop()
        self._paused = loop.time()
        for run in self._running:
            if run.timer is not None:
                run.timer.cancel()
                run.left_s = max(0.0, run.until - self._paused)
        whole = {run: run.left_s for run in self._running}
        yield
        paused, self._paused = loop.time() - self._paused, None
        self.load.down_s += self.slots * paused
        self._prefill_free += paused
        self._known.clear()  # computed with the old weights
        for run in whole:
            if run in self._running and not run.answer.done():
                self._resume(run)
        for run in self._running - whole.keys():
            self._resume(run)

    async def load_tensors(self, tensors: Mapping[str, Tensor], version: int) -> None:
        await asyncio.sleep(UPDATE_S)
        await self.check(timeout_s=0.0)
        self._version = version

    def die(self) -> None:
        """End, with all that runs here."""
        self.alive = False
        self.load.deaths += 1
        self.load.lost_s += self.under_way_s()
        for run in self._running:
            if not run.answer.done():
                run.answer.set_exception(ServerLost(f"{self.url}: died"))

    def under_way_s(self) -> float:
        """Seconds of decoding that requests in progress have had."""
        now = asyncio.get_running_loop().time()
        left = {run: run.left_s if self._paused is not None else run.until - now for run in self._running}
        return sum(max(0.0, run.need_s - max(0.0, left_s)) for run, left_s in left.items())

    async def abort(self, request: str) -> None: ...

    async def close(self) -> None: ...

    async def score(self, ids: Sequence[int], *, top: int = 0) -> list[Scored]:
        raise NotImplementedError

    async def load_folder(self, folder: Path, version: int) -> None:
        raise NotImplementedError

    async def load_adapter(self, folder: Path, version: int) -> None:
        raise NotImplementedError

    async def load_changes(self, changes: Mapping[str, Tensor], version: int) -> None:
        raise NotImplementedError

    async def join(self, place: GroupPlace) -> None:
        raise NotImplementedError

    async def receive(self, tensors: Mapping[str, Tensor], group: str, version: int) -> None:
        raise NotImplementedError

    async def leave(self, group: str) -> None:
        raise NotImplementedError

    async def sleep(self) -> None:
        raise NotImplementedError

    async def unpause(self) -> None:
        """Do nothing: it is never left paused."""

    async def wake(self, what: Literal["weights", "cache"]) -> None:
        raise NotImplementedError


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class SimulatedHost:
    """Starts simulated servers, one after another, and kills them."""

    def __init__(
        self,
        completions: Sequence[Completion],
        slots: int,
        step_s: float,
        load: Load,
        failures: Failures,
        number: int,
    ) -> None:
        self._name, self._rng = f"server {number}", random.Random(number)
        self._make = (completions, slots, step_s, load, failures)
        self._slots, self._load, self._failures = slots, load, failures
        self._server: SimulatedServer | None = None
        self._ended: asyncio.Future[str] | None = None
        self._down_since: float | None = None

    @property
    def name(self) -> str:
        return self._name

    def keep_log(self) -> None:
        """There is none."""

    async def start(self) -> SimulatedServer:
        loop = asyncio.get_running_loop()
        if self._down_since is not None:
            await asyncio.sleep(RESTART_S)
            self._load.down_s += self._slots * (loop.time() - self._down_since)
            self._down_since = None
        server = SimulatedServer(f"simulated://{self._name.replace(' ', '-')}", *self._make, rng=self._rng)
        self._server, self._ended = server, loop.create_future()
        if self._failures.death_every_s is not None:
            loop.call_later(self._rng.expovariate(1 / self._failures.death_every_s), self._kill, server)
        return server

    def _kill(self, server: SimulatedServer) -> None:
        server.die()
        self._down_since = asyncio.get_running_loop().time()
        assert self._ended is not None
        if not self._ended.done():
            self._ended.set_result("it died")

    def count_under_way(self) -> None:
        """Count what requests in progress have had, at the end of a measurement."""
        now = asyncio.get_running_loop().time()
        if self._down_since is not None:
            self._load.down_s += self._slots * (now - self._down_since)
            self._down_since = now
        elif self._server is not None:
            self._load.decoded_s += self._server.under_way_s()

    async def ended(self) -> str:
        assert self._ended is not None
        return await asyncio.shield(self._ended)

    async def stop(self) -> None: ...
