"""Training only the tokens of highest entropy."""

from __future__ import annotations

import math

from agentrl.algo.late import Tensor
from agentrl.algo.segments import trained

ROUNDING = 1e-5
"""Entropies closer than this count as equal. Siblings have the same one where their
common prompt ends, and rounding differs from micro-batch to micro-batch."""


def entropy_threshold(entropy_N: Tensor, top_fraction: float) -> float:
    """The entropy above which the top fraction of the step's trained tokens lies.

    Args:
        entropy_N: [N] of all trained tokens of the step, over all ranks.
        top_fraction: in (0, 1]; 0.2 keeps the fifth with the highest entropy.
    """
    if not 0 < top_fraction <= 1:
        raise ValueError(f"top_fraction must be in (0, 1], got {top_fraction}")
    if not entropy_N.numel() or top_fraction == 1:
        return -math.inf
    return float(_quantile(entropy_N.double(), 1 - top_fraction))


def high_entropy_mask(entropy_T: Tensor, loss_mask_T: Tensor, threshold: float) -> Tensor:
    """[T] bool: the trained tokens at or above `entropy_threshold`; the policy loss is taken on them only.

    Source: arXiv:2506.01939 (a minority of high-entropy tokens carries the learning).
    """
    (entropy_N,) = trained(loss_mask_T, entropy_T.detach())
    mask_T = loss_mask_T.bool()
    return mask_T.masked_scatter(mask_T, entropy_N >= threshold - ROUNDING)


def _quantile(values_N: Tensor, q: float) -> Tensor:
    """Linear interpolation between order statistics; torch.quantile refuses more than 16 million values."""
    ordered_N = values_N.sort().values
    at = q * (ordered_N.numel() - 1)
    below = int(at)
    above = min(below + 1, ordered_N.numel() - 1)
    return ordered_N[below] + (at - below) * (ordered_N[above] - ordered_N[below])
