"""Comparing the episodes of a group: their mean, their standard deviation, and whether they differ at all.

E episodes of a step, each in a group (the episodes of one task). Only scored episodes are given; one that failed
through no fault of the policy neither trains nor counts in its group. An episode alone in its group has nothing to
be compared with and gets exactly 0 from every estimator that compares siblings.
"""

from __future__ import annotations

from agentrl.algo.late import Tensor, torch
from agentrl.algo.segments import num_segments, segment_count, segment_max, segment_mean, segment_sum


def group_centered(rewards_E: Tensor, group_E: Tensor) -> Tensor:
    """[E] reward minus the mean of the group; exactly 0 in groups whose rewards are all equal.

    Rounding of the mean would otherwise leave 1e-17, which a division by std + eps blows up to a signal.
    """
    centered_E = rewards_E - segment_mean(rewards_E, group_E)[group_E]
    return torch.where(has_signal(rewards_E, group_E), centered_E, torch.zeros_like(centered_E))


def group_std(rewards_E: Tensor, group_E: Tensor) -> Tensor:
    """[E] standard deviation (with G - 1) of the rewards in the episode's group; 0 for a group of one."""
    square_S = segment_sum(group_centered(rewards_E, group_E).square(), group_E)
    count_S = segment_count(group_E, dtype=rewards_E.dtype)
    return (square_S / (count_S - 1).clamp(min=1)).sqrt()[group_E]


def has_signal(rewards_E: Tensor, group_E: Tensor) -> Tensor:
    """[E] bool, True where the rewards of the episode's group differ (nan counts as different)."""
    highest_S, lowest_S = segment_max(rewards_E, group_E), -segment_max(-rewards_E, group_E)
    return (highest_S != lowest_S)[group_E]


def has_siblings(group_E: Tensor) -> Tensor:
    """[E] bool, True where the episode has a sibling."""
    return (segment_count(group_E, num_segments(group_E)) > 1)[group_E]
