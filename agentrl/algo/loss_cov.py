"""Policy losses that hold back the few tokens which drive the entropy down.

Those tokens are the ones whose log-probability and advantage vary together. Which ones they are is a question
about the whole step: `clip_cov_selection` and `kl_cov_selection` answer it once, for all ranks, before the
update, and the losses take the answer. (Asked per micro-batch, the answer would depend on the micro-batch.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algo.kl import bounded_exp
from agentrl.algo.loss_ppo import LossOutput, check_clip, clipped_surrogate, ratio_metrics
from agentrl.algo.metrics import mean_of
from agentrl.algo.segments import trained


@dataclass(frozen=True, slots=True)
class ClipCov:
    """Parameters of `clip_cov`."""

    clip_low: float = 0.2
    """As in PPO."""
    clip_high: float = 0.2
    """As in PPO."""
    fraction: float = 2e-4
    """Share of the step's trained tokens that get no gradient (at least one token)."""
    cov_low: float = 1.0
    """They are drawn among those with a covariance above this ..."""
    cov_high: float = 5.0
    """... and below this."""
    seed: int = 0
    """Decides the draw, together with the tokens' keys."""

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high)
        check_fraction(self.fraction)
        if not self.cov_low < self.cov_high:
            raise ValueError(f"cov_low must be below cov_high, got {self.cov_low}, {self.cov_high}")


@dataclass(frozen=True, slots=True)
class KLCov:
    """Parameters of `kl_cov`."""

    fraction: float = 2e-4
    """Share of the step's trained tokens, those of largest covariance, that are penalised (at least one)."""
    kl_coef: float = 1.0
    """Weight of |log-ratio| on them."""

    def __post_init__(self) -> None:
        check_fraction(self.fraction)
        if not self.kl_coef >= 0:
            raise ValueError(f"kl_coef must be 0 or larger, got {self.kl_coef}")


def check_fraction(fraction: float) -> None:
    """Raises ValueError unless it is a share of tokens."""
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must be in (0, 1], got {fraction}")


def covariances(advantages_N: Tensor, logprobs_N: Tensor) -> Tensor:
    """[N] (A - mean A) (log pi - mean log pi) over the trained tokens of a whole step."""
    logprobs_N = logprobs_N.detach()
    return (advantages_N - advantages_N.mean()) * (logprobs_N - logprobs_N.mean())


def clip_cov_selection(advantages_N: Tensor, logprobs_N: Tensor, keys_N: Tensor, config: ClipCov) -> Tensor:
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
    rank_N = torch.where(inside_N, shuffle_keys(keys_N, config.seed), torch.iinfo(torch.long).max)
    chosen_N = torch.zeros_like(inside_N)
    chosen_N[torch.argsort(rank_N, stable=True)[:number]] = True
    return chosen_N & inside_N


def kl_cov_selection(advantages_N: Tensor, logprobs_N: Tensor, keys_N: Tensor, config: KLCov) -> Tensor:
    """[N] bool: the tokens of the step with the largest covariance; arguments as in `clip_cov_selection`."""
    chosen_N = torch.zeros_like(advantages_N, dtype=torch.bool)
    if not advantages_N.numel():
        return chosen_N
    cov_N = covariances(advantages_N, logprobs_N)
    number = max(int(config.fraction * cov_N.numel()), 1)
    by_key = torch.argsort(shuffle_keys(keys_N, 0))  # equal covariances: the keys decide, not the order
    chosen_N[by_key[torch.argsort(cov_N[by_key], descending=True, stable=True)[:number]]] = True
    return chosen_N


def shuffle_keys(keys_N: Tensor, seed: int) -> Tensor:
    """[N] long >= 0, a well mixed function of key and seed (splitmix64 with 64-bit wrap-around)."""
    state = keys_N.long() + _signed((seed + 1) * 0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ _shift_right(state, shift)) * _signed(factor)
    return (state ^ _shift_right(state, 31)) & 0x7FFFFFFFFFFFFFFF


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

    Source: arXiv:2505.22617.
    """
    new_N, old_N, adv_N, weight_N, selected_N = trained(
        loss_mask_T, logprobs_T, old_logprobs_T, advantages_T, weights_T, selected_T
    )
    ratio_N = bounded_exp(new_N - old_N)
    loss_N, metrics = clipped_surrogate(ratio_N, adv_N, config.clip_low, config.clip_high, None)
    loss_N = torch.where(selected_N, torch.zeros_like(loss_N), loss_N)
    metrics |= ratio_metrics(new_N, old_N) | {"selected_fraction": mean_of(selected_N)}
    return (weight_N * loss_N).sum(), metrics


def kl_cov(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    sequence_T: Tensor,
    loss_mask_T: Tensor,
    config: KLCov,
    *,
    selected_T: Tensor,
) -> LossOutput:
    """-A r, plus kl_coef |log-ratio| on the selected tokens.

    Args:
        selected_T: [T] bool, this micro-batch's part of `kl_cov_selection`.

    Source: arXiv:2505.22617.
    """
    new_N, old_N, adv_N, weight_N, selected_N = trained(
        loss_mask_T, logprobs_T, old_logprobs_T, advantages_T, weights_T, selected_T
    )
    log_ratio_N = new_N - old_N
    penalty_N = torch.where(selected_N, config.kl_coef * log_ratio_N.abs(), torch.zeros_like(new_N))
    loss_N = -adv_N * bounded_exp(log_ratio_N) + penalty_N
    metrics = ratio_metrics(new_N, old_N) | {"selected_fraction": mean_of(selected_N)}
    return (weight_N * loss_N).sum(), metrics


def _signed(number: int) -> int:
    """The same 64 bits as a signed number."""
    number &= 0xFFFFFFFFFFFFFFFF
    return number - (1 << 64) if number >> 63 else number


def _shift_right(state: Tensor, bits: int) -> Tensor:
    """Logical shift: long is signed, and >> on it would copy the sign."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)
