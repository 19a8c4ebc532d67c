"""Clip-Cov: a few tokens of large covariance get no gradient."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from agentrl.algo.covariance import covariances, shuffle_keys
from agentrl.algo.entries import PolicyLoss
from agentrl.algo.kl import bounded_exp
from agentrl.algo.late import Tensor, torch
from agentrl.algo.metrics import mean_of
from agentrl.algo.parameters import Above0, ClipLow, Named, Share
from agentrl.algo.ratio import LossOutput, clipped_surrogate, ratio_metrics
from agentrl.algo.segments import trained


class ClipCov(Named):
    """PPO's surrogate without the few tokens whose advantage and log-probability vary together.

    Source: arXiv:2505.22617.
    """

    name: Literal["clip_cov"] = "clip_cov"
    clip_low: ClipLow = 0.2
    """The policy ratio is clipped below 1 - clip_low."""
    clip_high: Above0 = 0.2
    """The policy ratio is clipped above 1 + clip_high."""
    fraction: Share = 2e-4
    """Fraction of the step's tokens that get no gradient (at least one token)."""
    cov_low: float = 1.0
    """They are drawn among tokens with a covariance above this."""
    cov_high: float = 5.0
    """They are drawn among tokens with a covariance below this."""

    @model_validator(mode="after")
    def _band(self) -> Self:
        if self.cov_low >= self.cov_high:
            raise ValueError(f"cov_low = {self.cov_low} must be below cov_high = {self.cov_high}")
        return self


def clip_cov_selection(
    advantages_N: Tensor, logprobs_N: Tensor, keys_N: Tensor, config: ClipCov, *, seed: int = 0
) -> Tensor:
    """[N] bool: the tokens of the step that get no gradient, drawn among those inside the covariance band.

    Args:
        advantages_N: [N] of all trained tokens of the step, over all ranks.
        logprobs_N: [N] log-probabilities at the start of the step.
        keys_N: [N] long, a number for each token that does not depend on where it lies (for instance episode
            number * 2^32 + position): the draw depends on the keys and the seed, not on the order.
    """
    if not advantages_N.numel():
        return torch.zeros_like(advantages_N, dtype=torch.bool)
    cov_N = covariances(advantages_N, logprobs_N)
    inside_N = (cov_N > config.cov_low) & (cov_N < config.cov_high)
    number = max(int(config.fraction * cov_N.numel()), 1)
    rank_N = torch.where(inside_N, shuffle_keys(keys_N, seed), torch.iinfo(torch.long).max)
    chosen_N = torch.zeros_like(inside_N)
    chosen_N[torch.argsort(rank_N, stable=True)[:number]] = True
    return chosen_N & inside_N


def clip_cov(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    sequence_T: Tensor,
    loss_mask_T: Tensor,
    config: ClipCov,
    *,
    selected_T: Tensor,
) -> LossOutput:
    """PPO's surrogate (no dual clip) with loss 0 on the selected tokens.

    Args:
        selected_T: [T] bool, this micro-batch's part of `clip_cov_selection`.
    """
    new_N, old_N, adv_N, weight_N, selected_N = trained(
        loss_mask_T, logprobs_T, old_logprobs_T, advantages_T, weights_T, selected_T
    )
    ratio_N = bounded_exp(new_N - old_N)
    clipped_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss_N, metrics = clipped_surrogate(ratio_N, clipped_N, adv_N)
    loss_N = torch.where(selected_N, torch.zeros_like(loss_N), loss_N)
    metrics |= ratio_metrics(new_N, old_N) | {"selected_fraction": mean_of(selected_N)}
    return (weight_N * loss_N).sum(), metrics


ENTRIES = {"clip_cov": PolicyLoss(clip_cov, ClipCov, silent=False, select=clip_cov_selection)}
