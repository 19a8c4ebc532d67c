"""How rewards become gradients: the estimator, the loss, the penalties and the corrections.

Estimators and losses are chosen by name: `loss: gspo`, or `loss: {name: gspo, clip_high: 1e-3}` with parameters.
Their parameters are the classes in `agentrl.algo`.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from agentrl.algo.advantages import ESTIMATORS
from agentrl.algo.advantages.grpo import GRPO
from agentrl.algo.correction import Correction, DriftGate
from agentrl.algo.entries import SUM, Signal
from agentrl.algo.losses import POLICY_LOSSES
from agentrl.algo.losses.ppo_clip import PPOClip
from agentrl.algo.parameters import (
    STATISTICS,
    Above0,
    Aggregation,
    KLKind,
    Level,
    Named,
    NonNegative,
    Share,
    check_band,
)
from agentrl.config.choice import OneOf, OwnFunction
from agentrl.config.facts import Advanced, NeverWhen, OnlyWhen, OnResume, PathTo
from agentrl.config.section import Count, Positive, Section

ALONE = frozenset(name for name, estimator in ESTIMATORS.items() if not estimator.compares)
"""Estimators that do not compare an episode with its siblings."""

_CORRECTION, _GATE = Correction(), DriftGate()


def _check_rule(statistic: str, limit: float | tuple[float, float]) -> None:
    if statistic not in STATISTICS:
        near = difflib.get_close_matches(statistic, STATISTICS, 1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"reject has no statistic {statistic!r}{hint}; there are {', '.join(STATISTICS)}")
    low, high = limit if isinstance(limit, tuple) else (None, limit)
    if low is not None and not statistic.endswith("k1"):
        raise ValueError(f"reject: {statistic} is never negative: give its highest value only, not {limit}")
    if low is None and statistic.endswith("k1") and 0 < high < 1:
        raise ValueError(
            f"reject: {statistic} alone means from 1/{high:g} to {high:g}, which is nothing: give at least 1, or "
            "[lowest, highest]"
        )
    if not high > 0 or (low is not None and not 0 < low <= high):
        raise ValueError(f"reject: {statistic} needs a limit above 0 (or 0 < lowest <= highest), got {limit}")


class CriticConfig(Section):
    """The critic of `advantage: gae`, or of an advantage of your own that needs values: a value model trained
    together with the policy."""

    path: Annotated[str | None, PathTo("folder", hub=True), OnResume("fixed")] = None
    """Model directory to initialize the critic from; by default the policy's initial model."""
    lr: Above0 = 1e-5
    """Peak learning rate; it follows the policy's schedule."""
    value_clip: Annotated[Above0 | None, Advanced()] = 0.5
    """Value clipping: predictions are clipped to within this distance of those before the step; null disables
    it."""
    warmup_steps: Count = 0
    """Number of initial steps that train only the critic. Their drift is measured only where a correction needs
    the learner's log-probabilities."""
    max_grad_norm: Annotated[Above0, Advanced()] = 1.0
    """Maximum gradient norm; larger gradients are scaled down."""
    updates_per_step: Annotated[Positive | None, Advanced()] = None
    """Mini-batches per step for the critic; by default the policy's number."""
    epochs: Annotated[Positive | None, Advanced()] = None
    """Passes of the critic over the episodes of a step; by default the policy's number."""
    aggregation: Annotated[Aggregation | None, Advanced()] = None
    """How token errors are aggregated; by default like the policy's token losses."""
    aggregation_scale: Annotated[Above0 | None, Advanced()] = None
    """Like `algorithm.aggregation_scale`, which is also the default."""
    ranks: Annotated[Count, OnResume("free")] = 0
    """Number of dedicated Ray workers for the critic, each with one shard; 0 runs it on the policy's ranks. With
    dedicated ranks, the policy also runs on Ray, even with a single rank."""


class KLConfig(Section):
    """The KL penalty toward the frozen reference: the policy at the start of RL training, without any adapters."""

    where: Annotated[Literal["loss", "reward", "both"], NeverWhen("coef", 0)] = "loss"
    """Add the penalty to the loss, subtract it from each token's reward before advantages are estimated, or
    both."""
    coef: NonNegative = 0.01
    """Weight of the penalty; 0 disables it and skips the reference pass."""
    kind: Annotated[Literal["auto", "full", KLKind], NeverWhen("coef", 0)] = "auto"
    """The estimate. `auto`: `k1` in the reward; in the loss `unbiased` (k3's value, an unbiased gradient that
    never vanishes), or with a `teacher` `full` where the policy's ranks evaluate it, else `centered`. `full`
    compares the whole distributions instead of the token drawn; `centered` is `unbiased` with a baseline: the mean
    of the step, with several envs of each. A `+` keeps the estimate's value and uses the gradient of k2. Without
    it, `k1` in the loss has a gradient of 0 on average, and `abs` and `k3` do not have the gradient of the KL
    divergence either."""
    top: Annotated[Count, Advanced()] = 128
    """`full`: how many tokens, the likeliest of the reference or teacher in each place, are compared one by one;
    the others count as one. 0: the whole vocabulary; memory grows with it."""
    jsd_beta: Annotated[float, Field(ge=0, le=1), Advanced()] = 1.0
    """`full`: 1 is the KL divergence of the policy from the reference or teacher (reverse KL), which seeks one of
    its modes; 0 is the opposite direction (forward KL), which covers all of them; values between interpolate
    (generalized Jensen-Shannon divergence, GKD)."""
    control: Annotated[Literal["fixed", "adaptive"], NeverWhen("coef", 0), Advanced()] = "fixed"
    """Keep the weight fixed, or adapt it to the measured KL; the current weight is saved in checkpoints."""
    target: Annotated[Above0, OnlyWhen("control", "adaptive"), Advanced()] = 0.1
    """Target KL per token."""
    horizon: Annotated[Above0, OnlyWhen("control", "adaptive"), Advanced()] = 10_000.0
    """Horizon of the adaptation, in episodes."""

    @property
    def in_loss(self) -> bool:
        """Whether the loss has a penalty."""
        return self.coef > 0 and self.where != "reward"

    @property
    def in_reward(self) -> bool:
        """Whether rewards are penalized."""
        return self.coef > 0 and self.where != "loss"

    @property
    def loss_kind(self) -> str:
        """The estimate in the loss."""
        return "unbiased" if self.kind == "auto" else self.kind  # with a teacher see `RunConfig.decided_algorithm`

    @property
    def reward_kind(self) -> str:
        """The estimate in the reward."""
        return "k1" if self.kind in ("auto", "full", "centered") else self.kind


class CorrectionConfig(Section):
    """Corrections for the difference between the sampler's and the learner's logprobs (always measured)."""

    importance: Level = _CORRECTION.importance
    """Importance weights: multiply each token's loss by the ratio learner / sampler of the token or its
    sequence."""
    high: Annotated[Above0, OnlyWhen("importance", "token", "sequence")] = _CORRECTION.high
    """Ratios are truncated at this value."""
    low: Annotated[Above0 | None, OnlyWhen("importance", "token", "sequence")] = _CORRECTION.low
    """If set, ratios outside [low, high] count as 0 (IcePop) instead of being truncated at `high`."""
    normalize: Annotated[bool, OnlyWhen("importance", "token", "sequence"), Advanced()] = _CORRECTION.normalize
    """Normalize the ratios of a step to a mean of 1."""
    reject: dict[str, float | tuple[float, float]] = Field(default_factory=dict)
    """Mask tokens or sequences out of the loss: a statistic (`token_k1`, `seq_mean_k3`, ...) and its maximum; for
    k1, the maximum ratio sampler / learner, or [minimum, maximum]."""
    veto: Annotated[Annotated[float, Field(gt=0, lt=1)] | None, Advanced()] = _CORRECTION.veto
    """Mask every sequence with a token whose ratio learner / sampler is below this (for example, 1e-4)."""
    off_policy: Above0 | None = None
    """Mask sequences with a negative advantage whose tokens have drifted by more than this on average."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for statistic, limit in self.reject.items():
            _check_rule(statistic, limit)
        check_band(self.low, self.high)
        return self


class DriftGateConfig(Section):
    """Limits on the difference between sampler and learner; the run stops if one is exceeded; null: no limit."""

    mean_abs: Annotated[Above0 | None, Advanced()] = _GATE.mean_abs
    """Maximum mean |sampler logprob - learner logprob| of a step."""
    max_abs: Annotated[Above0 | None, Advanced()] = _GATE.max_abs
    """Maximum |sampler logprob - learner logprob| of any token."""
    k3: Annotated[Above0 | None, Advanced()] = _GATE.k3
    """Maximum estimate of KL(sampler, learner)."""
    ess: Annotated[Share | None, Advanced()] = _GATE.ess
    """Minimum effective sample size, as a fraction of the tokens."""


_WRONG_GRADIENT = {"k1": "on average it is 0, so nothing is penalized", "abs": "it ignores how far the policy is"}


class AlgorithmConfig(Section):
    """How rewards become gradients. docs/algorithms.md explains each name."""

    advantage: Annotated[
        Named | OwnFunction, OneOf({name: entry.config for name, entry in ESTIMATORS.items()}, "grpo")
    ] = GRPO()
    """The advantage estimator: a name, a section with `name` and its parameters, or your own function as
    `module:function`. See [algorithms](algorithms.md#advantages)."""
    loss: Annotated[
        Named | OwnFunction, OneOf({name: entry.config for name, entry in POLICY_LOSSES.items()}, "ppo_clip")
    ] = PPOClip()
    """The policy loss: a name, a section with `name` and its parameters, or your own function as
    `module:function`. See [algorithms](algorithms.md#policy-losses)."""
    aggregation: Aggregation = "token-mean"
    """How token losses are aggregated into one number."""
    aggregation_scale: Annotated[Above0 | None, Advanced()] = None
    """`seq-mean-token-sum-norm`: the divisor of the token sums (for example, the maximum tokens per episode)."""
    kl: KLConfig = KLConfig()
    """The KL penalty toward the reference policy."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus in the loss."""
    observation_coef: Annotated[NonNegative, Advanced()] = 0.0
    """Weight of the observation loss: the mean cross-entropy of the env's answers (tool results and messages
    between the policy's turns), so that the policy also learns what its calls do (ECHO)."""
    entropy_top: Annotated[Share, Advanced()] = 1.0
    """Train only this fraction of a step's tokens, those with the highest entropy."""
    updates_per_step: Positive = 1
    """Mini-batches per step; each is one optimizer update."""
    epochs: Positive = 1
    """Passes over the episodes of a step (verl's `ppo_epochs`), each of `updates_per_step` updates. With more than
    one, every pass shuffles the episodes differently; old log-probabilities and advantages are kept."""
    drop_zero_signal_groups: bool = False
    """Drop groups in which no episode has an advantage, also from the KL penalty, the entropy bonus and the means.
    This saves time, but the gradient no longer matches the objective exactly."""
    ratio_veto: Annotated[Annotated[float, Field(gt=1)] | None, Advanced()] = 1e4
    """Mask sequences with a token whose ratio to the old policy exceeds this: such an old log-probability cannot
    be right, and not every loss bounds the ratio. null disables the check."""
    old_logprobs: Literal["auto", "learner", "sampler"] = "auto"
    """The denominator of the policy ratio: log-probabilities of the learner before the step, or of the sampler
    (bypass). `auto` uses the sampler if episodes may be stale (`rollout.max_staleness` above 0) and no
    `correction.importance` weights them, so that clipping bounds their effect on the policy; otherwise the
    learner."""
    correction: CorrectionConfig = CorrectionConfig()
    """Corrections for the difference between sampler and learner."""
    drift_gate: DriftGateConfig = DriftGateConfig()
    """Limits on the difference between sampler and learner, in every step that updates the policy and has no stale
    tokens."""

    @model_validator(mode="after")
    def _no_dead_keys(self) -> Self:
        self.refuse_dead_keys()
        return self

    def refuse_dead_keys(self) -> None:
        """Raises ValueError for keys that are missing or have no effect."""
        for problem in _dead_keys(self):
            raise ValueError(problem)

    def decided(self, max_staleness: int) -> AlgorithmConfig:
        """The section with `old_logprobs: auto` resolved for a run with this `rollout.max_staleness`."""
        if self.old_logprobs != "auto":
            return self
        stale = max_staleness > 0 and self.correction.importance == "none"
        return self.model_copy(update={"old_logprobs": "sampler" if stale else "learner"})

    @property
    def signal(self) -> Signal:
        """What of the rewards the advantage compares."""
        if not isinstance(self.advantage, Named):
            return SUM
        return ESTIMATORS[self.advantage.name].signal(self.advantage)

    @property
    def compares(self) -> bool:
        """Whether an episode is compared with its siblings, so that equal rewards carry no signal. Unknown for a
        user-supplied function."""
        return isinstance(self.advantage, Named) and self.advantage.name not in ALONE

    @property
    def own_metrics(self) -> bool:
        """Whether a loss of the user's own may add metrics under any name."""
        return isinstance(self.loss, OwnFunction)

    def idle_parameters(self, max_staleness: int) -> list[str]:
        """What the user set that has no effect because the ratio is always 1."""
        sampler = self.decided(max_staleness).old_logprobs == "sampler"
        if sampler or self.updates_per_step * self.epochs > 1:
            return []
        found = ["algorithm.ratio_veto"] if "ratio_veto" in self.written and self.ratio_veto else []
        found += ["algorithm.correction.off_policy"] if self.correction.off_policy else []
        if isinstance(self.loss, OwnFunction):
            return found
        unrelated = {"name", "importance", *(("fraction",) if self.loss.name == "clip_cov" else ())}
        given = sorted(self.loss.model_fields_set - unrelated)
        return found + [f"algorithm.loss.{name}" for name in given if not name.startswith("cov_")]

    def _idle_value_clip(self, critic: CriticConfig) -> bool:
        """Whether the user set the critic's clip, and its values never leave those before the step."""
        updates = (critic.updates_per_step or self.updates_per_step) * (critic.epochs or self.epochs)
        return updates == 1 and "value_clip" in critic.written and critic.value_clip is not None

    def notes(self, max_staleness: int, critic: CriticConfig | None = None) -> list[str]:
        """Notes on settings that do less than they appear to."""
        found = []
        if names := self.idle_parameters(max_staleness):
            found.append(
                f"{', '.join(names)}: no effect; with one update a step and the learner's own old "
                "log-probabilities the policy ratio is always 1 (algorithm.updates_per_step or algorithm.epochs "
                "above 1 changes that)"
            )
        if critic is not None and self._idle_value_clip(critic):
            found.append(
                "critic.value_clip: no effect; with one update of the critic a step its values are those before "
                "the step (critic.updates_per_step or critic.epochs above 1 changes that)"
            )
        if self.kl.in_loss and self.kl.kind in ("k1", "abs"):
            found.append(
                f"algorithm.kl.kind {self.kl.kind} in the loss: its gradient is not that of the KL divergence "
                f"({_WRONG_GRADIENT[self.kl.kind]}); use `auto`, or {self.kl.kind}+ to keep the reported value"
            )
        return found


def _dead_parameters(advantage: Named | OwnFunction) -> list[str]:
    """Errors about parameters of an estimator that others of its parameters disable."""
    if isinstance(advantage, OwnFunction):
        return []

    def changed(name: str) -> bool:
        fields = type(advantage).model_fields
        return name in fields and getattr(advantage, name) != fields[name].default

    undivided = getattr(advantage, "std", "") == "none" or not getattr(advantage, "normalize_std", True)
    found = []
    if undivided and changed("eps") and advantage.name != "gdpo":  # which also divides by that of the step
        found.append(
            "algorithm.advantage.eps has no effect where nothing is divided by a standard deviation: remove it"
        )
    if changed("per") and getattr(advantage, "gamma", None) == 1.0 and getattr(advantage, "lam", 1.0) == 1.0:
        both = " and lam: 1.0" if advantage.name == "gae" else ""
        found.append(
            f"algorithm.advantage.per has no effect with gamma: 1.0{both}, which discount nothing: remove it"
        )
    return found


def _dead_keys(config: AlgorithmConfig) -> list[str]:
    """Errors about keys that are missing or have no effect."""
    kl = config.kl
    norm, bypass = config.aggregation == "seq-mean-token-sum-norm", config.old_logprobs == "sampler"
    weighs = config.correction.importance != "none"
    checks = (
        (config.aggregation_scale and not norm, "aggregation_scale", "aggregation: seq-mean-token-sum-norm"),
        (kl.in_reward and config.advantage.name == "gdpo", "kl.where", "another advantage than gdpo"),
        (
            config.drop_zero_signal_groups and config.advantage.name == "gae",
            "drop_zero_signal_groups",
            "an advantage that compares episodes",
        ),
        (weighs and bypass, "correction.importance", "old_logprobs: learner or auto"),
    )
    found = [f"algorithm.{key} has no effect without {other}: remove it" for dead, key, other in checks if dead]
    found += _dead_parameters(config.advantage)
    if norm and config.aggregation_scale is None:
        found.append(
            "algorithm.aggregation_scale is missing: seq-mean-token-sum-norm divides by a constant; give the most "
            "tokens an episode may sample"
        )
    if kl.in_reward and config.advantage.name == "max_rl":
        found.append(
            f"algorithm.kl.where {kl.where} can make rewards negative, and algorithm.advantage max_rl needs "
            "rewards of at least 0: use algorithm.kl.where loss"
        )
    if kl.where == "reward" and kl.kind not in ("auto", "k1", "abs", "k2", "k3") and kl.coef > 0:
        found.append(f"algorithm.kl.kind {kl.kind} differs in its gradient, and a reward has none: write k1 or k3")
    return found
