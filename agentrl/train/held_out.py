"""Evaluation on the held-out tasks during a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.config.run import RunConfig
from agentrl.reporting.report import Reporter
from agentrl.rollout.build import make_guard
from agentrl.rollout.collect import collect
from agentrl.rollout.episode_metrics import mean_reward, passed, solved
from agentrl.rollout.group import Plays
from agentrl.train.in_step import InStep, counting
from agentrl.types import Group, Task


@dataclass(frozen=True)
class EvalSet:
    """The held-out tasks of one env.

    Args:
        name: of the env; empty if the run has only one.
        config: the run as this env sees it.
        player: samples with the settings in `eval`.
    """

    name: str
    config: RunConfig
    tasks: Sequence[Task]
    player: Plays

    def due(self, step: int) -> bool:
        """Whether it is played after this step; 0 is the start of the run."""
        settings = self.config.eval
        if step == 0:
            return settings.before_training
        return step == self.config.steps or bool(settings.every and step % settings.every == 0)


@dataclass(frozen=True)
class HeldOut:
    """Plays the held-out tasks."""

    sets: Sequence[EvalSet]
    reporter: Reporter
    in_step: InStep

    async def play(self, step: int) -> dict[str, float]:
        """What is due after this step: `held_out`, the share of episodes solved (if the env declares that), and
        `held_out_reward`, the mean reward; with several attempts also `held_out_pass`, the share of tasks solved
        at least once. With several envs, these are logged for each under `env/NAME/`, and over the episodes of all
        whenever all are due.

        Empty if there are no held-out tasks. The loop waits during the evaluation, so all tokens are sampled with
        the weights of this step, and no training episode begins (those in flight continue).
        """
        sets = [each for each in self.sets if each.tasks]
        played = [(each, await self._play(each, step)) for each in sets if each.due(step)]
        found = {
            f"env/{each.name}/{name}": value
            for each, groups in played
            for name, value in _metrics(groups, each.config.eval.attempts).items()
            if each.name
        }
        if not played or len(played) < len(sets):
            return found
        attempts = min(each.config.eval.attempts for each in sets)
        return found | _metrics([group for _, groups in played for group in groups], attempts)

    async def _play(self, each: EvalSet, step: int) -> list[Group]:
        attempts = each.config.eval.attempts
        what = f"held-out tasks of {each.name}" if each.name else "held-out tasks"
        self.in_step.pause(what)
        return await collect(
            each.player,
            each.tasks,
            group_size=attempts,
            label=f"held-out-{step}" + (f"/{each.name}" if each.name else ""),
            seed=each.config.seed,
            infra_retries=each.config.rollout.infra_retries,
            on_episode=counting(self.reporter, what, len(each.tasks) * attempts),
            guard=make_guard(each.config, self.reporter.note),
        )


def _metrics(groups: Sequence[Group], attempts: int) -> dict[str, float]:
    share = solved(groups)
    found = {"held_out_reward": mean_reward(groups)}
    if share is not None:
        found |= {"held_out": share} | ({"held_out_pass": passed(groups)} if attempts > 1 else {})
    return found
