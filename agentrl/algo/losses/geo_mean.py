"""GMPO: token log-ratios are clipped, then averaged over the sequence."""

from __future__ import annotations

from typing import Literal

from agentrl.algo.entries import PolicyLoss
from agentrl.algo.kl import bounded_exp
from agentrl.algo.late import Tensor, torch
from agentrl.algo.metrics import mean_of
from agentrl.algo.parameters import Above0, Named
from agentrl.algo.ratio import LossOutput, ratio_metrics
from agentrl.algo.segments import segment_mean, segment_sum, trained


class GeoMean(Named):
    """The geometric mean of the clipped token ratios of each sequence (GMPO).

    Source: GMPO, arXiv:2507.20673.
    """

    name: Literal["geo_mean"] = "geo_mean"
    clip_low: Above0 = 0.4
    """For negative advantages a token's log-ratio is clipped below -clip_low."""
    clip_high: Above0 = 0.4
    """For positive advantages a token's log-ratio is clipped above clip_high."""


def geo_mean(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    sequence_T: Tensor,
    loss_mask_T: Tensor,
    config: GeoMean,
) -> LossOutput:
    """-A exp(mean of the clipped log-ratios of the sequence), A the mean advantage of its tokens.

    Each log-ratio is clipped on the side to which the advantage would push it. The loss of a sequence is assigned
    to each of its tokens, so that the weights decide how sequences count: seq-mean-token-mean is GMPO's mean over
    sequences.
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


ENTRIES = {"geo_mean": PolicyLoss(geo_mean, GeoMean)}
