"""REINFORCE++: discounted returns, whitened over the step."""

from __future__ import annotations

from typing import Literal

from agentrl.algo.entries import Estimator
from agentrl.algo.parameters import Discount, Named
from agentrl.algo.returns import return_to_go, whiten
from agentrl.algo.step_data import Advantages, StepData


class ReinforcePlusPlus(Named):
    """Discounted return, whitened over the step.

    Source: REINFORCE++, arXiv:2501.03262.
    """

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    gamma: Discount = 1.0
    """Discount of later rewards."""
    per: Literal["token", "turn"] = "token"
    """Apply `gamma` per token or per turn."""


def reinforce_plus_plus(step: StepData, config: ReinforcePlusPlus) -> Advantages:
    """The advantage of each token."""
    turn_N = step.turn_N if config.per == "turn" else None
    return Advantages(
        whiten(return_to_go(step.token_rewards(), step.sequence_N, gamma=config.gamma, turn_N=turn_N))
    )


ENTRIES = {"reinforce_plus_plus": Estimator(reinforce_plus_plus, ReinforcePlusPlus, compares=False)}
