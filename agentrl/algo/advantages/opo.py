"""OPO: rewards compared with the group's mean weighted by length."""

from __future__ import annotations

from typing import Literal

from agentrl.algo.entries import Estimator
from agentrl.algo.late import Tensor, torch
from agentrl.algo.parameters import Named
from agentrl.algo.segments import segment_sum
from agentrl.algo.siblings import has_signal
from agentrl.algo.step_data import Advantages, StepData, spread


class OPO(Named):
    """Reward - mean of the group weighted by length.

    Source: OPO, arXiv:2505.23585.
    """

    name: Literal["opo"] = "opo"


def opo(step: StepData, config: OPO) -> Advantages:
    """The advantage of an episode for each of its tokens."""
    return spread(opo_advantages(step.rewards_E, step.group_E, step.lengths()), step)


def opo_advantages(rewards_E: Tensor, group_E: Tensor, lengths_E: Tensor) -> Tensor:
    """[E] reward minus sum(len * r) / sum(len) of the group: the baseline of least variance.

    Args:
        lengths_E: [E] sampled tokens of each episode, also of one that is kept out of the loss: its reward says as
            much about the task.
    """
    weight_E = lengths_E.to(rewards_E.dtype)
    total_S = segment_sum(weight_E, group_E)
    baseline_S = segment_sum(weight_E * rewards_E, group_E) / total_S.clamp(min=1e-12)
    advantage_E = rewards_E - baseline_S[group_E]
    return torch.where(has_signal(rewards_E, group_E), advantage_E, torch.zeros_like(advantage_E))


ENTRIES = {"opo": Estimator(opo, OPO)}
