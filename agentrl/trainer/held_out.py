"""Evaluation on the held-out tasks during a run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from agentrl.config.eval_config import EvalConfig
from agentrl.config.run import RunConfig
from agentrl.engine.base import Engine
from agentrl.reporting.report import Reporter
from agentrl.rollout.build import make_guard
from agentrl.rollout.collect import collect
from agentrl.rollout.episode_metrics import mean_reward, passed, passed_at, solved
from agentrl.rollout.group import Plays
from agentrl.trainer.in_step import InStep, counting
from agentrl.trainer.signals import StoppedEarly, unless_stopped
from agentrl.types import Group, Task


@dataclass(frozen=True)
class EvalSet:
    """Held-out tasks of one env and how they are played.

    Args:
        env: name of the env; empty if the run has only one.
        name: of `eval.sets`; empty for the held-out tasks themselves.
        config: the run as this env sees it.
        settings: of the evaluation.
        player: samples with `settings`.
    """

    env: str
    name: str
    config: RunConfig
    settings: EvalConfig
    tasks: Sequence[Task]
    player: Plays

    def due(self, step: int) -> bool:
        """Whether it is played after this step; 0 is the start of the run."""
        if step == 0:
            return self.settings.before_training
        return step == self.config.steps or bool(self.settings.every and step % self.settings.every == 0)

    def key(self, metric: str) -> str:
        """The name of a metric of this set."""
        return "/".join((*(("env", self.env) if self.env else ()), metric, *((self.name,) if self.name else ())))

    @property
    def label(self) -> str:
        """Its description in messages."""
        return f"held-out tasks{f' of {self.env}' if self.env else ''}{f' ({self.name})' if self.name else ''}"


class Evaluation(Protocol):
    """Evaluates during a run."""

    async def after(self, step: int) -> Mapping[str, float]:
        """Evaluate after a step if that is due; returns the metrics that are known by then."""
        ...

    async def catch_up(self, metrics: Sequence[Mapping[str, float]]) -> None:
        """Begin the evaluation of the last step of `metrics` again if a process that was killed did not end it."""
        ...

    async def finished(self) -> None:
        """Wait for an evaluation that is still running."""
        ...


@dataclass(frozen=True)
class HeldOut:
    """Plays the held-out tasks while training waits.

    Args:
        shown: whether progress is part of the step's display.
    """

    sets: Sequence[EvalSet]
    reporter: Reporter
    in_step: InStep
    shown: bool = True

    def due(self, step: int) -> bool:
        """Whether anything is played after this step."""
        return any(each.due(step) for each in self.sets)

    async def after(self, step: int) -> Mapping[str, float]:
        """What is due after this step: `held_out`, the share of episodes solved (if the env declares that), and
        `held_out_reward`, the mean reward; with several attempts also `held_out_pass`, the share of tasks solved
        at least once, and `held_out_pass@k`. Those of a named set are `held_out/NAME` and so on. With several
        envs, all are logged for each under `env/NAME/`, and over the episodes of all envs whenever all are due.

        Empty if there are no held-out tasks. The loop waits during the evaluation, so all tokens are sampled with
        the weights of this step, and no training episode begins (those in flight continue).
        """
        played = [(each, await self._play(each, step)) for each in self.sets if each.due(step)]
        found = {
            each.key(name): value
            for each, groups in played
            for name, value in _metrics(groups, each.settings.attempts).items()
        }
        envs = [each for each in self.sets if each.env and not each.name]
        together = [(each, groups) for each, groups in played if each.env and not each.name]
        if together and len(together) == len(envs):
            attempts = min(each.settings.attempts for each in envs)
            found |= _metrics([group for _, groups in together for group in groups], attempts)
        return found

    async def catch_up(self, metrics: Sequence[Mapping[str, float]]) -> None:
        """Does nothing: a step is logged after its evaluation."""

    async def finished(self) -> None:
        """Does nothing: evaluations end before `after` returns."""

    async def _play(self, each: EvalSet, step: int) -> list[Group]:
        attempts, what = each.settings.attempts, each.label
        if self.shown:
            self.in_step.pause(what)
        return await collect(
            each.player,
            each.tasks,
            group_size=attempts,
            label="/".join((f"held-out-{step}", *filter(None, (each.env, each.name)))),
            seed=each.config.seed,
            infra_retries=each.config.rollout.infra_retries,
            on_episode=counting(self.reporter, what, len(each.tasks) * attempts) if self.shown else None,
            guard=make_guard(each.config, self.reporter.note),
        )


@dataclass
class InBackground:
    """Plays the held-out tasks on an engine with the weights of the evaluated step, while training continues.

    One evaluation runs at a time: the next one waits for it.

    Args:
        held_out: plays on `engine`.
        engine: gets the weights of each evaluated step.
        weights: what engines receive.
        began: is called with the step when its evaluation begins.
        late: is called with the step and its metrics when they are known.
        stopping: whether the run was asked to stop; an evaluation ends early then, without a result.
    """

    held_out: HeldOut
    engine: Engine
    weights: Callable[[], Awaitable[dict[str, Tensor]]]
    began: Callable[[int], None]
    late: Callable[[int, Mapping[str, float]], None]
    stopping: Callable[[], bool]
    _running: asyncio.Task[None] | None = None

    async def after(self, step: int) -> Mapping[str, float]:
        """Begin what is due after this step; its metrics come later, except for those before the first step.

        Raises:
            AgentRLError: the evaluation before this one failed.
        """
        if not self.held_out.due(step):
            self._raise_if_failed()
            return {}
        await self.finished()
        await self.engine.update_weights(await self.weights(), version=step)
        if step == 0:
            return await self.held_out.after(0)
        self.began(step)
        self._running = asyncio.create_task(self._play(step), name=f"evaluation after step {step}")
        return {}

    async def catch_up(self, metrics: Sequence[Mapping[str, float]]) -> None:
        """Begin the evaluation of the last step of `metrics`, whose weights the learner has, if it is missing."""
        last = metrics[-1] if metrics else {"step": 0}
        if last["step"] and not any("held_out" in name for name in last):
            await self.after(int(last["step"]))

    async def finished(self) -> None:
        """Wait for the evaluation that is running. Raises AgentRLError if it failed."""
        running, self._running = self._running, None
        if running is not None:
            with suppress(StoppedEarly):
                await unless_stopped(self.stopping, running)

    async def cancel(self) -> None:
        """End the evaluation that is running, without a result."""
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _play(self, step: int) -> None:
        self.late(step, await self.held_out.after(step))

    def _raise_if_failed(self) -> None:
        if self._running is not None and self._running.done():
            running, self._running = self._running, None
            running.result()


def _metrics(groups: Sequence[Group], attempts: int) -> dict[str, float]:
    share = solved(groups)
    found = {"held_out_reward": mean_reward(groups)}
    if share is not None:
        found["held_out"] = share
        if attempts > 1:
            found["held_out_pass"] = passed(groups)
            below = [2**n for n in range(1, attempts.bit_length()) if 2**n < attempts]
            found |= {f"held_out_pass@{k}": passed_at(k, groups) for k in below}
    return found
