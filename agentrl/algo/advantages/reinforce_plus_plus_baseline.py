"""REINFORCE++-baseline: rewards minus the mean of the group, whitened over the step."""

from __future__ import annotations

from typing import Literal

from agentrl.algo.entries import Estimator
from agentrl.algo.parameters import Named
from agentrl.algo.returns import whiten
from agentrl.algo.siblings import group_centered, has_siblings
from agentrl.algo.step_data import Advantages, StepData


class ReinforcePlusPlusBaseline(Named):
    """Reward - mean of the group, whitened over the step.

    Source: REINFORCE++, arXiv:2501.03262.
    """

    name: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"


def reinforce_plus_plus_baseline(step: StepData, config: ReinforcePlusPlusBaseline) -> Advantages:
    """The advantage of each token; episodes alone in their group get 0 and do not count in the whitening."""
    centered_E = group_centered(step.rewards_E, step.group_E)
    return Advantages(whiten(centered_E[step.sequence_N], has_siblings(step.group_E)[step.sequence_N]))


ENTRIES = {"reinforce_plus_plus_baseline": Estimator(reinforce_plus_plus_baseline, ReinforcePlusPlusBaseline)}
