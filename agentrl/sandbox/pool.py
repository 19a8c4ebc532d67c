"""A pool of sandboxes: started ahead of need, bounded in number, each leased once and then destroyed."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import importlib
import itertools
import logging
import os
import pkgutil
import time
from collections.abc import AsyncIterator
from typing import cast

from agentrl.async_tasks import spawn
from agentrl.errors import ConfigError, SandboxError
from agentrl.sandbox import canary
from agentrl.sandbox.box import Box
from agentrl.sandbox.contract import DEFAULT_BACKEND, Backend, Capabilities, Sandbox
from agentrl.sandbox.errors import PoolExhausted, SandboxUnavailable

log = logging.getLogger(__name__)

_numbers = itertools.count(1)


def backend_names() -> list[str]:
    """Return the names of the built-in back-ends, the default one first."""
    package = importlib.import_module("agentrl.sandboxes")
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__) if module.ispkg)
    return sorted(names, key=lambda name: name != DEFAULT_BACKEND)


def make_backend(spec: Sandbox) -> Backend:
    """Return the back-end that the spec names: a built-in one, or `module:Name`.

    Raises:
        ConfigError: no back-end has that name.
    """
    module, colon, name = spec.backend.partition(":")
    if not colon:
        module, name = f"agentrl.sandboxes.{spec.backend}", "Backend"
    try:
        return cast(Backend, getattr(importlib.import_module(module), name)(spec))
    except ModuleNotFoundError as error:
        if error.name != module:
            raise ConfigError(
                f"sandbox backend {spec.backend!r} needs the package {error.name!r}: {error}"
            ) from error
        raise ConfigError(
            f"sandbox backend {spec.backend!r} is unknown: use {', '.join(backend_names())} or module:Name"
        ) from None
    except AttributeError:
        raise ConfigError(f"sandbox backend {spec.backend!r}: {module} has no {name}") from None


class SandboxPool:
    """Lease sandboxes of one spec. Use a pool from a single event loop.

    Args:
        spec: the spec of every sandbox in the pool.
        min_idle: number of sandboxes to keep ready; each lease takes one and a replacement is created.
        max_total: maximum number of sandboxes, including idle ones; further leases wait in order of arrival.
        create_concurrency: how many sandboxes may be created at the same time.
        acquire_timeout_s: how long a lease waits before raising PoolExhausted.
    """

    def __init__(
        self,
        spec: Sandbox,
        *,
        min_idle: int = 2,
        max_total: int = 256,
        create_concurrency: int = 4,
        acquire_timeout_s: float = 300.0,
    ) -> None:
        if not 0 <= min_idle <= max_total or max_total < 1 or create_concurrency < 1:
            raise ConfigError(
                f"sandbox pool: need 0 <= min_idle <= max_total, 1 <= max_total and 1 <= create_concurrency, got "
                f"min_idle={min_idle}, max_total={max_total}, create_concurrency={create_concurrency}"
            )
        self.spec = spec
        self.min_idle, self.max_total = min_idle, max_total
        self.acquire_timeout_s = acquire_timeout_s
        self.capabilities: Capabilities | None = None
        """What the back-end can enforce here; available after `open`."""
        self.name = f"{os.getpid()}-{next(_numbers)}"
        self._backend = make_backend(spec)
        self._creating = asyncio.Semaphore(create_concurrency)
        self._opening = asyncio.Lock()
        self._is_open = self._closed = False
        self._idle: collections.deque[Box] = collections.deque()
        self._leased: dict[Box, float] = {}
        self._waiters: collections.deque[asyncio.Future[Box | None]] = collections.deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._total = 0
        self._refilling = 0
        self._count = 0
        self._failures = 0
        self._retry_at = self._failed_at = 0.0
        self._last_failure = ""
        self._counters = collections.Counter[str]()
        self._wait_s = 0.0

    async def open(self) -> None:
        """Start the back-end and test its promises; idempotent, and called by the first lease if necessary.

        Raises:
            PromiseNotEnforceable: the spec requires a promise that this machine cannot keep.
            SandboxUnavailable: the back-end does not work here.
        """
        async with self._opening:
            if self._closed:
                raise SandboxUnavailable("the sandbox pool has been closed")
            if self._is_open:
                return
            await self._backend.open()
            box = self._new_box()
            try:
                await self._start_first(box)
                self.capabilities = await canary.probe(self.spec, self._backend, box)
                canary.require(self.spec, self.capabilities, self._backend.promises()[0])
            except BaseException:
                await box.close()
                await self._backend.close()
                raise
            await box.close()
            self._is_open = True
            self._refill()

    async def _start_first(self, box: Box) -> None:
        try:
            await box.start()
        except SandboxUnavailable as error:
            if self.spec.backend != "namespace":
                raise
            raise SandboxUnavailable(
                f"{error}. This kernel, container or policy seems to forbid namespaces: `agentrl doctor` shows "
                "what works here; backend='landlock' needs none and promises less, 'docker' and 'remote' bring "
                "their own"
            ) from error

    @contextlib.asynccontextmanager
    async def lease(self, episode: str = "") -> AsyncIterator[Box]:
        """Lease a sandbox for the duration of the block."""
        box = await self.acquire(episode)
        try:
            yield box
        finally:
            await self.release(box)

    async def acquire(self, episode: str = "") -> Box:
        """Lease a sandbox that has never been used. Return it with `release`.

        Raises:
            PoolExhausted: none became free within `acquire_timeout_s`.
            SandboxUnavailable: none could be created.
        """
        if not self._is_open or self._closed:
            await self.open()
        began = time.monotonic()
        try:
            async with asyncio.timeout(self.acquire_timeout_s):
                box = await self._next()
        except TimeoutError:
            self._counters["exhausted"] += 1
            raise PoolExhausted(
                f"no sandbox became free within {self.acquire_timeout_s:g} s: {len(self._leased)} of at most "
                f"{self.max_total} are leased{f' (wanted by {episode})' if episode else ''}"
            ) from None
        self._leased[box] = began
        self._counters["leases"] += 1
        self._wait_s += time.monotonic() - began
        self._refill()
        return box

    async def release(self, box: Box) -> None:
        """Destroy a leased sandbox in any state; idempotent, and completes even if cancelled."""
        if self._leased.pop(box, None) is None:
            return
        await asyncio.shield(spawn(self._tasks, self._discard(box)))

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called; a closed pool grants no more leases."""
        return self._closed

    async def close(self) -> None:
        """Destroy all sandboxes, including leased ones, and close the back-end; idempotent."""
        self._closed = True
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(SandboxUnavailable("the sandbox pool has been closed"))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        boxes = [*self._idle, *self._leased]
        self._idle.clear()
        self._leased.clear()
        await asyncio.gather(*(box.close() for box in boxes), return_exceptions=True)
        self._total = 0
        await self._backend.close()

    async def __aenter__(self) -> SandboxPool:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def metrics(self) -> dict[str, float]:
        """Return counters since the start and current counts."""
        leases = self._counters["leases"]
        names = ("leases", "created", "died_idle", "create_failed", "exhausted", "destroyed")
        return {
            **{name: float(self._counters[name]) for name in names},
            "lease_wait_s": self._wait_s / leases if leases else 0.0,
            "idle": float(len(self._idle)),
            "leased": float(len(self._leased)),
            "total": float(self._total),
        }

    # Internals

    def _new_box(self) -> Box:
        self._count += 1
        return Box(self.spec, self._backend, f"{self.name}-{self._count}")

    async def _next(self) -> Box:
        """Return an idle box that responds, or a new one, in order of arrival."""
        while True:
            box = await self._turn()
            if box is None:
                return await self._create(awake=True)
            try:
                await box.wake()
            except SandboxError:
                # It died while idle, before anybody used it: take another.
                self._counters["died_idle"] += 1
                await self._discard(box)
            except asyncio.CancelledError:
                spawn(self._tasks, self._discard(box))
                raise
            else:
                return box

    async def _turn(self) -> Box | None:
        """Return an idle box, or None as permission to create one that already counts toward the total."""
        if not self._waiters:
            if self._idle:
                return self._idle.popleft()
            if self._total < self.max_total:
                self._total += 1
                return None
        waiter: asyncio.Future[Box | None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            with contextlib.suppress(ValueError):
                self._waiters.remove(waiter)
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                # It was already our turn: pass it on.
                given = waiter.result()
                if given is None:
                    self._total -= 1
                else:
                    self._idle.append(given)
                self._advance()
            raise

    def _advance(self) -> None:
        """Wake waiting leases, as far as capacity allows."""
        while self._waiters:
            if self._idle:
                given: Box | None = self._idle.popleft()
            elif self._total < self.max_total:
                self._total += 1
                given = None
            else:
                break
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(given)
            elif given is None:
                self._total -= 1
            else:
                self._idle.appendleft(given)
        self._refill()

    async def _create(self, *, awake: bool) -> Box:
        """Create a box, which already counts toward the total: ready to use if `awake`, else a single process."""
        began = time.monotonic()
        pause_s = self._retry_at - began
        try:
            if pause_s > 0:
                raise SandboxUnavailable(
                    f"sandbox backend {self.spec.backend!r} failed {self._failures} times in a row; "
                    f"next try in {pause_s:.1f} s; the last failure: {self._last_failure}"
                )
            async with self._creating:
                began = time.monotonic()
                box = self._new_box()
                try:
                    await box.start()
                    if awake:
                        await box.wake()
                except BaseException:
                    await box.close()
                    raise
        except BaseException as error:
            self._total -= 1
            if isinstance(error, SandboxError) and pause_s <= 0:  # without a try, do not extend the pause
                self._counters["create_failed"] += 1
                self._fail(error, began)
            self._advance()
            raise
        self._failures = 0
        self._counters["created"] += 1
        return box

    def _fail(self, error: SandboxError, began: float) -> None:
        """Pause after several failures in a row. Those of boxes that were being created together, often with one
        cause, count once."""
        if began >= self._failed_at:
            self._failed_at = time.monotonic()
            self._failures += 1
        self._last_failure = str(error)
        if self._failures >= 3:
            self._retry_at = time.monotonic() + min(30.0, 0.5 * 2 ** (self._failures - 3))

    def _refill(self) -> None:
        """Start creating enough boxes to restore `min_idle`."""
        if self._closed or not self._is_open or time.monotonic() < self._retry_at:
            return
        while len(self._idle) + self._refilling < self.min_idle and self._total < self.max_total:
            self._total += 1
            self._refilling += 1
            spawn(self._tasks, self._make_idle())

    async def _make_idle(self) -> None:
        try:
            self._idle.append(await self._create(awake=False))
        except SandboxError as error:
            log.warning("a sandbox could not be made ahead of need: %s", error)
            return
        finally:
            self._refilling -= 1
        self._advance()

    async def _discard(self, box: Box) -> None:
        try:
            await box.close()
        finally:
            self._counters["destroyed"] += 1
            self._total -= 1
            if not self._closed:
                self._advance()
