"""DPPO: the policy gradient within a trust region of total variation or of binary KL."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agentrl.algo.entries import PolicyLoss
from agentrl.algo.kl import bounded_exp
from agentrl.algo.late import Tensor, torch
from agentrl.algo.metrics import mean_of
from agentrl.algo.parameters import Named, NonNegative
from agentrl.algo.ratio import LossOutput, ratio_metrics
from agentrl.algo.segments import trained


class DPPO(Named):
    """The policy gradient within a trust region of total variation (`dppo_tv`) or binary KL (`dppo_kl`).

    Source: DPPO, arXiv:2602.04879.
    """

    name: Literal["dppo_tv", "dppo_kl"] = "dppo_tv"
    divergence_low: NonNegative = 0.2
    """Tokens with a negative advantage stop once their probability has fallen by this divergence."""
    divergence_high: NonNegative = 0.2
    """Tokens with a positive advantage stop once their probability has risen by this divergence."""
    ratio_max: Annotated[float, Field(ge=1)] = 20.0
    """Ratios are truncated at this value."""


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

    Only the side to which the advantage pushes is bounded.
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

    Only the side to which the advantage pushes is bounded.
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


ENTRIES = {"dppo_tv": PolicyLoss(dppo_tv, DPPO), "dppo_kl": PolicyLoss(dppo_kl, DPPO)}
