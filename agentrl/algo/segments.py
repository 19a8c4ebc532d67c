"""Sums over the tokens of each sequence, for flat tokens in any order."""

from __future__ import annotations

from agentrl.algo.late import Tensor, torch


def num_segments(sequence_T: Tensor) -> int:
    """One more than the largest sequence number; 0 for no tokens. Numbers need not be used without gaps."""
    return int(sequence_T.max()) + 1 if sequence_T.numel() else 0


def segment_sum(values_T: Tensor, sequence_T: Tensor, size: int | None = None) -> Tensor:
    """[S] sum of the values of each sequence; differentiable; 0 where a sequence number is unused.

    Args:
        values_T: [T] floating or integer values.
        sequence_T: [T] long, the sequence of each token, 0 or larger.
        size: S; by default one more than the largest sequence number.
    """
    size = num_segments(sequence_T) if size is None else size
    return values_T.new_zeros(size).index_add(0, sequence_T, values_T)


def segment_count(sequence_T: Tensor, size: int | None = None, *, dtype: torch.dtype | None = None) -> Tensor:
    """[S] number of tokens of each sequence, as float32 by default."""
    return segment_sum(torch.ones_like(sequence_T, dtype=dtype or torch.float32), sequence_T, size)


def segment_mean(values_T: Tensor, sequence_T: Tensor, size: int | None = None) -> Tensor:
    """[S] mean of the values of each sequence; 0 where a sequence number is unused."""
    size = num_segments(sequence_T) if size is None else size
    count_S = segment_count(sequence_T, size, dtype=values_T.dtype)
    return segment_sum(values_T, sequence_T, size) / count_S.clamp(min=1)


def segment_max(values_T: Tensor, sequence_T: Tensor, size: int | None = None) -> Tensor:
    """[S] largest value of each sequence; -inf where a sequence number is unused. Not differentiated."""
    size = num_segments(sequence_T) if size is None else size
    start_S = values_T.new_full((size,), -torch.inf)
    return start_S.scatter_reduce(0, sequence_T, values_T.detach(), "amax")


def trained(loss_mask_T: Tensor, *tensors_T: Tensor) -> tuple[Tensor, ...]:
    """The trained tokens of each tensor, in order: [T] -> [N].

    What is masked is never computed with, so inf or nan there reaches neither the loss nor the gradient:
    the gradient at a masked position is exactly zero.
    """
    index_N = loss_mask_T.bool().nonzero().squeeze(-1)
    return tuple(tensor_T.index_select(0, index_N) for tensor_T in tensors_T)
