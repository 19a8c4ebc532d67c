"""Advantages of tokens and turns: returns from each point on, GAE, and the optimal token baseline.

N trained tokens of the E episodes of a step, each episode's in the order they were sampled. Only trained
tokens are given: observations between them take no part, so that values and returns carry across a tool's
answer unchanged. A reward that was given on an untrained token belongs to the last trained one before it
(`rewards_at_trained`).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from agentrl.algo.advantage import grpo_advantages, in_company
from agentrl.algo.segments import num_segments, segment_count, segment_sum


def rewards_at_trained(rewards_T: Tensor, sequence_T: Tensor, loss_mask_T: Tensor) -> Tensor:
    """[N] the rewards of all tokens moved onto trained ones, so that no reward is lost.

    Each reward goes to the last trained token of its episode at or before it; what comes before the first
    trained token goes to that one; rewards of an episode without any are dropped with it.
    """
    mask_T = loss_mask_T.bool()
    order_T = torch.sort(sequence_T, stable=True).indices
    mask_s, sequence_s = mask_T[order_T], sequence_T[order_T]
    size = num_segments(sequence_T)
    trained_S = segment_sum(mask_s.long(), sequence_s, size)
    first_S = trained_S.cumsum(0) - trained_S  # rank of each episode's first trained token
    rank_s = torch.maximum(mask_s.long().cumsum(0) - 1, first_S[sequence_s])
    has_s = trained_S[sequence_s] > 0
    summed_N = segment_sum(rewards_T[order_T][has_s], rank_s[has_s], int(trained_S.sum()))
    # Back from the order by episode to the order in which the trained tokens were given.
    back_N = torch.empty_like(summed_N)
    back_N[_rank_of_trained(mask_T)[order_T][mask_s]] = summed_N
    return back_N


def rewards_at_end(rewards_E: Tensor, sequence_N: Tensor) -> Tensor:
    """[N] the reward of each episode on its last trained token, 0 elsewhere."""
    rows = _Rows(sequence_N, rewards_E.numel())
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
    rows = _Rows(sequence_N)
    factor_EL = _factor(rows, gamma, turn_N, rewards_N.dtype)
    return rows.flat(_scan(rows.pad(rewards_N), factor_EL))


def gae(
    rewards_N: Tensor,
    values_N: Tensor,
    sequence_N: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    turn_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over trained tokens: (advantages_N, returns_N), not whitened.

    delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lam A_{t+1}; returns = A + V. The value after
    the last trained token is 0: an episode that was cut off counts as ended.

    Args:
        values_N: [N] the critic's values.
        turn_N: [N] the turn of each token; where given, gamma and lam are applied once per turn.

    Source: arXiv:1506.02438.
    """
    rows = _Rows(sequence_N)
    rewards_EL, values_EL = rows.pad(rewards_N), rows.pad(values_N)
    gamma_EL = _factor(rows, gamma, turn_N, rewards_EL.dtype)
    lam_EL = _factor(rows, lam, turn_N, rewards_EL.dtype)
    next_EL = torch.cat([values_EL[:, 1:], torch.zeros_like(values_EL[:, :1])], dim=1)
    delta_EL = rewards_EL + gamma_EL * next_EL - values_EL
    advantages_N = rows.flat(_scan(delta_EL, gamma_EL * lam_EL))
    return advantages_N, advantages_N + values_N


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


def turn_returns(rewards_K: Tensor, episode_K: Tensor, *, gamma: float = 1.0) -> Tensor:
    """[K] sum of the rewards from each turn on, discounted by gamma per turn.

    Args:
        rewards_K: [K] reward of each turn, an episode's in order; what is scored at the end of an episode
            belongs to its last turn.
        episode_K: [K] long, the episode of each turn.
    """
    return return_to_go(rewards_K, episode_K, gamma=gamma)


def turn_advantages(
    rewards_K: Tensor,
    episode_K: Tensor,
    group_E: Tensor,
    *,
    gamma: float = 1.0,
    baseline: Literal["group", "turn"] = "group",
    normalize_std: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """[K] the advantage of each turn: its discounted return against those of the siblings' turns.

    Args:
        rewards_K, episode_K, gamma: as in `turn_returns`.
        group_E: [E] long, the group of each episode.
        baseline: "group" compares with all turns of the group (pooled mean and std); "turn" with the turns
            of the same number only, where a turn that no sibling reached gets 0.
        normalize_std: divide by std + eps (with n - 1) of what is compared with.

    A group of one episode gets 0. Source: arXiv:2505.11821 (turn-level credit in GRPO).
    """

    returns_K = turn_returns(rewards_K, episode_K, gamma=gamma)
    cell_K = group_E[episode_K]
    if baseline == "turn":
        cell_K = cell_K * (int(index_in_sequence(episode_K).max()) + 1 if episode_K.numel() else 1)
        cell_K = cell_K + index_in_sequence(episode_K)
    elif baseline != "group":
        raise ValueError(f"unknown baseline {baseline!r}: group or turn")
    advantages_K = grpo_advantages(returns_K, cell_K, std="group" if normalize_std else "none", eps=eps)
    return torch.where(in_company(group_E)[episode_K], advantages_K, torch.zeros_like(advantages_K))


def optimal_token_baseline(
    rewards_N: Tensor,
    sequence_N: Tensor,
    group_E: Tensor,
    old_logprobs_N: Tensor,
    sum_pi_squared_N: Tensor,
    *,
    correction_N: Tensor | None = None,
    position_N: Tensor | None = None,
    zero_tail: bool = True,
    eps: float = 1e-8,
) -> Tensor:
    """[N] return to go minus a baseline per position, weighted by how much each episode's gradient varies.

    At each position the baseline is sum(W G) / sum(W) over the siblings that reach it, with G the return to
    go and W the sum over the tokens so far of 1 - 2 pi + sum(pi^2), the expected squared norm of the
    gradient of the logits (times the squared correction weight).

    Args:
        sum_pi_squared_N: [N] sum over the vocabulary of the squared probabilities at each token.
        correction_N: [N] importance weights between sampler and learner.
        position_N: [N] which tokens of siblings are compared; by default the index among trained tokens.
        zero_tail: beyond the second longest sibling the longest one is compared with itself only; its
            baseline is 0 there instead of its own return.

    A group of one gets 0. Source: Li et al. 2026, "The optimal token baseline".
    """
    index_N = index_in_sequence(sequence_N) if position_N is None else position_N
    gradient_N = 1 - 2 * old_logprobs_N.exp() + sum_pi_squared_N
    if correction_N is not None:
        gradient_N = gradient_N * correction_N.square()
    rows = _Rows(sequence_N, group_E.numel())
    weight_N = rows.flat(rows.pad(gradient_N).cumsum(1))
    return_N = return_to_go(rewards_N, sequence_N)
    width = int(index_N.max()) + 1 if index_N.numel() else 1
    cell_N = group_E[sequence_N] * width + index_N
    total = segment_sum(weight_N, cell_N)
    baseline_N = (segment_sum(weight_N * return_N, cell_N) / (total + eps))[cell_N]
    if zero_tail:
        baseline_N = torch.where(_beyond_siblings(rows.length_E, group_E, sequence_N, index_N), 0.0, baseline_N)
    advantage_N = return_N - baseline_N
    return torch.where(in_company(group_E)[sequence_N], advantage_N, torch.zeros_like(advantage_N))


def index_in_sequence(sequence_N: Tensor) -> Tensor:
    """[N] 0, 1, 2 ... along each sequence, in the order given."""
    order_N = torch.sort(sequence_N, stable=True).indices
    count_S = segment_count(sequence_N, dtype=torch.long)
    start_S = count_S.cumsum(0) - count_S
    index_N = torch.empty_like(sequence_N)
    index_N[order_N] = torch.arange(sequence_N.numel(), device=sequence_N.device) - start_S[sequence_N[order_N]]
    return index_N


def _beyond_siblings(length_E: Tensor, group_E: Tensor, sequence_N: Tensor, index_N: Tensor) -> Tensor:
    """[N] bool: tokens of the one longest episode of a group at or beyond the length of the second longest."""
    second_E = length_E.clone()
    for group in range(num_segments(group_E)):
        members = (group_E == group).nonzero().squeeze(-1)
        if members.numel() > 1:
            second_E[members] = length_E[members].sort().values[-2]
    return (length_E > second_E)[sequence_N] & (index_N >= second_E[sequence_N])


def _rank_of_trained(mask_T: Tensor) -> Tensor:
    return mask_T.long().cumsum(0) - 1


def _factor(rows: _Rows, factor: float, turn_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[E, L] what the step from each token to the next multiplies by."""
    if turn_N is None:
        return torch.full(rows.shape, factor, dtype=dtype, device=rows.index_N.device)
    turn_EL = rows.pad(turn_N)
    ends_EL = torch.ones(rows.shape, dtype=torch.bool, device=turn_EL.device)
    ends_EL[:, :-1] = turn_EL[:, 1:] != turn_EL[:, :-1]
    return torch.ones(rows.shape, dtype=dtype, device=turn_EL.device).masked_fill(ends_EL, factor)


def _scan(values_EL: Tensor, factor_EL: Tensor) -> Tensor:
    """[E, L] x_t + factor_t * (x_{t+1} + factor_{t+1} * ...), from the right."""
    out_EL = torch.empty_like(values_EL)
    running_E = torch.zeros_like(values_EL[:, 0])
    for t in range(values_EL.shape[1] - 1, -1, -1):
        running_E = values_EL[:, t] + factor_EL[:, t] * running_E
        out_EL[:, t] = running_E
    return out_EL


class _Rows:
    """Flat tokens as rows of equal width, zero behind each row's end, and back."""

    def __init__(self, sequence_N: Tensor, size: int | None = None) -> None:
        size = num_segments(sequence_N) if size is None else size
        self.sequence_N, self.index_N = sequence_N, index_in_sequence(sequence_N)
        self.length_E = segment_count(sequence_N, size, dtype=torch.long)
        self.shape = (size, max(int(self.length_E.max()), 1) if size else 1)

    def pad(self, values_N: Tensor) -> Tensor:
        out_EL = values_N.new_zeros(self.shape)
        out_EL[self.sequence_N, self.index_N] = values_N
        return out_EL

    def flat(self, values_EL: Tensor) -> Tensor:
        return values_EL[self.sequence_N, self.index_N]
