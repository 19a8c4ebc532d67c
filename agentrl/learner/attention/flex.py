"""Packed attention with PyTorch's flex attention: one call over all flat positions, skipping fully masked blocks.

Source: https://docs.pytorch.org/docs/2.13/nn.attention.flex_attention.html.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from agentrl.learner.attention.packed import Spans

BLOCK = 128
"""Positions in a block on either side."""


def attend(
    q_1HTD: Tensor, k_1HTD: Tensor, v_1HTD: Tensor, spans: Spans, scaling: float, window: int | None
) -> Tensor:
    """[1, T, H, D]; see `packed_attention`."""
    mask = spans.plan(block_mask, window)
    grouped = q_1HTD.shape[1] != k_1HTD.shape[1]
    out_1HTD: Tensor = _kernel(q_1HTD.device.type)(
        q_1HTD, k_1HTD, v_1HTD, block_mask=mask, scale=scaling, enable_gqa=grouped
    )
    return out_1HTD.transpose(1, 2)


@cache
def _kernel(device_type: str) -> Callable[..., Any]:
    """Compiled on GPUs; not compiled on a CPU, where only tests of the forward pass run."""
    return cast(Callable[..., Any], torch.compile(flex_attention) if device_type == "cuda" else flex_attention)


def block_mask(spans: Spans, window: int | None) -> BlockMask:
    """The mask and the blocks to skip, computed from the rows rather than from pairs of positions."""
    rows, device = spans.rows, spans.device
    length = rows[-1].at + rows[-1].length
    own = torch.tensor([row.length for row in rows])
    row_T = torch.repeat_interleave(torch.arange(len(rows)), own).to(device)
    number = {row.at: n for n, row in enumerate(rows) if row.prefix == 0}
    before = torch.tensor([number[row.prefix_at] if row.prefix else n for n, row in enumerate(rows)])
    prefix_T = torch.repeat_interleave(before, own).to(device)
    starts = torch.tensor([row.prefix - row.at for row in rows])
    place_T = torch.arange(length, device=device) + torch.repeat_interleave(starts, own).to(device)

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        back = place_T[q] - place_T[k]
        same = (row_T[q] == row_T[k]) | (prefix_T[q] == row_T[k])
        return same & (back >= 0) & (back < window if window is not None else back >= 0)

    some_QK, all_QK = _blocks(spans, window, -(-length // BLOCK))
    return BlockMask.from_kv_blocks(
        *_ordered(some_QK & ~all_QK, device),
        *_ordered(all_QK, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(length, length),
    )


def _blocks(spans: Spans, window: int | None, size: int) -> tuple[Tensor, Tensor]:
    """[Q, K] pairs of blocks in which a position sees another, and those in which each sees all."""
    some_QK, all_QK = torch.zeros(2, size, size, dtype=torch.bool)
    for row in spans.rows:
        first = row.first_key(window)
        queries = _Run(row.at, row.prefix, row.length)
        for keys in (_Run(row.prefix_at + first, first, row.prefix - first), _Run(row.at, row.prefix, row.length)):
            if keys.length <= 0:
                continue
            first_Q, last_Q = (places[:, None] for places in queries.ends)
            first_K, last_K = (places[None, :] for places in keys.ends)
            seen_QK, whole_QK = last_Q >= first_K, first_Q >= last_K
            if window is not None:
                seen_QK, whole_QK = seen_QK & (first_Q - last_K < window), whole_QK & (last_Q - first_K < window)
            whole_QK = whole_QK & (last_Q - first_Q == BLOCK - 1) & (last_K - first_K == BLOCK - 1)
            some_QK[queries.blocks, keys.blocks] |= seen_QK
            all_QK[queries.blocks, keys.blocks] |= whole_QK
    return some_QK, all_QK


class _Run(NamedTuple):
    """Contiguous positions of a row: the first one, its place in the row, and their number."""

    at: int
    place: int
    length: int

    @property
    def blocks(self) -> slice:
        """The blocks that it touches."""
        return slice(self.at // BLOCK, -(-(self.at + self.length) // BLOCK))

    @property
    def ends(self) -> tuple[Tensor, Tensor]:
        """The first and the last place of it in each of them."""
        starts = torch.arange(self.blocks.start, self.blocks.stop) * BLOCK
        first = starts.clamp(min=self.at)
        last = (starts + BLOCK).clamp(max=self.at + self.length) - 1
        return first - self.at + self.place, last - self.at + self.place


def _ordered(pairs_QK: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries has, and their numbers first."""
    counts_Q = pairs_QK.sum(1, dtype=torch.int32)
    order_QK = torch.argsort(pairs_QK.to(torch.int8), dim=1, descending=True, stable=True).to(torch.int32)
    return counts_Q[None, None].to(device), order_QK[None, None].to(device)
