"""One group: concurrent episodes of one task; infrastructure failures are retried individually."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from agentrl.async_tasks import time_limit
from agentrl.env.env import Env
from agentrl.env.tasks import with_own_row
from agentrl.env.toolenv.asked import asking
from agentrl.env.toolenv.dispatch import no_exit
from agentrl.env.toolenv.json_schema import shorten
from agentrl.env.toolenv.observe import error_text
from agentrl.env.toolenv.rewards import finite
from agentrl.errors import InfraError, JudgeError, RewardError, first_error, traceback_of
from agentrl.rollout.lifecycle import PASSED_ON, EpisodeStatus, check_clock, close_env, is_ours, raised
from agentrl.rollout.rewards.model import RewardModel
from agentrl.rollout.seeds import draw_seed
from agentrl.run_folder.redraws import RedrawGuard
from agentrl.types import Episode, Group, StopReason, Task

BEGIN_AT_ONCE = 256
"""Number of episodes started per iteration of the event loop."""


class Plays(Protocol):
    """Plays episodes: a `Player` in this process, or Ray workers."""

    @property
    def make_env(self) -> Callable[[], Env]:
        """Creates the env; an instance that is never set up computes group rewards."""
        ...

    async def play(
        self, task: Task, *, episode_id: str, seed: int, status: EpisodeStatus | None = None
    ) -> Episode:
        """Play one episode; infrastructure failures become its `error`."""
        ...


@dataclass
class GroupPlayer:
    """Plays groups and tracks the status of their episodes.

    Args:
        player: plays the episodes.
        group_size: episodes of one task.
        seed: with label, number and place in the group, it determines all sampling.
        infra_retries: retries per place in a group.
        on_episode: called with every finished episode.
        greedy: plays an additional greedy episode of each task as a baseline for the others.
        reward_model: scores every episode.
        guard: stops a run if too many episodes are lost or rewards keep raising.
        timeout_s: timeout of group rewards.
    """

    player: Plays
    group_size: int
    seed: int
    infra_retries: int = 2
    on_episode: Callable[[Episode], None] | None = None
    greedy: Plays | None = None
    reward_model: RewardModel | None = None
    guard: RedrawGuard = field(default_factory=RedrawGuard)
    timeout_s: float = 300.0
    playing: dict[str, EpisodeStatus] = field(default_factory=dict)
    """Episodes in flight by name, oldest first."""

    async def play(self, task: Task, label: str, number: int) -> Group:
        """Play a complete group of this task.

        Args:
            task: the task of all episodes.
            label: with `number`, names the episodes, for example "s12" and 3 for s12/g3/e0, s12/g3/e1, ...
            number: number of the group under this label.

        Raises:
            InfraError: one place failed `infra_retries + 1` times; the last error is in the text.
            AgentRLError: raised by the guard.
            Exception: a bug in agentrl, unchanged.
        """
        failed: list[Episode] = []
        try:
            async with asyncio.TaskGroup() as running:
                places = [
                    running.create_task(self._place(task, label, number, index, failed))
                    for index in range(self.group_size)
                ]
                baseline = None
                if self.greedy is not None:
                    one = self._place(task, label, number, "greedy", failed, self.greedy)
                    baseline = running.create_task(one)
        except BaseExceptionGroup as several:
            first = first_error(several)
            raise first from first.__cause__
        played = [place.result() for place in places] + ([] if baseline is None else [baseline.result()])
        episodes = tuple(await self._group_rewards(played))  # the greedy one is judged in the same comparison
        self.guard.scored(episodes)
        greedy = None if baseline is None else episodes[-1]
        return Group(task, episodes[: self.group_size], tuple(failed), greedy)

    async def _place(
        self,
        task: Task,
        label: str,
        number: int,
        index: int | str,
        failed: list[Episode],
        player: Plays | None = None,
    ) -> Episode:
        error, player = None, player or self.player
        for attempt in range(self.infra_retries + 1):
            suffix = f"r{attempt}" if attempt else ""
            name = index if isinstance(index, str) else f"e{index}"
            status = EpisodeStatus(f"{label}/g{number}/{name}{suffix}", task.id)
            self.playing[status.episode_id] = status
            try:
                async with self._beginning:
                    await asyncio.sleep(0)
                seed = draw_seed(self.seed, label, number, index, attempt)
                episode = await player.play(task, episode_id=status.episode_id, seed=seed, status=status)
                if self.reward_model is not None:
                    episode = await self.reward_model.judged(episode)
            finally:
                del self.playing[status.episode_id]
            if self.on_episode:
                self.on_episode(episode)
            self.guard.ended(episode, len(self.playing))
            if episode.error is None:
                return episode
            failed.append(episode)
            error = episode.error
        raise InfraError(
            f"task {task.id}: {self.infra_retries + 1} episodes in a row could not be played; "
            f"the last one: {error}"
        )

    async def _group_rewards(self, episodes: Sequence[Episode]) -> Sequence[Episode]:
        """Add group rewards, if the env has any. Raises InfraError if they are not available."""
        if not self._scores_groups:
            return episodes
        for _ in range(self.infra_retries):
            with suppress(InfraError):
                return await with_group_rewards(self.player.make_env(), episodes, self.timeout_s)
        return await with_group_rewards(self.player.make_env(), episodes, self.timeout_s)

    def __post_init__(self) -> None:
        # Starting thousands in one iteration of the event loop would block running episodes for seconds.
        self._beginning = asyncio.Semaphore(BEGIN_AT_ONCE)
        self._scores_groups = self.player.make_env().scores_groups


class PlaysGroups(Protocol):
    """Plays groups: a `GroupPlayer`, or one of each env."""

    @property
    def playing(self) -> Mapping[str, EpisodeStatus]:
        """Episodes in flight by name, oldest first."""
        ...

    async def play(self, task: Task, label: str, number: int) -> Group:
        """Play a complete group of this task."""
        ...


@dataclass(frozen=True)
class GroupsByEnv:
    """Plays each group with the player of its task's env.

    Args:
        players: by env.
        playing: episodes in flight by name, oldest first; the same mapping as that of each player.
    """

    players: Mapping[str, GroupPlayer]
    playing: Mapping[str, EpisodeStatus]

    async def play(self, task: Task, label: str, number: int) -> Group:
        """Play a complete group of this task."""
        return await self.players[task.env].play(task, label, number)


async def with_group_rewards(env: Env, episodes: Sequence[Episode], timeout_s: float = 300.0) -> Sequence[Episode]:
    """Add the env's group rewards to the scored episodes of one task.

    Rewards that raise, time out or are not finite count as 0 and become faults.

    Args:
        env: an instance that is never set up; closed afterwards.
        episodes: episodes of one task.
        timeout_s: timeout of `score_group`.

    Raises:
        InfraError: a judge is unreachable.
    """
    faults: dict[str, str] = {}
    try:
        found = await _group_rewards(env, episodes, timeout_s, faults)
    finally:
        await close_env(env, timeout_s)
    return [
        e
        if e.stop_reason in (StopReason.SANDBOX_BROKEN, StopReason.FAULT)  # its reward is fixed
        else replace(
            e,
            rewards={**e.rewards, **{name: e.rewards.get(name, 0.0) + part for name, part in parts.items()}},
            reward=(e.reward or 0.0) + sum(parts.values()),
            faults={**e.faults, **faults},
        )
        for e, parts in zip(episodes, found, strict=True)
    ]


async def _group_rewards(
    env: Env, episodes: Sequence[Episode], timeout_s: float, faults: dict[str, str]
) -> Sequence[Mapping[str, float]]:
    """Validate one mapping per episode; errors are recorded in `faults`."""
    where = f"{type(env).__name__}.score_group"
    found: Sequence[Mapping[str, float]] = ()
    with asking() as asked:
        try:
            async with time_limit(timeout_s) as clock:
                answered = await no_exit(env.score_group, [with_own_row(episode) for episode in episodes])
                check_clock(clock)
            found = answered
        except RewardError as e:
            faults.update(e.faults)
            found = () if isinstance(e.rewards, Mapping) else e.rewards
        except Exception as e:
            cause = raised(e)
            if isinstance(cause, PASSED_ON):
                raise cause from (None if cause is e else e)
            if clock.expired() and asked.waiting:
                raise JudgeError(f"{where}: no answer of {asked.waiting[0]} in {timeout_s:g} s") from None
            if not clock.expired() and is_ours(env, "score_group"):
                raise
            said = f"took longer than {timeout_s:g} s" if clock.expired() else f"raised {error_text(cause)}"
            faults["score_group"] = f"{where} {said}\n{traceback_of(cause)}"
    if not isinstance(found, Sequence):
        faults["score_group"] = (
            f"{where} returned {shorten(found)}; return a list of mappings, one for each episode"
        )
        return [{} for _ in episodes]
    if len(found) != len(episodes):
        if not faults:
            faults["score_group"] = f"{where} returned {len(found)} mappings for {len(episodes)} episodes"
        return [{} for _ in episodes]
    return [finite(rewards, where, faults) for rewards in found]
