"""Advantages of whole episodes: what each one did better than its siblings, or than the batch.

E episodes of a step, each in a group (the episodes of one task). Only episodes that were scored are given:
one that failed without the policy's doing neither trains nor votes. A group of one has nobody to be compared
with, so each estimator that compares siblings gives it exactly 0.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from agentrl.algo.segments import num_segments, segment_count, segment_max, segment_mean, segment_sum

Scale = Literal["group", "batch", "none"]


def group_advantages(rewards_G: Tensor, *, normalize_std: bool = True, eps: float = 1e-6) -> Tensor:
    """Score each episode against its siblings: A_i = (r_i - mean) / (std + eps), std with G - 1.

    Args:
        rewards_G: [G] one reward per episode of the same task.
        normalize_std: False keeps the mean baseline only (Dr. GRPO, arXiv:2503.20783).
        eps: keeps the quotient finite where rewards hardly differ.

    Returns:
        [G] advantages summing to zero; all exactly zero when every episode scored the same, and for a group
        of one, which has nobody to be compared with.

    Source: DeepSeekMath, arXiv:2402.03300.
    """
    if rewards_G.numel() < 2 or bool((rewards_G == rewards_G[0]).all()):
        return torch.zeros_like(rewards_G)
    centered_G = rewards_G - rewards_G.mean()
    return centered_G / (rewards_G.std() + eps) if normalize_std else centered_G


def group_centered(rewards_E: Tensor, group_E: Tensor) -> Tensor:
    """[E] reward minus the mean of the group; exactly 0 in groups without a difference.

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
    """[E] bool, True where the episode's group has rewards that differ (nan counts as different)."""
    highest_S, lowest_S = segment_max(rewards_E, group_E), -segment_max(-rewards_E, group_E)
    return (highest_S != lowest_S)[group_E]


def grpo_advantages(rewards_E: Tensor, group_E: Tensor, *, std: Scale = "group", eps: float = 1e-6) -> Tensor:
    """(r - mean of the group) / (std + eps), with the std of the group, of all rewards, or no division.

    "none" is Dr. GRPO (arXiv:2503.20783); "batch" divides by the std over the whole step (with E - 1), so
    that groups which hardly differ are not amplified. Source: DeepSeekMath, arXiv:2402.03300.
    """
    centered_E = group_centered(rewards_E, group_E)
    if std == "group":
        return centered_E / (group_std(rewards_E, group_E) + eps)
    if std == "batch":
        return centered_E / (rewards_E.std() + eps) if rewards_E.numel() > 1 else centered_E
    if std == "none":
        return centered_E
    raise ValueError(f"unknown std {std!r}: one of group, batch, none")


def rloo_advantages(rewards_E: Tensor, group_E: Tensor) -> Tensor:
    """Reward minus the mean of the siblings' rewards: G / (G - 1) * (r - mean). Source: arXiv:2402.14740."""
    count_E = segment_count(group_E, dtype=rewards_E.dtype)[group_E]
    return group_centered(rewards_E, group_E) * count_E / (count_E - 1).clamp(min=1)


def passk_advantages(
    rewards_E: Tensor, group_E: Tensor, *, normalize_std: bool = True, eps: float = 1e-6
) -> Tensor:
    """Only the best episode of each group is credited: with its lead over the second best, by the std.

    Episodes that share the best reward lead by nothing, so that such a group gives 0.
    Source: arXiv:2503.19595 (pass@k objective, k = G).
    """
    best_S = segment_max(rewards_E, group_E)
    is_best_E = rewards_E == best_S[group_E]
    second_S = segment_max(rewards_E.masked_fill(is_best_E, -torch.inf), group_E)
    alone_S = (segment_count(group_E) > 1) & (segment_sum(is_best_E.long(), group_E) == 1)
    credited_E = is_best_E & alone_S[group_E]
    lead_E = torch.where(credited_E, rewards_E - second_S[group_E], torch.zeros_like(rewards_E))
    return lead_E / (group_std(rewards_E, group_E) + eps) if normalize_std else lead_E


def opo_advantages(rewards_E: Tensor, group_E: Tensor, lengths_E: Tensor) -> Tensor:
    """Reward minus the group's mean weighted by length, sum(len * r) / sum(len): the baseline of least variance.

    Args:
        lengths_E: [E] trained tokens of each episode.

    Source: OPO, arXiv:2505.23585.
    """
    weight_E = lengths_E.to(rewards_E.dtype)
    total_S = segment_sum(weight_E, group_E)
    baseline_S = segment_sum(weight_E * rewards_E, group_E) / total_S.clamp(min=1e-12)
    advantage_E = rewards_E - baseline_S[group_E]
    return torch.where(has_signal(rewards_E, group_E), advantage_E, torch.zeros_like(advantage_E))


def gpg_advantages(rewards_E: Tensor, group_E: Tensor) -> Tensor:
    """alpha * (r - mean), alpha = episodes / episodes in groups whose rewards differ.

    alpha makes up for groups that give no gradient. Source: GPG, arXiv:2504.02546.
    """
    signal = int(has_signal(rewards_E, group_E).sum())
    return group_centered(rewards_E, group_E) * (rewards_E.numel() / max(signal, 1))


def gdpo_advantages(
    components_EK: Tensor,
    group_E: Tensor,
    *,
    weights_K: Tensor | None = None,
    normalize_std: bool = True,
    eps: float = 1e-6,
    whiten: bool = True,
) -> Tensor:
    """Each reward component is compared within its group, the weighted sum of them within the step.

    So a component of small spread keeps its say beside one of large spread.

    Args:
        components_EK: [E, K] the reward components of each episode; nan where one does not apply to it:
            it neither votes for that component nor gets anything from it.
        weights_K: [K] their weights, all 1 by default.
        whiten: divide the centred sum by its std over the step (with E - 1); groups of one stay 0 and
            take no part in mean and std.

    Source: GDPO, arXiv:2601.05242.
    """
    weights = [1.0] * components_EK.shape[1] if weights_K is None else weights_K.tolist()
    if len(weights) != components_EK.shape[1]:
        raise ValueError(f"{len(weights)} weights for {components_EK.shape[1]} reward components")
    std: Scale = "group" if normalize_std else "none"
    total_E = torch.zeros_like(components_EK[:, 0])
    for k, weight in enumerate(weights):
        given_E = ~components_EK[:, k].isnan()
        compared = grpo_advantages(components_EK[given_E, k], group_E[given_E], std=std, eps=eps)
        total_E[given_E] += weight * compared
    if not whiten:
        return total_E
    votes_E = in_company(group_E)
    voters = total_E[votes_E]
    if voters.numel() < 2:
        return total_E
    whitened_E = (total_E - voters.mean()) / (voters.std() + eps)
    return torch.where(votes_E, whitened_E, torch.zeros_like(total_E))


def in_company(group_E: Tensor) -> Tensor:
    """[E] bool, True where the episode has a sibling."""
    return (segment_count(group_E, num_segments(group_E)) > 1)[group_E]
