"""Policy losses whose ratio belongs to a whole sequence.

All trained tokens of an episode lie in one micro-batch, in however many rows; the ratio is taken over them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algo.kl import bounded_exp
from agentrl.algo.loss_ppo import LossOutput, check_clip, clipped_surrogate, ratio_metrics, sequence_log_ratio
from agentrl.algo.metrics import mean_of
from agentrl.algo.segments import segment_mean, segment_sum, trained


@dataclass(frozen=True, slots=True)
class GSPO:
    """Parameters of `gspo`."""

    clip_low: float = 3e-4
    """A sequence ratio counts from 1 - clip_low upwards where the advantage is negative."""
    clip_high: float = 4e-4
    """A sequence ratio counts up to 1 + clip_high where the advantage is positive."""
    dual_clip: float | None = None
    """Where the advantage is negative the loss is at most dual_clip * |advantage|; None switches it off."""

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high, self.dual_clip)


def gspo(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    sequence_T: Tensor,
    loss_mask_T: Tensor,
    config: GSPO,
) -> LossOutput:
    """PPO's surrogate on the geometric mean of the token ratios of a sequence, with per-token advantages.

    The ratio of token t has the value of the sequence's and the gradient of the token's log-probability
    (GSPO-token), so that the weights decide how tokens and sequences count; with equal advantages and
    seq-mean-token-mean it is GSPO. With seq-mean-token-sum sequences count by their length (LUSPO).

    Source: GSPO, arXiv:2507.18071; LUSPO, arXiv:2602.05261.
    """
    new_N, old_N, adv_N, weight_N, seq_N = trained(
        loss_mask_T, logprobs_T, old_logprobs_T, advantages_T, weights_T, sequence_T
    )
    ratio_N = bounded_exp(sequence_log_ratio(new_N, old_N, seq_N))
    loss_N, metrics = clipped_surrogate(ratio_N, adv_N, config.clip_low, config.clip_high, config.dual_clip)
    return (weight_N * loss_N).sum(), metrics | ratio_metrics(new_N, old_N)


@dataclass(frozen=True, slots=True)
class GeoMean:
    """Parameters of `geo_mean`."""

    clip_low: float = 0.4
    """A token's log-ratio counts from -clip_low upwards where the advantage is negative."""
    clip_high: float = 0.4
    """A token's log-ratio counts up to clip_high where the advantage is positive."""

    def __post_init__(self) -> None:
        if not (self.clip_low >= 0 and self.clip_high >= 0):
            raise ValueError(f"clip_low and clip_high must be 0 or larger, got {self.clip_low}, {self.clip_high}")


def geo_mean(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    sequence_T: Tensor,
    loss_mask_T: Tensor,
    config: GeoMean,
) -> LossOutput:
    """-A exp(mean of the clipped log-ratios of the sequence), A the mean advantage of its tokens (GMPO).

    Log-ratios are clipped one by one on the side where the advantage would push them further. The sequence's
    loss is laid on each of its tokens, so that the weights decide how sequences count: seq-mean-token-mean
    is GMPO's mean over sequences.

    Source: GMPO, arXiv:2507.20673.
    """
    new_N, old_N, adv_N, weight_N, seq_N = trained(
        loss_mask_T, logprobs_T, old_logprobs_T, advantages_T, weights_T, sequence_T
    )
    log_ratio_N = new_N - old_N
    up_N = torch.minimum(log_ratio_N, log_ratio_N.clamp(-config.clip_low, config.clip_high))
    down_N = torch.maximum(log_ratio_N, log_ratio_N.clamp(-config.clip_low, config.clip_high))
    zero_N = torch.zeros_like(log_ratio_N)
    clipped_N = torch.where(adv_N > 0, up_N, torch.where(adv_N < 0, down_N, zero_N))
    ratio_S = bounded_exp(segment_mean(clipped_N, seq_N))
    weight_S = segment_sum(weight_N, seq_N)
    loss_S = -segment_mean(adv_N, seq_N) * ratio_S
    metrics = ratio_metrics(new_N, old_N)
    metrics["clip_fraction"] = mean_of((adv_N != 0) & (clipped_N != log_ratio_N))
    return (weight_S * loss_S).sum(), metrics


@dataclass(frozen=True, slots=True)
class VESPO:
    """Parameters of `vespo`: the shape of the weight w^k exp(lambda (1 - w)) by the sign of the advantage."""

    k_positive: float = 2.0
    lambda_positive: float = 3.0
    k_negative: float = 3.0
    lambda_negative: float = 2.0

    def __post_init__(self) -> None:
        if min(self.k_positive, self.lambda_positive, self.k_negative, self.lambda_negative) < 0:
            raise ValueError(f"the parameters of vespo must be 0 or larger, got {self}")


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

    Source: VESPO, arXiv:2602.10693.
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
