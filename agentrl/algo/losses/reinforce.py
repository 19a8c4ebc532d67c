"""REINFORCE, with truncated importance weights on request."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from agentrl.algo.correction import importance_weights
from agentrl.algo.entries import PolicyLoss
from agentrl.algo.late import Tensor
from agentrl.algo.metrics import mean_of
from agentrl.algo.parameters import Above0, Named, check_band
from agentrl.algo.ratio import LossOutput, ratio_metrics
from agentrl.algo.segments import trained


class Reinforce(Named):
    """The policy gradient, optionally weighted by truncated ratios to the old policy."""

    name: Literal["reinforce"] = "reinforce"
    importance: Literal["none", "token", "sequence"] = "none"
    """Weight by the ratio of each token or of each sequence to the old policy, or not at all."""
    high: Above0 = 2.0
    """Ratios are truncated at this value."""
    low: Above0 | None = None
    """If set, ratios outside [low, high] count as 0 (IcePop) instead of being truncated at high."""

    @model_validator(mode="after")
    def _band(self) -> Self:
        given = self.model_fields_set - {"name", "importance"}
        if self.importance == "none" and (self.low is not None or self.high != 2.0 or len(given) == 1):
            raise ValueError(f"{' and '.join(sorted(given))} has no effect while importance is none: remove it")
        check_band(self.low, self.high)
        return self


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


ENTRIES = {"reinforce": PolicyLoss(reinforce, Reinforce)}
