"""Several servers as one: which server takes a request, and how lost servers are handled."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import httpx

from agentrl.async_tasks import spawn
from agentrl.engine.servers.client import InferenceServer, ServerAnswer
from agentrl.engine.servers.http import ServerLost, ServerRestarted, ServerTaken
from agentrl.errors import EngineError, first_error

ATTEMPTS = 6
"""How often a request is sent before its caller gets an error."""
BUSY = {429, 502, 503, 504}
"""HTTP statuses of servers, and of proxies before them, that may answer in a moment."""
BACK_OFF_S = 0.25
"""Seconds before a request is sent to such a server again; doubled each time."""
SHRINK = 0.8
"""Factor applied to a server's limit when it runs out of cache memory."""


T = TypeVar("T")
Ask = Callable[[InferenceServer], Coroutine[Any, Any, T]]


class Host(Protocol):
    """How one server is started and stopped."""

    @property
    def name(self) -> str:
        """Name for messages."""
        ...

    async def start(self) -> InferenceServer:
        """Return a server that answers requests. Raises EngineError if there is none in time."""
        ...

    async def ended(self) -> str:
        """Return the reason when the server is known to have ended; never returns for external servers."""
        ...

    async def stop(self) -> None:
        """Stop the server if it is ours; idempotent."""
        ...

    def keep_log(self) -> Path | None:
        """Keep the output of a server that failed, and return where; None if it is not on this machine."""
        ...


@dataclass(frozen=True, slots=True)
class ServedLimits:
    """How servers are used; see `agentrl.config.engine.ServerConfig`.

    Attributes:
        capacity: maximum number of concurrent requests per server.
        restarts: how often a server is restarted before it has answered anything.
        health_every_s: interval of health checks of a server without answers.
        health_timeout_s: time limit of a health check.
    """

    capacity: int = 256
    restarts: int = 3
    health_every_s: float = 15.0
    health_timeout_s: float = 30.0


@dataclass(eq=False)
class Replica:
    """One server and its running requests.

    `limit` is its maximum number of concurrent requests: it shrinks when the server evicts sequences from its
    cache, and grows by one for each round of answers without evictions.
    """

    host: Host
    most: int
    restarts: int
    server: InferenceServer | None = None
    ready: bool = False
    asleep: bool = False
    loading: bool = False
    """Whether an update of its weights is in progress."""
    running: int = 0
    limit: float = 0.0
    left: int = 0
    """Restarts left until it answers a request again."""
    given_up: bool = False
    answered: float = 0.0
    updates: int = 0
    pardoned: int = 0
    """Number of answers during which the limit does not shrink again."""
    calls: set[asyncio.Task[Any]] = field(default_factory=set)
    watch: asyncio.Task[None] | None = None
    busy_s: float = 0.0
    """Seconds with a running request since the last `timing`, until `busy_since`."""
    busy_since: float | None = None
    tokens: int = 0
    answer_s: float = 0.0
    """Seconds of all completions since the last `timing`, which sampled `tokens`."""

    def __post_init__(self) -> None:
        self.limit, self.left = float(self.most), self.restarts

    @property
    def free(self) -> bool:
        """Whether it can take another request now."""
        return self.ready and not self.asleep and self.running < int(self.limit)

    def begin(self) -> None:
        """Count a request as running."""
        self.running += 1
        if self.busy_since is None:
            self.busy_since = time.monotonic()

    def end(self) -> None:
        """Count it no longer."""
        self.running -= 1
        if not self.running and self.busy_since is not None:
            self.busy_s += time.monotonic() - self.busy_since
            self.busy_since = None

    def timing(self) -> dict[str, float]:
        """What it did since the last call."""
        now = time.monotonic()
        if self.busy_since is not None:
            self.busy_s, self.busy_since = self.busy_s + now - self.busy_since, now
        found = {"busy_seconds": self.busy_s, "tokens": float(self.tokens)}
        if self.tokens:
            found["token_seconds"] = self.answer_s / self.tokens
        self.busy_s, self.tokens, self.answer_s = 0.0, 0, 0.0
        return found

    def note(self, answer: object, updates_before: int) -> None:
        """Adjust the limit after an answer: is there memory for this many sequences?"""
        self.answered, self.left = time.monotonic(), self.restarts
        self.pardoned = max(0, self.pardoned - 1)
        retractions = answer.retractions if isinstance(answer, ServerAnswer) else 0
        if retractions and updates_before == self.updates:  # new weights retract all requests
            if not self.pardoned:
                self.limit = max(1.0, min(self.limit, float(self.running)) * SHRINK)
                self.pardoned = self.running
        else:
            self.limit = min(float(self.most), self.limit + 1.0 / self.limit)


class ReplicaPool:
    """The servers of an engine: sticky and least-loaded routing, capacity, failover, restart.

    Args:
        hosts: one for each server.
        limits: how the servers are used.
        prepare: brings the current weights to a server that has just started, calls its second argument as soon as
        it may be used, and returns.
        tell: callback for messages about losses and restarts.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        limits: ServedLimits,
        *,
        prepare: Callable[[InferenceServer, Callable[[], None]], Awaitable[None]],
        tell: Callable[[str], None],
    ) -> None:
        self.replicas = [Replica(host, limits.capacity, limits.restarts) for host in hosts]
        self._limits, self._prepare, self._tell = limits, prepare, tell
        self._homes: dict[str, Replica] = {}
        self._waiting: deque[tuple[asyncio.Future[Replica], str | None]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: EngineError | None = None
        self._outage_since: float | None = time.monotonic()
        self._outage_s = 0.0

    async def start(self) -> None:
        """Start every server and return when all of them respond.

        Raises:
            EngineError: one of them did not start; the others are stopped.
        """
        try:
            async with asyncio.TaskGroup() as starting:
                for replica in self.replicas:
                    starting.create_task(self._start_first(replica))
        except BaseExceptionGroup as several:
            await self.close()
            raise first_error(several) from None
        except BaseException:
            await self.close()
            raise

    @property
    def outage_s(self) -> float:
        """Seconds, so far, during which no server could answer."""
        since = self._outage_since
        return self._outage_s + (0.0 if since is None else time.monotonic() - since)

    @property
    def ready(self) -> list[Replica]:
        """Servers that can answer, or are asleep."""
        return [replica for replica in self.replicas if replica.ready]

    async def call(self, session: str | None, ask: Ask[T]) -> T:
        """Send a request to a server, and again to another one (or the same, restarted) whenever it is lost.

        Raises:
            EngineError: the answer is invalid, or no server can answer any more.
        """
        last: ServerLost | None = None
        for attempt in range(ATTEMPTS):
            replica = await self._take(session)
            server, updates, sent = replica.server, replica.updates, time.monotonic()
            assert server is not None
            try:
                answer = await _guarded(replica, ask(server))
                replica.note(answer, updates)
                if isinstance(answer, ServerAnswer):
                    replica.tokens += len(answer.ids)
                    replica.answer_s += time.monotonic() - sent
                return answer
            except ServerTaken as e:
                self.fail(e)
                raise
            except ServerLost as e:
                last = e
                await self._suspect(replica, server, e)
            finally:
                replica.end()
                self._serve_waiting()
            if last.status in BUSY and attempt + 1 < ATTEMPTS:
                await asyncio.sleep(BACK_OFF_S * 2**attempt)
        raise EngineError(f"a request was lost {ATTEMPTS} times; the last time: {last}") from last

    async def call_each(self, ask: Ask[T]) -> dict[str, T]:
        """Send a request to every server; return, by name, the answers of those that are not lost meanwhile, at
        least one.

        Raises:
            EngineError: an answer is invalid, no server can answer any more, or the request ends each one.
        """
        for _ in range(ATTEMPTS):
            await self.any_ready()
            asked = self.ready
            answers = await asyncio.gather(*(self._ask_one(replica, ask) for replica in asked))
            pairs = zip(asked, answers, strict=True)
            if found := {replica.host.name: answer for replica, answer in pairs if answer is not None}:
                return found
        raise EngineError(f"every server was lost, {ATTEMPTS} times in a row, when all were sent a request")

    async def _ask_one(self, replica: Replica, ask: Ask[T]) -> T | None:
        """Return the server's answer; None if it is lost."""
        server = replica.server
        assert server is not None
        for attempt in range(ATTEMPTS):
            try:
                return await _guarded(replica, ask(server))
            except ServerTaken as e:
                self.fail(e)
                raise
            except ServerLost as e:
                last = e
                await self._suspect(replica, server, e)
            if not replica.ready or replica.server is not server:
                return None
            if last.status in BUSY and attempt + 1 < ATTEMPTS:
                await asyncio.sleep(BACK_OFF_S * 2**attempt)
        raise EngineError(f"a request was lost {ATTEMPTS} times; the last time: {last}") from last

    def timing(self) -> dict[str, float]:
        """What each server did since the last call, as metrics."""
        return {
            f"server/{number}/{name}": value
            for number, replica in enumerate(self.replicas)
            for name, value in replica.timing().items()
        }

    def forget(self, session: str) -> None:
        """End a session."""
        self._homes.pop(session, None)

    def lose(self, replica: Replica, reason: str) -> None:
        """Stop sending to a server, retry its requests elsewhere, and restart it."""
        if not replica.ready:
            return
        self._set_ready(replica, False)
        self._tell(f"{replica.host.name} is lost ({reason}); its requests are being retried")
        for call in list(replica.calls):
            call.cancel(LOST)
        spawn(self._tasks, self._recover(replica, reason))

    def awake(self, replica: Replica) -> None:
        """Mark the server as awake."""
        replica.asleep = False
        self._serve_waiting()

    async def any_ready(self) -> None:
        """Return when a server can answer. Raises EngineError if none ever will."""
        self._refuse_broken()
        if not self.ready:
            replica = await self._take(None)
            replica.end()
            self._serve_waiting()

    async def close(self) -> None:
        """Stop everything, failing all waiting callers. Idempotent."""
        self.fail(EngineError("the engine is closed"))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for replica in self.replicas:
            replica.ready = False
            for call in list(replica.calls):
                call.cancel(LOST)
        async with asyncio.TaskGroup() as stopping:
            for replica in self.replicas:
                stopping.create_task(self._stop(replica))

    # -- who takes a request -----------------------------------------------------------------------------------

    async def _take(self, session: str | None) -> Replica:
        """Wait for a server with room, preferring the session's own. It counts as running from now on."""
        self._refuse_broken()
        if not self._waiting and (replica := self._pick(session)) is not None:
            return replica
        place: asyncio.Future[Replica] = asyncio.get_running_loop().create_future()
        self._waiting.append((place, session))
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                place.result().end()  # granted, but the caller is gone
                self._serve_waiting()
            raise

    def _refuse_broken(self) -> None:
        if self._broken is not None:
            raise EngineError(str(self._broken)) from self._broken

    def _pick(self, session: str | None) -> Replica | None:
        home = self._homes.get(session) if session is not None else None
        if home is None or not home.free:
            free = [replica for replica in self.replicas if replica.free]
            if not free:
                return None
            home = min(free, key=lambda replica: replica.running / replica.limit)
        if session is not None:
            self._homes[session] = home
        home.begin()
        return home

    def _serve_waiting(self) -> None:
        while self._waiting:
            place, session = self._waiting[0]
            if place.done():
                self._waiting.popleft()
                continue
            replica = self._pick(session)
            if replica is None:
                return
            self._waiting.popleft()
            place.set_result(replica)

    def fail(self, error: EngineError) -> None:
        """End all requests, also later ones, with this error."""
        self._broken = self._broken or error
        while self._waiting:
            place, _ = self._waiting.popleft()
            if not place.done():
                place.set_exception(EngineError(str(self._broken)))

    def _set_ready(self, replica: Replica, ready: bool) -> None:
        replica.ready = ready
        if self.ready and self._outage_since is not None:
            self._outage_s += time.monotonic() - self._outage_since
            self._outage_since = None
        elif not self.ready and self._outage_since is None:
            self._outage_since = time.monotonic()
        if ready:
            self._serve_waiting()

    # -- losses ------------------------------------------------------------------------------------------------

    async def _suspect(self, replica: Replica, server: InferenceServer, reason: ServerLost) -> None:
        """Handle a broken request: a server that still responds keeps its others (one connection was cut)."""
        if not replica.ready or replica.server is not server:
            return
        if isinstance(reason, ServerRestarted):
            self.lose(replica, str(reason))
            return
        try:
            await server.check(timeout_s=self._limits.health_timeout_s)
        except EngineError:
            if replica.server is server:
                self.lose(replica, str(reason))

    async def _start(self, replica: Replica) -> None:
        """Start a server and bring it the weights; afterwards it takes requests."""
        server = await replica.host.start()
        replica.server = server

        def usable() -> None:
            replica.asleep, replica.answered = False, time.monotonic()
            self._set_ready(replica, True)

        await self._prepare(server, usable)
        replica.watch = spawn(self._tasks, self._watch(replica, server))

    async def _start_first(self, replica: Replica) -> None:
        """Start a server; one that is busy, or whose connection broke, may answer in a moment."""
        for attempt in range(ATTEMPTS):
            try:
                await self._start(replica)
                return
            except ServerLost as e:
                slow = isinstance(e.__cause__, httpx.TimeoutException)
                if slow or e.status not in {None, *BUSY} or attempt + 1 == ATTEMPTS:
                    raise
            await self._stop(replica)
            await asyncio.sleep(BACK_OFF_S * 2**attempt)

    async def _recover(self, replica: Replica, reason: str) -> None:
        while replica.left > 0 and self._broken is None:
            replica.left -= 1
            await self._stop(replica)
            started = time.monotonic()
            try:
                await self._start(replica)
            except EngineError as e:
                reason = str(e)
                continue
            except Exception as e:  # requests wait for this task
                reason = f"{type(e).__name__}: {e}"
                continue
            self._tell(f"{replica.host.name} answers again after {time.monotonic() - started:.0f} s")
            return
        await self._stop(replica)
        replica.given_up = True
        if self._broken is not None:
            return
        log = replica.host.keep_log()
        reason += f" (its log: {log})" if log and str(log) not in reason else ""
        if all(r.given_up for r in self.replicas):
            self.fail(EngineError(f"no server is left: {replica.host.name} could not be started again: {reason}"))
        else:
            self._tell(f"going on without {replica.host.name}, which could not be started again: {reason}")

    async def _watch(self, replica: Replica, server: InferenceServer) -> None:
        """Watch for a server that has ended or no longer responds."""
        ended = asyncio.ensure_future(replica.host.ended())
        failures = 0
        try:
            while replica.ready and replica.server is server:
                await asyncio.wait([ended], timeout=self._limits.health_every_s)
                if ended.done():
                    self.lose(replica, ended.result())
                    return
                if replica.asleep or time.monotonic() - replica.answered < self._limits.health_every_s:
                    continue
                updates = replica.updates
                try:
                    await server.check(timeout_s=self._limits.health_timeout_s)
                    failures = 0
                except Exception as e:  # an EngineError, or what a broken answer raises: nobody else watches
                    # SGLang's check samples a token, which a server that loads weights cannot: it answers 503.
                    busy = replica.loading and isinstance(e, ServerLost) and e.status is not None
                    if updates == replica.updates and not replica.asleep and not busy:
                        failures += 1
                    if failures > 1:
                        self.lose(replica, str(e))
        finally:
            ended.cancel()
            await asyncio.gather(ended, return_exceptions=True)

    async def _stop(self, replica: Replica) -> None:
        if replica.watch is not None and replica.watch is not asyncio.current_task():
            replica.watch.cancel()
            await asyncio.gather(replica.watch, return_exceptions=True)
        await replica.host.stop()
        if replica.server is not None:
            server, replica.server = replica.server, None
            with contextlib.suppress(EngineError):
                await server.close()


LOST = "the server is lost"


async def _guarded(replica: Replica, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; if the replica is lost in the meantime, raise ServerLost instead of a cancellation."""
    call = asyncio.ensure_future(work)
    replica.calls.add(call)
    try:
        return await call
    except asyncio.CancelledError as e:
        task = asyncio.current_task()
        if e.args[:1] == (LOST,) and not (task and task.cancelling()):
            raise ServerLost(f"{replica.host.name}: lost while it worked on a request") from None
        raise
    finally:
        replica.calls.discard(call)
