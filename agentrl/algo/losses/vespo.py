"""VESPO: a smooth weight of the sequence's whole ratio."""

from __future__ import annotations

from typing import Literal

from agentrl.algo.entries import PolicyLoss
from agentrl.algo.late import Tensor, torch
from agentrl.algo.metrics import mean_of
from agentrl.algo.parameters import Named, NonNegative
from agentrl.algo.ratio import LossOutput, ratio_metrics
from agentrl.algo.segments import segment_sum, trained


class VESPO(Named):
    """The policy gradient weighted by W^k exp(lambda (1 - W)) of the sequence's ratio W.

    Source: VESPO, arXiv:2602.10693.
    """

    name: Literal["vespo"] = "vespo"
    k_positive: NonNegative = 2.0
    """k for positive advantages."""
    lambda_positive: NonNegative = 3.0
    """lambda for positive advantages."""
    k_negative: NonNegative = 3.0
    """k for negative advantages."""
    lambda_negative: NonNegative = 2.0
    """lambda for negative advantages."""


def vespo(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    sequence_T: Tensor,
    loss_mask_T: Tensor,
    config: VESPO,
) -> LossOutput:
    """-phi(W) A log pi, with phi(W) = W^k exp(lambda (1 - W)) of the sequence's full ratio W, no gradient.

    W is the product of all token ratios, not their mean: phi is 1 at W = 1 and fades smoothly on both sides.
    """
    new_N, old_N, adv_N, weight_N, seq_N = trained(
        loss_mask_T, logprobs_T, old_logprobs_T, advantages_T, weights_T, sequence_T
    )
    log_w_N = segment_sum((new_N - old_N).detach(), seq_N)[seq_N].clamp(-20.0, 20.0)
    up_N = adv_N >= 0
    k_N = torch.full_like(log_w_N, config.k_negative).masked_fill(up_N, config.k_positive)
    lam_N = torch.full_like(log_w_N, config.lambda_negative).masked_fill(up_N, config.lambda_positive)
    phi_N = torch.exp(k_N * log_w_N + lam_N * (1 - log_w_N.exp()))
    metrics = ratio_metrics(new_N, old_N)
    metrics["gradient_weight"] = mean_of(phi_N)
    return (weight_N * -phi_N.detach() * adv_N * new_N).sum(), metrics


ENTRIES = {"vespo": PolicyLoss(vespo, VESPO)}
