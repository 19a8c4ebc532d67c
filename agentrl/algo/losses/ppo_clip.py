"""PPO's clipped surrogate with separate bounds and a dual clip."""

from __future__ import annotations

from typing import Literal

from agentrl.algo.entries import PolicyLoss
from agentrl.algo.kl import bounded_exp
from agentrl.algo.late import Tensor
from agentrl.algo.parameters import Above0, ClipLow, DualClip, Named
from agentrl.algo.ratio import LossOutput, clipped_surrogate, ratio_metrics
from agentrl.algo.segments import trained


class PPOClip(Named):
    """PPO's clipped surrogate with two bounds and a dual clip.

    Source: PPO, arXiv:1707.06347; dual clip, arXiv:1912.09729; separate bounds, DAPO, arXiv:2503.14476.
    """

    name: Literal["ppo_clip"] = "ppo_clip"
    clip_low: ClipLow = 0.2
    """The policy ratio is clipped below 1 - clip_low."""
    clip_high: Above0 = 0.28
    """The policy ratio is clipped above 1 + clip_high (DAPO's clip-higher)."""
    dual_clip: DualClip | None = 3.0
    """For negative advantages the loss is at most dual_clip * |advantage|; null turns this off."""


def ppo_clip(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    sequence_T: Tensor,
    loss_mask_T: Tensor,
    config: PPOClip,
) -> LossOutput:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) with r the ratio of each token; dual clip bounds it for A < 0."""
    new_N, old_N, adv_N, weight_N = trained(loss_mask_T, logprobs_T, old_logprobs_T, advantages_T, weights_T)
    ratio_N = bounded_exp(new_N - old_N)
    clipped_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss_N, metrics = clipped_surrogate(ratio_N, clipped_N, adv_N, config.dual_clip)
    return (weight_N * loss_N).sum(), metrics | ratio_metrics(new_N, old_N)


ENTRIES = {"ppo_clip": PolicyLoss(ppo_clip, PPOClip)}
