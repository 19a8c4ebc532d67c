"""From token losses to one number: a weight per token, computed from the counts of the whole update.

With these weights the loss of an update is `sum(weights_T * token_loss_T)` over all its tokens, in whatever
layout, so that micro-batches, packing, the order of rows, the number of ranks and forked rows cannot change it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from agentrl.algo.late import Tensor, torch
from agentrl.algo.parameters import AGGREGATIONS
from agentrl.algo.segments import num_segments, segment_sum


class Totals(NamedTuple):
    """What an optimizer update trains on, over all micro-batches and ranks.

    `num_tokens` counts trained tokens; `num_sequences` counts the episodes that have at least one; `num_observed`
    counts tokens of the observation loss.
    """

    num_tokens: int
    num_sequences: int
    num_observed: int = 0


def totals_of_lengths(trained_tokens: Iterable[int]) -> Totals:
    """Totals from the number of trained tokens of each episode (all rows of an episode together)."""
    lengths = [int(n) for n in trained_tokens]
    return Totals(sum(lengths), sum(n > 0 for n in lengths))


def totals_of_tokens(loss_mask_T: Tensor, sequence_T: Tensor) -> Totals:
    """Totals of episodes whose tokens are all in one flat tensor."""
    count_S = segment_sum(loss_mask_T.long(), sequence_T)
    return Totals(int(count_S.sum()), int((count_S > 0).sum()))


def aggregation_weights(
    kind: str,
    loss_mask_T: Tensor,
    sequence_T: Tensor,
    totals: Totals,
    *,
    world_size: int = 1,
    scale: float | None = None,
    lengths_S: Sequence[int] | Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The weight of each token in the loss: [T], 0 where the token is not trained.

    Args:
        kind: one of AGGREGATIONS. token-mean is DAPO's, seq-mean-token-mean the original GRPO's,
            seq-mean-token-sum-norm is Dr. GRPO's: a sum over tokens divided by the constant `scale`.
        loss_mask_T: [T] bool, True on trained tokens.
        sequence_T: [T] long, the episode of each token; rows forked from one episode share its number.
        totals: counts of the whole update, over all micro-batches and ranks.
        world_size: number of ranks whose gradients are averaged afterwards (DDP and FSDP do so by default);
            1 if they are summed.
        scale: the constant of seq-mean-token-sum-norm, for instance the largest number of tokens that an
            episode may sample; it must not depend on the batch.
        lengths_S: trained tokens of each episode by sequence number. Needed by seq-mean-token-mean only
            where the rows of an episode are spread over several micro-batches; counted here otherwise.
        dtype: of the weights; float32 by default.

    Raises:
        ValueError: unknown kind; seq-mean-token-sum-norm without a positive `scale`.
    """
    dtype = dtype or torch.float32
    mask_T = loss_mask_T.to(dtype)
    tokens, sequences = max(totals.num_tokens, 1), max(totals.num_sequences, 1)
    if kind == "token-mean":
        return mask_T * (world_size / tokens)
    if kind == "token-sum":
        return mask_T * float(world_size)
    if kind == "seq-mean-token-sum":
        return mask_T * (world_size / sequences)
    if kind == "seq-mean-token-sum-norm":
        if scale is None or not scale > 0:
            raise ValueError(
                f"seq-mean-token-sum-norm needs a constant scale > 0, got {scale}: set it to the most tokens "
                "an episode may sample (a width taken from the batch would change the loss with the batch)"
            )
        return mask_T * (world_size / (sequences * scale))
    if kind == "seq-mean-token-mean":
        if lengths_S is None:
            length_S = segment_sum(mask_T, sequence_T, num_segments(sequence_T))
        else:
            length_S = torch.as_tensor(lengths_S, dtype=dtype, device=mask_T.device)
        return mask_T * (world_size / sequences) / length_S.clamp(min=1)[sequence_T]
    raise ValueError(f"unknown aggregation {kind!r}; there are {', '.join(AGGREGATIONS)}")


def aggregate(token_loss_T: Tensor, weights_T: Tensor, loss_mask_T: Tensor) -> Tensor:
    """sum(weights_T * token_loss_T) over trained tokens; values at masked positions are ignored."""
    mask_T = loss_mask_T.bool()
    zero = token_loss_T.new_zeros(())
    return (torch.where(mask_T, token_loss_T, zero) * torch.where(mask_T, weights_T, zero)).sum()
