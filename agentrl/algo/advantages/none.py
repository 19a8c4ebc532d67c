"""No advantage: rewards do not train, only what is added to the loss does."""

from __future__ import annotations

from typing import Literal

from agentrl.algo.entries import Estimator
from agentrl.algo.late import torch
from agentrl.algo.parameters import Named
from agentrl.algo.step_data import Advantages, StepData


class NoAdvantage(Named):
    """0 for every token: the policy learns from the KL penalty toward `teacher` alone (on-policy distillation), or
    from the observation loss.

    Source: Thinking Machines Lab, "On-Policy Distillation" (2025); Agarwal et al., arXiv:2306.13649.
    """

    name: Literal["none"] = "none"


def none(step: StepData, config: NoAdvantage) -> Advantages:
    """[N] zeros."""
    return Advantages(torch.zeros(step.sequence_N.numel(), dtype=torch.float64))


ENTRIES = {"none": Estimator(none, NoAdvantage, compares=False)}
