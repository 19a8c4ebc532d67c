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
from agentrl.types import Task


@dataclass(frozen=True)
class HeldOut:
    """Plays the held-out tasks.

    Args:
        player: samples with the settings in `eval`.
    """

    config: RunConfig
    tasks: Sequence[Task]
    player: Plays
    reporter: Reporter
    in_step: InStep

    async def play(self, step: int) -> dict[str, float]:
        """`held_out`, the share of episodes solved (if the env declares that), and `held_out_reward`, the mean
        reward; with several attempts also `held_out_pass`, the share of tasks solved at least once.

        Empty if there are no held-out tasks. The loop waits during the evaluation, so all tokens are sampled with
        the weights of this step, and no training episode begins (those in flight continue).
        """
        if not self.tasks:
            return {}
        attempts = self.config.eval.attempts
        self.in_step.pause("held-out tasks")
        groups = await collect(
            self.player,
            self.tasks,
            group_size=attempts,
            label=f"held-out-{step}",
            seed=self.config.seed,
            infra_retries=self.config.rollout.infra_retries,
            on_episode=counting(self.reporter, "held-out tasks", len(self.tasks) * attempts),
            guard=make_guard(self.config, self.reporter.note),
        )
        share = solved(groups)
        found = {"held_out_reward": mean_reward(groups)}
        if share is not None:
            found |= {"held_out": share} | ({"held_out_pass": passed(groups)} if attempts > 1 else {})
        return found
