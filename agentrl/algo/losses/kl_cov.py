"""KL-Cov: the tokens of largest covariance are penalized."""

from __future__ import annotations

from typing import Literal

from agentrl.algo.covariance import covariances, shuffle_keys
from agentrl.algo.entries import PolicyLoss
from agentrl.algo.kl import bounded_exp
from agentrl.algo.late import Tensor, torch
from agentrl.algo.metrics import mean_of
from agentrl.algo.parameters import Named, NonNegative, Share
from agentrl.algo.ratio import LossOutput, ratio_metrics
from agentrl.algo.segments import trained

ROUNDING = 1e-4
"""Log-ratios up to here may be rounding of float32; they are not penalized."""


class KLCov(Named):
    """The policy gradient with a penalty on the few tokens whose advantage and log-probability vary together.

    Source: arXiv:2505.22617.
    """

    name: Literal["kl_cov"] = "kl_cov"
    fraction: Share = 2e-4
    """Fraction of the step's tokens, those of largest covariance, that are penalized (at least one)."""
    kl_coef: NonNegative = 1.0
    """Weight of |log-ratio| on them."""


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
    """-A r, plus kl_coef |log-ratio| on the selected tokens, as far as it is more than rounding.

    Before the first change of the weights, log-ratios are rounding errors of either sign, and the gradient of
    |log-ratio| is that sign: it would depend on how rows are packed.

    Args:
        selected_T: [T] bool, this micro-batch's part of `kl_cov_selection`.
    """
    new_N, old_N, adv_N, weight_N, selected_N = trained(
        loss_mask_T, logprobs_T, old_logprobs_T, advantages_T, weights_T, selected_T
    )
    log_ratio_N = new_N - old_N
    moved_N = selected_N & (log_ratio_N.detach().abs() > ROUNDING)
    penalty_N = torch.where(moved_N, config.kl_coef * log_ratio_N.abs(), torch.zeros_like(new_N))
    loss_N = -adv_N * bounded_exp(log_ratio_N) + penalty_N
    metrics = ratio_metrics(new_N, old_N) | {"selected_fraction": mean_of(selected_N)}
    return (weight_N * loss_N).sum(), metrics


ENTRIES = {"kl_cov": PolicyLoss(kl_cov, KLCov, silent=False, select=kl_cov_selection)}
