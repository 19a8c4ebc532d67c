"""PPO's clipped surrogate, and what the policy losses share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algo.kl import bounded_exp
from agentrl.algo.metrics import Metrics, max_of, mean_of
from agentrl.algo.segments import segment_mean, trained

LossOutput = tuple[Tensor, Metrics]


@dataclass(frozen=True, slots=True)
class PPOClip:
    """Parameters of `ppo_clip`."""

    clip_low: float = 0.2
    """The ratio counts from 1 - clip_low upwards where the advantage is negative."""
    clip_high: float = 0.2
    """The ratio counts up to 1 + clip_high where the advantage is positive (DAPO: 0.28)."""
    dual_clip: float | None = 3.0
    """Where the advantage is negative the loss is at most dual_clip * |advantage|; None switches it off."""

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high, self.dual_clip)


def check_clip(clip_low: float, clip_high: float, dual_clip: float | None = None) -> None:
    """Raises ValueError unless [1 - clip_low, 1 + clip_high] is an interval of ratios around 1."""
    if not 0 <= clip_low <= 1:
        raise ValueError(f"clip_low must be in [0, 1], got {clip_low}")
    if not clip_high >= 0:
        raise ValueError(f"clip_high must be 0 or larger, got {clip_high}")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be above 1 (or None), got {dual_clip}")


def ppo_clip(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    sequence_T: Tensor,
    loss_mask_T: Tensor,
    config: PPOClip,
) -> LossOutput:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) with r the ratio of each token; dual clip bounds it for A < 0.

    Source: PPO, arXiv:1707.06347; dual clip, arXiv:1912.09729; separate bounds, DAPO, arXiv:2503.14476.
    """
    new_N, old_N, adv_N, weight_N = trained(loss_mask_T, logprobs_T, old_logprobs_T, advantages_T, weights_T)
    ratio_N = bounded_exp(new_N - old_N)
    loss_N, metrics = clipped_surrogate(ratio_N, adv_N, config.clip_low, config.clip_high, config.dual_clip)
    return (weight_N * loss_N).sum(), metrics | ratio_metrics(new_N, old_N)


def clipped_surrogate(
    ratio_N: Tensor, adv_N: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Metrics]:
    """[N] PPO's loss per token for ratios of whatever kind, and how often each clip held."""
    plain_N = -adv_N * ratio_N
    bound_N = -adv_N * ratio_N.clamp(1 - clip_low, 1 + clip_high)
    loss_N = torch.maximum(plain_N, bound_N)
    metrics = {"clip_fraction": mean_of(bound_N > plain_N)}
    if dual_clip is not None:
        ceiling_N = -adv_N * dual_clip
        dual_N = (adv_N < 0) & (loss_N > ceiling_N)
        loss_N = torch.where(dual_N, ceiling_N, loss_N)
        metrics["dual_clip_fraction"] = mean_of(dual_N)
    return loss_N, metrics


def sequence_log_ratio(new_N: Tensor, old_N: Tensor, sequence_N: Tensor) -> Tensor:
    """[N] mean log-ratio of each token's sequence in value, the token's own in gradient (GSPO-token)."""
    mean_N = segment_mean((new_N - old_N).detach(), sequence_N)[sequence_N]
    return mean_N + (new_N - new_N.detach())


def ratio_metrics(new_N: Tensor, old_N: Tensor) -> Metrics:
    """How far the policy has moved since the step began, over trained tokens."""
    log_ratio_N = (new_N - old_N).detach()
    return {
        "policy_kl": mean_of(-log_ratio_N),
        "policy_kl_k3": mean_of(bounded_exp(log_ratio_N) - 1 - log_ratio_N),
        "log_ratio_max": max_of(log_ratio_N.abs()),
    }
