"""AdamW with its two moments in float32, bfloat16 or 8 bits.

With fewer bits, each update reads a piece of the moments as float32, computes what AdamW computes, and rounds
back:

- bfloat16 rounds at random to one of the two neighbors, so that small changes are kept on average: rounded to the
  nearest, a second moment that changes by less than 0.2% an update would never change. The random numbers follow
  from the number of the update and the parameter, so a resumed run repeats them.
- int8 stores the largest magnitude of each block (up to 256 numbers of a row) in float32, and for each number one
  byte: the nearest of 255 fractions of it, closer to each other where they are small. Of the second moment, the
  root is stored, which has the range of the first, and no number but 0 becomes 0: the update divides by it.
  Blocks do not cross rows, so a row means the same on any number of ranks.
  Source: Dettmers et al. 2022, arXiv:2110.02861 (8-bit Optimizers via Block-wise Quantization).

Tensors that are too small to matter (norms, biases) stay in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from agentrl.config.run import OptimConfig, OptimizerState
from agentrl.errors import ConfigError
from agentrl.learner.moments import SMALLEST, scales_per_row

AT_ONCE = 1 << 22
"""Numbers that exist in float32 at once, so that an update needs no copy of the whole."""
MOMENTS = ("exp_avg", "exp_avg_sq")
SCALE = "_scale"
"""What follows the name of a moment in 8 bits in the name of its scales."""


def make_optimizer(parameters: Iterable[nn.Parameter], optim: OptimConfig, lr: float) -> torch.optim.Optimizer:
    """AdamW for these parameters, with its moments as `optim.state` says.

    Raises:
        ConfigError: no parameter is large enough for the state to be smaller.
    """
    params = list(parameters)
    shared: dict[str, Any] = {"lr": lr, "betas": optim.betas, "weight_decay": optim.weight_decay}
    if optim.state == "float32":
        return torch.optim.AdamW(params, **shared, fused=True)
    if not any(is_large(p.shape) for p in params):
        raise ConfigError(
            f"optim.state {optim.state} has no effect: only matrices of {SMALLEST:,} numbers and more are kept in "
            "fewer bits, and no trained parameter has as many; remove it"
        )
    return CompactAdamW(params, state=optim.state, **shared)


def is_large(shape: torch.Size) -> bool:
    """Whether the moments of a parameter of this shape are kept in fewer bits."""
    return len(shape) > 1 and shape.numel() >= SMALLEST


class CompactAdamW(torch.optim.Optimizer):
    """AdamW whose moments take 2 bytes or 1 per number, and float32 where that saves nothing.

    A state holds this rank's rows as plain tensors: `exp_avg` and `exp_avg_sq` in the shape of the parameter, in 8
    bits with `..._scale` of [rows, blocks] next to each.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        state: OptimizerState,
        eps: float = 1e-8,
    ) -> None:
        self.kind: OptimizerState = state
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update with the current gradients."""
        number = 0
        for group in self.param_groups:
            for param in group["params"]:
                number += 1
                if param.grad is not None:
                    self._update(param, group, number)

    def put(self, param: Tensor, entry: str, rows: Tensor) -> None:
        """Store one moment of this rank's rows, given in float32."""
        for name, value in stored(entry, rows, self._kind_of(param)).items():
            self.state[param][name] = value

    def _kind_of(self, param: Tensor) -> OptimizerState:
        return self.kind if is_large(param.shape) else "float32"

    def _update(self, param: nn.Parameter, group: dict[str, Any], number: int) -> None:
        state, kind = self.state[param], self._kind_of(param)
        own, grad = _local(param), _local(param.grad)
        if not state:
            state["step"] = torch.zeros(())
            for entry in MOMENTS:
                self.put(param, entry, torch.zeros_like(own))
        state["step"] += 1
        step, (beta1, beta2) = int(state["step"]), group["betas"]
        random = torch.Generator(own.device).manual_seed(step * 1_000_003 + number)
        for rows in _pieces(own.shape):
            p, g = own[rows], grad[rows]
            m, v = (loaded(state, entry, rows) for entry in MOMENTS)
            p.mul_(1 - group["lr"] * group["weight_decay"])
            m.lerp_(g, 1 - beta1)
            v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            down = (v.sqrt() / (1 - beta2**step) ** 0.5).add_(group["eps"])
            p.addcdiv_(m, down, value=-group["lr"] / (1 - beta1**step))
            for entry, value in zip(MOMENTS, (m, v), strict=True):
                for name, found in stored(entry, value, kind, random).items():
                    state[name][rows] = found


def stored(
    entry: str, rows: Tensor, kind: OptimizerState, random: torch.Generator | None = None
) -> dict[str, Tensor]:
    """A moment as a state holds it, by name.

    Args:
        rows: [R, ...] in float32; this rank's.
        random: rounds to one of the neighbors in bfloat16; None rounds to the nearest.
    """
    if kind == "float32":
        return {entry: rows}
    if kind == "bfloat16":
        return {entry: _bfloat16(rows, random)}
    root = entry.endswith("exp_avg_sq")
    codes, scales = _bytes(rows.sqrt() if root else rows, signed=not root)
    return {entry: codes, entry + SCALE: scales}


def loaded(state: dict[str, Tensor], entry: str, rows: slice | EllipsisType = ...) -> Tensor:
    """Rows of a moment in float32: a copy, or the state itself where it is in float32."""
    values = state[entry][rows]
    if values.dtype != torch.uint8:
        return values.float()
    root = entry.endswith("exp_avg_sq")
    found = _from_bytes(values, state[entry + SCALE][rows], signed=not root)
    return found.square_() if root else found


def _bfloat16(rows: Tensor, random: torch.Generator | None) -> Tensor:
    if random is None:
        return rows.bfloat16()
    bits = rows.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=random)
    return ((bits + noise) & -65536).view(torch.float32).bfloat16()  # exact: the low half is 0


def _bytes(rows: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """[R, ...] numbers as codes, and [R, blocks] the largest magnitude of each block."""
    blocks_RKB = _blocks(rows)
    scales_RK = blocks_RKB.abs().amax(-1)
    parts = (blocks_RKB / scales_RK.clamp(min=torch.finfo(torch.float32).tiny)[..., None]).clamp_(-1, 1)
    table, edges = _fractions(signed, rows.device)
    codes = torch.bucketize(parts, edges, out_int32=True)
    zero = int((table == 0).nonzero())
    lost = (codes == zero) & (parts != 0)  # the smallest code of its sign instead
    codes = torch.where(lost, zero + parts.sign().int(), codes)
    flat = codes.to(torch.uint8).flatten(1)[:, : rows.shape[1:].numel()]
    return flat.reshape(rows.shape), scales_RK


def _from_bytes(codes: Tensor, scales_RK: Tensor, *, signed: bool) -> Tensor:
    table, _ = _fractions(signed, codes.device)
    found_RKB = table[_blocks(codes).int()] * scales_RK[..., None]
    return found_RKB.flatten(1)[:, : codes.shape[1:].numel()].reshape(codes.shape)


def _blocks(rows: Tensor) -> Tensor:
    """[R, K, B] each row in blocks of equal size, with zeros behind the last number."""
    width = rows.shape[1:].numel()
    count = scales_per_row(width)
    size = -(-width // count)
    flat = nn.functional.pad(rows.reshape(len(rows), width), (0, count * size - width))
    return flat.view(len(rows), count, size)


@cache
def _fractions(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """The fractions of a block's largest magnitude that codes stand for, ascending, and the edges between them.

    Each decade, from 1e-7 to 1, has twice as many as the one below it.
    """
    decades, magnitudes = 7, list[float]()
    first = 1 if signed else 2
    for place in range(decades):
        count = first << place
        low, high = 10.0 ** (place - decades), 10.0 ** (place - decades + 1)
        magnitudes += [low + (high - low) * (i + 1) / count for i in range(count)]
    values = [0.0, *magnitudes]
    if signed:
        values = [-m for m in reversed(magnitudes)] + values
    table = torch.tensor(values, dtype=torch.float64)
    edges = (table[1:] + table[:-1]) / 2
    return table.float().to(device), edges.float().to(device)


def _pieces(shape: torch.Size) -> Iterator[slice | EllipsisType]:
    """Rows of a tensor in pieces that are computed at once; all of a number alone."""
    if not shape:
        yield ...
        return
    rows = max(1, AT_ONCE // max(1, shape[1:].numel()))
    for first in range(0, shape[0], rows):
        yield slice(first, first + rows)


def _local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
