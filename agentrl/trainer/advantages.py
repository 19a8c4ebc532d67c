"""Inputs of estimators and corrections for a whole step, as flat tensors over all trained tokens."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from agentrl.algo.correction import LogprobDrift, correct, drift, normalizer, weight_sums
from agentrl.algo.entropy import entropy_threshold, high_entropy_mask
from agentrl.algo.kl import kl_per_token
from agentrl.algo.metrics import Metric, Metrics, mean_of
from agentrl.algo.step_data import Advantages, StepData, penalize_kl
from agentrl.learner.policy_loss import ConfiguredLoss
from agentrl.trainer.samples import Flat, Scores, TrainingRows, with_constant
from agentrl.types import Sample, has_teacher

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The trained tokens of a step, and what its advantages are estimated from.

    Attributes:
        rows: the rows they are from.
        flat: all tokens, in the order of the rows.
        segment_N: the number of each one's segment in its episode.
        order_N: from that order to the order of sampling.
        step: the estimator's input, with tokens in the order of sampling.
        metrics: of the KL penalty in the reward.
    """

    rows: TrainingRows
    flat: Flat
    segment_N: Tensor
    order_N: Tensor
    step: StepData
    metrics: Metrics

    @classmethod
    def of(cls, rows: TrainingRows, configured: ConfiguredLoss) -> StepTokens:
        """The tokens of these rows; a KL penalty in the reward is subtracted."""
        flat = Flat.of(rows.samples, rows.scores.episodes)
        segment_N = flat.column("segment").long()
        width = int(segment_N.max()) + 1 if segment_N.numel() else 1
        order_N = torch.argsort(flat.sequence_N * width + segment_N, stable=True)
        return cls(
            rows, flat, segment_N, order_N, *step_data(flat, order_N, rows.scores, configured, rows.kl_coef)
        )

    def with_advantages(self, found: Advantages) -> TrainingRows:
        """The rows with the advantages (and returns) that an estimator found."""
        advantages_N = self._unordered(found.advantages_N.to(torch.float64))
        by_segment = advantages_by_segment(self.flat, self.segment_N, advantages_N)
        metrics = dict(self.metrics)
        if found.returns_N is not None:
            self.flat.add("returns", self._unordered(found.returns_N))
        samples = with_advantages(self.flat, advantages_N)
        return replace(self.rows, samples=samples, by_segment=by_segment, metrics=metrics)

    def _unordered(self, values_N: Tensor) -> Tensor:
        """From the order of sampling to the order of the rows."""
        out_N = torch.empty_like(values_N)
        out_N[self.order_N] = values_N
        return out_N


def step_data(
    flat: Flat, order_N: Tensor, scores: Scores, configured: ConfiguredLoss, kl_coef: float
) -> tuple[StepData, Metrics]:
    """The estimator's input, with tokens in sampling order."""
    config = configured.config

    def ordered(name: str) -> Tensor:
        return flat.column(name)[order_N]

    has = flat.rows[0].columns.keys() if flat.rows else ()
    sampler_N = flat.trained("logprobs")[order_N]
    learner_N = ordered("learner_logprobs") if "learner_logprobs" in has else sampler_N
    old_N = sampler_N if config.old_logprobs == "sampler" else learner_N
    sequence_N = flat.sequence_N[order_N]
    weights_N = None
    if "learner_logprobs" in has and configured.correction.importance != "none":
        everything_N = torch.ones_like(sequence_N, dtype=torch.bool)
        weights_N = correct(learner_N, sampler_N, sequence_N, everything_N, configured.correction).weights_T
    names = sorted({name for each in scores.parts for name in each})
    parts = [[float(each.get(name, 0.0)) for name in names] for each in scores.parts]
    step = StepData(
        rewards_E=torch.tensor(scores.rewards, dtype=torch.float64),
        group_E=torch.tensor(scores.groups, dtype=torch.long),
        sequence_N=sequence_N,
        rewards_N=ordered("reward"),
        turn_N=ordered("turn").long(),
        values_N=ordered("values") if "values" in has else None,
        greedy_E=None if scores.greedy is None else torch.tensor(scores.greedy, dtype=torch.float64),
        components_EK=torch.tensor(parts, dtype=torch.float64) if names else None,
        old_logprobs_N=old_N if "learner_logprobs" in has else None,
        sum_pi_squared_N=ordered("sum_pi_squared") if "sum_pi_squared" in has else None,
        correction_N=weights_N,
        length_E=torch.tensor(scores.lengths, dtype=torch.float64) if scores.lengths else None,
        component_names=tuple(names),
    )
    if not config.kl.in_reward:
        return step, {}
    ref_N, kind = ordered("ref_logprobs"), config.kl.reward_kind
    kl_N = kl_per_token(kind, old_N, ref_N, torch.ones_like(sequence_N, dtype=torch.bool))
    taught_N = kl_N[ordered("taught") > 0] if "taught" in has else kl_N
    return penalize_kl(step, old_N, ref_N, coef=kl_coef, kind=kind), {"kl_in_reward": mean_of(taught_N)}


def explained_variance(rows: Sequence[Sample]) -> Metrics:
    """The fraction of the variance of the returns that the values explain: 1 is all of it, 0 equals a constant.

    Without a critic, or if the returns do not vary, there is nothing to log.
    """
    flat = Flat.of([row for row in rows if {"returns", "values"} <= row.columns.keys()])
    returns_N, values_N = flat.column("returns"), flat.column("values")
    if returns_N.numel() < 2 or returns_N.var() < 1e-12:
        return {}
    explained = 1 - (returns_N - values_N).var() / returns_N.var()
    return {"critic/explained_variance": mean_of(explained[None])}


def advantages_by_segment(flat: Flat, segment_N: Tensor, advantages_N: Tensor) -> dict[str, dict[int, float]]:
    """Episode id -> segment -> mean advantage of its tokens."""
    sums: dict[str, dict[int, tuple[float, int]]] = {row.episode_id: {} for row in flat.rows}
    counts = flat.counts
    for row, segments, values in zip(
        flat.rows, torch.split(segment_N, counts), torch.split(advantages_N, counts), strict=True
    ):
        own = sums[row.episode_id]
        for segment, value in zip(segments.tolist(), values.tolist(), strict=True):
            total, number = own.get(segment, (0.0, 0))
            own[segment] = (total + value, number + 1)
    return {
        episode: {segment: total / number for segment, (total, number) in own.items()}
        for episode, own in sums.items()
    }


def correct_rows(rows: Sequence[Sample], configured: ConfiguredLoss) -> tuple[list[Sample], Metrics, LogprobDrift]:
    """Measure the drift between sampler and learner; weigh, reject and select tokens over the whole step."""
    config, correction = configured.config, configured.correction
    flat = Flat.of(rows)
    learner_N, sampler_N = flat.column("learner_logprobs"), flat.trained("logprobs")
    everything_N = torch.ones_like(flat.sequence_N, dtype=torch.bool)
    measured = drift(learner_N, sampler_N, flat.sequence_N, everything_N)
    corrected = correct(learner_N, sampler_N, flat.sequence_N, everything_N, correction)
    metrics, keep_N = dict(corrected.metrics), corrected.keep_T
    if config.entropy_top < 1:
        entropy_N = flat.column("entropy")
        high_N = high_entropy_mask(entropy_N, everything_N, entropy_threshold(entropy_N, config.entropy_top))
        metrics["high_entropy_fraction"] = mean_of(high_N)
        flat.add("high_entropy", high_N.to(learner_N.dtype))
    weights_N = corrected.weights_T
    if correction.importance != "none":
        if correction.normalize:
            level = correction.importance
            weights_N = weights_N * normalizer(
                [weight_sums(weights_N, flat.sequence_N, everything_N, level=level)]
            )
        flat.add("correction", weights_N)
    if configured.select is not None:
        chosen_N = torch.zeros_like(keep_N)
        chosen_N[keep_N] = configured.select(
            flat.trained("advantages")[keep_N], learner_N[keep_N], flat.keys_N[keep_N]
        )
        flat.add("selected", chosen_N.to(learner_N.dtype))
    return (flat.rows if bool(keep_N.all()) else flat.kept(keep_N)), metrics, measured


def kl_of_envs(rows: Sequence[Sample]) -> dict[str, Metric]:
    """How far the sampler is from the reference or teacher, on average over the tokens of each env with one."""
    found = {}
    for env in dict.fromkeys(row.env for row in rows if has_teacher(row)):
        flat = Flat.of([row for row in rows if row.env == env and has_teacher(row)])
        found[env] = mean_of(flat.trained("logprobs") - flat.column("ref_logprobs"))
    return found


def with_kl_mean(rows: Sequence[Sample], kl: Mapping[str, Metric]) -> list[Sample]:
    """Note the mean of its env with each token; see `kl_of_envs`."""
    means = {env: float(metric.value) / float(metric.num) for env, metric in kl.items()}
    return [with_constant(row, "kl_mean", means.get(row.env, 0.0)) for row in rows]


def without_advantage(rows: Sequence[Sample], key: Callable[[Sample], K]) -> frozenset[K]:
    """The episodes or groups (by `key`) without a token under the loss whose advantage is not 0."""
    loud = {key(row) for row in rows if any(a for a, on in zip(row.advantages, row.loss_mask, strict=True) if on)}
    return frozenset(map(key, rows)) - loud


def with_advantages(flat: Flat, advantages_N: Tensor) -> list[Sample]:
    """The rows of `flat` with the advantage of each trained token, 0 elsewhere."""
    samples = []
    for row, values_N in zip(flat.rows, torch.split(advantages_N, flat.counts), strict=True):
        values = iter(values_N.tolist())
        samples.append(replace(row, advantages=tuple(next(values) if on else 0.0 for on in row.loss_mask)))
    return samples
