"""DRO: the policy gradient with a quadratic penalty on the log-ratio."""

from __future__ import annotations

from typing import Literal

from agentrl.algo.entries import PolicyLoss
from agentrl.algo.late import Tensor
from agentrl.algo.parameters import Above0, Named
from agentrl.algo.ratio import LossOutput, ratio_metrics
from agentrl.algo.segments import trained


class DRO(Named):
    """The policy gradient with a quadratic penalty on the log-ratio.

    Source: direct reward optimization, arXiv:2405.19107.
    """

    name: Literal["dro"] = "dro"
    beta: Above0 = 0.1
    """Weight of the squared log-ratio."""


def dro(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    sequence_T: Tensor,
    loss_mask_T: Tensor,
    config: DRO,
) -> LossOutput:
    """-(A log pi - beta / 2 (log-ratio)^2)."""
    new_N, old_N, adv_N, weight_N = trained(loss_mask_T, logprobs_T, old_logprobs_T, advantages_T, weights_T)
    loss_N = -(adv_N * new_N - config.beta / 2 * (new_N - old_N).square())
    return (weight_N * loss_N).sum(), ratio_metrics(new_N, old_N)


ENTRIES = {"dro": PolicyLoss(dro, DRO, silent=False)}
