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
    # One gradient for all buckets: each alone would be as large as the batch.
    q_NHD, k_MHD, v_MHD = (
        picked(x_1HTD[0].transpose(0, 1), index)
        for x_1HTD, index in ((q_1HTD, plan.query_N), (k_1HTD, plan.key_M), (v_1HTD, plan.key_M))
    )
    queries, keys = [b.query_BL.numel() for b in plan.buckets], [b.key_BK.numel() for b in plan.buckets]
    pieces = []
    parts = (torch.split(x, sizes) for x, sizes in ((q_NHD, queries), (k_MHD, keys), (v_MHD, keys)))
    for bucket, q, k, v in zip(plan.buckets, *parts, strict=True):
        spans_B = len(bucket.query_BL)
        q_BHLD, k_BHKD, v_BHKD = (x.unflatten(0, (spans_B, -1)).transpose(1, 2) for x in (q, k, v))
        out_BHLD = F.scaled_dot_product_attention(
            q_BHLD,
            k_BHKD,
            v_BHKD,
            attn_mask=bucket.mask,
            is_causal=bucket.mask is None,
            scale=scaling,
            enable_gqa=q_NHD.shape[1] != k_MHD.shape[1],
        )
        pieces.append(out_BHLD.transpose(1, 2).flatten(0, 1))
    return picked(torch.cat(pieces), plan.place_T)[None]


@dataclass(frozen=True, slots=True)
class _Bucket:
    """B spans of similar length and with paths of similar length before them, in one attention call.

    `query_BL` and `key_BK` are flat positions (K: what is seen of the path, then L); short spans repeat their last
    one, which nothing before it attends to. `real_BL` says which queries are no repetitions. `mask` is [L, K] or
    [B, 1, L, K], None if plain causal attention does.
    """

    query_BL: Tensor
    key_BK: Tensor
    real_BL: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _Plan:
    """Buckets that cover every flat position once, their queries and keys end to end, and for each flat position
    the number of its query."""

    buckets: tuple[_Bucket, ...]
    query_N: Tensor
    key_M: Tensor
    place_T: Tensor


def _plan(spans: Spans, window: int | None) -> _Plan:
    buckets = tuple(_bucket(spans, numbers, window) for numbers in _alike(spans))
    query_N = torch.cat([bucket.query_BL.flatten() for bucket in buckets])
    real_N = torch.cat([bucket.real_BL.flatten() for bucket in buckets]).nonzero().squeeze(1)
    place_T = torch.empty_like(real_N)
    place_T[query_N[real_N]] = real_N
    return _Plan(buckets, query_N, torch.cat([bucket.key_BK.flatten() for bucket in buckets]), place_T)


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
    return _Bucket(query_BL, key_BK, real_BL, mask)
