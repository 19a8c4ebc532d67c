"""Policy losses: one file each, with its parameters; pure functions of flat tokens.

Every loss has the same signature and returns `sum(weights_T * token_loss_T)` with its metrics:

    fn(logprobs_T, old_logprobs_T, advantages_T, weights_T, sequence_T, loss_mask_T, config)
        -> (loss, metrics)

    logprobs_T      [T] log-probabilities under the policy being trained; gradients flow into them
    old_logprobs_T  [T] under the policy at the start of the step (bypass: under the sampler)
    advantages_T    [T] advantage of each token
    weights_T       [T] from `aggregation_weights`, times correction weights where sampler and learner differ
    sequence_T      [T] long, the episode of each token
    loss_mask_T     [T] bool, True on trained tokens: elsewhere nothing is read and the gradient is exactly 0

All trained tokens of an episode are in one micro-batch, in however many rows, so a loss may take the ratio of a
whole sequence. Ratios are exp() of a log-ratio, continued by the tangent beyond 20 (5e8): loss and gradient stay
finite.
The two covariance losses also take `selected_T`, chosen once for the whole step by the entry's `select`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from agentrl.algo.late import Tensor
from agentrl.algo.losses.cispo import CISPO, cispo
from agentrl.algo.losses.clip_cov import ClipCov, clip_cov, clip_cov_selection
from agentrl.algo.losses.dppo import DPPO, dppo_kl, dppo_tv
from agentrl.algo.losses.dro import DRO, dro
from agentrl.algo.losses.geo_mean import GeoMean, geo_mean
from agentrl.algo.losses.gpg import GPG, gpg
from agentrl.algo.losses.gspo import GSPO, gspo
from agentrl.algo.losses.kl_cov import KLCov, kl_cov, kl_cov_selection
from agentrl.algo.losses.ppo_clip import PPOClip, ppo_clip
from agentrl.algo.losses.reinforce import Reinforce, reinforce
from agentrl.algo.losses.sapo import SAPO, sapo
from agentrl.algo.losses.vespo import VESPO, vespo
from agentrl.algo.parameters import Named
from agentrl.algo.ratio import LossOutput


class PolicyLoss(NamedTuple):
    """A policy loss as the configuration names it."""

    fn: Callable[..., LossOutput]
    """With the signature described above."""
    config: type[Named]
    """Its parameters; all have defaults."""
    silent: bool = True
    """Whether an episode whose advantages are all 0 adds nothing to the gradient."""
    select: Callable[[Tensor, Tensor, Tensor, Any], Tensor] | None = None
    """(advantages_N, old_logprobs_N, keys_N, config) -> bool_N over all trained tokens of a step, for losses that
    take `selected_T`."""


POLICY_LOSSES: Mapping[str, PolicyLoss] = {
    "ppo_clip": PolicyLoss(ppo_clip, PPOClip),
    "gspo": PolicyLoss(gspo, GSPO),
    "geo_mean": PolicyLoss(geo_mean, GeoMean),
    "cispo": PolicyLoss(cispo, CISPO),
    "sapo": PolicyLoss(sapo, SAPO),
    "reinforce": PolicyLoss(reinforce, Reinforce),
    "gpg": PolicyLoss(gpg, GPG),
    "dro": PolicyLoss(dro, DRO, silent=False),
    "dppo_tv": PolicyLoss(dppo_tv, DPPO),
    "dppo_kl": PolicyLoss(dppo_kl, DPPO),
    "clip_cov": PolicyLoss(clip_cov, ClipCov, silent=False, select=clip_cov_selection),
    "kl_cov": PolicyLoss(kl_cov, KLCov, silent=False, select=kl_cov_selection),
    "vespo": PolicyLoss(vespo, VESPO),
}
"""Every loss by its name. A new one is a file in this folder and a line here."""
