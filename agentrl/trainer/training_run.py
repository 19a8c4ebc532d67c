"""The state of a running training."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field

from agentrl.config.run import RunConfig
from agentrl.engine.base import Engine
from agentrl.errors import AgentRLError
from agentrl.learner.learner import Learner
from agentrl.learner.split import StepResult
from agentrl.rollout.admission import Batch
from agentrl.rollout.scheduler import Scheduler
from agentrl.trainer.algorithm import Algorithm
from agentrl.trainer.held_out import Evaluation
from agentrl.trainer.in_step import InStep
from agentrl.trainer.samples import TrainingRows
from agentrl.trainer.save import Checkpoints
from agentrl.trainer.signals import StoppedEarly, StopRequest, unless_stopped
from agentrl.trainer.start import sent_weights
from agentrl.trainer.step_log import StepLog, check_drift
from agentrl.trainer.verify import WeightCheck


@dataclass
class Run:
    """Everything the loop uses. Steps count from 1: step N is the N-th optimizer step.

    Args:
        check: compares the servers' weights with the learner's, if the engine has servers.
    """

    config: RunConfig
    scheduler: Scheduler
    algorithm: Algorithm
    learner: Learner
    engine: Engine
    evaluation: Evaluation
    checkpoints: Checkpoints
    log: StepLog
    in_step: InStep
    stop: StopRequest
    check: WeightCheck | None = None
    _published: int = 0
    _mark: float = field(default_factory=time.monotonic)
    _seconds: dict[str, float] = field(default_factory=dict)

    def begin(self) -> None:
        """Start the clock of the first step."""
        done = self.scheduler.admission.next_step - 1
        if done >= self.config.steps:
            self.log.reporter.note(
                f"step {done} is done and steps is {self.config.steps}: nothing to train; raise steps to go on"
            )
        self.log.reporter.phase("train", self.config.steps, done)
        self.in_step.resume()
        self.engine.server_timing()  # what came before the first step
        self._mark = time.monotonic()

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        """While the learner works; servers that share its GPUs sleep."""
        self.in_step.pause("update")
        if self.config.engine.server.sleep:
            await self.engine.sleep()
        self._seconds["update_began_seconds"] = time.time()
        with self._timed("update_seconds"):
            yield

    def leaving(self) -> bool:
        """Whether to leave a step unfinished: the run was asked to stop, and no server can answer.

        The signal may have ended the servers as well. A scheduler that wants its machine back does not wait until
        they have started again.
        """
        return bool(self.stop) and not (self.engine.ready or self.engine.asleep)

    async def leave(self) -> None:
        """Save the last complete step, if the run was left in the next one and has not saved it yet."""
        step = self.scheduler.admission.next_step - 1
        if not self.leaving() or step == self.config.steps:
            return
        self.log.reporter.note(f"no server can answer any more: step {step + 1} is left unfinished")
        if step > 0:
            await self.save(step)

    async def save(self, step: int) -> None:
        """Save a complete step before the run ends, unless that was done when it was finished."""
        await self.checkpoints.saved()
        if not self.checkpoints.has(step):  # the run was asked to stop after `finish` had looked
            self.in_step.pause("checkpoint")
            await self.checkpoints.save(step)

    async def publish(self, version: int) -> None:
        """Hand the learner's weights to the engine; completions that are being sampled continue with them."""
        with suppress(StoppedEarly):
            await unless_stopped(self.leaving, self._publish(version))

    async def _publish(self, version: int) -> None:
        self.in_step.pause("sending weights")
        with self._timed("publish_seconds"):
            await self.engine.update_weights(await sent_weights(self.config, self.learner), version=version)
        if self.check is not None:
            self._seconds["sync_gap"] = await self.check.gap(version)
        self._published = version

    async def finish(self, batch: Batch, rows: TrainingRows, update: StepResult) -> None:
        """Log the step, and evaluate and save when due. A step beyond the drift gate is logged, but not saved.

        Raises:
            AgentRLError: sampler and learner disagree, or the first steps had no reward at all.
        """
        step, config = batch.step, self.config
        timing = {**self._seconds, **update.timing, **self.engine.server_timing()}
        timing["seconds"] = time.monotonic() - self._mark
        metrics = self.log.metrics(batch, update, timing)
        metrics |= self.algorithm.observe(update.metrics, rows.num_episodes)
        self.log.episodes(batch, rows)
        self.log.tokens(batch, rows, update)
        last = step == config.steps
        try:
            check_drift(config, step, metrics)
        except AgentRLError:
            self.log.step(step, metrics)
            raise
        metrics |= await self._evaluated(step)
        self.log.step(step, metrics)
        if last or self.stop or (config.checkpoint.every and step % config.checkpoint.every == 0):
            self.in_step.pause("checkpoint")
            await self.checkpoints.save(step)
        self.log.examine(step)
        self.log.draw()
        self.in_step.taken(batch)
        self._mark = time.monotonic()

    async def _evaluated(self, step: int) -> Mapping[str, float]:
        """Evaluate if that is due, unless the run is to stop and no server can answer with these weights."""
        if self._published == step:
            with suppress(StoppedEarly):
                return await unless_stopped(self.leaving, self.evaluation.after(step))
        return {}

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = time.monotonic() - started
