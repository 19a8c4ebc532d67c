"""GRPO: rewards compared with the mean of the group."""

from __future__ import annotations

from typing import Literal

from agentrl.algo.entries import Estimator
from agentrl.algo.late import Tensor
from agentrl.algo.parameters import Above0, Named
from agentrl.algo.siblings import group_centered, group_std
from agentrl.algo.step_data import Advantages, StepData, spread

Scale = Literal["group", "batch", "none"]


class GRPO(Named):
    """(reward - mean of the group) / std.

    Source: DeepSeekMath, arXiv:2402.03300.
    """

    name: Literal["grpo"] = "grpo"
    std: Scale = "group"
    """Divide by the standard deviation of the group, of the whole step, or not at all."""
    eps: Above0 = 1e-6
    """Added to the standard deviation."""


def grpo(step: StepData, config: GRPO) -> Advantages:
    """The advantage of an episode for each of its tokens."""
    return spread(grpo_advantages(step.rewards_E, step.group_E, std=config.std, eps=config.eps), step)


def grpo_advantages(rewards_E: Tensor, group_E: Tensor, *, std: Scale = "group", eps: float = 1e-6) -> Tensor:
    """[E] (r - mean of the group) / (std + eps), with the std of the group, of all rewards, or no division.

    "none" is Dr. GRPO (arXiv:2503.20783); "batch" divides by the std over the whole step (with E - 1), so
    that groups with small differences are not amplified.
    """
    centered_E = group_centered(rewards_E, group_E)
    if std == "group":
        return centered_E / (group_std(rewards_E, group_E) + eps)
    if std == "batch":
        return centered_E / (rewards_E.std() + eps) if rewards_E.numel() > 1 else centered_E
    if std == "none":
        return centered_E
    raise ValueError(f"unknown std {std!r}: one of group, batch, none")


ENTRIES = {"grpo": Estimator(grpo, GRPO)}
