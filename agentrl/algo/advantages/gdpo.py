"""GDPO: every part of the reward is compared on its own."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentrl.algo.advantages.grpo import Scale, grpo_advantages
from agentrl.algo.entries import Estimator, Signal
from agentrl.algo.late import Tensor, torch
from agentrl.algo.parameters import Above0, Named
from agentrl.algo.siblings import has_siblings
from agentrl.algo.step_data import Advantages, StepData, given, spread


class GDPO(Named):
    """Each named reward against its group, their weighted sum whitened over the step.

    Source: GDPO, arXiv:2601.05242.
    """

    name: Literal["gdpo"] = "gdpo"
    weights: dict[str, float] = Field(default_factory=dict)
    """Weights by reward name; 1 for rewards that are not listed."""
    normalize_std: bool = True
    """Divide each reward by its standard deviation within the group."""
    eps: Above0 = 1e-6
    """Added to the standard deviation."""


def gdpo(step: StepData, config: GDPO) -> Advantages:
    """The advantage of an episode for each of its tokens."""
    weights = [config.weights.get(name, 1.0) for name in step.component_names]
    out_E = gdpo_advantages(
        given(step.components_EK),
        step.group_E,
        weights_K=torch.tensor(weights, dtype=torch.float64) if config.weights else None,
        normalize_std=config.normalize_std,
        eps=config.eps,
    )
    return spread(out_E, step)


def gdpo_advantages(
    components_EK: Tensor,
    group_E: Tensor,
    *,
    weights_K: Tensor | None = None,
    normalize_std: bool = True,
    eps: float = 1e-6,
    whiten: bool = True,
) -> Tensor:
    """[E] each component compared within its group, their weighted sum compared within the step.

    A component with a small spread keeps its influence next to one with a large spread.

    Args:
        components_EK: [E, K] the reward components of each episode; nan where one does not apply to it: the
            episode neither counts in that component's group nor gets anything from it.
        weights_K: [K] their weights, all 1 by default.
        whiten: divide the centered sum by its std over the step (with E - 1); episodes alone in their group stay 0
            and do not count in mean and std.
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
    counts_E = has_siblings(group_E)
    counted = total_E[counts_E]
    if counted.numel() < 2:
        return total_E
    whitened_E = (total_E - counted.mean()) / (counted.std() + eps)
    return torch.where(counts_E, whitened_E, torch.zeros_like(total_E))


def _signal(config: GDPO) -> Signal:
    return Signal("parts", frozenset(name for name, weight in config.weights.items() if weight == 0))


ENTRIES = {"gdpo": Estimator(gdpo, GDPO, ("components_EK",), signal=_signal)}
