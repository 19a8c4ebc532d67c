"""What happens to a step's rows before the first update, over all ranks at once.

Whatever is a question about the whole step is answered here, once: advantages that need values, old or reference
log-probabilities; which tokens are rejected; the mean of the correction weights; which tokens a loss selects. The
learner only adds what it says of each token (`evaluate`). So no answer depends on micro-batches or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from agentrl.algo.correction import LogprobDrift, correct, drift, normalizer, weight_sums
from agentrl.algo.entropy import entropy_threshold, high_entropy_mask
from agentrl.algo.metrics import Metric, Metrics, mean_of
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.train.advantages import Scores, estimate_advantages
from agentrl.train.algorithm import make_algorithm, make_kl_control
from agentrl.train.flat import Flat
from agentrl.types import Sample

K = TypeVar("K", bound=Hashable)
Evaluate = Callable[[Sequence[Sample]], Sequence[Sample]]
"""The same rows, in any order, with the columns that `Preparation.evaluates` names."""
LOSS_COLUMNS = (
    *("learner_logprobs", "ref_logprobs", "values", "returns", "correction", "selected", "high_entropy"),
)
"""What the losses read; other columns go no further."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Rows ready for the loss, and what was found on the way.

    Attributes:
        samples: all that counts.
        idle: the episodes among them that count and need no pass: they add nothing to the gradient.
        advantages: those of each episode's sampled segments by number, where they were estimated here.
    """

    samples: Sequence[Sample]
    idle: frozenset[str] = frozenset()
    metrics: Metrics = field(default_factory=dict)
    drift: LogprobDrift = LogprobDrift()  # noqa: RUF009 - frozen
    advantages: Mapping[str, Mapping[int, float]] = field(default_factory=dict)


class Preparation:
    """The part of an algorithm that sees whole steps; whoever drives the ranks has one.

    Args:
        reference_apart: the reference is not where the loss is computed: what it says is asked for beforehand.

    Raises:
        ConfigError: a function of the user's own cannot be used.
    """

    def __init__(self, config: AlgorithmConfig, *, reference_apart: bool = False) -> None:
        self.config = config
        self.algorithm = make_algorithm(config)
        self.evaluates = self.algorithm.evaluates | ({"ref_logprobs"} if reference_apart else set())
        """What the models must say of every token before the first update, by column name."""
        self.kl = make_kl_control(config.kl)

    def prepare(self, samples: Sequence[Sample], scores: Scores | None, evaluate: Evaluate) -> Prepared:
        """Rows with advantages and everything else that the loss needs to know of the whole step.

        Args:
            scores: what the advantages are made from; None where the rows have theirs already.
            evaluate: adds the learner's columns to rows.
        """
        if not samples:
            return Prepared(samples)
        late, rows = self.algorithm.late, list(samples)
        if late:
            rows = list(evaluate(rows))
        metrics: Metrics = {}
        advantages: Mapping[str, Mapping[int, float]] = {}
        if scores is not None:
            estimated = estimate_advantages(rows, scores, self.algorithm, kl_coef=self.kl.coef)
            rows, metrics, advantages = estimated.samples, estimated.metrics, estimated.by_segment
        idle = without_advantage(rows, lambda row: row.episode_id)
        if scores is not None:
            metrics = metrics | {"episodes_without_advantage": _count(len(idle))}
        if self.config.drop_zero_signal_groups:
            dropped = without_advantage(rows, lambda row: row.group)
            rows = [row for row in rows if row.group not in dropped]
            metrics = metrics | {"dropped_groups": _count(len(dropped))}
        idle = idle if self.algorithm.skips else frozenset()
        rows, found, measured = self._evaluated(rows, idle, None if late else evaluate)
        return Prepared([_stripped(row) for row in rows], idle, metrics | found, measured, advantages)

    def _evaluated(
        self, rows: Sequence[Sample], idle: frozenset[str], evaluate: Evaluate | None
    ) -> tuple[list[Sample], Metrics, LogprobDrift]:
        """All rows; those that are not idle with what the models say of them, weighed, rejected and selected."""
        active = [row for row in rows if row.episode_id not in idle]
        if active and evaluate is not None and self.evaluates:
            active = list(evaluate(active))
        metrics: Metrics = {}
        measured = LogprobDrift()
        if active and "learner_logprobs" in active[0].columns:
            active, metrics, measured = self._correct(active)
        if not idle:
            return active, metrics, measured
        following = iter(active)  # as many as before: nothing is rejected where rows are idle
        return [row if row.episode_id in idle else next(following) for row in rows], metrics, measured

    def after(self, values: Mapping[str, float], num_episodes: int) -> dict[str, float]:
        """Take in what a step came to; returns what there is to log of it."""
        used = self.kl.coef
        kl = values.get("kl", values.get("kl_in_reward"))
        if kl is not None:
            self.kl.update(kl, num_episodes)
        return {"kl_coef": used} if self.config.kl.control == "adaptive" else {}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs, as JSON."""
        return {"kl": self.kl.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; one without this part was written with a fixed weight.

        Raises:
            KeyError, TypeError, ValueError: the state is damaged.
        """
        if "kl" in state:
            self.kl.load_state_dict(state["kl"])

    def _correct(self, rows: Sequence[Sample]) -> tuple[list[Sample], Metrics, LogprobDrift]:
        """Measure the drift; weigh, reject and select tokens."""
        algorithm, config = self.algorithm, self.config
        flat = Flat.of(rows)
        learner_N, sampler_N = flat.column("learner_logprobs"), flat.trained("logprobs")
        everything_N = torch.ones_like(flat.sequence_N, dtype=torch.bool)
        measured = drift(learner_N, sampler_N, flat.sequence_N, everything_N)
        corrected = correct(learner_N, sampler_N, flat.sequence_N, everything_N, algorithm.correction)
        metrics, keep_N = dict(corrected.metrics), corrected.keep_T
        if config.entropy_top < 1:
            entropy_N = flat.column("entropy")
            high_N = high_entropy_mask(entropy_N, everything_N, entropy_threshold(entropy_N, config.entropy_top))
            metrics["high_entropy_fraction"] = mean_of(high_N)
            flat.add("high_entropy", high_N.to(learner_N.dtype))
        weights_N = corrected.weights_T
        if algorithm.correction.importance != "none":
            if algorithm.correction.normalize:
                level = algorithm.correction.importance
                weights_N = weights_N * normalizer(
                    [weight_sums(weights_N, flat.sequence_N, everything_N, level=level)]
                )
            flat.add("correction", weights_N)
        if algorithm.select is not None:
            chosen_N = torch.zeros_like(keep_N)
            chosen_N[keep_N] = algorithm.select(
                flat.trained("advantages")[keep_N], learner_N[keep_N], flat.keys_N[keep_N]
            )
            flat.add("selected", chosen_N.to(learner_N.dtype))
        return (flat.rows if bool(keep_N.all()) else flat.kept(keep_N)), metrics, measured


def without_advantage(rows: Sequence[Sample], key: Callable[[Sample], K]) -> frozenset[K]:
    """The episodes or groups (by `key`) without a token under the loss whose advantage is not 0."""
    loud = {key(row) for row in rows if any(a for a, on in zip(row.advantages, row.loss_mask, strict=True) if on)}
    return frozenset(map(key, rows)) - loud


def _count(number: int) -> Metric:
    return Metric("sum", float(number))


def _stripped(row: Sample) -> Sample:
    """Without the columns that no loss reads."""
    if row.columns.keys() <= set(LOSS_COLUMNS):
        return row
    return replace(row, columns={k: v for k, v in row.columns.items() if k in LOSS_COLUMNS})
