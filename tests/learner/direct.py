"""A learner and its algorithm with plain calls: what the loop does in a step, without a run around it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.learner.learner import Learner
from agentrl.learner.policy_rank import LocalPolicyRank
from agentrl.learner.rank import InProcess, LearnerSpec
from agentrl.learner.ray_learner import ray_learner
from agentrl.learner.shard import World
from agentrl.learner.split import StepResult
from agentrl.learner.teacher_server import asked_teacher
from agentrl.trainer.algorithm import Algorithm
from agentrl.trainer.samples import Scores, TrainingRows
from agentrl.trainer.save import resume
from agentrl.types import Sample


class DirectLearner:
    """Its rank's models and optimizers are attributes, unless the ranks are Ray workers."""

    def __init__(
        self,
        policy_dir: Path,
        *,
        algorithm: AlgorithmConfig,
        on_ray: bool = False,
        world: World | None = None,
        **spec: Any,
    ) -> None:
        made = LearnerSpec(policy_dir, algorithm=algorithm, **spec)
        if on_ray:
            self.learner = ray_learner(made)
        else:
            self.rank = LocalPolicyRank(made, world)
            self.learner = Learner(made, InProcess(self.rank, self.rank), reference=asked_teacher(made))
        self.steps = Algorithm(algorithm, reference_apart=self.learner.reference_apart)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["rank"], name)

    def step(self, samples: Sequence[Sample], scores: Scores | None = None) -> StepResult:
        """A step; without scores the rows have their advantages."""
        return asyncio.run(self._step(samples, scores))

    def prepared(self, samples: Sequence[Sample], scores: Scores | None = None) -> TrainingRows:
        """The rows as the learner's step gets them."""
        return asyncio.run(self._prepared(samples, scores))

    def imitate(self, samples: Sequence[Sample], lr: float) -> float:
        return asyncio.run(self.learner.imitate(samples, lr))

    def probe(self, samples: Sequence[Sample]) -> list[list[float]]:
        return asyncio.run(self.learner.probe(samples))

    def weights(self) -> dict[str, Tensor]:
        return asyncio.run(self.learner.weights())

    def adapter(self) -> dict[str, Tensor]:
        return asyncio.run(self.learner.adapter())

    def save(self, directory: Path) -> None:
        asyncio.run(self.learner.save(directory, self.steps.state_dict()))

    def load_optimizer(self, directory: Path) -> None:
        asyncio.run(resume(self.learner, self.steps, directory))

    def export(self, directory: Path) -> None:
        asyncio.run(self.learner.export(directory))

    def close(self) -> None:
        asyncio.run(self.learner.close())

    async def _prepared(self, samples: Sequence[Sample], scores: Scores | None) -> TrainingRows:
        steps = self.steps
        rows = TrainingRows(samples, kl_coef=steps.kl.coef, scores=scores or Scores((), (), ()))
        rows = await self.learner.annotate(rows, steps.advantage_needs)
        rows = steps.without_signal(rows) if scores is None else steps.advantages(rows)
        rows = await self.learner.annotate(rows, steps.loss_needs)
        return steps.corrections(rows)

    async def _step(self, samples: Sequence[Sample], scores: Scores | None) -> StepResult:
        update = await self.learner.step(await self._prepared(samples, scores))
        more = self.steps.observe(update.metrics, len({s.episode_id for s in samples}))
        return replace(update, metrics={**update.metrics, **more})
