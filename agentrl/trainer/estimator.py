"""The advantage estimator that a configuration names, with its parameters; user-supplied ones are tested first."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from agentrl.algo.advantages import ESTIMATORS
from agentrl.algo.advantages.gdpo import GDPO
from agentrl.algo.parameters import Named
from agentrl.algo.returns import rewards_at_end
from agentrl.algo.step_data import Advantages, StepData, UnsuitableRewardsError
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.choice import OwnFunction
from agentrl.config.run import RunConfig
from agentrl.env.toolenv.env import ToolEnv
from agentrl.errors import ConfigError, traceback_of
from agentrl.importing import load_function, try_function
from agentrl.rollout.content import Content

OCCASIONAL = ("turns", "overlong", "reward_model")
"""Parts of the reward that may be missing from every episode of a step."""


@dataclass(frozen=True, slots=True)
class NamedEstimator:
    """An estimator with its parameters bound.

    Attributes:
        estimate: the advantages of a step.
        needs: fields of StepData that may not be None.
        check: raises ConfigError if the parameters do not fit rewards of these names.
    """

    estimate: Callable[[StepData], Advantages]
    needs: frozenset[str]
    check: Callable[[Sequence[str]], None] = lambda names: None


def make_estimator(config: AlgorithmConfig) -> NamedEstimator:
    """The estimator that the configuration names; a user-supplied function is tested on a few tokens.

    Raises:
        ConfigError: a user-supplied function cannot be loaded or is invalid.
    """
    chosen = config.advantage
    return _own_estimator(chosen, config) if isinstance(chosen, OwnFunction) else _built_in(chosen)


def check_penalties(config: RunConfig, content: Content) -> None:
    """Check that the policy cannot end a run with a negative reward, which `max_rl` does not take.

    Raises:
        ConfigError: the sandbox of an env has a negative `death_reward`.
    """
    for name, view in config.by_env.items():
        env = content.by_env[name].make_env()
        sandbox = env.sandbox if isinstance(env, ToolEnv) else None
        if view.algorithm.advantage.name == "max_rl" and sandbox is not None and sandbox.death_reward < 0:
            where = f"envs.{name}: " if name else ""
            raise ConfigError(
                f"{where}the sandbox of {type(env).__name__} has death_reward={sandbox.death_reward:g}, and "
                "algorithm.advantage max_rl needs rewards of at least 0: use 0, or another advantage"
            )


def check_weights(config: RunConfig, content: Content) -> None:
    """Check the weights of parts that come from the run rather than from the env.

    Raises:
        ConfigError: the run has no such part.
    """
    model = config.reward_model
    absent = {
        "overlong": config.rollout.overlong != "penalise" and "rollout.overlong: penalise",
        "reward_model": (model is None or model.name != "reward_model") and "a reward_model of this name",
    }
    for name, view in config.by_env.items():
        advantage = view.algorithm.advantage
        declared = content.by_env[name].make_env().declared_rewards()
        if not isinstance(advantage, GDPO) or declared is None:
            continue
        for part in advantage.weights:
            if (needed := absent.get(part)) and part not in declared:
                where = f"envs.{name}: " if name else ""
                raise ConfigError(
                    f"{where}algorithm.advantage.weights.{part} has no effect without {needed}: remove it"
                )


def _built_in(parameters: Named) -> NamedEstimator:
    entry = ESTIMATORS[parameters.name]
    weights = parameters.weights if isinstance(parameters, GDPO) else {}

    def estimate(step: StepData) -> Advantages:
        found: Advantages
        try:
            found = entry.fn(step, parameters)
        except UnsuitableRewardsError as e:
            raise ConfigError(f"algorithm.advantage {parameters.name}: {e}") from None
        return found

    def check(names: Sequence[str]) -> None:
        if unknown := sorted(part for part in weights if not _may_come(part, names)):
            raise ConfigError(
                f"algorithm.advantage.weights names {unknown[0]!r}; the rewards of this env are {', '.join(names)}"
            )

    return NamedEstimator(estimate, frozenset(entry.needs), check)


def _may_come(part: str, names: Sequence[str]) -> bool:
    """Whether a part of the reward is among these names, or may be missing from some steps: because its function
    returns several rewards, or only some episodes earn it."""
    function = part.partition("/")[0] if "/" in part else None
    return part in (*names, *OCCASIONAL) or function in {name.partition("/")[0] for name in names if "/" in name}


def _own_estimator(own: OwnFunction, config: AlgorithmConfig) -> NamedEstimator:
    where, options = f"algorithm.advantage {own.use!r}", own.options
    function = load_function(own.use, where)
    needs = getattr(function, "needs", ())
    known = {f.name for f in fields(StepData)}
    listed = isinstance(needs, Sequence | Set) and not isinstance(needs, str)
    if not listed or not all(isinstance(name, str) for name in needs) or not set(needs) <= known - {"greedy_E"}:
        raise ConfigError(
            f"{where}: `needs` must list fields of StepData ({', '.join(sorted(known))}; greedy_E with remax "
            f"only), got {needs!r}"
        )
    if "correction_N" in needs and config.correction.importance == "none":
        raise ConfigError(f"{where}: needs correction_N, which is there with algorithm.correction.importance only")

    def estimate(step: StepData) -> Advantages:
        try:
            found = function(step, **options)
        except ConfigError:
            raise
        except Exception as e:
            raise ConfigError(f"{where} raised {type(e).__name__}: {e}\n{traceback_of(e)}") from e
        advantages = found if isinstance(found, Advantages) else Advantages(found)
        _check_values(advantages.advantages_N, step, f"{where}: must return one advantage for each token")
        if advantages.returns_N is None and "values_N" in needs:
            raise ConfigError(
                f"{where}: must return Advantages(advantages_N, returns_N), because the critic learns the returns"
            )
        if advantages.returns_N is not None:
            _check_values(advantages.returns_N, step, f"{where}: returns_N has one return for each token")
        return advantages

    weighed = {"old_logprobs_N"} if "correction_N" in needs else set[str]()  # weights come from both
    given = frozenset({*needs, *weighed})
    step = _small_step(given)
    try:
        try_function(lambda: estimate(step), where)
    except ConfigError:
        if not step.names_read:  # otherwise it may want a part that only the run's rewards have
            raise
    return NamedEstimator(estimate, given)


class _SmallStep(StepData):
    """A made-up step that records whether a function read the names of the reward's parts, made up as well."""

    names_read = False

    def __getattribute__(self, name: str) -> Any:
        if name == "component_names":
            object.__setattr__(self, "names_read", True)
        return super().__getattribute__(name)


def _check_values(values_N: object, step: StepData, what: str) -> None:
    """Raises ConfigError unless it is a finite number for each token."""
    if not isinstance(values_N, Tensor) or values_N.shape != step.sequence_N.shape or values_N.is_complex():
        got: object = type(values_N).__name__
        if isinstance(values_N, Tensor):
            got = values_N.dtype if values_N.is_complex() else tuple(values_N.shape)
        raise ConfigError(f"{what}, a tensor of shape {tuple(step.sequence_N.shape)}, got {got}")
    odd_N = ~values_N.isfinite()
    if bool(odd_N.any()):
        group = step.group_E[step.sequence_N[odd_N][0]]
        rewards = ", ".join(f"{reward:.4g}" for reward in step.rewards_E[step.group_E == group].tolist())
        raise ConfigError(f"{what}: some are not finite, first in a group with the rewards {rewards}")


def _small_step(needs: Set[str]) -> _SmallStep:
    """Two groups of two episodes and one that scored the same, of up to two turns, with the fields that a run
    fills, and those that are needed."""

    def given(name: str, tensor: Tensor) -> Tensor | None:
        return tensor if name in needs else None

    sequence_N = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 4, 5, 5])
    rewards_E = torch.tensor([1.0, 0.0, 0.5, 0.25, 0.5, 0.5], dtype=torch.float64)
    random = torch.Generator().manual_seed(0)
    return _SmallStep(
        rewards_E=rewards_E,
        group_E=torch.tensor([0, 0, 1, 1, 2, 2]),
        sequence_N=sequence_N,
        rewards_N=rewards_at_end(rewards_E, sequence_N),
        turn_N=torch.tensor([0, 0, 1, 0, 1, 0, 0, 1, 1, 0, 0, 0, 1]),
        components_EK=torch.rand(6, 2, generator=random, dtype=torch.float64),
        component_names=("first", "second"),
        length_E=torch.tensor([3.0, 2.0, 4.0, 1.0, 1.0, 2.0], dtype=torch.float64),
        values_N=given("values_N", torch.rand(13, generator=random, dtype=torch.float64)),
        old_logprobs_N=given("old_logprobs_N", -torch.rand(13, generator=random, dtype=torch.float64)),
        sum_pi_squared_N=given("sum_pi_squared_N", torch.rand(13, generator=random, dtype=torch.float64)),
        correction_N=given("correction_N", torch.ones(13, dtype=torch.float64)),
    )
