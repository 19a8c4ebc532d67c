"""Packed attention with PyTorch's scaled_dot_product_attention: spans of similar length in one call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from agentrl.learner.attention.packed import Spans
from agentrl.learner.picked import picked


def attend(
    q_1HTD: Tensor, k_1HTD: Tensor, v_1HTD: Tensor, spans: Spans, scaling: float, window: int | None
) -> Tensor:
    """[1, T, H, D]; see `packed_attention`."""
    plan = spans.plan(_plan, window)
    q_THD, k_THD, v_THD = (x[0].transpose(0, 1) for x in (q_1HTD, k_1HTD, v_1HTD))
    grouped = q_THD.shape[1] != k_THD.shape[1]
    pieces = []
    for bucket in plan.buckets:
        q_BHLD = picked(q_THD, bucket.query_BL).transpose(1, 2)
        k_BHKD, v_BHKD = (picked(x, bucket.key_BK).transpose(1, 2) for x in (k_THD, v_THD))
        out_BHLD = F.scaled_dot_product_attention(
            q_BHLD,
            k_BHKD,
            v_BHKD,
            attn_mask=bucket.mask,
            is_causal=bucket.mask is None,
            scale=scaling,
            enable_gqa=grouped,
        )
        pieces.append(picked(out_BHLD.transpose(1, 2).flatten(0, 1), bucket.cell_N))
    return picked(torch.cat(pieces), plan.place_T)[None]


@dataclass(frozen=True, slots=True)
class _Bucket:
    """B spans of similar length and with paths of similar length before them, in one attention call.

    `query_BL` and `key_BK` are flat positions (K: what is seen of the path, then L); short spans repeat their last
    one, which nothing before it attends to. `cell_N` says which of the B x L queries are real, `flat_N` where
    their results belong. `mask` is [L, K] or [B, 1, L, K], None if plain causal attention does.
    """

    query_BL: Tensor
    key_BK: Tensor
    cell_N: Tensor
    flat_N: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _Plan:
    """Buckets that cover every flat position once; result t is number `place_T[t]` of theirs end to end."""

    buckets: tuple[_Bucket, ...]
    place_T: Tensor


def _plan(spans: Spans, window: int | None) -> _Plan:
    buckets = tuple(_bucket(spans, numbers, window) for numbers in _alike(spans))
    return _Plan(buckets, torch.argsort(torch.cat([bucket.flat_N for bucket in buckets])))


def _alike(spans: Spans) -> Iterator[list[int]]:
    """Spans whose own lengths differ by at most a quarter, and the lengths of their paths, too."""
    rows = spans.rows
    waiting = sorted(range(len(rows)), key=lambda n: rows[n].length)
    while waiting:
        widest = _slack(rows[waiting[0]].length)
        taken = [n for n in waiting if rows[n].length <= widest]
        waiting = waiting[len(taken) :]
        taken.sort(key=lambda n: rows[n].prefix)
        while taken:
            longest = _slack(rows[taken[0]].prefix) if rows[taken[0]].prefix else 0
            together = [n for n in taken if rows[n].prefix <= longest]
            taken = taken[len(together) :]
            yield together


def _slack(length: int) -> float:
    return max(length * 1.25, length + 8)


def _bucket(spans: Spans, numbers: Sequence[int], window: int | None) -> _Bucket:
    """One attention call. Paths are aligned at their ends, so that the distance of two slots is that of places."""
    rows, device = [spans.rows[n] for n in numbers], spans.device
    at_B, length_B, prefix_B = torch.tensor([(row.at, row.length, row.prefix) for row in rows], device=device).T
    width, shared = max(row.length for row in rows), max(row.prefix for row in rows)
    within_L = torch.arange(width, device=device)
    query_BL = at_B[:, None] + torch.minimum(within_L[None, :], length_B[:, None] - 1)
    real_BL = within_L[None, :] < length_B[:, None]
    key_BK, mask = query_BL, None
    first = 0 if window is None else max(0, shared + 1 - window)  # the first slot that any query sees
    if first < shared:
        before = np.zeros((len(rows), shared - first), np.int64)
        for path, number, row in zip(before, numbers, rows, strict=True):
            missing = max(0, shared - row.prefix - first)
            path[missing:] = spans.path(number, first - (shared - row.prefix) + missing)
        key_BK = torch.cat([torch.from_numpy(before).to(device), query_BL], 1)
    if first < shared or (window is not None and window < width):
        slot_K = torch.arange(first, shared + width, device=device)
        back_LK = (shared + within_L)[:, None] - slot_K[None, :]
        mask = back_LK >= 0 if window is None else (back_LK >= 0) & (back_LK < window)
        if first < shared and bool((prefix_B < shared).any()):
            mask = (mask[None] & (slot_K[None, :] >= shared - prefix_B[:, None])[:, None, :])[:, None]
    return _Bucket(query_BL, key_BK, real_BL.flatten().nonzero().squeeze(1), query_BL[real_BL], mask)
