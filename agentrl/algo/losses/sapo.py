"""SAPO: a smooth gate instead of the clip."""

from __future__ import annotations

from typing import Literal

from agentrl.algo.entries import PolicyLoss
from agentrl.algo.kl import bounded_exp
from agentrl.algo.late import Tensor, torch
from agentrl.algo.parameters import Above0, Named
from agentrl.algo.ratio import LossOutput, ratio_metrics, sequence_log_ratio
from agentrl.algo.segments import trained


class SAPO(Named):
    """A smooth gate around a ratio of 1 instead of a clip; tau is how sharply it closes.

    Source: SAPO, arXiv:2511.20347.
    """

    name: Literal["sapo"] = "sapo"
    tau_positive: Above0 = 1.0
    """tau for positive advantages."""
    tau_negative: Above0 = 1.05
    """tau for all others; larger, since pushing tokens down is the less stable direction."""
    level: Literal["token", "sequence"] = "token"
    """Gate the ratio of each token, or the geometric mean of the ratios of its sequence."""


def sapo(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    sequence_T: Tensor,
    loss_mask_T: Tensor,
    config: SAPO,
) -> LossOutput:
    """-A (4 / tau) sigmoid(tau (r - 1)): a smooth gate instead of the clip."""
    new_N, old_N, adv_N, weight_N, seq_N = trained(
        loss_mask_T, logprobs_T, old_logprobs_T, advantages_T, weights_T, sequence_T
    )
    log_ratio_N = new_N - old_N if config.level == "token" else sequence_log_ratio(new_N, old_N, seq_N)
    ratio_N = bounded_exp(log_ratio_N)
    tau_N = torch.full_like(ratio_N, config.tau_negative).masked_fill(adv_N > 0, config.tau_positive)
    gate_N = torch.sigmoid(tau_N * (ratio_N - 1)) * (4 / tau_N)
    return (weight_N * -adv_N * gate_N).sum(), ratio_metrics(new_N, old_N)


ENTRIES = {"sapo": PolicyLoss(sapo, SAPO)}
