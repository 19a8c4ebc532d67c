"""Policy losses: pure functions of flat tokens, each with a frozen dataclass of its parameters.

Every loss has the same signature and returns `sum(weights_T * token_loss_T)` with its metrics:

    fn(logprobs_T, old_logprobs_T, advantages_T, weights_T, sequence_T, loss_mask_T, config)
        -> (loss, metrics)

    logprobs_T      [T] log-probabilities under the policy that is trained; gradients flow into them
    old_logprobs_T  [T] under the policy at the start of the step (bypass: under the sampler)
    advantages_T    [T] advantage of each token
    weights_T       [T] from `aggregation_weights`, times correction weights where sampler and learner differ
    sequence_T      [T] long, the episode of each token
    loss_mask_T     [T] bool, True on trained tokens: elsewhere nothing is read and the gradient is exactly 0

Ratios are exp() of a log-ratio, continued by the tangent beyond 20 (5e8): loss and gradient stay finite.
The two covariance losses also take `selected_T`, chosen once for the whole step by the entry's `select`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from agentrl.algo.loss_cov import ClipCov, KLCov, clip_cov, clip_cov_selection, kl_cov, kl_cov_selection
from agentrl.algo.loss_ppo import LossOutput, PPOClip, ppo_clip
from agentrl.algo.loss_reinforce import (
    CISPO,
    DPPO,
    DRO,
    GPG,
    SAPO,
    Reinforce,
    cispo,
    dppo_kl,
    dppo_tv,
    dro,
    gpg,
    reinforce,
    sapo,
)
from agentrl.algo.loss_sequence import GSPO, VESPO, GeoMean, geo_mean, gspo, vespo

__all__ = [
    "CISPO",
    "DPPO",
    "DRO",
    "GPG",
    "GSPO",
    "POLICY_LOSSES",
    "SAPO",
    "VESPO",
    "ClipCov",
    "GeoMean",
    "KLCov",
    "LossOutput",
    "PPOClip",
    "PolicyLoss",
    "Reinforce",
    "cispo",
    "clip_cov",
    "clip_cov_selection",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "geo_mean",
    "gpg",
    "gspo",
    "kl_cov",
    "kl_cov_selection",
    "ppo_clip",
    "reinforce",
    "sapo",
    "vespo",
]


class PolicyLoss(NamedTuple):
    """A policy loss as the configuration names it."""

    fn: Callable[..., LossOutput]
    """With the signature that the module describes."""
    config: type[Any]
    """The dataclass of its parameters; all have defaults."""
    silent: bool = True
    """Whether an episode whose advantages are all 0 adds nothing to the gradient."""
    select: Callable[[Tensor, Tensor, Tensor, Any], Tensor] | None = None
    """(advantages_N, old_logprobs_N, keys_N, config) -> bool_N over all trained tokens of a step, where the
    loss takes `selected_T`."""


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo_clip": PolicyLoss(ppo_clip, PPOClip),
    "gspo": PolicyLoss(gspo, GSPO),
    "geo_mean": PolicyLoss(geo_mean, GeoMean),
    "cispo": PolicyLoss(cispo, CISPO),
    "sapo": PolicyLoss(sapo, SAPO),
    "gpg": PolicyLoss(gpg, GPG),
    "reinforce": PolicyLoss(reinforce, Reinforce),
    "dro": PolicyLoss(dro, DRO, silent=False),
    "dppo_tv": PolicyLoss(dppo_tv, DPPO),
    "dppo_kl": PolicyLoss(dppo_kl, DPPO),
    "clip_cov": PolicyLoss(clip_cov, ClipCov, silent=False, select=clip_cov_selection),
    "kl_cov": PolicyLoss(kl_cov, KLCov, silent=False, select=kl_cov_selection),
    "vespo": PolicyLoss(vespo, VESPO),
}
