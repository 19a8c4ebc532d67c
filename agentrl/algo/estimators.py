"""The advantage estimators as the configuration names them: one call for the episodes of a step.

    estimate("grpo", step, GRPO(std="batch")).advantages_N

`StepData` holds what any of them may need; each says which fields it cannot do without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from agentrl.algo import advantage, returns
from agentrl.algo.kl import kl_per_token
from agentrl.algo.segments import segment_count, segment_sum


@dataclass(frozen=True, slots=True)
class StepData:
    """The scored episodes of a step (E) and their trained tokens (N), over all ranks.

    The tokens of an episode are in the order they were sampled; episodes may be in any order.
    """

    rewards_E: Tensor
    """Total reward of each episode."""
    group_E: Tensor
    """Long: the group (task) of each episode."""
    sequence_N: Tensor
    """Long: the episode of each token, an index into E. An episode may have no token: it still votes."""
    rewards_N: Tensor | None = None
    """Where the reward was given, if not at the end: sums to `rewards_E` (see `rewards_at_trained`)."""
    turn_N: Tensor | None = None
    """Long: the turn of each token within its episode."""
    values_N: Tensor | None = None
    """The critic's values."""
    greedy_E: Tensor | None = None
    """Reward of the greedy episode of the same task."""
    components_EK: Tensor | None = None
    """The parts of the reward."""
    old_logprobs_N: Tensor | None = None
    """Log-probabilities under the policy at the start of the step."""
    sum_pi_squared_N: Tensor | None = None
    """Sum of the squared probabilities of the vocabulary at each token."""
    correction_N: Tensor | None = None
    """Importance weights between sampler and learner, if they are used."""

    def token_rewards(self) -> Tensor:
        """[N] the rewards where they were given; all at the last token of the episode by default."""
        if self.rewards_N is not None:
            return self.rewards_N
        return returns.rewards_at_end(self.rewards_E, self.sequence_N)


class Advantages(NamedTuple):
    """[N] the advantage of each trained token; what the critic should have said, where there is a critic."""

    advantages_N: Tensor
    returns_N: Tensor | None = None


def penalise_kl(
    step: StepData, logprobs_N: Tensor, ref_logprobs_N: Tensor, *, coef: float, kind: str = "k1"
) -> StepData:
    """The same step with coef times the KL estimate of each token taken off the rewards (k1: see `kl_in_reward`).

    Args:
        logprobs_N: [N] under the policy that sampled, ref_logprobs_N under the reference.
    """
    everything = torch.ones_like(step.sequence_N, dtype=torch.bool)
    penalty_N = coef * kl_per_token(kind, logprobs_N.detach(), ref_logprobs_N, everything)
    penalty_E = segment_sum(penalty_N, step.sequence_N, step.rewards_E.numel())
    return replace(step, rewards_E=step.rewards_E - penalty_E, rewards_N=step.token_rewards() - penalty_N)


@dataclass(frozen=True, slots=True)
class GAE:
    """Generalised advantage estimation with a critic."""

    gamma: float = 1.0
    lam: float = 1.0
    per: Literal["token", "turn"] = "token"
    """What gamma and lam count."""
    whiten: bool = True
    """Scale the advantages of the step to mean 0 and variance 1."""


@dataclass(frozen=True, slots=True)
class GRPO:
    """Rewards against the mean of the group."""

    std: advantage.Scale = "group"
    """What the difference is divided by: the std of the group, of the whole step, or nothing."""
    eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class PassK:
    """Only the best episode of a group is credited."""

    normalize_std: bool = True
    eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class ReinforcePlusPlus:
    """Discounted return to go, whitened over the step."""

    gamma: float = 1.0
    per: Literal["token", "turn"] = "token"
    """What gamma counts."""


@dataclass(frozen=True, slots=True)
class GDPO:
    """Each reward component against its group, the sum over the step."""

    weights: tuple[float, ...] | None = None
    """One per component; all 1 by default."""
    normalize_std: bool = True
    eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class TurnLevel:
    """The return of each turn against the turns of the group."""

    gamma: float = 1.0
    """Discount per turn."""
    baseline: Literal["group", "turn"] = "group"
    """Compare with all turns of the group, or with those of the same number."""
    normalize_std: bool = True
    eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class OptimalTokenBaseline:
    """Return to go against a baseline per token position that gives the least variance."""

    zero_tail: bool = True
    """No baseline where the longest episode of a group has no sibling left."""


@dataclass(frozen=True, slots=True)
class NoParameters:
    """For estimators that have none."""


class Estimator(NamedTuple):
    """An estimator as the configuration names it; `needs` are the fields of StepData that may not be None."""

    fn: Callable[[StepData, Any], Advantages]
    config: type[Any]
    needs: tuple[str, ...] = ()


def estimate(name: str, step: StepData, config: Any) -> Advantages:
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


def _spread(advantages_E: Tensor, step: StepData) -> Advantages:
    return Advantages(advantages_E[step.sequence_N])


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "estimate() checks what an estimator needs"
    return tensor


def _turn_or_none(step: StepData, per: str) -> Tensor | None:
    return step.turn_N if per == "turn" else None


def _gae(step: StepData, config: GAE) -> Advantages:
    advantages_N, returns_N = returns.gae(
        step.token_rewards(),
        _given(step.values_N),
        step.sequence_N,
        gamma=config.gamma,
        lam=config.lam,
        turn_N=_turn_or_none(step, config.per),
    )
    return Advantages(returns.whiten(advantages_N) if config.whiten else advantages_N, returns_N)


def _grpo(step: StepData, config: GRPO) -> Advantages:
    return _spread(advantage.grpo_advantages(step.rewards_E, step.group_E, std=config.std, eps=config.eps), step)


def _dr_grpo(step: StepData, config: NoParameters) -> Advantages:
    return _spread(advantage.grpo_advantages(step.rewards_E, step.group_E, std="none"), step)


def _passk(step: StepData, config: PassK) -> Advantages:
    out_E = advantage.passk_advantages(
        step.rewards_E, step.group_E, normalize_std=config.normalize_std, eps=config.eps
    )
    return _spread(out_E, step)


def _rloo(step: StepData, config: NoParameters) -> Advantages:
    return _spread(advantage.rloo_advantages(step.rewards_E, step.group_E), step)


def _opo(step: StepData, config: NoParameters) -> Advantages:
    lengths_E = segment_count(step.sequence_N, step.rewards_E.numel(), dtype=step.rewards_E.dtype)
    return _spread(advantage.opo_advantages(step.rewards_E, step.group_E, lengths_E), step)


def _gpg(step: StepData, config: NoParameters) -> Advantages:
    return _spread(advantage.gpg_advantages(step.rewards_E, step.group_E), step)


def _gdpo(step: StepData, config: GDPO) -> Advantages:
    components_EK = _given(step.components_EK)
    weights_K = None if config.weights is None else torch.tensor(config.weights, dtype=torch.float64)
    out_E = advantage.gdpo_advantages(
        components_EK,
        step.group_E,
        weights_K=weights_K,
        normalize_std=config.normalize_std,
        eps=config.eps,
    )
    return _spread(out_E, step)


def _reinforce_plus_plus(step: StepData, config: ReinforcePlusPlus) -> Advantages:
    returns_N = returns.return_to_go(
        step.token_rewards(),
        step.sequence_N,
        gamma=config.gamma,
        turn_N=_turn_or_none(step, config.per),
    )
    return Advantages(returns.whiten(returns_N))


def _reinforce_plus_plus_baseline(step: StepData, config: NoParameters) -> Advantages:
    centered_E = advantage.group_centered(step.rewards_E, step.group_E)
    votes_N = advantage.in_company(step.group_E)[step.sequence_N]
    return Advantages(returns.whiten(centered_E[step.sequence_N], votes_N))


def _remax(step: StepData, config: NoParameters) -> Advantages:
    returns_N = returns.return_to_go(step.token_rewards(), step.sequence_N)
    return Advantages(returns_N - _given(step.greedy_E)[step.sequence_N])


def _turn_level(step: StepData, config: TurnLevel) -> Advantages:
    turn_N = _given(step.turn_N)
    width = int(turn_N.max()) + 1 if turn_N.numel() else 1
    cells, cell_N = torch.unique(step.sequence_N * width + turn_N, return_inverse=True)
    advantages_K = returns.turn_advantages(
        segment_sum(step.token_rewards(), cell_N, cells.numel()),
        cells // width,
        step.group_E,
        gamma=config.gamma,
        baseline=config.baseline,
        normalize_std=config.normalize_std,
        eps=config.eps,
    )
    return Advantages(advantages_K[cell_N])


def _optimal_token_baseline(step: StepData, config: OptimalTokenBaseline) -> Advantages:
    return Advantages(
        returns.optimal_token_baseline(
            step.token_rewards(),
            step.sequence_N,
            step.group_E,
            _given(step.old_logprobs_N),
            _given(step.sum_pi_squared_N),
            correction_N=step.correction_N,
            zero_tail=config.zero_tail,
        )
    )


ESTIMATORS: dict[str, Estimator] = {
    "gae": Estimator(_gae, GAE, ("values_N",)),
    "grpo": Estimator(_grpo, GRPO),
    "dr_grpo": Estimator(_dr_grpo, NoParameters),
    "grpo_passk": Estimator(_passk, PassK),
    "rloo": Estimator(_rloo, NoParameters),
    "reinforce_plus_plus": Estimator(_reinforce_plus_plus, ReinforcePlusPlus),
    "reinforce_plus_plus_baseline": Estimator(_reinforce_plus_plus_baseline, NoParameters),
    "remax": Estimator(_remax, NoParameters, ("greedy_E",)),
    "opo": Estimator(_opo, NoParameters),
    "gpg": Estimator(_gpg, NoParameters),
    "gdpo": Estimator(_gdpo, GDPO, ("components_EK",)),
    "turn_level": Estimator(_turn_level, TurnLevel, ("turn_N",)),
    "optimal_token_baseline": Estimator(
        _optimal_token_baseline, OptimalTokenBaseline, ("old_logprobs_N", "sum_pi_squared_N")
    ),
}
