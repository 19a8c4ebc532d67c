"""RLOO: rewards compared with the other episodes of the group."""

from __future__ import annotations

from typing import Literal

from agentrl.algo.entries import Estimator
from agentrl.algo.late import Tensor
from agentrl.algo.parameters import Named
from agentrl.algo.segments import segment_count
from agentrl.algo.siblings import group_centered
from agentrl.algo.step_data import Advantages, StepData, spread


class RLOO(Named):
    """Reward - mean of the siblings.

    Source: RLOO, arXiv:2402.14740.
    """

    name: Literal["rloo"] = "rloo"


def rloo(step: StepData, config: RLOO) -> Advantages:
    """The advantage of an episode for each of its tokens."""
    return spread(rloo_advantages(step.rewards_E, step.group_E), step)


def rloo_advantages(rewards_E: Tensor, group_E: Tensor) -> Tensor:
    """[E] reward minus the mean of the siblings' rewards: G / (G - 1) * (r - mean)."""
    count_E = segment_count(group_E, dtype=rewards_E.dtype)[group_E]
    return group_centered(rewards_E, group_E) * count_E / (count_E - 1).clamp(min=1)


ENTRIES = {"rloo": Estimator(rloo, RLOO)}
