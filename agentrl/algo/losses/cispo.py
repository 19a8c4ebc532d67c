"""CISPO: the log-likelihood weighted by a clipped ratio."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from agentrl.algo.entries import PolicyLoss
from agentrl.algo.kl import bounded_exp
from agentrl.algo.late import Tensor
from agentrl.algo.metrics import mean_of
from agentrl.algo.parameters import Above0, Named, NonNegative
from agentrl.algo.ratio import LossOutput, ratio_metrics
from agentrl.algo.segments import trained


class CISPO(Named):
    """The policy gradient weighted by the clipped ratio; every token keeps a gradient.

    Source: MiniMax-M1, arXiv:2506.13585.
    """

    name: Literal["cispo"] = "cispo"
    ratio_max: Above0 = 5.0
    """Ratios are clipped above this value."""
    ratio_min: NonNegative = 0.0
    """Ratios are clipped below this value; 0 leaves them unbounded below, as in the paper."""

    @model_validator(mode="after")
    def _band(self) -> Self:
        if self.ratio_min >= self.ratio_max:
            raise ValueError(f"ratio_min = {self.ratio_min} must be below ratio_max = {self.ratio_max}")
        return self


def cispo(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    sequence_T: Tensor,
    loss_mask_T: Tensor,
    config: CISPO,
) -> LossOutput:
    """-clip(r) A log pi, no gradient through the ratio: every token keeps a gradient, its weight is clipped."""
    new_N, old_N, adv_N, weight_N = trained(loss_mask_T, logprobs_T, old_logprobs_T, advantages_T, weights_T)
    ratio_N = bounded_exp((new_N - old_N).detach())
    bound_N = ratio_N.clamp(config.ratio_min, config.ratio_max)
    metrics = ratio_metrics(new_N, old_N) | {"clip_fraction": mean_of(bound_N != ratio_N)}
    return (weight_N * -bound_N * adv_N * new_N).sum(), metrics


ENTRIES = {"cispo": PolicyLoss(cispo, CISPO)}
