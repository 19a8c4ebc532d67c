"""MaxRL: rewards compared with the mean of the group, and divided by it."""

from __future__ import annotations

from typing import Literal

from agentrl.algo.entries import Estimator
from agentrl.algo.late import Tensor, torch
from agentrl.algo.parameters import Named
from agentrl.algo.siblings import group_centered
from agentrl.algo.step_data import Advantages, StepData, UnsuitableRewardsError, spread


class MaxRL(Named):
    """(reward - mean of the group) / mean, so that rarely solved tasks weigh more. For rewards of 0
    and 1; negative ones are refused.

    Source: MaxRL, arXiv:2602.02710.
    """

    name: Literal["max_rl"] = "max_rl"


def max_rl(step: StepData, config: MaxRL) -> Advantages:
    """The advantage of an episode for each of its tokens.

    Raises:
        UnsuitableRewardsError: a reward is negative.
    """
    return spread(max_rl_advantages(step.rewards_E, step.group_E), step)


def max_rl_advantages(rewards_E: Tensor, group_E: Tensor) -> Tensor:
    """[E] (r - mean of the group) / mean, 0 where all rewards of a group are 0.

    With rewards of 0 and 1 the mean over a group is the mean score of its successes, with the mean score of all as
    a control variate: the gradient of the log of the success rate, to the order of the group's size.

    Raises:
        UnsuitableRewardsError: a reward is negative, so that a mean might be 0 or have the wrong sign.
    """
    if bool((rewards_E < 0).any()):
        raise UnsuitableRewardsError(
            "divides by the mean reward of a group, so rewards must be at least 0, got "
            f"{float(rewards_E.min()):g}: use another advantage, or rewards without penalties"
        )
    centered_E = group_centered(rewards_E, group_E)
    mean_E = rewards_E - centered_E
    return torch.where(mean_E > 0, centered_E / mean_E.clamp(min=torch.finfo(mean_E.dtype).tiny), 0.0)


ENTRIES = {"max_rl": Estimator(max_rl, MaxRL)}
