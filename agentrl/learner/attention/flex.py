"""Packed attention with PyTorch's flex attention: one call over all flat positions, skipping fully masked blocks.

Source: https://docs.pytorch.org/docs/2.13/nn.attention.flex_attention.html.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch._dynamo import config as dynamo
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from agentrl.learner.attention.packed import Spans

BLOCK = 128
"""Positions in a block on either side."""
MOST_KERNELS = 128
"""Policy and critic, with and without gradients, each sliding window, short and long batches: each has its own."""


def attend(
    q_1HTD: Tensor, k_1HTD: Tensor, v_1HTD: Tensor, spans: Spans, scaling: float, window: int | None
) -> Tensor:
    """[1, T, H, D]; see `packed_attention`."""
    mask = spans.plan(block_mask, window)
    # The setting is one of each thread. Beyond its 8, PyTorch would compute scores of all pairs without a kernel.
    dynamo.recompile_limit = max(dynamo.recompile_limit, MOST_KERNELS)
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
    """The mask and the blocks to skip, computed from spans and blocks rather than from pairs of positions."""
    device = spans.device
    lengths = torch.tensor([row.length for row in spans.rows])
    end_cpu_T = torch.repeat_interleave(torch.tensor([row.end for row in spans.rows]), lengths)
    end_T, place_T = end_cpu_T.to(device), spans.places()
    length = len(end_cpu_T)

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        below = (q >= k) & (q < end_T[k])  # depth first, whatever comes behind a token on its paths is together
        return below if window is None else below & (place_T[q] - place_T[k] < window)

    some_QK, all_QK = _blocks(end_cpu_T, place_T.cpu(), window)
    return BlockMask.from_kv_blocks(
        *_ordered(some_QK & ~all_QK, device),
        *_ordered(all_QK, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(length, length),
    )


def _blocks(end_T: Tensor, place_T: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """[Q, K] pairs of blocks in which a position may see another, and those in which each sees all.

    With a window, the first are a few more than those in which one does.
    """
    number = torch.arange(-(-len(end_T) // BLOCK))
    first, last = number * BLOCK, number * BLOCK + BLOCK - 1
    ends = _by_block(end_T, 0)
    some_QK = (number[:, None] >= number[None, :]) & (first[:, None] < ends.amax(1)[None, :])
    all_QK = (number[:, None] > number[None, :]) & (last[:, None] < ends.amin(1)[None, :])
    if window is not None:
        lowest, highest = _by_block(place_T, 1 << 40).amin(1), _by_block(place_T, -1).amax(1)
        some_QK &= lowest[:, None] - highest[None, :] < window
        all_QK &= highest[:, None] - lowest[None, :] < window
    return some_QK, all_QK


def _by_block(values_T: Tensor, missing: int) -> Tensor:
    """[blocks, BLOCK] the values, with others behind the last one."""
    padding = -len(values_T) % BLOCK
    return torch.nn.functional.pad(values_T, (0, padding), value=missing).view(-1, BLOCK)


def _ordered(pairs_QK: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries has, and their numbers first."""
    counts_Q = pairs_QK.sum(1, dtype=torch.int32)
    order_QK = torch.argsort(pairs_QK.to(torch.int8), dim=1, descending=True, stable=True).to(torch.int32)
    return counts_Q[None, None].to(device), order_QK[None, None].to(device)
