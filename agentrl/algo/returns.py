"""Returns: the rewards from each point of an episode on, discounted.

N trained tokens of the E episodes of a step, each episode's in the order they were sampled. Only trained
tokens are given: observations between them take no part, so that values and returns carry across a tool's
answer unchanged.
"""

from __future__ import annotations

from agentrl.algo.late import Tensor, torch
from agentrl.algo.segments import num_segments, segment_count


def rewards_at_end(rewards_E: Tensor, sequence_N: Tensor) -> Tensor:
    """[N] the reward of each episode on its last trained token, 0 elsewhere."""
    rows = Rows(sequence_N, rewards_E.numel())
    out_EL = rewards_E.new_zeros(rows.shape)
    ends_E = (rows.length_E - 1).clamp(min=0)
    out_EL.scatter_(1, ends_E[:, None], rewards_E[:, None])
    return rows.flat(out_EL)


def return_to_go(
    rewards_N: Tensor, sequence_N: Tensor, *, gamma: float = 1.0, turn_N: Tensor | None = None
) -> Tensor:
    """[N] sum over the rewards from each token on, discounted by gamma per token.

    Args:
        turn_N: [N] the turn of each token within its episode; where given, gamma is applied once per turn
            and not per token.
    """
    rows = Rows(sequence_N)
    factor_EL = discounts(rows, gamma, turn_N, rewards_N.dtype)
    return rows.flat(scan(rows.pad(rewards_N), factor_EL))


def whiten(values_N: Tensor, keep_N: Tensor | None = None, *, shift: bool = True) -> Tensor:
    """[N] (x - mean) / sqrt(var + 1e-8) over the kept values (var with N - 1); the others become 0.

    Args:
        keep_N: [N] bool, which values take part; all by default.
        shift: False leaves the mean where it is.

    Fewer than two values are returned as they are.
    """
    keep_N = torch.ones_like(values_N, dtype=torch.bool) if keep_N is None else keep_N
    kept = values_N[keep_N]
    if kept.numel() >= 2:
        scaled_N = (values_N - kept.mean()) * torch.rsqrt(kept.var() + 1e-8)
        values_N = scaled_N if shift else scaled_N + kept.mean()
    return torch.where(keep_N, values_N, torch.zeros_like(values_N))


def index_in_sequence(sequence_N: Tensor) -> Tensor:
    """[N] 0, 1, 2 ... along each sequence, in the order given."""
    order_N = torch.sort(sequence_N, stable=True).indices
    count_S = segment_count(sequence_N, dtype=torch.long)
    start_S = count_S.cumsum(0) - count_S
    index_N = torch.empty_like(sequence_N)
    index_N[order_N] = torch.arange(sequence_N.numel(), device=sequence_N.device) - start_S[sequence_N[order_N]]
    return index_N


def discounts(rows: Rows, factor: float, turn_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[E, L] what the step from each token to the next multiplies by."""
    if turn_N is None:
        return torch.full(rows.shape, factor, dtype=dtype, device=rows.index_N.device)
    turn_EL = rows.pad(turn_N)
    ends_EL = torch.ones(rows.shape, dtype=torch.bool, device=turn_EL.device)
    ends_EL[:, :-1] = turn_EL[:, 1:] != turn_EL[:, :-1]
    return torch.ones(rows.shape, dtype=dtype, device=turn_EL.device).masked_fill(ends_EL, factor)


def scan(values_EL: Tensor, factor_EL: Tensor) -> Tensor:
    """[E, L] x_t + factor_t * (x_{t+1} + factor_{t+1} * ...), from the right."""
    out_EL = torch.empty_like(values_EL)
    running_E = torch.zeros_like(values_EL[:, 0])
    for t in range(values_EL.shape[1] - 1, -1, -1):
        running_E = values_EL[:, t] + factor_EL[:, t] * running_E
        out_EL[:, t] = running_E
    return out_EL


class Rows:
    """Flat tokens as rows of equal width, padded with zeros, and back."""

    def __init__(self, sequence_N: Tensor, size: int | None = None) -> None:
        size = num_segments(sequence_N) if size is None else size
        self.sequence_N, self.index_N = sequence_N, index_in_sequence(sequence_N)
        self.length_E = segment_count(sequence_N, size, dtype=torch.long)
        self.shape = (size, max(int(self.length_E.max()), 1) if size else 1)

    def pad(self, values_N: Tensor) -> Tensor:
        """[E, L] the values of each sequence in its row."""
        out_EL = values_N.new_zeros(self.shape)
        out_EL[self.sequence_N, self.index_N] = values_N
        return out_EL

    def flat(self, values_EL: Tensor) -> Tensor:
        """[N] the values in the order of the flat tokens."""
        return values_EL[self.sequence_N, self.index_N]
