"""Policy losses that weigh the gradient of the log-probability instead of clipping a surrogate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from agentrl.algo.correction import Correct, check_band, importance_weights
from agentrl.algo.kl import bounded_exp
from agentrl.algo.loss_ppo import LossOutput, ratio_metrics, sequence_log_ratio
from agentrl.algo.metrics import mean_of
from agentrl.algo.segments import trained


@dataclass(frozen=True, slots=True)
class Reinforce:
    """Parameters of `reinforce`."""

    importance: Correct = "none"
    """Weigh by the truncated ratio of each token or each sequence to the old policy, or not at all."""
    high: float = 2.0
    """Ratios count up to this."""
    low: float | None = None
    """Where given, ratios outside [low, high] count as 0 (IcePop) instead of being truncated at high."""

    def __post_init__(self) -> None:
        check_band(self.importance, self.low, self.high)


def reinforce(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    sequence_T: Tensor,
    loss_mask_T: Tensor,
    config: Reinforce,
) -> LossOutput:
    """-w A log pi, with w the truncated ratio to the old policy, no gradient through it.

    With the sampler's log-probabilities as `old_logprobs_T` (bypass) this is off-policy REINFORCE that needs
    no second evaluation of the old policy.
    """
    new_N, old_N, adv_N, weight_N, seq_N = trained(
        loss_mask_T, logprobs_T, old_logprobs_T, advantages_T, weights_T, sequence_T
    )
    loss_N = -adv_N * new_N
    metrics = ratio_metrics(new_N, old_N)
    if config.importance != "none":
        ratio_N = importance_weights(
            (new_N - old_N).detach(), seq_N, level=config.importance, low=config.low, high=config.high
        )
        loss_N = ratio_N * loss_N
        metrics["importance_weight"] = mean_of(ratio_N)
    return (weight_N * loss_N).sum(), metrics


@dataclass(frozen=True, slots=True)
class GPG:
    """`gpg` has no parameters."""


def gpg(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    sequence_T: Tensor,
    loss_mask_T: Tensor,
    config: GPG,
) -> LossOutput:
    """-A log pi: the plain policy gradient; the old policy only enters the metrics. Source: arXiv:2504.02546."""
    new_N, old_N, adv_N, weight_N = trained(loss_mask_T, logprobs_T, old_logprobs_T, advantages_T, weights_T)
    return (weight_N * -adv_N * new_N).sum(), ratio_metrics(new_N, old_N)


@dataclass(frozen=True, slots=True)
class CISPO:
    """Parameters of `cispo`."""

    ratio_max: float = 5.0
    """Ratios count up to this."""
    ratio_min: float = 0.0
    """Ratios count at least as this; 0 leaves the lower side open, as in the paper."""

    def __post_init__(self) -> None:
        if not 0 <= self.ratio_min < self.ratio_max:
            raise ValueError(f"needs 0 <= ratio_min < ratio_max, got {self.ratio_min}, {self.ratio_max}")


def cispo(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    sequence_T: Tensor,
    loss_mask_T: Tensor,
    config: CISPO,
) -> LossOutput:
    """-clip(r) A log pi, no gradient through the ratio: every token keeps a gradient, its weight is clipped.

    Source: MiniMax-M1, arXiv:2506.13585.
    """
    new_N, old_N, adv_N, weight_N = trained(loss_mask_T, logprobs_T, old_logprobs_T, advantages_T, weights_T)
    ratio_N = bounded_exp((new_N - old_N).detach())
    bound_N = ratio_N.clamp(config.ratio_min, config.ratio_max)
    metrics = ratio_metrics(new_N, old_N) | {"clip_fraction": mean_of(bound_N != ratio_N)}
    return (weight_N * -bound_N * adv_N * new_N).sum(), metrics


@dataclass(frozen=True, slots=True)
class SAPO:
    """Parameters of `sapo`: how sharply the gate closes around a ratio of 1."""

    tau_positive: float = 1.0
    """Where the advantage is positive."""
    tau_negative: float = 1.05
    """Elsewhere; larger, since pushing tokens down is the less stable direction."""
    level: Literal["token", "sequence"] = "token"
    """Gate the ratio of each token, or the geometric mean of the ratios of its sequence."""

    def __post_init__(self) -> None:
        if self.level not in ("token", "sequence"):
            raise ValueError(f"level must be token or sequence, got {self.level!r}")
        if not (self.tau_positive > 0 and self.tau_negative > 0):
            raise ValueError(f"temperatures must be above 0, got {self.tau_positive}, {self.tau_negative}")


def sapo(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    sequence_T: Tensor,
    loss_mask_T: Tensor,
    config: SAPO,
) -> LossOutput:
    """-A (4 / tau) sigmoid(tau (r - 1)): a smooth gate in the place of the clip.

    Source: SAPO, arXiv:2511.20347.
    """
    new_N, old_N, adv_N, weight_N, seq_N = trained(
        loss_mask_T, logprobs_T, old_logprobs_T, advantages_T, weights_T, sequence_T
    )
    log_ratio_N = new_N - old_N if config.level == "token" else sequence_log_ratio(new_N, old_N, seq_N)
    ratio_N = bounded_exp(log_ratio_N)
    tau_N = torch.full_like(ratio_N, config.tau_negative).masked_fill(adv_N > 0, config.tau_positive)
    gate_N = torch.sigmoid(tau_N * (ratio_N - 1)) * (4 / tau_N)
    return (weight_N * -adv_N * gate_N).sum(), ratio_metrics(new_N, old_N)


@dataclass(frozen=True, slots=True)
class DRO:
    """Parameters of `dro`."""

    beta: float = 0.1
    """Weight of the squared log-ratio."""

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ValueError(f"beta must be above 0, got {self.beta}")


def dro(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    sequence_T: Tensor,
    loss_mask_T: Tensor,
    config: DRO,
) -> LossOutput:
    """-(A log pi - beta / 2 (log-ratio)^2): the plain gradient held back by a quadratic.

    Source: direct reward optimisation, arXiv:2405.19107.
    """
    new_N, old_N, adv_N, weight_N = trained(loss_mask_T, logprobs_T, old_logprobs_T, advantages_T, weights_T)
    loss_N = -(adv_N * new_N - config.beta / 2 * (new_N - old_N).square())
    return (weight_N * loss_N).sum(), ratio_metrics(new_N, old_N)


@dataclass(frozen=True, slots=True)
class DPPO:
    """Parameters of `dppo_tv` and `dppo_kl`."""

    divergence_low: float = 0.2
    """Tokens with negative advantage stop once their probability has fallen by this divergence."""
    divergence_high: float = 0.2
    """Tokens with positive advantage stop once their probability has risen by this divergence."""
    ratio_max: float = 20.0
    """Ratios count up to this."""

    def __post_init__(self) -> None:
        if not (self.divergence_low >= 0 and self.divergence_high >= 0 and self.ratio_max >= 1):
            raise ValueError(f"dppo needs divergences of 0 or larger and ratio_max of 1 or larger, got {self}")


def dppo_tv(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    sequence_T: Tensor,
    loss_mask_T: Tensor,
    config: DPPO,
) -> LossOutput:
    """-min(r, max) A log pi for tokens within a trust region of total variation |pi - old|.

    The region is left only on the side where the advantage pushes. Source: DPPO, arXiv:2602.04879.
    """
    new_N, old_N, adv_N, weight_N = trained(loss_mask_T, logprobs_T, old_logprobs_T, advantages_T, weights_T)
    moved_N = new_N.detach().exp() - old_N.exp()
    return _trust_region(new_N, old_N, adv_N, weight_N, moved_N.abs(), moved_N, config)


def dppo_kl(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    sequence_T: Tensor,
    loss_mask_T: Tensor,
    config: DPPO,
) -> LossOutput:
    """-min(r, max) A log pi within a trust region of binary KL: this token against all others.

    The region is left only on the side where the advantage pushes. Source: DPPO, arXiv:2602.04879.
    """
    new_N, old_N, adv_N, weight_N = trained(loss_mask_T, logprobs_T, old_logprobs_T, advantages_T, weights_T)
    now_N, was_N = new_N.detach().exp(), old_N.exp()
    rest_now_N, rest_was_N = -torch.expm1(new_N.detach()), -torch.expm1(old_N)
    tiny = torch.finfo(now_N.dtype).tiny
    other_N = torch.xlogy(rest_was_N, rest_was_N.clamp(min=tiny) / rest_now_N.clamp(min=tiny))
    divergence_N = was_N * (old_N - new_N.detach()) + other_N
    return _trust_region(new_N, old_N, adv_N, weight_N, divergence_N, now_N - was_N, config)


def _trust_region(
    new_N: Tensor,
    old_N: Tensor,
    adv_N: Tensor,
    weight_N: Tensor,
    divergence_N: Tensor,
    moved_N: Tensor,
    config: DPPO,
) -> LossOutput:
    too_high_N = (adv_N > 0) & (moved_N > 0) & (divergence_N > config.divergence_high)
    too_low_N = (adv_N <= 0) & (moved_N < 0) & (divergence_N > config.divergence_low)
    outside_N = too_high_N | too_low_N
    ratio_N = bounded_exp((new_N - old_N).detach()).clamp(max=config.ratio_max)
    loss_N = torch.where(outside_N, torch.zeros_like(new_N), -ratio_N * adv_N * new_N)
    metrics = ratio_metrics(new_N, old_N) | {"clip_fraction": mean_of(outside_N)}
    return (weight_N * loss_N).sum(), metrics
