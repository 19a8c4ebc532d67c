"""Advantages for the rows of a step: what each token did better than its siblings, the critic, or the step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from agentrl.algo.correction import correct
from agentrl.algo.kl import kl_per_token
from agentrl.algo.metrics import Metrics, mean_of
from agentrl.algo.step_data import StepData, penalize_kl
from agentrl.train.algorithm import Algorithm
from agentrl.train.flat import Flat
from agentrl.types import Sample


@dataclass(frozen=True, slots=True)
class Scores:
    """The scored episodes of a step. They all vote; those that train have rows.

    Attributes:
        episodes: their ids.
        rewards: total reward of each.
        groups: the number of each one's group.
        greedy: reward of the greedy episode of the same task, where there is one.
        parts: the rewards of each by name. One that an episode was not given counts 0; nan says that it does not
            apply to the episode, which then neither votes for it nor gets anything from it.
    """

    episodes: Sequence[str]
    rewards: Sequence[float]
    groups: Sequence[int]
    greedy: Sequence[float] | None = None
    parts: Sequence[Mapping[str, float]] = ()


@dataclass(frozen=True, slots=True)
class Estimated:
    """Rows with advantages (and returns); `by_segment` has those of each episode's sampled segments by number."""

    samples: list[Sample]
    metrics: Metrics = field(default_factory=dict)
    by_segment: Mapping[str, Mapping[int, float]] = field(default_factory=dict)


def estimate_advantages(
    rows: Sequence[Sample], scores: Scores, algorithm: Algorithm, *, kl_coef: float
) -> Estimated:
    """Estimate the advantages of a step.

    Every row is returned, also those whose advantages are all 0: penalties and means count them as well.

    Args:
        rows: with the columns `reward`, `turn` and `segment`, and what the estimator needs of the learner.
        kl_coef: weight of the KL penalty, where it is part of the reward.
    """
    flat = Flat.of(rows, scores.episodes)
    segment_N = flat.column("segment").long()
    width = int(segment_N.max()) + 1 if segment_N.numel() else 1
    order_N = torch.argsort(flat.sequence_N * width + segment_N, stable=True)  # as they were sampled
    step, metrics = _step_data(flat, order_N, scores, algorithm, kl_coef)
    found = algorithm.estimate(step, part_names(scores.parts))
    advantages_N = _back(found.advantages_N.to(torch.float64), order_N)
    by_segment = _by_segment(flat, segment_N, advantages_N)
    if found.returns_N is not None:
        flat.add("returns", _back(found.returns_N, order_N))
        metrics["critic/explained_variance"] = mean_of(_explained(found.returns_N, step.values_N)[None])
    samples = []
    for row, values_N in zip(flat.rows, torch.split(advantages_N, flat.counts), strict=True):
        values = iter(values_N.tolist())
        by_token = tuple(next(values) if on else 0.0 for on in row.loss_mask)
        samples.append(replace(row, advantages=by_token))
    return Estimated(samples, metrics, by_segment)


def part_names(parts: Iterable[Mapping[str, float]]) -> list[str]:
    """The names of the rewards of a step."""
    return sorted({name for each in parts for name in each})


def _step_data(
    flat: Flat, order_N: Tensor, scores: Scores, algorithm: Algorithm, kl_coef: float
) -> tuple[StepData, Metrics]:
    """What the estimator is given, tokens as they were sampled."""
    config = algorithm.config

    def ordered(name: str) -> Tensor:
        return flat.column(name)[order_N]

    has = flat.rows[0].columns.keys() if flat.rows else ()
    sampler_N = flat.trained("logprobs")[order_N]
    learner_N = ordered("learner_logprobs") if "learner_logprobs" in has else sampler_N
    old_N = sampler_N if config.old_logprobs == "sampler" else learner_N
    sequence_N = flat.sequence_N[order_N]
    weights_N = None
    if "learner_logprobs" in has and algorithm.correction.importance != "none":
        everything_N = torch.ones_like(sequence_N, dtype=torch.bool)
        weights_N = correct(learner_N, sampler_N, sequence_N, everything_N, algorithm.correction).weights_T
    names = part_names(scores.parts)
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
    )
    if not config.kl.in_reward:
        return step, {}
    ref_N, kind = ordered("ref_logprobs"), config.kl.reward_kind
    kl_N = kl_per_token(kind, old_N, ref_N, torch.ones_like(sequence_N, dtype=torch.bool))
    return penalize_kl(step, old_N, ref_N, coef=kl_coef, kind=kind), {"kl_in_reward": mean_of(kl_N)}


def _back(values_N: Tensor, order_N: Tensor) -> Tensor:
    """From the order of sampling to the order of the rows."""
    out_N = torch.empty_like(values_N)
    out_N[order_N] = values_N
    return out_N


def _explained(returns_N: Tensor, values_N: Tensor | None) -> Tensor:
    """The share of the variance of the returns that the values explain: 1 is all, 0 is that of a constant."""
    if values_N is None or returns_N.numel() < 2:
        return torch.zeros((), dtype=torch.float64)
    return 1 - (returns_N - values_N).var() / returns_N.var().clamp(min=1e-12)


def _by_segment(flat: Flat, segment_N: Tensor, advantages_N: Tensor) -> dict[str, dict[int, float]]:
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
