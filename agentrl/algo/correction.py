"""The difference between sampler and learner: always measured, optionally corrected.

The sampler's log-probabilities of a token and the learner's, under the very same weights, differ: other
kernels, another precision, weights that arrived late. With d = learner - sampler of a token:

    drift        measures it, and a gate stops the run if it is too large;
    weights      exp(d), truncated or cut to a band, per token or per sequence, multiply the loss;
    rejection    takes tokens or whole sequences out of the loss mask;
    veto         takes out sequences with a token whose ratio learner / sampler is too small.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple, get_args

from agentrl.algo.kl import bounded_exp
from agentrl.algo.late import Tensor, torch
from agentrl.algo.metrics import Metrics, max_of, mean_of, min_of
from agentrl.algo.parameters import STATISTICS, Level, Statistic
from agentrl.algo.segments import num_segments, segment_count, segment_max, segment_mean, segment_sum, trained


@dataclass(frozen=True, slots=True)
class LogprobDrift:
    """Sums over trained tokens of d = learner logprob - sampler logprob; parts add up over ranks.

    The learner evaluates the tokens under the very weights that sampled them: without error d is 0.
    """

    tokens: float = 0.0
    sequences: float = 0.0
    sum_d: float = 0.0
    sum_abs_d: float = 0.0
    max_abs_d: float = 0.0
    sum_k3: float = 0.0
    """exp(d) - 1 - d, an estimate of KL(sampler, learner)."""
    sum_ratio: float = 0.0
    """exp(d)."""
    sum_square_ratio: float = 0.0
    sum_sequence_d: float = 0.0
    """Of the mean d of each sequence."""
    sum_sequence_abs_d: float = 0.0
    sum_sequence_ppl_ratio: float = 0.0
    """Of the learner's over the sampler's perplexity, exp(-mean d), of each sequence."""

    def __add__(self, other: LogprobDrift) -> LogprobDrift:
        merged = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        merged["max_abs_d"] = largest(self.max_abs_d, other.max_abs_d)
        return LogprobDrift(**merged)

    def metrics(self) -> dict[str, float]:
        """The numbers to log; empty if no token was trained.

        mean_abs and max_abs: |d| over tokens; kl: mean of -d; k3: mean of exp(d) - 1 - d;
        chi2: mean of exp(2d) - 1; ess: effective sample size of the token ratios as a share of the tokens, 1
        without drift; ppl_ratio: mean over sequences of learner perplexity / sampler perplexity.
        """
        if self.tokens == 0:
            return {}
        n, s = self.tokens, max(self.sequences, 1.0)
        return {
            "mean_abs": self.sum_abs_d / n,
            "max_abs": self.max_abs_d,
            "kl": -self.sum_d / n,
            "k3": self.sum_k3 / n,
            "chi2": self.sum_square_ratio / n - 1,
            "ess": self.sum_ratio**2 / (n * self.sum_square_ratio) if self.sum_square_ratio else 0.0,
            "log_ppl_diff": -self.sum_sequence_d / s,
            "log_ppl_abs_diff": self.sum_sequence_abs_d / s,
            "ppl_ratio": self.sum_sequence_ppl_ratio / s,
        }


def largest(a: float, b: float) -> float:
    """The larger one; nan if either is nan, so that problems stay visible."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


def drift(learner_T: Tensor, sampler_T: Tensor, sequence_T: Tensor, loss_mask_T: Tensor) -> LogprobDrift:
    """Measure the drift of one micro-batch.

    Args:
        learner_T: [T] log-probabilities under the learner, of the weights that sampled.
        sampler_T: [T] log-probabilities that the sampler gave.
        sequence_T: [T] long, the episode of each token; all tokens of an episode lie in this micro-batch.
        loss_mask_T: [T] bool, True on trained tokens; elsewhere nothing is read.
    """
    learner_N, sampler_N, seq_N = trained(loss_mask_T, learner_T.detach(), sampler_T.detach(), sequence_T)
    if not seq_N.numel():
        return LogprobDrift()
    d_N = learner_N.double() - sampler_N.double()
    ratio_N = bounded_exp(d_N)
    mean_d_S = segment_mean(d_N, seq_N)[segment_count(seq_N) > 0]
    measured = torch.stack(  # one transfer from the device for all of them
        [
            d_N.sum(),
            d_N.abs().sum(),
            d_N.abs().max(),
            (ratio_N - 1 - d_N).sum(),
            ratio_N.sum(),
            ratio_N.square().sum(),
            mean_d_S.sum(),
            mean_d_S.abs().sum(),
            bounded_exp(-mean_d_S).sum(),
        ]
    )
    return LogprobDrift(float(d_N.numel()), float(mean_d_S.numel()), *measured.tolist())


def merge_drift(parts: Iterable[LogprobDrift]) -> LogprobDrift:
    """The drift of several micro-batches or ranks together."""
    return sum(parts, start=LogprobDrift())


@dataclass(frozen=True, slots=True)
class DriftGate:
    """Limits of the drift; None sets no limit. If one is exceeded, the run should stop instead of training on."""

    mean_abs: float | None = 0.1
    max_abs: float | None = None
    k3: float | None = None
    ess: float | None = None
    """Lowest effective sample size, as a share of the tokens."""

    def exceeded(self, values: Mapping[str, float]) -> str | None:
        """Which limits the metrics of a drift exceed, in words; None if all hold. A nan exceeds every limit."""
        found: list[str] = []
        for name in ("mean_abs", "max_abs", "k3", "ess"):
            limit = getattr(self, name)
            if limit is None or name not in values:
                continue
            holds = values[name] >= limit if name == "ess" else values[name] <= limit
            if not holds:
                side = "below" if name == "ess" else "above"
                found.append(f"{name} {values[name]:.4g} is {side} the limit {limit:g}")
        return "; ".join(found) or None


@dataclass(frozen=True, slots=True)
class Reject:
    """One rejection rule: tokens outside the limits of its statistic are removed from the loss mask.

    k1 is -d, k2 is d^2 / 2, k3 is exp(d) - 1 - d; a statistic "token_..." rejects tokens, "seq_..." whole
    sequences by the sum, mean or largest value over their tokens. "seq_mean_k1" is the geometric mean ratio.
    """

    statistic: Statistic
    high: float
    """k1: the largest ratio sampler / learner; k2, k3: the largest value."""
    low: float | None = None
    """k1 only: the smallest ratio; 1 / high if it is left out."""

    def __post_init__(self) -> None:
        if self.statistic not in STATISTICS:
            raise ValueError(f"unknown statistic {self.statistic!r}; there are {', '.join(STATISTICS)}")
        if not self.high > 0:
            raise ValueError(f"{self.statistic}: high must be above 0, got {self.high}")
        if self.statistic.endswith("k1"):
            low = 1 / self.high if self.low is None else self.low
            if not 0 < low <= self.high:
                raise ValueError(f"{self.statistic}: needs 0 < low <= high, got {self.low}, {self.high}")
        elif self.low is not None:
            raise ValueError(f"{self.statistic} is never negative: it takes high only, got low={self.low}")


@dataclass(frozen=True, slots=True)
class Correction:
    """How to correct the difference; by default not at all."""

    importance: Level = "none"
    """Multiply the loss of each token by the ratio learner / sampler of the token or of its sequence."""
    high: float = 2.0
    """Ratios count up to this."""
    low: float | None = None
    """Where given, ratios outside [low, high] count as 0 (IcePop) instead of being truncated at high."""
    normalize: bool = False
    """Scale the weights of the step to a mean of 1 (over tokens, or over sequences)."""
    reject: tuple[Reject, ...] = ()
    """Rules that take tokens or sequences out of the loss."""
    veto: float | None = None
    """Take out every sequence with a token whose ratio learner / sampler is below this (1e-4, say)."""

    def __post_init__(self) -> None:
        check_band(self.importance, self.low, self.high)
        if self.veto is not None and not 0 < self.veto < 1:
            raise ValueError(f"veto must be in (0, 1), got {self.veto}")


class Corrected(NamedTuple):
    """`weights_T` multiply the weights of the loss (1 without importance weights, 0 where not trained);
    `keep_T` is the loss mask without what was rejected: totals and aggregation weights are computed from it.
    """

    weights_T: Tensor
    keep_T: Tensor
    metrics: Metrics


def check_band(level: str, low: float | None, high: float) -> None:
    """Raises ValueError unless `level` is known and [low, high] is a band of ratios."""
    if level not in get_args(Level):
        raise ValueError(f"unknown level of importance weights {level!r}: none, token or sequence")
    if not high > 0 or (low is not None and not 0 < low < high):
        raise ValueError(f"importance weights need 0 < low < high (low may be left out), got {low}, {high}")


def correct(
    learner_T: Tensor, sampler_T: Tensor, sequence_T: Tensor, loss_mask_T: Tensor, config: Correction
) -> Corrected:
    """Weights, mask and metrics of one micro-batch; arguments as in `drift`.

    Rejection does not change the weights of what is kept. With `normalize`, divide the weights by the step's
    mean afterwards: `weight_sums` of all micro-batches and ranks, added up.
    """
    mask_T = loss_mask_T.bool()
    learner_N, sampler_N, seq_N = trained(mask_T, learner_T.detach(), sampler_T.detach(), sequence_T)
    d_N = learner_N - sampler_N
    weights_T = mask_T.to(d_N.dtype)
    metrics: Metrics = {}
    if config.importance != "none":
        weight_N = importance_weights(d_N, seq_N, level=config.importance, low=config.low, high=config.high)
        weights_T = weights_T.masked_scatter(mask_T, weight_N)
        metrics |= _weight_metrics(d_N, weight_N, seq_N, config)
    keep_N = torch.ones_like(seq_N, dtype=torch.bool)
    for rule in config.reject:
        kept_N = rejection(d_N, seq_N, rule)
        metrics[f"rejected/{rule.statistic}"] = mean_of(~kept_N)
        keep_N = keep_N & kept_N
    if config.veto is not None:
        lowest_S = -segment_max(-d_N, seq_N)
        kept_N = (lowest_S >= math.log(config.veto))[seq_N]
        metrics["rejected/veto"] = mean_of(~kept_N)
        keep_N = keep_N & kept_N
    if config.reject or config.veto is not None:
        metrics["rejected/tokens"] = mean_of(~keep_N)
        touched_S = segment_max((~keep_N).to(d_N.dtype), seq_N)[segment_count(seq_N) > 0]
        metrics["rejected/sequences_touched"] = mean_of(touched_S)
    return Corrected(weights_T, mask_T.masked_scatter(mask_T, keep_N), metrics)


def importance_weights(d_N: Tensor, sequence_N: Tensor, *, level: Level, low: float | None, high: float) -> Tensor:
    """[N] exp(d) of each token, or exp(sum of d) of its sequence; truncated at `high`, or 0 off the band.

    Args:
        d_N: [N] log-ratios of trained tokens, without gradient.
        low: where given, ratios outside [low, high] count as 0.

    Source: truncated importance sampling, Ionides 2008; the band is IcePop, arXiv:2510.18855.
    """
    if level == "none":
        return torch.ones_like(d_N)
    log_N = segment_sum(d_N, sequence_N)[sequence_N] if level == "sequence" else d_N
    ratio_N = torch.exp(log_N.clamp(-_MAX_LOG, _MAX_LOG))
    if low is None:
        return ratio_N.clamp(max=high)
    return torch.where((ratio_N >= low) & (ratio_N <= high), ratio_N, torch.zeros_like(ratio_N))


_MAX_LOG = 20.0


def weight_sums(
    weights_T: Tensor, sequence_T: Tensor, loss_mask_T: Tensor, *, level: Level
) -> tuple[float, float]:
    """(sum, number) whose totals over the step give the mean weight that `normalize` divides by.

    Per token at level "token"; at level "sequence" each sequence counts once.
    """
    weight_N, seq_N = trained(loss_mask_T, weights_T, sequence_T)
    if level == "sequence":
        weight_N = segment_mean(weight_N, seq_N)[segment_count(seq_N) > 0]
    return float(weight_N.double().sum()), float(weight_N.numel())


def normalizer(parts: Iterable[tuple[float, float]]) -> float:
    """1 / mean weight of the step, from the `weight_sums` of its parts; 1 where the weights sum to nothing."""
    pairs = list(parts)
    total, number = sum(p[0] for p in pairs), sum(p[1] for p in pairs)
    return number / total if total > 0 else 1.0


def rejection(d_N: Tensor, sequence_N: Tensor, rule: Reject) -> Tensor:
    """[N] bool, True on the trained tokens that the rule keeps."""
    scope, _, kind = rule.statistic.rpartition("_")
    if kind == "k1":
        value_N = -d_N
        low, high = math.log(1 / rule.high if rule.low is None else rule.low), math.log(rule.high)
    else:
        value_N = d_N.square() / 2 if kind == "k2" else bounded_exp(d_N) - 1 - d_N
        low, high = -math.inf, rule.high
    if scope != "token":
        reduce = {"seq_sum": segment_sum, "seq_mean": segment_mean, "seq_max": segment_max}[scope]
        value_N = reduce(value_N, sequence_N, num_segments(sequence_N))[sequence_N]
    return (value_N >= low) & (value_N <= high)


def off_policy_sequences(
    new_T: Tensor,
    old_T: Tensor,
    advantages_T: Tensor,
    sequence_T: Tensor,
    loss_mask_T: Tensor,
    *,
    threshold: float,
) -> Tensor:
    """[T] bool: the loss mask without the tokens of negative advantage in sequences that have drifted away.

    A sequence has drifted where the mean of old - new over its trained tokens is above the threshold.
    Source: DeepSeek-V3.2, arXiv:2512.02556.
    """
    mask_T = loss_mask_T.bool()
    new_N, old_N, adv_N, seq_N = trained(mask_T, new_T.detach(), old_T.detach(), advantages_T, sequence_T)
    drifted_N = (segment_mean(old_N - new_N, seq_N) > threshold)[seq_N]
    return mask_T.masked_scatter(mask_T, ~(drifted_N & (adv_N < 0)))


def believed_sequences(
    new_T: Tensor, old_T: Tensor, sequence_T: Tensor, loss_mask_T: Tensor, *, limit: float
) -> Tensor:
    """[T] bool: the loss mask without sequences that have a token whose ratio new / old is above the limit.

    The old policy held such a token to be all but impossible, and yet it was sampled: its log-probability is
    wrong, and if no clip bounds the ratio (gspo, geo_mean) its gradient would drown all others.
    """
    mask_T = loss_mask_T.bool()
    new_N, old_N, seq_N = trained(mask_T, new_T.detach(), old_T.detach(), sequence_T)
    highest_S = segment_max(new_N - old_N, seq_N)
    return mask_T.masked_scatter(mask_T, (highest_S <= math.log(limit))[seq_N])


def _weight_metrics(d_N: Tensor, weight_N: Tensor, seq_N: Tensor, config: Correction) -> Metrics:
    log_N = segment_sum(d_N, seq_N)[seq_N] if config.importance == "sequence" else d_N
    metrics = {
        "importance/mean": mean_of(weight_N),
        "importance/max": max_of(weight_N),
        "importance/min": min_of(weight_N),
        "importance/above": mean_of(log_N > math.log(config.high)),
    }
    if config.low is not None:
        metrics["importance/below"] = mean_of(log_N < math.log(config.low))
    return metrics
