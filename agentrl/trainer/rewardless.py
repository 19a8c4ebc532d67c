"""Detect runs whose episodes never get a reward: `check` reports it, and `train` stops."""

from __future__ import annotations

from collections.abc import Iterable

from agentrl.env.env import Env
from agentrl.errors import ConfigError
from agentrl.rollout.episode_metrics import reward_parts
from agentrl.types import Episode

STEPS = 3
"""Steps without any reward after which a run stops: tools may give rewards that no episode earned yet."""
STEPS_RARE = 20
"""The same for an env that does not declare its rewards: they may be rare."""
ADVICE = (
    "write a method with @reward, name a function as `reward` in env.options, return a reward from a tool, or set "
    "reward_model"
)

WEIGHT_ADVICE = "there is nothing to learn from; change env.reward_weights, or set reward_model"

ADVICE_OF_ENVS = (
    "return a reward from `step` or `score`, start from easier tasks or a cold start, or set reward_model"
)


def rewarded(episodes: Iterable[Episode]) -> bool:
    """Whether any of them got a reward: a named one of any value, or a turn reward."""
    return any(reward_parts(e) or e.reward or any(turn.reward for turn in e.turns) for e in episodes)


def no_reward(env: Env, episodes: Iterable[Episode]) -> str:
    """The warning about an env that declares no reward and gave none to these episodes; else empty."""
    declared, name = env.declared_rewards(), type(env).__name__
    if declared and all(reward.weight == 0 for reward in declared.values()):
        unpaid = not any(e.reward or reward_parts(e).keys() - declared.keys() for e in episodes)
        return f"every reward of {name} has the weight 0: {WEIGHT_ADVICE}" if unpaid else ""
    if declared or rewarded(episodes):
        return ""
    if declared is not None:
        return f"{name} gives no reward, so there is nothing to learn from: {ADVICE}"
    return f"{name} gave every episode the reward 0, and nothing is learned from that: {ADVICE_OF_ENVS}"


class RewardWatch:
    """Stops a run that has seen no reward in its first steps.

    Args:
        env: any of its kind.
        over: whether a step before had a reward, if the run was resumed.
    """

    def __init__(self, env: Env, over: bool = False) -> None:
        self._env, self._without, self._over = env, 0, over
        self._steps = STEPS_RARE if env.declared_rewards() is None else STEPS

    def see(self, step: int, episodes: Iterable[Episode]) -> None:
        """Record the episodes of a step.

        Raises:
            ConfigError: there was no reward in `STEPS` steps (`STEPS_RARE` of an env that declares none).
        """
        if self._over:
            return
        text = no_reward(self._env, episodes)
        self._over, self._without = not text, self._without + 1
        if text and self._without == self._steps:
            raise ConfigError(f"step {step}: no episode was given any reward yet; {text}")
