"""Packed attention with flash-attn: every span is a separate sequence whose keys start with its path.

If there are more keys than queries, flash-attn (2.1 and later) aligns the causal mask to the last key of each
sequence, which is what spans behind a shared path need.
Source: `flash_attn_varlen_func` of https://github.com/Dao-AILab/flash-attention (Dao 2023, arXiv:2307.08691).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from agentrl.learner.attention.packed import Spans


def attend(
    q_1HTD: Tensor, k_1HTD: Tensor, v_1HTD: Tensor, spans: Spans, scaling: float, window: int | None
) -> Tensor:
    """[1, T, H, D]; see `packed_attention`."""
    plan = spans.plan(_plan, window)
    q_THD, k_KHD, v_KHD = (x[0].transpose(0, 1) for x in (q_1HTD, k_1HTD, v_1HTD))
    if plan.key_K is not None:
        k_KHD, v_KHD = k_KHD[plan.key_K], v_KHD[plan.key_K]
    function = import_module("flash_attn").flash_attn_varlen_func
    out_THD: Tensor = function(
        q_THD,
        k_KHD,
        v_KHD,
        cu_seqlens_q=plan.query_ends,
        cu_seqlens_k=plan.key_ends,
        max_seqlen_q=plan.most_queries,
        max_seqlen_k=plan.most_keys,
        softmax_scale=scaling,
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
    )
    return out_THD[None]


@dataclass(frozen=True, slots=True)
class _Plan:
    """Sequences of queries and of keys; `key_K` are the keys' flat positions, None if each has separate keys."""

    key_K: Tensor | None
    query_ends: Tensor
    key_ends: Tensor
    most_queries: int
    most_keys: int


def _plan(spans: Spans, window: int | None) -> _Plan:
    rows, device = spans.rows, spans.device
    queries = [row.length for row in rows]
    flat = [
        np.concatenate([spans.path(number, row.first_key(window)), np.arange(row.at, row.at + row.length)])
        for number, row in enumerate(rows)
    ]
    keys = [len(positions) for positions in flat]

    def ends(lengths: list[int]) -> Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)

    return _Plan(
        key_K=torch.from_numpy(np.concatenate(flat)).to(device) if keys != queries else None,
        query_ends=ends(queries),
        key_ends=ends(keys),
        most_queries=max(queries),
        most_keys=max(keys),
    )
