"""GPG: the plain policy gradient."""

from __future__ import annotations

from typing import Literal

from agentrl.algo.entries import PolicyLoss
from agentrl.algo.late import Tensor
from agentrl.algo.parameters import Named
from agentrl.algo.ratio import LossOutput, ratio_metrics
from agentrl.algo.segments import trained


class GPG(Named):
    """The plain policy gradient.

    Source: GPG, arXiv:2504.02546.
    """

    name: Literal["gpg"] = "gpg"


def gpg(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    sequence_T: Tensor,
    loss_mask_T: Tensor,
    config: GPG,
) -> LossOutput:
    """-A log pi; the old policy only enters the metrics."""
    new_N, old_N, adv_N, weight_N = trained(loss_mask_T, logprobs_T, old_logprobs_T, advantages_T, weights_T)
    return (weight_N * -adv_N * new_N).sum(), ratio_metrics(new_N, old_N)


ENTRIES = {"gpg": PolicyLoss(gpg, GPG)}
