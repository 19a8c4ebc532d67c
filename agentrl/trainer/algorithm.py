"""The algorithm of a run: groups to rows, rows to advantages, and the step-wide inputs of the loss.

Everything that depends on the whole step is computed here, once: advantages, rejected tokens, the mean of the
correction weights, tokens selected by a loss. The results therefore do not depend on ranks or micro-batches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.algo.correction import LogprobDrift
from agentrl.algo.kl import AdaptiveKL, FixedKL, KLController
from agentrl.algo.metrics import Metric, Metrics
from agentrl.algo.parameters import Named
from agentrl.config.algorithm import AlgorithmConfig, KLConfig
from agentrl.config.choice import OwnFunction
from agentrl.config.run import RunConfig
from agentrl.errors import ConfigError
from agentrl.learner.policy_loss import make_policy_loss
from agentrl.trainer.advantages import (
    StepTokens,
    correct_rows,
    explained_variance,
    kl_of_envs,
    with_kl_mean,
    without_advantage,
)
from agentrl.trainer.estimator import NamedEstimator, make_estimator
from agentrl.trainer.hints import Hinted, Hints
from agentrl.trainer.samples import TrainingRows, joined, scores_by_env, to_samples, with_constant
from agentrl.types import Group, Sample

LATE_FIELDS = frozenset({"values_N", "old_logprobs_N", "sum_pi_squared_N"})
"""Columns an estimator may need from the learner."""
LOSS_COLUMNS = frozenset(
    {
        "learner_logprobs",
        "ref_logprobs",
        "values",
        "returns",
        "correction",
        "selected",
        "high_entropy",
        "kl_scale",
        "taught",
        "kl_mean",
    }
)
"""Columns read by the losses; others are removed before the step."""


class Algorithm:
    """Turns scored groups into the rows of a step. Its methods are pure except for the weight of the KL penalty.

    Args:
        overlong: what happens to episodes that a limit cut, see `rollout.overlong`.
        reference_apart: whether the reference has ranks to itself, so its log-probabilities must be annotated.
        by_env: advantage estimators of envs that have their own.
        kl_by_env: weights of the KL penalty of envs that have their own.
        hints: makes the hints of a teacher that reads them.
        taught: the envs that have a teacher, if others have none.
        record: whether steps return what their updates saw of each token.

    Raises:
        ConfigError: a user-supplied function cannot be loaded or is invalid.
    """

    def __init__(
        self,
        config: AlgorithmConfig,
        *,
        overlong: str = "train",
        reference_apart: bool = False,
        by_env: Mapping[str, Named | OwnFunction] | None = None,
        kl_by_env: Mapping[str, float] | None = None,
        hints: Hints | None = None,
        taught: Collection[str] | None = None,
        record: bool = False,
    ) -> None:
        self.config, self.overlong, self.reference_apart = config, overlong, reference_apart
        self.record, self.kl_by_env, self.hints, self.taught = record, dict(kl_by_env or {}), hints, taught
        self.estimator = make_estimator(config)
        self.by_env = {
            name: make_estimator(config.model_copy(update={"advantage": advantage}))
            for name, advantage in (by_env or {}).items()
        }
        self.configured = make_policy_loss(config)
        self.kl = make_kl_control(config.kl)

    def rows(self, groups: Sequence[Group]) -> TrainingRows:
        """Sampled tokens, each reward on the token that earned it."""
        samples, scores = to_samples(groups, overlong=self.overlong, observed=self.config.observation_coef > 0)
        hinted = Hinted(samples, {}, {}) if self.hints is None else self.hints.add(samples, groups)
        samples = hinted.rows
        if self.kl_by_env and self.config.kl.in_loss:
            samples = [self._kl_scaled(row) for row in samples]
        if self.taught is not None:
            samples = [with_constant(row, "taught", float(row.env in self.taught)) for row in samples]
        return TrainingRows(
            samples,
            metrics=hinted.metrics,
            hints=hinted.texts,
            kl_coef=self.kl.coef,
            scores=scores,
            by_env=scores_by_env(groups, overlong=self.overlong),
            num_episodes=len({s.episode_id for s in samples}),
            record=self.record,
        )

    def advantages(self, rows: TrainingRows) -> TrainingRows:
        """Estimate the advantage of every trained token; the KL penalty first, if it is part of the reward.

        With several envs, the episodes of each are estimated by themselves: no baseline or normalizer, even one
        over the whole batch, sees the episodes of another env.
        """
        if not rows.samples:
            return rows
        parts = []
        for part, estimator in self._by_env(rows):
            tokens = StepTokens.of(part, self.configured)
            estimator.check(tokens.step.component_names)
            parts.append(tokens.with_advantages(estimator.estimate(tokens.step)))
        scored = joined(rows, parts) if rows.by_env else parts[0]
        metrics = {**rows.metrics, **scored.metrics, **explained_variance(scored.samples)}
        return self.without_signal(replace(scored, metrics=metrics))

    def _by_env(self, rows: TrainingRows) -> Iterator[tuple[TrainingRows, NamedEstimator]]:
        """The rows of each env with its estimator; with a single env, all rows."""
        if not rows.by_env:
            yield rows, self.estimator
        for env, scores in rows.by_env.items():
            own = frozenset(scores.episodes)
            samples = [s for s in rows.samples if s.episode_id in own]
            kl_coef = self.kl_by_env.get(env, rows.kl_coef)
            if samples:
                part = replace(rows, samples=samples, scores=scores, kl_coef=kl_coef)
                yield part, self.by_env.get(env, self.estimator)

    def _kl_scaled(self, row: Sample) -> Sample:
        """Note the weight of the KL penalty of a row's env, relative to the run's."""
        return with_constant(row, "kl_scale", self.kl_by_env.get(row.env, self.kl.coef) / self.kl.coef)

    def without_signal(self, rows: TrainingRows) -> TrainingRows:
        """Mark or drop what has no advantage, where that changes nothing or the configuration asks for it."""
        idle = without_advantage(rows.samples, lambda row: row.episode_id)
        metrics, samples = rows.metrics | {"episodes_without_advantage": _count(len(idle))}, rows.samples
        if self.config.drop_zero_signal_groups:
            dropped = without_advantage(samples, lambda row: row.group)
            samples = [row for row in samples if row.group not in dropped]
            metrics = metrics | {"dropped_groups": _count(len(dropped))}
        return replace(rows, samples=samples, idle=idle if self.skips else frozenset(), metrics=metrics)

    def corrections(self, rows: TrainingRows) -> TrainingRows:
        """Weigh, reject and select tokens by the learner's log-probabilities, if they were annotated."""
        active = [row for row in rows.samples if row.episode_id not in rows.idle]
        metrics: Metrics = {}
        measured = LogprobDrift()
        if active and "learner_logprobs" in active[0].columns:
            active, metrics, measured = correct_rows(active, self.configured)
        samples = active
        if rows.idle:
            following = iter(active)  # as many as before: nothing is rejected where rows are idle
            samples = [row if row.episode_id in rows.idle else next(following) for row in rows.samples]
        if samples and all("ref_logprobs" in row.columns for row in samples):
            kl = kl_of_envs(samples)
            metrics = metrics | {f"env/{env}/kl": metric for env, metric in kl.items() if env}
            if self.config.kl.in_loss and self.config.kl.loss_kind == "centered":
                samples = with_kl_mean(samples, kl)
        if self.config.kl.loss_kind != "full":
            samples = [_answered(row) for row in samples]
        return replace(
            rows, samples=[_stripped(row) for row in samples], metrics=rows.metrics | metrics, drift=measured
        )

    @property
    def late(self) -> bool:
        """Whether advantages need columns of the learner."""
        return bool(self._estimators_need & LATE_FIELDS) or self.config.kl.in_reward

    @property
    def advantage_needs(self) -> frozenset[str]:
        """Columns that `advantages` reads: old and reference log-probabilities, values."""
        return self._needs if self.late else frozenset()

    @property
    def loss_needs(self) -> frozenset[str]:
        """Columns that corrections and loss read, unless they were annotated for the advantages."""
        return frozenset() if self.late else self._needs

    @property
    def skips(self) -> bool:
        """Whether an episode whose advantages are all 0 changes nothing but the counts, so that its rows need no
        pass. Never if a critic learns from it, it has a penalty, bonus or observation loss, or its tokens affect
        other episodes."""
        c, correction = self.config, self.configured.correction
        shared = correction.normalize or correction.reject or correction.veto is not None or c.entropy_top < 1
        learns = c.kl.in_loss or c.entropy_coef or c.observation_coef or "values_N" in self.estimator.needs
        return self.configured.silent and not (learns or shared)

    def observe(self, values: Mapping[str, float], num_episodes: int) -> dict[str, float]:
        """Adapt the weight of the KL penalty to a step's metrics; returns metrics to log."""
        used = self.kl.coef
        kl = values.get("kl", values.get("kl_in_reward"))
        if kl is not None:
            self.kl.update(kl, num_episodes)
        return {"kl_coef": used} if self.config.kl.control == "adaptive" else {}

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, as JSON."""
        return {"kl": self.kl.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a checkpoint; one without this part was written with a fixed weight.

        Raises:
            KeyError, TypeError, ValueError: the state is damaged.
        """
        if "kl" in state:
            self.kl.load_state_dict(state["kl"])

    @property
    def _estimators_need(self) -> frozenset[str]:
        """Fields of StepData that the run's estimators need."""
        return self.estimator.needs.union(*(estimator.needs for estimator in self.by_env.values()))

    @property
    def _needs(self) -> frozenset[str]:
        """Columns that the learner must annotate before the first update."""
        c, found = self.config, {"ref_logprobs"} if self.reference_apart else set[str]()
        if "values_N" in self._estimators_need:
            found.add("values")
        if "sum_pi_squared_N" in self._estimators_need:
            found.add("sum_pi_squared")
        again = c.kl.in_loss and c.epochs > 1 and c.kl.loss_kind != "full"
        if c.kl.in_reward or again or (c.kl.in_loss and c.kl.loss_kind == "centered"):
            found.add("ref_logprobs")
        if c.entropy_top < 1:
            found.add("entropy")
        correction = self.configured.correction
        if (
            "old_logprobs_N" in self._estimators_need
            or c.kl.in_reward
            or self.configured.select is not None
            or (c.updates_per_step * c.epochs > 1 and c.old_logprobs != "sampler")
            or correction.normalize
            or correction.reject
            or correction.veto is not None
        ):
            found.add("learner_logprobs")
        return frozenset(found)


def algorithm_of(config: RunConfig, reference_apart: bool, hints: Hints | None, *, record: bool) -> Algorithm:
    """The algorithm of a run, including what its envs override; see `Algorithm`.

    Raises:
        ConfigError: a critic without an advantage that needs its values, or the other way round.
    """
    own, servers = {name: env.algorithm for name, env in config.envs.items()}, config.teachers_on_servers
    algorithm = Algorithm(
        config.decided_algorithm,
        overlong=config.rollout.overlong,
        reference_apart=reference_apart,
        by_env={name: of_env.advantage for name, of_env in own.items() if of_env.advantage},
        kl_by_env={name: of_env.kl_coef for name, of_env in own.items() if of_env.kl_coef is not None},
        hints=hints,
        taught=servers if servers and hints is None and len(servers) < len(own) else None,
        record=record,
    )
    needed = "values_N" in algorithm.estimator.needs
    for name, estimator in algorithm.by_env.items():
        if ("values_N" in estimator.needs) != needed:
            raise ConfigError(
                f"envs.{name}.algorithm.advantage {'does not need' if needed else 'needs'} values_N, unlike "
                "algorithm.advantage: a critic learns from all episodes of a run, so an advantage with its values "
                "cannot be chosen or replaced for a single env"
            )
    if (config.critic is not None) != needed:
        raise ConfigError(
            "algorithm.advantage needs values_N, which a critic gives: add the section `critic`"
            if needed
            else "algorithm.advantage does not list values_N in its `needs`, so no critic learns: list it, or "
            "remove the section `critic`"
        )
    return algorithm


def make_kl_control(config: KLConfig) -> KLController:
    """The weight of the KL penalty."""
    if config.control == "adaptive":
        return AdaptiveKL(config.coef, target=config.target, horizon=config.horizon)
    return FixedKL(config.coef)


def _count(number: int) -> Metric:
    return Metric("sum", float(number))


def _answered(row: Sample) -> Sample:
    """Without the hint, if the teacher has read it."""
    return replace(row, hinted=None) if row.hinted is not None and "ref_logprobs" in row.columns else row


def _stripped(row: Sample) -> Sample:
    """Without the columns that no loss reads."""
    if row.columns.keys() <= LOSS_COLUMNS:
        return row
    return replace(row, columns={k: v for k, v in row.columns.items() if k in LOSS_COLUMNS})
