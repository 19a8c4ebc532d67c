"""Play a fixed list of tasks once, for evaluations and probes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agentrl.env.curriculum import TaskSampler
from agentrl.rollout.admission import Admission
from agentrl.rollout.group import GroupPlayer, Plays
from agentrl.rollout.scheduler import Scheduler
from agentrl.run_folder.redraws import RedrawGuard
from agentrl.types import Episode, Group, Task


async def collect(
    player: Plays,
    tasks: Sequence[Task],
    *,
    group_size: int,
    label: str,
    seed: int,
    infra_retries: int = 2,
    on_episode: Callable[[Episode], None] | None = None,
    guard: RedrawGuard | None = None,
    timeout_s: float = 300.0,
) -> list[Group]:
    """Play `group_size` episodes of every task concurrently and return complete groups in the order of `tasks`.

    Args:
        player: plays the episodes; the engine bounds concurrency.
        tasks: one group per task.
        group_size: episodes of each task.
        label: name prefix of the episodes, for example "s12" for step 12.
        seed: with label, task and place in the group, it determines all sampling.
        infra_retries: retries per place in a group.
        on_episode: called with every finished episode.
        guard: stops if too many are lost.
        timeout_s: timeout of group rewards.

    Raises:
        InfraError: one place failed `infra_retries + 1` times; the last error is in the text.
    """
    if not tasks:
        return []
    admission = Admission(TaskSampler(tasks), groups_per_step=len(tasks), last_step=1, label=label)
    groups = GroupPlayer(
        player, group_size, seed, infra_retries, on_episode, guard=guard or RedrawGuard(), timeout_s=timeout_s
    )
    async with Scheduler(groups, admission, version=lambda: 0) as scheduler:
        return [group async for batch in scheduler.batches() for group in batch.groups]
