"""The classifier of a reward model on Ray workers, each with a full copy and a GPU if available."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.config.reward_model import RewardModelConfig
from agentrl.errors import ConfigError, InfraError, WorkerLost
from agentrl.garbage import collect_rarely
from agentrl.ray_cluster import connect, disconnect, import_ray
from agentrl.rollout.rewards.classifier import Classifier
from agentrl.types import Episode

KEY = "reward_model.workers"
START_S = 300.0
"""Timeout for a worker to start and load its model."""
ASKED_AT_ONCE = 100_000
"""Maximum concurrent episodes per worker; the scheduler bounds the total."""
STARTS, ATTEMPTS = 3, 2
"""Restarts of a dead worker by Ray, and retries of its requests."""


class ScoringWorker:
    """The actor: a classifier that scores waiting episodes in batches."""

    def __init__(self, config: RewardModelConfig, policy: Path) -> None:
        collect_rarely()
        self._config, self._policy = config, policy
        self._model: Classifier | None = None

    async def ready(self) -> None:
        """Load the model.

        Raises:
            ConfigError: it cannot be loaded, or is not visible from this node.
        """
        self._loaded()

    async def score(self, episode: Episode) -> float:
        """The model's score of an episode."""
        return await self._loaded().score(episode)

    def _loaded(self) -> Classifier:
        """The model; a restarted worker loads it at the first request."""
        if self._model is None:
            for folder in (self._policy, Path(self._config.path or "")):
                if not folder.is_dir():
                    raise ConfigError(
                        f"{KEY}: a worker cannot find {folder}: models and the run folder must be available under "
                        "the same path on all nodes of the cluster"
                    )
            self._model = Classifier.load(self._config, self._policy)
        return self._model


@dataclass
class ScoringWorkers:
    """Sends requests to the worker with the fewest pending ones."""

    ray: Any
    workers: list[_Worker]
    started: bool

    @classmethod
    async def start(cls, config: RewardModelConfig, policy: Path, address: str | None) -> ScoringWorkers:
        """Start all workers.

        Raises:
            ConfigError: Ray is not installed, the cluster has no room, or the classifier cannot be loaded there.
            WorkerLost: a worker did not start.
        """
        ray = import_ray(KEY)
        made = cls(ray, [], connect(ray, address, cpus=config.workers))
        try:
            gpus = _on_gpus(ray, config)
            where = {"path": str(Path(config.path or "").absolute()), "device": "cuda" if gpus else "cpu"}
            settings = config.model_copy(update=where)
            kind = ray.remote(ScoringWorker).options(
                num_cpus=0,
                num_gpus=int(gpus),
                scheduling_strategy="SPREAD",
                max_concurrency=ASKED_AT_ONCE,
                max_restarts=STARTS,
                max_task_retries=ATTEMPTS,
            )
            actors = [kind.remote(settings, policy.absolute()) for _ in range(config.workers)]
            made.workers = [_Worker(number, actor) for number, actor in enumerate(actors)]
            async with asyncio.timeout(START_S):
                await asyncio.gather(*(worker.ask(ray, "ready") for worker in made.workers))
        except TimeoutError:
            await made.close()
            raise ConfigError(
                f"{KEY} is {config.workers}, and not all of them had started within {START_S:g} s: the Ray "
                f"cluster has no room for them, or {config.path} takes too long to load"
            ) from None
        except BaseException:
            await made.close()
            raise
        return made

    async def score(self, episode: Episode) -> float:
        """The model's score of an episode; see `Scorer`."""
        worker = min(self.workers, key=lambda w: w.open)
        return float(await worker.ask(self.ray, "score", episode))

    async def close(self) -> None:
        """End the workers, and the cluster if it was started for them; idempotent."""
        workers, self.workers = self.workers, []
        for worker in workers:
            self.ray.kill(worker.actor)
        if self.started:
            disconnect(self.ray)
            self.started = False


@dataclass
class _Worker:
    number: int
    actor: Any
    open: int = field(default=0)

    async def ask(self, ray: Any, method: str, *arguments: Any) -> Any:
        """Call a method; re-raises its exception, or WorkerLost."""
        self.open += 1
        try:
            return await getattr(self.actor, method).remote(*arguments)
        except ray.exceptions.RayTaskError as e:
            raise e.cause if isinstance(e.cause, Exception) else InfraError(str(e.cause)) from e
        except ray.exceptions.RayError as e:
            reason = " ".join(str(e).split())[:400]
            raise WorkerLost(f"worker {self.number} of the reward model is lost ({KEY}): {reason}") from e
        finally:
            self.open -= 1


def _on_gpus(ray: Any, config: RewardModelConfig) -> bool:
    """Whether each worker has a GPU. Raises ConfigError if there are too few."""
    there = int(ray.cluster_resources().get("GPU", 0))
    if config.device == "cpu" or (config.device == "auto" and not there):
        return False
    if there < config.workers:
        raise ConfigError(
            f"{KEY} is {config.workers}, but the Ray cluster has {there} GPUs: use fewer workers, or more nodes"
        )
    return True
