"""Turn-level credit: the return of each turn compared with the turns of the group."""

from __future__ import annotations

from typing import Literal

from agentrl.algo.advantages.grpo import grpo_advantages
from agentrl.algo.entries import Estimator, Signal
from agentrl.algo.late import Tensor, torch
from agentrl.algo.parameters import Above0, Discount, Named
from agentrl.algo.returns import index_in_sequence, return_to_go
from agentrl.algo.segments import segment_sum
from agentrl.algo.siblings import has_siblings
from agentrl.algo.step_data import Advantages, StepData, given


class TurnLevel(Named):
    """The return of each turn against the turns of the group.

    Source: turn-level credit in GRPO, arXiv:2505.11821.
    """

    name: Literal["turn_level"] = "turn_level"
    gamma: Discount = 1.0
    """Discount per turn; rewards of the whole episode belong to its last turn."""
    baseline: Literal["group", "turn"] = "group"
    """Compare with all turns of the group, or only with turns of the same number."""
    normalize_std: bool = True
    """Divide by the standard deviation of the turns compared with."""
    eps: Above0 = 1e-6
    """Added to the standard deviation."""


def turn_level(step: StepData, config: TurnLevel) -> Advantages:
    """The advantage of a turn for each of its tokens."""
    turn_N = given(step.turn_N)
    width = int(turn_N.max()) + 1 if turn_N.numel() else 1
    cells, cell_N = torch.unique(step.sequence_N * width + turn_N, return_inverse=True)
    advantages_K = turn_advantages(
        segment_sum(step.token_rewards(), cell_N, cells.numel()),
        cells // width,
        step.group_E,
        gamma=config.gamma,
        baseline=config.baseline,
        normalize_std=config.normalize_std,
        eps=config.eps,
    )
    return Advantages(advantages_K[cell_N])


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
        baseline: "group" compares with all turns of the group (pooled mean and std); "turn" only with the turns
            of the same number; a turn that no sibling reached gets 0.
        normalize_std: divide by std + eps (with n - 1) of the turns compared with.

    The turns of an episode alone in its group get 0.
    """
    returns_K = turn_returns(rewards_K, episode_K, gamma=gamma)
    cell_K = group_E[episode_K]
    if baseline == "turn":
        cell_K = cell_K * (int(index_in_sequence(episode_K).max()) + 1 if episode_K.numel() else 1)
        cell_K = cell_K + index_in_sequence(episode_K)
    elif baseline != "group":
        raise ValueError(f"unknown baseline {baseline!r}: group or turn")
    advantages_K = grpo_advantages(returns_K, cell_K, std="group" if normalize_std else "none", eps=eps)
    return torch.where(has_siblings(group_E)[episode_K], advantages_K, torch.zeros_like(advantages_K))


ENTRIES = {"turn_level": Estimator(turn_level, TurnLevel, ("turn_N",), signal=lambda config: Signal("turns"))}
