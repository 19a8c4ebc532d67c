"""Dr. GRPO: rewards minus the mean of the group."""

from __future__ import annotations

from typing import Literal

from agentrl.algo.advantages.grpo import grpo_advantages
from agentrl.algo.entries import Estimator
from agentrl.algo.parameters import Named
from agentrl.algo.step_data import Advantages, StepData, spread


class DrGRPO(Named):
    """Reward - mean of the group.

    Source: Dr. GRPO, arXiv:2503.20783.
    """

    name: Literal["dr_grpo"] = "dr_grpo"


def dr_grpo(step: StepData, config: DrGRPO) -> Advantages:
    """GRPO without the division by the standard deviation."""
    return spread(grpo_advantages(step.rewards_E, step.group_E, std="none"), step)


ENTRIES = {"dr_grpo": Estimator(dr_grpo, DrGRPO)}
