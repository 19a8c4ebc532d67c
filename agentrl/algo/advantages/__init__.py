"""Advantage estimators: one file each, with its parameters; pure functions of the episodes of a step.

    estimate("grpo", step, GRPO(std="batch")).advantages_N

`StepData` holds everything that any of them reads; the fields that an estimator requires are in its `needs`.
"""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.algo.entries import Estimator, entries_in
from agentrl.algo.parameters import Named
from agentrl.algo.step_data import Advantages, StepData

ESTIMATORS: Mapping[str, Estimator] = entries_in(__name__, __path__, Estimator)
"""Every estimator by its name. A new one is a file in this folder."""


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
