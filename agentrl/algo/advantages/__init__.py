"""Advantage estimators: one file each, with its parameters; pure functions of the episodes of a step.

    estimate("grpo", step, GRPO(std="batch")).advantages_N

`StepData` holds everything that any of them reads; the fields that an estimator requires are in its `needs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from agentrl.algo.advantages.dr_grpo import DrGRPO, dr_grpo
from agentrl.algo.advantages.gae import GAE, gae
from agentrl.algo.advantages.gdpo import GDPO, gdpo
from agentrl.algo.advantages.gpg import GPGAdvantage, gpg
from agentrl.algo.advantages.grpo import GRPO, grpo
from agentrl.algo.advantages.grpo_passk import PassK, passk
from agentrl.algo.advantages.opo import OPO, opo
from agentrl.algo.advantages.optimal_token_baseline import OptimalTokenBaseline, optimal_token_baseline
from agentrl.algo.advantages.reinforce_plus_plus import ReinforcePlusPlus, reinforce_plus_plus
from agentrl.algo.advantages.reinforce_plus_plus_baseline import (
    ReinforcePlusPlusBaseline,
    reinforce_plus_plus_baseline,
)
from agentrl.algo.advantages.remax import ReMax, remax
from agentrl.algo.advantages.rloo import RLOO, rloo
from agentrl.algo.advantages.turn_level import TurnLevel, turn_level
from agentrl.algo.parameters import Named
from agentrl.algo.step_data import Advantages, StepData


class Estimator(NamedTuple):
    """An advantage estimator as the configuration names it."""

    fn: Callable[[StepData, Any], Advantages]
    config: type[Named]
    """Its parameters; all have defaults."""
    needs: tuple[str, ...] = ()
    """Fields of StepData that may not be None."""
    compares: bool = True
    """Whether an episode is compared with its siblings, so that equal rewards carry no signal."""


ESTIMATORS: Mapping[str, Estimator] = {
    "grpo": Estimator(grpo, GRPO),
    "dr_grpo": Estimator(dr_grpo, DrGRPO),
    "rloo": Estimator(rloo, RLOO),
    "turn_level": Estimator(turn_level, TurnLevel, ("turn_N",)),
    "gae": Estimator(gae, GAE, ("values_N",), compares=False),
    "reinforce_plus_plus": Estimator(reinforce_plus_plus, ReinforcePlusPlus, compares=False),
    "reinforce_plus_plus_baseline": Estimator(reinforce_plus_plus_baseline, ReinforcePlusPlusBaseline),
    "remax": Estimator(remax, ReMax, ("greedy_E",), compares=False),
    "opo": Estimator(opo, OPO),
    "gpg": Estimator(gpg, GPGAdvantage),
    "gdpo": Estimator(gdpo, GDPO, ("components_EK",)),
    "grpo_passk": Estimator(passk, PassK),
    "optimal_token_baseline": Estimator(
        optimal_token_baseline, OptimalTokenBaseline, ("old_logprobs_N", "sum_pi_squared_N")
    ),
}
"""Every estimator by its name. A new one is a file in this folder and a line here."""


def estimate(name: str, step: StepData, config: Named) -> Advantages:
    """The advantages of a step.

    Raises:
        ValueError: unknown name, parameters of another estimator, or a field that the estimator needs is missing.
    """
    estimator = ESTIMATORS.get(name)
    if estimator is None:
        raise ValueError(f"unknown advantage estimator {name!r}; there are {', '.join(ESTIMATORS)}")
    if not isinstance(config, estimator.config):
        raise ValueError(f"{name} takes {estimator.config.__name__}, got {type(config).__name__}")
    needs = estimator.needs + (("turn_N",) if getattr(config, "per", "token") == "turn" else ())
    missing = [field for field in needs if getattr(step, field) is None]
    if missing:
        raise ValueError(f"advantage estimator {name!r} needs {', '.join(missing)} of the step")
    return estimator.fn(step, config)
