"""Ranks that compute each row together: each has a piece of every packed batch, and all heads in attention.

Outside attention a token is computed without the others, so a rank holds 1/n of the tokens. Attention needs all of
them: before it, ranks exchange pieces of tokens for pieces of heads, so that each has every token of 1/n of the
heads, and after it they exchange back. Source: Jacobs et al. 2023, arXiv:2309.14509 (DeepSpeed Ulysses).

What is computed behind the model (log-probabilities, values) is gathered, so that each of these ranks has the loss
of the whole batch, and passes on the gradient of its own tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from agentrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SequenceRanks:
    """The ranks among which rows are split, and this one's place.

    A batch of T tokens is padded to n equal pieces of t tokens, in flat order.
    """

    place: int
    size: int
    group: dist.ProcessGroup

    def piece(self, tokens: int) -> int:
        """The number of tokens per rank."""
        return -(-tokens // self.size)

    def own(self, values_T: Tensor) -> Tensor:
        """[t] this rank's piece."""
        piece = self.piece(len(values_T))
        return _padded(values_T, 0, piece * self.size)[self.place * piece : (self.place + 1) * piece]

    def by_head(self, q_1HtD: Tensor, k_1HtD: Tensor, v_1HtD: Tensor, tokens: int) -> tuple[Tensor, ...]:
        """[1, H', T, D] queries, keys and values of all tokens, for this rank's heads.

        Keys and values of fewer heads than ranks are repeated, and heads that cannot be divided are joined by
        some of zeros, whose results `by_token` drops.

        Raises:
            ConfigError: there are more ranks than heads.
        """
        heads, shared = q_1HtD.shape[1], k_1HtD.shape[1]
        if self.size > heads:
            raise ConfigError(
                f"learner.sequence_ranks is {self.size}, and the model has {heads} attention heads, of which each "
                f"rank needs one: set learner.sequence_ranks to {heads} or less"
            )
        whole = heads % self.size == 0
        times = (lcm(shared, self.size) if whole else heads) // shared
        width = -(-heads // self.size) * self.size
        made = [_padded(q_1HtD, 1, width)]
        for x_1HtD in (k_1HtD, v_1HtD):
            repeated = x_1HtD.repeat_interleave(times, dim=1) if times > 1 else x_1HtD
            made.append(repeated if whole else _padded(repeated, 1, width))
        return tuple(self._heads_of_all(x_1HtD)[:, :, :tokens] for x_1HtD in made)

    def by_token(self, out_1THD: Tensor, heads: int) -> Tensor:
        """[1, t, H, D] the results of this rank's tokens for all heads."""
        piece = self.piece(out_1THD.shape[1])
        _, _, own, depth = out_1THD.shape
        cut_ntHD = _padded(out_1THD, 1, piece * self.size).view(self.size, piece, own, depth)
        found_ntHD = exchange(cut_ntHD, self.group)
        return found_ntHD.transpose(0, 1).reshape(1, piece, self.size * own, depth)[:, :, :heads]

    def _heads_of_all(self, x_1HtD: Tensor) -> Tensor:
        _, heads, piece, depth = x_1HtD.shape
        cut_nHtD = x_1HtD.reshape(self.size, heads // self.size, piece, depth)
        found_nHtD = exchange(cut_nHtD, self.group)
        return found_nHtD.transpose(0, 1).reshape(1, heads // self.size, self.size * piece, depth)

    def gathered(self, own_M: Tensor, owner_N: Tensor) -> Tensor:
        """[N, ...] what all ranks found, on each of them.

        Args:
            own_M: [M, ...] what this rank found for its own, in their order.
            owner_N: the rank that has each.
        """
        found: Tensor = _Gathered.apply(own_M, owner_N, self)  # type: ignore[no-untyped-call]
        return found


def exchange(pieces_n: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[n, ...] the piece that each rank has for this one, of what each cut into a piece per rank."""
    found: Tensor = _Exchanged.apply(pieces_n, group)  # type: ignore[no-untyped-call]
    return found


class _Exchanged(torch.autograd.Function):
    """Piece i of rank j becomes piece j of rank i; gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, pieces_n: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(pieces_n, group)

    @staticmethod
    def backward(ctx: Any, grad_n: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grad_n, ctx.group), None


class _Gathered(torch.autograd.Function):
    """Every rank continues with the same computation, so each takes the gradient of its own part; no sum."""

    @staticmethod
    def forward(ctx: Any, own_M: Tensor, owner_N: Tensor, ranks: SequenceRanks) -> Tensor:
        ctx.owned = own_N = owner_N == ranks.place
        counts = torch.bincount(owner_N, minlength=ranks.size).tolist()
        assert counts[ranks.place] == len(own_M) == int(own_N.sum())
        mine = _padded(own_M, 0, max(1, *counts)).contiguous()
        parts = [torch.empty_like(mine) for _ in range(ranks.size)]
        dist.all_gather(parts, mine, group=ranks.group)
        found = own_M.new_empty(len(owner_N), *own_M.shape[1:])
        for rank, (part, count) in enumerate(zip(parts, counts, strict=True)):
            found[owner_N == rank] = part[:count]
        return found

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None]:
        return grad_N[ctx.owned], None, None


def _exchanged(pieces_n: Tensor, group: dist.ProcessGroup) -> Tensor:
    pieces_n = pieces_n.contiguous()
    found_n = torch.empty_like(pieces_n)
    dist.all_to_all_single(found_n, pieces_n, group=group)
    return found_n


def _padded(x: Tensor, dim: int, length: int) -> Tensor:
    """With zeros behind it along a dimension."""
    missing = length - x.shape[dim]
    return nn.functional.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing)) if missing else x
