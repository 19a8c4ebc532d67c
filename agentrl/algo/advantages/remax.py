"""ReMax: returns compared with a greedy episode of the same task."""

from __future__ import annotations

from typing import Literal

from agentrl.algo.entries import Estimator
from agentrl.algo.parameters import Named
from agentrl.algo.returns import return_to_go
from agentrl.algo.step_data import Advantages, StepData, given


class ReMax(Named):
    """Return - reward of a greedy episode of the same task.

    Source: ReMax, arXiv:2310.10505.
    """

    name: Literal["remax"] = "remax"


def remax(step: StepData, config: ReMax) -> Advantages:
    """The advantage of each token."""
    returns_N = return_to_go(step.token_rewards(), step.sequence_N)
    return Advantages(returns_N - given(step.greedy_E)[step.sequence_N])


ENTRIES = {"remax": Estimator(remax, ReMax, ("greedy_E",), compares=False)}
