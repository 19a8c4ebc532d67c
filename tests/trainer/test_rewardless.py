"""An env that gives no reward is named by `check` and stops a run; one that may still give some does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentrl.env import Env, ToolEnv, reward, tool
from agentrl.env.env import StepInfo
from agentrl.errors import ConfigError
from agentrl.trainer.rewardless import RewardWatch, no_reward
from agentrl.types import Episode, Message, StopReason, Task, Turn


class Nothing(ToolEnv):
    """Does nothing."""

    def setup(self) -> str:
        return "go"

    @tool
    def look(self) -> str:
        """Look around."""
        return "nothing"


class Something(Nothing):
    """Pays."""

    @reward
    def solved(self) -> bool:
        return False


TURN = Turn(Message("assistant", "x"), (), 0.0, "stop", 3, 0.1, 0.2)
EMPTY = Episode("e", Task("t"), (), (TURN,), (), StopReason.ANSWERED, 0.0)


@pytest.mark.parametrize(
    "paid",
    [
        replace(EMPTY, rewards={"model": 0.0}),
        replace(EMPTY, reward=1.0),
        replace(EMPTY, turns=(replace(TURN, reward=0.5),)),
        replace(EMPTY, metrics={"reward/tools": 0.0}),
    ],
)
def test_any_reward_is_enough(paid: Episode):
    assert no_reward(Nothing(), [EMPTY]).startswith("Nothing gives no reward")
    assert no_reward(Nothing(), [EMPTY, paid]) == ""
    assert no_reward(Something(), [EMPTY]) == ""


class Unweighted(Something):
    """Pays nothing."""

    @reward(weight=0)
    def solved(self) -> bool:
        return True


def test_rewards_without_weight_are_no_reward_unless_something_else_pays():
    played = replace(EMPTY, rewards={"solved": 0.0})
    assert no_reward(Unweighted(), [played]).startswith("every reward of Unweighted has the weight 0")
    assert no_reward(Unweighted(), [played, replace(played, reward=0.5)]) == ""
    assert no_reward(Unweighted(), [replace(EMPTY, rewards={"solved": 0.0, "reward_model": 0.0})]) == ""


class Bare(Env):
    """No ToolEnv."""

    async def reset(self, task: Task) -> tuple[list[Message], dict[str, object]]:
        return [Message("user", "go")], {}

    async def step(self, message: Message) -> tuple[list[Message], float, bool, bool, StepInfo]:
        return [], 0.0, True, False, StepInfo()


def test_an_env_of_any_kind_that_never_pays_stops_a_run_later():
    watch = RewardWatch(Bare())
    for step in range(1, 20):
        watch.see(step, [EMPTY])
    with pytest.raises(ConfigError, match=r"step 20: .* Bare gave every episode the reward 0"):
        watch.see(20, [EMPTY])
    assert no_reward(Bare(), [EMPTY, replace(EMPTY, reward=1.0)]) == ""


def test_a_run_stops_after_three_steps_without_any():
    watch = RewardWatch(Nothing())
    watch.see(1, [EMPTY])
    watch.see(2, [EMPTY])
    with pytest.raises(ConfigError, match="step 3: no episode was given any reward yet; Nothing gives no reward"):
        watch.see(3, [EMPTY])
    late = RewardWatch(Nothing())
    for step, episode in enumerate([EMPTY, EMPTY, replace(EMPTY, reward=1.0), EMPTY, EMPTY, EMPTY], 1):
        late.see(step, [episode])
