"""Episodes on Ray actors, so that tokenization, tools and rewards use the cores of many machines.

The engine stays in the training process: workers return their requests from a long-running call, and completions
are delivered in separate batched calls. There are no ports and no polling. If a worker dies, its episodes become
infrastructure failures and are retried individually on a replacement worker.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.chat.ids import Ids
from agentrl.config.run import RunConfig
from agentrl.engine.base import Engine
from agentrl.env.env import Env
from agentrl.errors import AgentRLError, ConfigError, InfraError, WorkerLost
from agentrl.ray_cluster import connect, disconnect, import_ray, node_lives
from agentrl.rollout.episode import Player
from agentrl.rollout.group import Plays
from agentrl.rollout.lifecycle import EpisodeStatus, during_outage
from agentrl.rollout.ray.worker import (
    EngineReply,
    EngineRequest,
    EnvWorker,
    EpisodeRequest,
    WorkerSetup,
    pack_setup,
)
from agentrl.types import Completion, Episode, StopReason, Task

START_S, STOP_S = 300.0, 30.0
"""Timeouts for a worker to start, and for its envs to close at the end."""
EPISODES_AT_ONCE = 100_000
"""Maximum concurrent calls of an actor; the scheduler bounds the number of episodes."""


@asynccontextmanager
async def placed(config: RunConfig, model: Path, engine: Engine) -> AsyncIterator[Callable[[Player], Plays]]:
    """Yields a function that moves a player to the run's workers, or returns it unchanged without workers.

    Args:
        config: configuration of the run, with `rollout.workers` and `ray`.
        model: directory with the tokenizer.
        engine: samples for all of them.

    Raises:
        ConfigError: see `Workers.start`.
        WorkerLost: likewise.
    """
    num = config.rollout.workers
    if num == 0:
        yield lambda player: player
        return
    kit = pack_setup(config, model, engine.max_context)
    workers = Workers(num, kit, engine, address=config.ray)
    try:
        await workers.start()
        yield workers.player
    finally:
        await workers.close()


class Workers:
    """The env workers of a run.

    Args:
        num: how many.
        kit: the setup of the workers.
        engine: samples for all of them.
        address: address of the Ray cluster; None starts one on this machine, unless this process is already
            connected.
    """

    def __init__(self, num: int, kit: WorkerSetup, engine: Engine, *, address: str | None = None) -> None:
        self._num, self._kit, self._engine, self._address = num, kit, engine, address
        self._ray: Any = None
        self._started = False
        self._tasks = asyncio.TaskGroup()
        self._workers: list[_Worker] = []
        self.waiting: dict[str, EpisodeStatus] = {}
        """Status of the episodes by name, updated with their requests to the engine."""

    async def start(self) -> None:
        """Start all workers.

        Raises:
            ConfigError: Ray is not installed, no cluster is at the address, or the env does not import there.
            WorkerLost: a worker did not start.
        """
        self._ray = import_ray("rollout.workers")
        await self._tasks.__aenter__()
        self._started = connect(self._ray, self._address, cpus=self._num)
        self._workers = [_Worker(number, self) for number in range(self._num)]
        for error in await asyncio.gather(*(w.ready() for w in self._workers), return_exceptions=True):
            if isinstance(error, BaseException):
                raise error

    async def close(self) -> None:
        """Close all envs, end the workers, and the cluster if it was started for them; idempotent."""
        workers, self._workers = self._workers, []
        await asyncio.gather(*(w.stop() for w in workers))
        if self._ray is not None:
            await self._tasks.__aexit__(None, None, None)
            if self._started:
                disconnect(self._ray)
            self._ray, self._started = None, False

    def player(self, player: Player) -> RemotePlayer:
        """A player like `player` that runs on the workers."""
        return RemotePlayer(self, player)

    async def play(self, order: EpisodeRequest, status: EpisodeStatus) -> Any:
        """Play one episode on the worker with the fewest episodes; returns episode and report.

        Raises:
            WorkerLost: the worker died, or could not be restarted.
        """
        worker = min(self._workers, key=lambda w: len(w.episodes))
        worker.episodes.add(order.episode_id)
        self.waiting[order.episode_id] = status
        try:
            try:
                await worker.ready()
            except ConfigError as e:  # the previous worker could: this node differs from the others
                raise WorkerLost(f"env worker {worker.number} did not start again: {e}") from e
            status.now(worker.name)
            episode, report = await worker.play(order)
            return replace(episode, worker=worker.number), report
        finally:
            worker.episodes.discard(order.episode_id)
            del self.waiting[order.episode_id]


@dataclass(frozen=True, slots=True)
class RemotePlayer:
    """Plays episodes on workers; otherwise like `player`."""

    workers: Workers
    player: Player

    @property
    def make_env(self) -> Callable[[], Env]:
        """Creates envs in this process (for group rewards)."""
        return self.player.make_env

    async def play(
        self, task: Task, *, episode_id: str, seed: int, status: EpisodeStatus | None = None
    ) -> Episode:
        """Play one episode on a worker; the loss of the worker is an infrastructure failure.

        Raises:
            TemplateError: too many transcripts failed their token check.
        """
        player, check = self.player, self.player.token_check
        mode = None if check is None else check.mode
        order = EpisodeRequest(
            task,
            episode_id,
            seed,
            player.limits,
            replace(player.sampling, stop_ids=frozenset()),
            mode,
            player.hints,
        )
        status = status or EpisodeStatus(episode_id, task.id)
        before_s = player.engine.outage_s
        try:
            episode, report = await self.workers.play(order, status)
        except InfraError as e:
            error = f"{type(e).__name__}: {e}"
            return Episode(episode_id, task, (), (), (), StopReason.INFRA, None, error=error)
        late = episode.stop_reason is StopReason.TIMEOUT and not episode.metrics.get("stuck_calls")
        if late and player.engine.outage_s > before_s:  # unknown to workers
            error = f"InfraError: {during_outage(player.limits.timeout_s)}"
            return Episode(episode_id, task, (), (), (), StopReason.INFRA, None, error=error)
        if check is not None and report is not None and episode.error is None:
            check.watch.add(report, episode_id)
        found: Episode = episode
        return found


@dataclass(eq=False)
class _Worker:
    """One worker, restarted on demand if it is dead."""

    number: int
    workers: Workers
    episodes: set[str] = field(default_factory=set)
    _actor: Any = None
    _pumps: list[asyncio.Task[None]] = field(default_factory=list)
    _sampling: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    _answers: list[EngineReply] = field(default_factory=list)
    _some: asyncio.Event = field(default_factory=asyncio.Event)
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def name(self) -> str:
        """The name used by the watchdog."""
        return f"worker {self.number} (env or tokens)"

    async def ready(self) -> None:
        """Start the actor unless it lives.

        Raises:
            ConfigError: the env or the tokenizer cannot be used there.
            WorkerLost: it did not start.
            AgentRLError: no worker can start any more, since Ray has died on this machine.
        """
        async with self._starting:
            if self._actor is not None:
                return
            ray = self.workers._ray
            if not await asyncio.to_thread(node_lives, ray):
                raise AgentRLError(
                    f"env worker {self.number} died with Ray's own process on this machine (raylet). No finished "
                    "checkpoint is lost: run the same command again to resume"
                )
            kind = ray.remote(EnvWorker).options(
                num_cpus=0, scheduling_strategy="SPREAD", max_concurrency=EPISODES_AT_ONCE
            )
            actor = kind.remote(self.workers._kit)
            try:
                async with asyncio.timeout(START_S):
                    await actor.ready.remote()
            except TimeoutError:
                ray.kill(actor)
                raise WorkerLost(f"env worker {self.number} did not start within {START_S:g} s") from None
            except ray.exceptions.RayError as e:
                ray.kill(actor)
                raise _reason(e, f"env worker {self.number} did not start") from e
            self._actor, self._answers = actor, []
            create = self.workers._tasks.create_task
            self._pumps = [create(self._listen(actor)), create(self._tell(actor))]

    async def play(self, order: EpisodeRequest) -> Any:
        """Play on this worker; see `Workers.play`."""
        actor, errors = self._actor, self.workers._ray.exceptions
        try:
            return await actor.play.remote(order)
        except asyncio.CancelledError:
            with contextlib.suppress(errors.RayError):
                actor.cancel.remote(order.episode_id)
            raise
        except errors.RayError as e:
            raise self._lost(actor, e) from e

    async def stop(self) -> None:
        """Close its envs and stop it."""
        async with self._starting:
            actor, self._actor = self._actor, None
            if actor is None:
                return
            ray = self.workers._ray
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await actor.stop.remote()
            self._end_pumps()
            ray.kill(actor)

    # -- between the actor and the engine ----------------------------------------------------------------------

    async def _listen(self, actor: Any) -> None:
        """Forward the worker's requests to the engine."""
        try:
            while True:
                for request in await actor.asked.remote():
                    await self._take(request)
        except self.workers._ray.exceptions.RayError as e:
            self._lost(actor, e)

    async def _take(self, request: EngineRequest) -> None:
        if request.ids is not None:
            sampling = self._sampling
            sampling[request.number] = self.workers._tasks.create_task(self._sample(request, sampling))
        elif request.session is not None:
            with contextlib.suppress(InfraError):
                await self.workers._engine.release(request.session)
        elif request.number in self._sampling:
            self._sampling[request.number].cancel()

    async def _sample(self, request: EngineRequest, sampling: dict[int, asyncio.Task[None]]) -> None:
        assert request.ids is not None
        assert request.sampling is not None
        status = self.workers.waiting.get(request.session or "")
        if status is not None:
            status.now("the engine")
        completion: Completion | None = None
        error = ("", "")
        try:
            ids = Ids(request.ids.astype(np.int64))
            completion = await self.workers._engine.generate(ids, request.sampling, session=request.session)
        except (InfraError, ValueError) as e:
            error = (type(e).__name__, str(e))
        finally:
            del sampling[request.number]
        if status is not None:
            status.now(self.name)
        self._answers.append(EngineReply(request.number, completion, error))
        self._some.set()

    async def _tell(self, actor: Any) -> None:
        """Deliver the engine's answers to the worker in batches."""
        try:
            while True:
                await self._some.wait()
                self._some.clear()
                answers, self._answers = self._answers, []
                if answers:
                    await actor.answer.remote(answers)
        except self.workers._ray.exceptions.RayError as e:
            self._lost(actor, e)

    def _lost(self, actor: Any, error: Exception) -> Exception:
        """The error for a failed call; a dead actor and its requests are dropped."""
        found = _reason(error, f"env worker {self.number} died")
        if isinstance(found, WorkerLost) and self._actor is actor:
            self._actor = None
            self._end_pumps()
        return found

    def _end_pumps(self) -> None:
        current = asyncio.current_task()
        for task in (*self._pumps, *self._sampling.values()):
            if task is not current:
                task.cancel()
        self._pumps, self._sampling = [], {}


def _reason(error: Exception, what: str) -> Exception:
    """The agentrl error raised by the worker, else WorkerLost with Ray's message."""
    exceptions = import_module("ray.exceptions")
    if isinstance(error, exceptions.RayTaskError):
        cause = error.cause
        return cause if isinstance(cause, Exception) else InfraError(str(cause))
    return WorkerLost(f"{what}: {' '.join(str(error).split())[:300]}")
