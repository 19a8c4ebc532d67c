"""Which tasks a step plays: sampled, told how they went, and drawn again where a group taught nothing."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.config.run import RunConfig
from agentrl.env.curriculum import TaskSampler, has_signal
from agentrl.errors import CheckpointError
from agentrl.rollout.metrics import solved
from agentrl.types import Group, Task

SAMPLER_FILE = "sampler.json"
"""In a checkpoint: where the task sampler stands."""

Play = Callable[[Sequence[Task], str], Awaitable[list[Group]]]
"""Plays a group of each task; the text is added to the label that names their episodes."""


@dataclass
class TaskFeed:
    """The tasks of a run, step by step.

    Args:
        sampler: draws them.
        groups_per_step: groups that a step learns from.
        refill: groups that a step may play beyond those, in place of such that scored all the same.
    """

    sampler: TaskSampler
    groups_per_step: int
    refill: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last step: `refilled_groups` and `refilled_episodes` that were played and put aside."""

    @classmethod
    def of(cls, config: RunConfig, tasks: Sequence[Task]) -> TaskFeed:
        """The feed that a configuration asks for, at its beginning."""
        data, rollout = config.data.sampler, config.rollout
        sampler = TaskSampler(tasks, config.seed, data.order, data.window, data.floor)
        return cls(sampler, rollout.groups_per_step, rollout.refill_zero_signal)

    async def groups(self, play: Play) -> list[Group]:
        """Draw and play the groups of a step.

        A group whose episodes all scored the same gives its place to a group of the next task, while `refill`
        lasts; what it scored still tells the sampler how hard its task is.
        """
        groups = await self._draw(self.groups_per_step, play, "")
        aside: list[Group] = []
        while len(aside) < self.refill:
            dull = [
                i for i, group in enumerate(groups) if not has_signal([e.reward or 0.0 for e in group.episodes])
            ]
            dull = dull[: self.refill - len(aside)]
            if not dull:
                break
            fresh = await self._draw(len(dull), play, f"/refill{len(aside)}")
            for place, group in zip(dull, fresh, strict=True):
                aside.append(groups[place])
                groups[place] = group
        if self.refill:
            episodes = sum(len(group.episodes) + len(group.failed) for group in aside)
            self.metrics = {"refilled_groups": float(len(aside)), "refilled_episodes": float(episodes)}
        return groups

    def save(self, folder: Path) -> None:
        """Write where the sampler stands into a checkpoint folder."""
        (folder / SAMPLER_FILE).write_text(json.dumps(self.sampler.state()))

    def load(self, folder: Path, step: int) -> None:
        """Go on where `save` was called, after step `step`.

        A checkpoint that has no such file was written by a version that walked through the tasks in order.

        Raises:
            CheckpointError: the file is damaged, or missing where the order is not sequential.
        """
        file = folder / SAMPLER_FILE
        if not file.exists() and self.sampler.order == "sequential":
            self.sampler.restore({"drawn": step * self.groups_per_step, "results": {}})
            return
        try:
            self.sampler.restore(json.loads(file.read_text()))
        except OSError as e:
            raise CheckpointError(f"{file}: cannot read where the tasks stood: {e.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise CheckpointError(f"{file}: damaged: {e}") from None

    async def _draw(self, num: int, play: Play, label: str) -> list[Group]:
        drawn = self.sampler.take(num)
        groups = await play([task for _, task in drawn], label)
        if self.sampler.order == "weighted":
            for (position, _), group in zip(drawn, groups, strict=True):
                self.sampler.report(position, solved([group]))
        return groups
