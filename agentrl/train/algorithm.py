"""The estimator and the loss that a configuration names, with their parameters; your own are tried out first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from agentrl.algo.advantages import ESTIMATORS, estimate
from agentrl.algo.aggregate import aggregation_weights, totals_of_tokens
from agentrl.algo.correction import Correction, DriftGate, Reject
from agentrl.algo.kl import AdaptiveKL, FixedKL, KLController
from agentrl.algo.losses import POLICY_LOSSES
from agentrl.algo.metrics import Metric, Metrics, mean_of
from agentrl.algo.ratio import LossOutput
from agentrl.algo.step_data import Advantages, StepData
from agentrl.config.algorithm import AlgorithmConfig, CorrectionConfig, KLConfig, is_own
from agentrl.errors import ConfigError
from agentrl.importing import load_object

OCCASIONAL = ("turns", "overlong", "reward_model")
"""Parts of the reward that no episode of a step may have."""
LATE_FIELDS = frozenset({"values_N", "old_logprobs_N", "sum_pi_squared_N"})
"""What an estimator may need of the learner, so that advantages wait for it."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What turns rewards into gradients.

    Attributes:
        estimate: the advantages of a step, whose rewards have these names.
        needs: fields of StepData that the estimator cannot do without.
        loss: a policy loss with its parameters bound (see `agentrl.algo.losses`).
        select: for losses that take `selected_T`: chooses those tokens among all of the step.
    """

    config: AlgorithmConfig
    estimate: Callable[[StepData, Sequence[str]], Advantages]
    needs: frozenset[str]
    loss: Callable[..., LossOutput]
    select: Callable[[Tensor, Tensor, Tensor], Tensor] | None
    correction: Correction
    gate: DriftGate

    @property
    def late(self) -> bool:
        """Whether advantages wait for what the learner says of the tokens."""
        return bool(self.needs & LATE_FIELDS) or self.config.kl.in_reward

    @property
    def skips(self) -> bool:
        """Whether an episode whose advantages are all 0 changes nothing but the counts, so that its rows need no
        pass. Never where a critic learns from it, a penalty or bonus is laid on it, or its tokens help to decide
        what happens to others."""
        c, correction = self.config, self.correction
        silent = not is_own(c.loss) and POLICY_LOSSES[c.loss].silent
        shared = correction.normalize or correction.reject or correction.veto is not None or c.entropy_top < 1
        return silent and not (c.kl.in_loss or c.entropy_coef or "values_N" in self.needs or shared)

    @property
    def evaluates(self) -> frozenset[str]:
        """What the learner must say of every token before the first update, by column name."""
        c, found = self.config, set()
        if "values_N" in self.needs:
            found.add("values")
        if "sum_pi_squared_N" in self.needs:
            found.add("sum_pi_squared")
        if c.kl.in_reward or (c.kl.in_loss and c.epochs > 1):
            found.add("ref_logprobs")
        if c.entropy_top < 1:
            found.add("entropy")
        correction = self.correction
        if (
            "old_logprobs_N" in self.needs
            or c.kl.in_reward
            or self.select is not None
            or (c.updates_per_step * c.epochs > 1 and c.old_logprobs != "sampler")
            or correction.normalize
            or correction.reject
            or correction.veto is not None
        ):
            found.add("learner_logprobs")
        return frozenset(found)


def make_algorithm(config: AlgorithmConfig) -> Algorithm:
    """The functions that the configuration names.

    Raises:
        ConfigError: a function of the user's own cannot be loaded, or does not do what it should.
    """
    estimator, needs = _own_estimator(config) if is_own(config.advantage) else _estimator(config)
    loss, select = (_own_loss(config), None) if is_own(config.loss) else _loss(config)
    gate = DriftGate(**config.drift_gate.model_dump())
    return Algorithm(config, estimator, needs, loss, select, make_correction(config.correction), gate)


def make_correction(config: CorrectionConfig) -> Correction:
    """The correction between sampler and learner."""
    rules = tuple(
        Reject(name, limit[1], limit[0]) if isinstance(limit, tuple) else Reject(name, limit)  # type: ignore[arg-type]
        for name, limit in config.reject.items()
    )
    return Correction(config.importance, config.high, config.low, config.normalize, rules, config.veto)


def make_kl_control(config: KLConfig) -> KLController:
    """What the weight of the KL penalty is."""
    if config.control == "adaptive":
        return AdaptiveKL(config.coef, target=config.target, horizon=config.horizon)
    return FixedKL(config.coef)


Estimate = Callable[[StepData, Sequence[str]], Advantages]


def _estimator(config: AlgorithmConfig) -> tuple[Estimate, frozenset[str]]:
    name, entry, section = config.advantage, ESTIMATORS[config.advantage], config.advantage_section
    given = {} if section is None else section.model_dump()
    weights: Mapping[str, float] = given.get("weights", {})
    parameters = entry.config(**given)

    def estimator(step: StepData, names: Sequence[str]) -> Advantages:
        if unknown := sorted(part for part in weights if not _may_come(part, names)):
            raise ConfigError(
                f"algorithm.{name}.weights names {unknown[0]!r}; the rewards of this env are {', '.join(names)}"
            )
        return estimate(name, replace(step, component_names=tuple(names)), parameters)

    return estimator, frozenset(entry.needs)


def _may_come(part: str, names: Sequence[str]) -> bool:
    """Whether a part of the reward is among these, or one that only some steps have: of a function that returns
    several, or of what only some episodes earn."""
    function = part.partition("/")[0] if "/" in part else None
    return part in (*names, *OCCASIONAL) or function in {name.partition("/")[0] for name in names if "/" in name}


def _loss(
    config: AlgorithmConfig,
) -> tuple[Callable[..., LossOutput], Callable[[Tensor, Tensor, Tensor], Tensor] | None]:
    entry, section = POLICY_LOSSES[config.loss], config.loss_section
    parameters = entry.config(name=config.loss, **({} if section is None else section.model_dump()))

    def loss(*tensors_T: Tensor, **selected: Tensor) -> LossOutput:
        return entry.fn(*tensors_T, parameters, **selected)

    choose = entry.select
    if choose is None:
        return loss, None
    return loss, lambda advantages_N, logprobs_N, keys_N: choose(advantages_N, logprobs_N, keys_N, parameters)


# --- the user's own --------------------------------------------------------------------------------------------


def _own_estimator(config: AlgorithmConfig) -> tuple[Estimate, frozenset[str]]:
    where, options = f"algorithm.advantage {config.advantage!r}", config.advantage_options
    function = _function(config.advantage, where)
    needs = getattr(function, "needs", ())
    known = {f.name for f in fields(StepData)}
    if not isinstance(needs, Sequence) or isinstance(needs, str) or not set(needs) <= known - {"values_N"}:
        raise ConfigError(
            f"{where}: `needs` must list fields of StepData ({', '.join(sorted(known))}; values_N is there with "
            f"advantage: gae only), got {needs!r}"
        )

    def estimator(step: StepData, names: Sequence[str]) -> Advantages:
        found = function(step, **options)
        advantages = found if isinstance(found, Advantages) else Advantages(found)
        values_N = advantages.advantages_N
        if not isinstance(values_N, Tensor) or values_N.shape != step.sequence_N.shape:
            got = tuple(values_N.shape) if isinstance(values_N, Tensor) else type(values_N).__name__
            raise ConfigError(
                f"{where}: must return one advantage for each token, a tensor of shape "
                f"{tuple(step.sequence_N.shape)}, got {got}"
            )
        if not bool(values_N.isfinite().all()):
            raise ConfigError(f"{where}: returned advantages that are not finite")
        return advantages

    _try(lambda: estimator(_small_step(), ()), where)
    return estimator, frozenset(needs)


def _own_loss(config: AlgorithmConfig) -> Callable[..., LossOutput]:
    where, options = f"algorithm.loss {config.loss!r}", config.loss_options
    function = _function(config.loss, where)

    def loss(*tensors_T: Tensor) -> LossOutput:
        found = function(*tensors_T, **options)
        value, metrics = found if isinstance(found, tuple) else (found, {})
        return value, _metrics(metrics)

    _try(lambda: _check_loss(loss, where), where)
    return loss


def _metrics(given: Mapping[str, Any]) -> Metrics:
    """Metrics as they are; plain tensors count as the mean of their values."""
    return {name: m if isinstance(m, Metric) else mean_of(torch.as_tensor(m)) for name, m in given.items()}


def _function(spec: str, where: str) -> Callable[..., Any]:
    found = load_object(spec)
    if not callable(found):
        raise ConfigError(f"{where}: is a {type(found).__name__}, not a function")
    function: Callable[..., Any] = found
    return function


def _try(call: Callable[[], Any], where: str) -> None:
    try:
        call()
    except ConfigError:
        raise
    except Exception as e:
        raise ConfigError(f"{where}: a first call with a few tokens raised {type(e).__name__}: {e}") from e


def _small_step() -> StepData:
    """Two groups of two episodes of two turns."""
    sequence_N = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3])
    random = torch.Generator().manual_seed(0)
    return StepData(
        rewards_E=torch.tensor([1.0, 0.0, 0.5, 0.25], dtype=torch.float64),
        group_E=torch.tensor([0, 0, 1, 1]),
        sequence_N=sequence_N,
        turn_N=torch.tensor([0, 0, 1, 0, 1, 0, 0, 1, 1, 0]),
        greedy_E=torch.zeros(4, dtype=torch.float64),
        components_EK=torch.rand(4, 2, generator=random, dtype=torch.float64),
        old_logprobs_N=-torch.rand(10, generator=random, dtype=torch.float64),
        sum_pi_squared_N=torch.rand(10, generator=random, dtype=torch.float64),
    )


def _check_loss(loss: Callable[..., LossOutput], where: str) -> None:
    """A scalar with a gradient, that adds up over micro-batches."""
    random = torch.Generator().manual_seed(0)
    sequence_T = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    mask_T = torch.ones_like(sequence_T, dtype=torch.bool)
    old_T = -torch.rand(7, generator=random, dtype=torch.float64)
    new_T = old_T + 0.1 * torch.randn(7, generator=random, dtype=torch.float64)
    advantages_T = torch.randn(7, generator=random, dtype=torch.float64)
    totals = totals_of_tokens(mask_T, sequence_T)
    weights_T = aggregation_weights("token-mean", mask_T, sequence_T, totals, dtype=torch.float64)

    def of(part: slice) -> tuple[Tensor, Tensor]:
        leaf_T = new_T[part].clone().requires_grad_()
        sequence = sequence_T[part] - sequence_T[part][0]
        value, _ = loss(leaf_T, old_T[part], advantages_T[part], weights_T[part], sequence, mask_T[part])
        if not isinstance(value, Tensor) or value.shape != () or not bool(value.isfinite()):
            raise ConfigError(f"{where}: must return a finite scalar tensor (or that and metrics), got {value!r}")
        if not value.requires_grad:
            raise ConfigError(f"{where}: its value does not depend on logprobs_T: there is nothing to train")
        value.backward()  # type: ignore[no-untyped-call]
        assert leaf_T.grad is not None
        return value.detach(), leaf_T.grad

    whole, gradient_T = of(slice(0, 7))
    (first, first_T), (second, second_T) = of(slice(0, 3)), of(slice(3, 7))
    if not torch.allclose(whole, first + second, 1e-6) or not torch.allclose(
        gradient_T, torch.cat([first_T, second_T]), 1e-6
    ):
        raise ConfigError(
            f"{where}: its value over two episodes ({float(whole):.6g}) is not the sum of its values over each "
            f"({float(first + second):.6g}): it would change with the micro-batches; return "
            "(weights_T * your_token_loss_T).sum()"
        )
