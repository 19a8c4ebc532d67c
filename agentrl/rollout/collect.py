"""Groups: the episodes of one task, played side by side; infrastructure failures are refilled one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from agentrl.env.env import Env
from agentrl.env.toolenv import ToolEnv
from agentrl.errors import InfraError
from agentrl.rollout.episode import Player, draw_seed, run_episode
from agentrl.types import Episode, Group, Task


async def collect(
    player: Player,
    tasks: Sequence[Task],
    *,
    group_size: int,
    label: str,
    seed: int,
    infra_retries: int = 2,
    on_episode: Callable[[Episode], None] | None = None,
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

    Raises:
        InfraError: one place failed `infra_retries + 1` times; the last error is in the text.
    """

    async def place(number: int, index: int, failed: list[Episode]) -> Episode:
        for attempt in range(infra_retries + 1):
            suffix = f"r{attempt}" if attempt else ""
            episode = await run_episode(
                player,
                tasks[number],
                episode_id=f"{label}/g{number}/e{index}{suffix}",
                seed=draw_seed(seed, label, number, index, attempt),
            )
            if on_episode:
                on_episode(episode)
            if episode.error is None:
                return episode
            failed.append(episode)
        raise InfraError(
            f"task {tasks[number].id}: {infra_retries + 1} episodes in a row could not be played; "
            f"the last one: {failed[-1].error}"
        )

    judge = player.make_env()  # never set up: asked for the rewards per group

    async def group(number: int) -> Group:
        failed: list[Episode] = []
        async with asyncio.TaskGroup() as running:
            places = [running.create_task(place(number, index, failed)) for index in range(group_size)]
        episodes = await _group_rewards(judge, [p.result() for p in places], infra_retries)
        return Group(tasks[number], tuple(episodes), tuple(failed))

    try:
        async with asyncio.TaskGroup() as running:
            groups = [running.create_task(group(number)) for number in range(len(tasks))]
    except BaseExceptionGroup as several:
        raise _first(several) from several
    return [g.result() for g in groups]


async def _group_rewards(env: Env, episodes: Sequence[Episode], retries: int) -> Sequence[Episode]:
    """Add the rewards per group, where the env has any. Raises InfraError when they cannot be had."""
    if not isinstance(env, ToolEnv) or all(reward.mark.per != "group" for reward in env.spec().rewards):
        return episodes
    for attempt in range(retries + 1):
        try:
            found = await env.score_group(episodes, env.settings)
            break
        except InfraError:
            if attempt == retries:
                raise
    return [
        replace(e, rewards={**e.rewards, **parts}, reward=(e.reward or 0.0) + sum(parts.values()))
        for e, parts in zip(episodes, found, strict=True)
    ]


def _first(several: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first single error inside (one cause is enough to read)."""
    error: BaseException = several
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
