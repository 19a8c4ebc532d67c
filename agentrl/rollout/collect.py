"""A fixed list of tasks, played once: what evaluations and probes need of the scheduler."""

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
    """Play `group_size` episodes of every task at once and return complete groups in the order of `tasks`.

    Args:
        player: what plays them; the engine bounds how many run at the same time.
        tasks: one group each.
        group_size: episodes of each task.
        label: names the episodes, for instance "s12" for step 12.
        seed: with label, task and place in the group it determines every draw.
        infra_retries: how often one place is refilled.
        on_episode: told of every episode that ends.
        guard: stops where too many are lost.
        timeout_s: limit of the rewards per group.

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
