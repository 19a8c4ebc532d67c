"""Packed attention with PyTorch's scaled_dot_product_attention: rows of similar length in one call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from agentrl.learner.attention.packed import Spans


def attend(
    q_1HTD: Tensor, k_1HTD: Tensor, v_1HTD: Tensor, spans: Spans, scaling: float, window: int | None
) -> Tensor:
    """[1, T, H, D]; see `packed_attention`."""
    plan = spans.plan(_plan, window)
    q_THD, k_THD, v_THD = (x[0].transpose(0, 1) for x in (q_1HTD, k_1HTD, v_1HTD))
    grouped = q_THD.shape[1] != k_THD.shape[1]
    pieces = []
    for bucket in plan.buckets:
        q_BHLD = q_THD[bucket.query_BL].transpose(1, 2)
        k_BHKD, v_BHKD = (x[bucket.key_BK].transpose(1, 2) for x in (k_THD, v_THD))
        out_BHLD = F.scaled_dot_product_attention(
            q_BHLD,
            k_BHKD,
            v_BHKD,
            attn_mask=bucket.mask_LK,
            is_causal=bucket.mask_LK is None,
            scale=scaling,
            enable_gqa=grouped,
        )
        pieces.append(out_BHLD.transpose(1, 2).flatten(0, 1)[bucket.cell_N])
    return torch.cat(pieces)[plan.place_T][None]


@dataclass(frozen=True, slots=True)
class _Bucket:
    """B rows of similar length that continue a shared prefix of the same length, in one attention call.

    `query_BL` and `key_BK` are flat positions (K: what is seen of the prefix, then L); short rows repeat their
    last one, which nothing before it attends to. `cell_N` says which of the B x L queries are real, `flat_N` where
    their results belong. `mask_LK` is None if plain causal attention does.
    """

    query_BL: Tensor
    key_BK: Tensor
    cell_N: Tensor
    flat_N: Tensor
    mask_LK: Tensor | None


@dataclass(frozen=True, slots=True)
class _Plan:
    """Buckets that cover every flat position once; result t is number `place_T[t]` of theirs end to end."""

    buckets: tuple[_Bucket, ...]
    place_T: Tensor


def _plan(spans: Spans, window: int | None) -> _Plan:
    buckets = tuple(_buckets(spans, window))
    return _Plan(buckets, torch.argsort(torch.cat([bucket.flat_N for bucket in buckets])))


def _buckets(spans: Spans, window: int | None) -> Iterator[_Bucket]:
    """Rows with a prefix of the same length whose own lengths differ by at most a quarter."""
    device = spans.device
    waiting = sorted(spans.rows, key=lambda row: (row.prefix, row.length))
    while waiting:
        shared, shortest = waiting[0].prefix, waiting[0].length
        taken = [r for r in waiting if r.prefix == shared and r.length <= max(shortest * 1.25, shortest + 8)]
        waiting = waiting[len(taken) :]
        prefix_B, _, own_B, length_B = torch.tensor(taken, device=device).T
        width, first = taken[-1].length, taken[0].first_key(window)
        within_L = torch.arange(width, device=device)
        query_BL = own_B[:, None] + torch.minimum(within_L[None, :], length_B[:, None] - 1)
        real_BL = within_L[None, :] < length_B[:, None]
        key_BK, mask_LK = query_BL, None
        if first < shared:
            key_BK = torch.cat(
                [prefix_B[:, None] + torch.arange(first, shared, device=device)[None, :], query_BL], 1
            )
        if first < shared or (window is not None and window < width):
            back_LK = (shared + within_L)[:, None] - torch.arange(first, shared + width, device=device)[None, :]
            mask_LK = back_LK >= 0 if window is None else (back_LK >= 0) & (back_LK < window)
        yield _Bucket(query_BL, key_BK, real_BL.flatten().nonzero().squeeze(1), query_BL[real_BL], mask_LK)
