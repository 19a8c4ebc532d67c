"""What every rank does, whichever model it holds: pack rows, evaluate their tokens, follow the schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from agentrl.config.run import LearnerConfig, OptimConfig
from agentrl.learner.pack import Packed, in_pack_order, pack
from agentrl.learner.sequence import SequenceRanks
from agentrl.learner.split import NOTHING, Columns, Rows, TokenValues


def working_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of the computation on a model's outputs."""
    return torch.promote_types(torch.float32, next(model.parameters()).dtype)


def packed_rows(
    rows: Rows,
    columns: Sequence[str],
    device: torch.device,
    dtype: torch.dtype,
    sequence: SequenceRanks | None = None,
) -> Packed:
    """The rows of a micro-batch, or what is computed if there are none, with the columns of the others."""
    packed = pack(rows or NOTHING, device, dtype, sequence)
    if rows:
        return packed
    empty_N = torch.zeros(0, dtype=dtype, device=device)
    return replace(packed, columns=dict.fromkeys(columns, empty_N))


def annotated(
    batches: Sequence[Rows],
    device: torch.device,
    dtype: torch.dtype,
    evaluate: Callable[[Packed], Mapping[str, Tensor]],
    sequence: SequenceRanks | None = None,
) -> list[Columns]:
    """`evaluate` for the trained tokens of each row, in the order of `in_pack_order`; no gradients."""
    with torch.no_grad():
        return [
            columns
            for rows in batches
            for columns in _by_row(rows, evaluate(packed_rows(rows, (), device, dtype, sequence)))
        ]


def recorded(batches: Sequence[Rows], parts: Sequence[tuple[Rows, Mapping[str, Tensor]]]) -> list[TokenValues]:
    """The values of each row's trained tokens, micro-batch by micro-batch in the order of `in_pack_order`, in host
    memory.

    Args:
        parts: the rows that were computed together, and the values of their trained tokens.
    """
    found: dict[int, TokenValues] = {}
    for rows, values in parts:
        packed = in_pack_order(rows)
        ends = np.cumsum([sum(row.loss_mask) for row in packed])[:-1]
        columns = {name: np.split(values_N.float().cpu().numpy(), ends) for name, values_N in values.items()}
        for number, row in enumerate(packed):
            found[id(row)] = {name: column[number] for name, column in columns.items()}
    return [found[id(row)] for rows in batches for row in in_pack_order(rows)]


def lr_factor(optim: OptimConfig, step: int, total_steps: int) -> float:
    """The share of the peak learning rate in a step; steps count from 0."""
    rise = optim.warmup_of(total_steps)
    if optim.schedule == "constant" or step < rise:
        return min(1.0, (step + 1) / max(1, rise))
    last = total_steps - 1
    top = rise if rise < last else max(0, rise - 1)  # a last step after the warmup falls from the warmup's last
    done = (step - top) / max(1, last - top)
    fall = done if optim.schedule == "linear" else (1 - math.cos(math.pi * done)) / 2
    return 1 - 0.9 * fall


def saving(config: LearnerConfig) -> AbstractContextManager[object]:
    """Where the backward pass finds what it needs: on the device, or in host memory; parameters are not moved."""
    if not config.offload_activations:
        return nullcontext()
    host: Any = torch.autograd.graph.save_on_cpu(pin_memory=True)

    def pack(tensor: Tensor) -> object:
        owner = tensor if tensor._base is None else tensor._base
        return tensor if isinstance(owner, nn.Parameter) else host.pack_hook(tensor)

    def unpack(kept: object) -> Tensor:
        found: Tensor = kept if isinstance(kept, Tensor) else host.unpack_hook(kept)
        return found

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _by_row(rows: Rows, found: Mapping[str, Tensor]) -> list[Columns]:
    """The columns of each row, from tensors over the trained tokens of all."""
    counts = [sum(row.loss_mask) for row in in_pack_order(rows)]
    parts = {name: torch.split(values_N, counts) for name, values_N in found.items()}
    return [{name: tuple(part[n].tolist()) for name, part in parts.items()} for n in range(len(counts))]
