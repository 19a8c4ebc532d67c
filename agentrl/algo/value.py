"""The critic's loss."""

from __future__ import annotations

from agentrl.algo.late import Tensor, torch
from agentrl.algo.metrics import Metrics, mean_of
from agentrl.algo.segments import trained


def value_loss(
    values_T: Tensor,
    old_values_T: Tensor,
    returns_T: Tensor,
    weights_T: Tensor,
    loss_mask_T: Tensor,
    clip: float | None,
) -> tuple[Tensor, Metrics]:
    """1/2 max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) over trained tokens, weighted and summed.

    Args:
        values_T: [T] the critic's values; gradients flow into them.
        old_values_T: [T] its values at the start of the step, from which the advantages were computed.
        returns_T: [T] the returns that it should have predicted.
        weights_T, loss_mask_T: as for the policy losses.
        clip: values count only as far as this from the old ones; None disables the clip.
    """
    value_N, old_N, return_N, weight_N = trained(loss_mask_T, values_T, old_values_T, returns_T, weights_T)
    loss_N = (value_N - return_N).square()
    metrics = {
        "value_error": mean_of((value_N - return_N).abs()),
        "value": mean_of(value_N),
        "return": mean_of(return_N),
    }
    if clip is not None:
        near_N = torch.clamp(value_N, old_N - clip, old_N + clip)
        near_loss_N = (near_N - return_N).square()
        metrics["value_clip_fraction"] = mean_of(near_loss_N > loss_N)
        loss_N = torch.maximum(loss_N, near_loss_N)
    return (weight_N * loss_N).sum() / 2, metrics
