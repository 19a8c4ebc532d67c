"""The critic's loss."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.algo.late import Tensor, torch
from agentrl.algo.metrics import Metrics, mean_of
from agentrl.algo.segments import trained


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """Parameters of `value_loss`."""

    clip: float | None = 0.5
    """Values count only as far as this from those at the start of the step; None switches the clip off."""

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be above 0 (or None), got {self.clip}")


def value_loss(
    values_T: Tensor,
    old_values_T: Tensor,
    returns_T: Tensor,
    weights_T: Tensor,
    loss_mask_T: Tensor,
    config: ValueLoss,
) -> tuple[Tensor, Metrics]:
    """1/2 max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) over trained tokens, weighted and summed.

    Args:
        values_T: [T] the critic's values; gradients flow into them.
        old_values_T: [T] its values at the start of the step, those that the advantages were made from.
        returns_T: [T] what it should have said.
        weights_T, loss_mask_T: as for the policy losses.
    """
    value_N, old_N, return_N, weight_N = trained(loss_mask_T, values_T, old_values_T, returns_T, weights_T)
    loss_N = (value_N - return_N).square()
    metrics = {
        "value_error": mean_of((value_N - return_N).abs()),
        "value": mean_of(value_N),
        "return": mean_of(return_N),
    }
    if config.clip is not None:
        near_N = torch.clamp(value_N, old_N - config.clip, old_N + config.clip)
        near_loss_N = (near_N - return_N).square()
        metrics["value_clip_fraction"] = mean_of(near_loss_N > loss_N)
        loss_N = torch.maximum(loss_N, near_loss_N)
    return (weight_N * loss_N).sum() / 2, metrics
