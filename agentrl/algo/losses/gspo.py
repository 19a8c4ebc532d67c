"""GSPO: PPO's surrogate on the ratio of a whole sequence."""

from __future__ import annotations

from typing import Literal

from agentrl.algo.entries import PolicyLoss
from agentrl.algo.kl import bounded_exp
from agentrl.algo.late import Tensor
from agentrl.algo.parameters import Above0, ClipLow, DualClip, Named
from agentrl.algo.ratio import LossOutput, clipped_surrogate, ratio_metrics, sequence_log_ratio
from agentrl.algo.segments import trained


class GSPO(Named):
    """PPO's surrogate on the geometric mean of the token ratios of each sequence.

    Source: GSPO, arXiv:2507.18071; with seq-mean-token-sum, LUSPO, arXiv:2602.05261.
    """

    name: Literal["gspo"] = "gspo"
    clip_low: ClipLow = 3e-4
    """The ratio of a sequence is clipped below 1 - clip_low."""
    clip_high: Above0 = 4e-4
    """The ratio of a sequence is clipped above 1 + clip_high."""
    dual_clip: DualClip | None = None
    """For negative advantages the loss is at most dual_clip * |advantage|; null turns this off."""


def gspo(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    sequence_T: Tensor,
    loss_mask_T: Tensor,
    config: GSPO,
) -> LossOutput:
    """PPO's surrogate on the geometric mean of the token ratios of a sequence, with per-token advantages.

    The ratio of token t has the value of its sequence's ratio and the gradient of its own log-probability
    (GSPO-token), so that the weights decide how tokens and sequences count: with equal advantages and
    seq-mean-token-mean this is GSPO; with seq-mean-token-sum sequences count by their length (LUSPO).
    """
    new_N, old_N, adv_N, weight_N, seq_N = trained(
        loss_mask_T, logprobs_T, old_logprobs_T, advantages_T, weights_T, sequence_T
    )
    ratio_N = bounded_exp(sequence_log_ratio(new_N, old_N, seq_N))
    clipped_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss_N, metrics = clipped_surrogate(ratio_N, clipped_N, adv_N, config.dual_clip)
    return (weight_N * loss_N).sum(), metrics | ratio_metrics(new_N, old_N)


ENTRIES = {"gspo": PolicyLoss(gspo, GSPO)}
