"""Pass@k: only the best episode of each group is credited."""

from __future__ import annotations

from typing import Literal

from agentrl.algo.entries import Estimator
from agentrl.algo.late import Tensor, torch
from agentrl.algo.parameters import Above0, Named
from agentrl.algo.segments import segment_count, segment_max, segment_sum
from agentrl.algo.siblings import group_std
from agentrl.algo.step_data import Advantages, StepData, spread


class PassK(Named):
    """Only the best episode of a group, by its lead over the second best.

    Source: pass@k objective with k = G, arXiv:2503.19595.
    """

    name: Literal["grpo_passk"] = "grpo_passk"
    normalize_std: bool = True
    """Divide by the standard deviation of the group."""
    eps: Above0 = 1e-6
    """Added to the standard deviation."""


def passk(step: StepData, config: PassK) -> Advantages:
    """The advantage of an episode for each of its tokens."""
    out_E = passk_advantages(step.rewards_E, step.group_E, normalize_std=config.normalize_std, eps=config.eps)
    return spread(out_E, step)


def passk_advantages(
    rewards_E: Tensor, group_E: Tensor, *, normalize_std: bool = True, eps: float = 1e-6
) -> Tensor:
    """[E] the lead of the best episode over the second best, by the std; 0 for all others.

    Episodes that share the best reward have no lead, so that such a group gives 0.
    """
    best_S = segment_max(rewards_E, group_E)
    is_best_E = rewards_E == best_S[group_E]
    second_S = segment_max(rewards_E.masked_fill(is_best_E, -torch.inf), group_E)
    alone_S = (segment_count(group_E) > 1) & (segment_sum(is_best_E.long(), group_E) == 1)
    credited_E = is_best_E & alone_S[group_E]
    lead_E = torch.where(credited_E, rewards_E - second_S[group_E], torch.zeros_like(rewards_E))
    return lead_E / (group_std(rewards_E, group_E) + eps) if normalize_std else lead_E


ENTRIES = {"grpo_passk": Estimator(passk, PassK)}
