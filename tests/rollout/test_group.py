"""What a group has beside its episodes: a greedy one to compare with, and the score of a reward model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from agentrl.chat.template import Renderer
from agentrl.env import ToolEnv, reward
from agentrl.env.env import Env, StepInfo
from agentrl.errors import InfraError, JudgeError
from agentrl.rollout.episode import Player
from agentrl.rollout.episode_metrics import episode_metrics
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.limits import EpisodeLimits
from agentrl.rollout.rewards.model import RewardModel
from agentrl.run_folder.redraws import RedrawGuard
from agentrl.testing.engine import ScriptedEngine
from agentrl.testing.policy import say
from agentrl.trainer.samples import penalized, to_records, to_samples
from agentrl.types import Episode, Message, Sampling, StopReason, Task


class Said(Env):
    """Pays one for "yes"."""

    async def reset(self, task: Task) -> tuple[Sequence[Message], dict[str, Any]]:
        return [Message("user", task.id)], {}

    async def step(self, message: Message) -> tuple[Sequence[Message], float, bool, bool, StepInfo]:
        self.said = message.content
        return [], 0.0, True, False, StepInfo()

    async def score(self, episode: Episode) -> dict[str, float]:
        return {"solved": float(self.said == "yes")}

    async def close(self) -> None:
        pass


def player(renderer: Renderer, answer: str) -> Player:
    return Player(ScriptedEngine(renderer, [say(answer)]), renderer, Said, EpisodeLimits(), Sampling())


async def test_a_greedy_episode_is_compared_with_and_does_not_train(renderer: Renderer):
    groups = GroupPlayer(player(renderer, "yes"), 3, 0, greedy=player(renderer, "no"))
    group = await groups.play(Task("t"), "s1", 0)
    assert [e.reward for e in group.episodes] == [1.0] * 3
    assert (group.greedy.id, group.greedy.reward) == ("s1/g0/greedy", 0.0)
    samples, scores = to_samples([group], overlong="train")
    assert {s.episode_id for s in samples} == {f"s1/g0/e{i}" for i in range(3)}
    assert scores.greedy == [0.0] * 3
    cut = GroupPlayer(player(renderer, "yes"), 1, 0, greedy=player(renderer, "no"))
    late = await cut.play(Task("t"), "s1", 0)
    (less,) = penalized([replace(late, greedy=replace(late.greedy, stop_reason=StopReason.TIMEOUT))], 0.5)
    assert less.greedy.reward == -0.5


class Compared(ToolEnv):
    """Pays the best answer of the group, and nobody by himself."""

    def setup(self) -> str:
        return "how much?"

    @reward(per="group")
    def best(self, episodes: Sequence[Episode]) -> list[float]:
        said = [float(e.messages[-1].content) for e in episodes]
        return [float(value == max(said)) for value in said]


async def test_rewards_per_group_are_in_the_baseline_of_remax(renderer: Renderer):
    def say_number(answer: str) -> Player:
        return Player(ScriptedEngine(renderer, [say(answer)]), renderer, Compared, EpisodeLimits(), Sampling())

    better = await GroupPlayer(say_number("1"), 2, 0, greedy=say_number("5")).play(Task("t"), "s1", 0)
    assert [e.reward for e in better.episodes] == [0.0, 0.0]
    assert (better.greedy.reward, better.greedy.rewards) == (1.0, {"best": 1.0})
    worse = await GroupPlayer(say_number("9"), 2, 0, greedy=say_number("5")).play(Task("t"), "s1", 0)
    _, scores = to_samples([worse], overlong="train")
    assert (scores.rewards, scores.greedy) == ([1.0, 1.0], [0.0, 0.0])
    records = to_records([worse], {}, step=1)
    assert [(r.episode.id, r.baseline) for r in records[1:]] == [("s1/g0/e1", False), ("s1/g0/greedy", True)]
    assert episode_metrics([worse])["episodes"] == 3


async def test_a_reward_that_is_fixed_gets_no_reward_per_group():
    """The policy has broken its sandbox, or the env raised after it had acted."""

    class Generous(Said):
        async def score_group(self, episodes: Sequence[Episode]) -> Sequence[Mapping[str, float]]:
            return [{"rank": 5.0}] * len(episodes)

    class Mixed:
        make_env = Generous
        stops = (StopReason.ANSWERED, StopReason.SANDBOX_BROKEN, StopReason.FAULT)

        async def play(self, task: Task, *, episode_id: str, seed: int, status: Any = None) -> Episode:
            return Episode(episode_id, task, (), (), (), self.stops[int(episode_id[-1])], -1.0)

    group = await GroupPlayer(Mixed(), 3, 0).play(Task("t"), "s1", 0)
    assert [e.reward for e in group.episodes] == [4.0, -1.0, -1.0]
    assert [e.rewards for e in group.episodes] == [{"rank": 5.0}, {}, {}]


class Unsteady:
    """Fails where it is told to."""

    def __init__(self, fails: int) -> None:
        self.fails = fails

    async def score(self, episode: Episode) -> float:
        self.fails -= 1
        if self.fails >= 0:
            raise JudgeError("no answer")
        return 0.5


async def test_an_episode_that_the_reward_model_cannot_score_is_played_again(renderer: Renderer):
    groups = GroupPlayer(player(renderer, "yes"), 2, 0, 2, reward_model=RewardModel(Unsteady(1), "quality", 2.0))
    group = await groups.play(Task("t"), "s1", 0)
    assert [e.rewards for e in group.episodes] == [{"solved": 1.0, "quality": 1.0}] * 2
    assert [e.reward for e in group.episodes] == [2.0] * 2
    assert [(e.reward, e.error) for e in group.failed] == [(None, "JudgeError: no answer")]


class Lost:
    """Loses every episode; notes with which seed."""

    make_env = Said

    def __init__(self) -> None:
        self.seeds: dict[str, int] = {}

    async def play(self, task: Task, *, episode_id: str, seed: int, status: Any = None) -> Episode:
        self.seeds[episode_id] = seed
        return Episode(episode_id, task, (), (), (), StopReason.INFRA, None, error="SandboxError: gone")


async def test_a_lost_episode_is_played_again_with_new_seeds_as_often_as_set():
    lost = Lost()
    for label in ("s1", "s2"):
        with pytest.raises(InfraError, match="3 episodes in a row could not be played"):
            await GroupPlayer(lost, 1, 0, 2).play(Task("t"), label, 0)
    assert list(lost.seeds) == [f"{label}/g0/e0{again}" for label in ("s1", "s2") for again in ("", "r1", "r2")]
    assert len(set(lost.seeds.values())) == 6


async def test_episodes_in_flight_count_among_those_that_are_not_lost():
    class LostAtFirst(Lost):
        async def play(self, task: Task, *, episode_id: str, seed: int, status: Any = None) -> Episode:
            if episode_id in {f"s1/g0/e{i}" for i in range(20)}:
                return await super().play(task, episode_id=episode_id, seed=seed)
            await asyncio.sleep(0)  # ends later
            return Episode(episode_id, task, (), (), (), StopReason.ANSWERED, 1.0)

    group = await GroupPlayer(LostAtFirst(), 60, 0, guard=RedrawGuard(redrawn_above=0.5)).play(Task("t"), "s1", 0)
    assert (len(group.episodes), len(group.failed)) == (60, 20)


async def test_a_reward_model_that_never_answers_stops_the_run(renderer: Renderer):
    groups = GroupPlayer(player(renderer, "yes"), 1, 0, 1, reward_model=RewardModel(Unsteady(99), "quality", 1.0))
    with pytest.raises(InfraError, match=r"2 episodes in a row could not be played.*JudgeError: no answer"):
        await groups.play(Task("t"), "s1", 0)
