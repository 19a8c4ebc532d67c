"""The work of one step, split over updates, ranks and micro-batches before any of it is done.

The learner splits and the ranks only compute. Counts that normalize the loss are those of the whole update,
so that neither the number of ranks nor the split changes the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from agentrl.algo.aggregate import Totals, totals_of_lengths
from agentrl.algo.correction import LogprobDrift, merge_drift
from agentrl.algo.metrics import Metrics, merge_metrics, metric_values
from agentrl.learner.pack import micro_batches
from agentrl.types import Sample

Rows = tuple[Sample, ...]
Columns = Mapping[str, tuple[float, ...]]
"""A model's outputs for a row: values of its trained tokens, by name."""
TokenValues = Mapping[str, NDArray[np.float32]]
"""What an update saw of a row's trained tokens, by name, for the record."""
NOTHING: Rows = (Sample((0, 0), (False, False), (0.0, 0.0), (0.0, 0.0), (0, 0), episode_id=""),)
"""What a rank computes that has no rows for a micro-batch, so that it takes part: nothing of it is trained."""
OF_UPDATE = ("loss", "policy_kl", "clip_fraction", "ratio_veto", "grad_norm")
"""Metrics that a step of several updates has of each."""
UNEVEN = 1.1
"""Groups stay on one rank, where they share their prefix, unless a rank would get this much more than the mean."""


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step, ready for the loss.

    Attributes:
        samples: every row that counts, with the columns that the loss reads.
        idle: episodes that count but add nothing to the gradient, so their rows need no forward pass.
        kl_coef: weight of the KL penalty in this step.
        metrics: what was measured while the rows were prepared.
        drift: between sampler and learner, if it was measured while the rows were prepared.
        record: whether the step returns what its updates saw of each token.
    """

    samples: Sequence[Sample]
    idle: frozenset[str] = frozenset()
    kl_coef: float = 0.0
    metrics: Metrics = field(default_factory=dict)
    drift: LogprobDrift = LogprobDrift()  # noqa: RUF009 - frozen
    record: bool = False


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did.

    Attributes:
        metrics: to log.
        tokens: tokens of all rows; what rows share counts in each.
        trained: tokens under the loss.
        values: what the updates of the first pass saw of each row's trained tokens, in the order of the rows;
            empty for idle rows, and for all if nothing is recorded.
        timing: of each rank, to log, if there are several.
    """

    metrics: Mapping[str, float]
    tokens: int
    trained: int
    values: Sequence[TokenValues] = ()
    timing: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """One rank's part of one optimizer update.

    Attributes:
        rows: by micro-batch; every rank has the same number, so that collectives match, and some may be empty.
        totals: counts of the whole update, over all ranks.
        kl_coef: weight of the KL penalty in this step.
        columns: names of the columns that the rows of this step have.
        record: whether the rank returns what the update saw of each token.
    """

    rows: tuple[Rows, ...]
    totals: Totals
    kl_coef: float = 0.0
    columns: tuple[str, ...] = ()
    record: bool = False


@dataclass(frozen=True, slots=True)
class RankResult:
    """The result of one rank's part of a step; `grad_norm` and `lr` are the same on all ranks."""

    metrics: Metrics
    drift: LogprobDrift
    grad_norm: float
    lr: float
    updates: Sequence[Metrics] = ()
    """The metrics of each optimizer update, those in `OF_UPDATE`."""
    values: Sequence[Sequence[TokenValues]] = ()
    """For each recorded update what it saw of each row, micro-batch by micro-batch in the order of
    `in_pack_order`."""
    forward_seconds: float = 0.0
    """How long the policy's blocks computed in forward passes; 0 if there is one rank."""


@dataclass(frozen=True, slots=True)
class Passes:
    """How the episodes of a step are distributed over optimizer updates.

    Attributes:
        updates: mini-batches of one pass.
        epochs: passes.
        seed: with the number of the pass and an episode's id it says where the episode comes in a pass.
    """

    updates: int = 1
    epochs: int = 1
    seed: int = 0

    def mini_batches(self, episodes: Sequence[str]) -> list[list[str]]:
        """The episodes of each update. In a single pass they are dealt out in their order, so that each update has
        its share of every group; of several each has its own order, which depends on nothing but seed and
        ids: not on ranks, and not on whether the run was resumed."""
        found = []
        for epoch in range(self.epochs):
            order = list(episodes) if self.epochs == 1 else sorted(episodes, key=lambda e: self._draw(epoch, e))
            found += [part for start in range(self.updates) if (part := order[start :: self.updates])]
        return found

    def _draw(self, epoch: int, episode: str) -> bytes:
        return blake2b(f"{self.seed}/{epoch}/{episode}".encode(), digest_size=16).digest()


def split_step(
    step: StepRows, passes: Passes, *, ranks: int, max_tokens: int, apart: bool = False
) -> list[list[MicroBatches]]:
    """For each rank its part of each optimizer update: episodes whole, tokens balanced.

    Idle episodes have their places in the mini-batches and their counts, and no rows.

    Raises:
        ConfigError: one episode alone has more than `max_tokens` tokens.
    """
    by_rank: list[list[MicroBatches]] = [[] for _ in range(ranks)]
    lengths = trained_by_episode(step.samples)
    rows_of: dict[str, list[tuple[int, Sample]]] = {name: [] for name in lengths}
    for place, sample in enumerate(step.samples):
        if sample.episode_id not in step.idle:
            rows_of[sample.episode_id].append((place, sample))
    columns = next((tuple(rows[0][1].columns) for rows in rows_of.values() if rows), ())
    for number, episodes in enumerate(passes.mini_batches(list(lengths)) or [[]]):
        totals = totals_of_lengths(lengths[name] for name in episodes)
        part = [row for _, row in sorted((row for name in episodes for row in rows_of[name]), key=lambda r: r[0])]
        totals = totals._replace(num_observed=sum(sum(row.observed) for row in part))
        for rank, rows in enumerate(split_rows(part, ranks=ranks, max_tokens=max_tokens, apart=apart)):
            # A gradient of 0 is one as well: the optimizer continues by its momentum.
            rows = rows or ((),) if totals.num_tokens else rows
            record = step.record and number < passes.updates
            by_rank[rank].append(MicroBatches(rows, totals, step.kl_coef, columns, record))
    return by_rank


def split_rows(
    samples: Sequence[Sample], *, ranks: int, max_tokens: int, apart: bool = False
) -> list[tuple[Rows, ...]]:
    """For each rank its micro-batches, as many on every rank; for `apart` see `micro_batches`.

    Raises:
        ConfigError: one episode alone has more than `max_tokens` tokens.
    """
    shares = [samples] if ranks == 1 else balanced(samples, ranks)
    found = [[tuple(rows) for rows in micro_batches(share, max_tokens, apart=apart)] for share in shares]
    most = max(len(rows) for rows in found)
    return [(*rows, *[()] * (most - len(rows))) for rows in found]


def balanced(samples: Sequence[Sample], ranks: int) -> list[list[Sample]]:
    """The rows of each rank: about the same number of tokens, episodes whole and, if it is even, groups too."""
    groups = _shares(samples, ranks, lambda s: str(s.group))
    sizes = [sum(len(s.ids) for s in share) for share in groups]
    if max(sizes) <= UNEVEN * sum(sizes) / ranks:
        return groups
    return _shares(samples, ranks, lambda s: s.episode_id)


def merge_results(
    step: StepRows, results: Sequence[RankResult], critic: Sequence[Metrics] = (), *, epochs: int = 1
) -> StepResult:
    """The result of a step, from earlier measurements and the results of all ranks.

    Args:
        critic: metrics of the critic's own ranks.
    """
    values = metric_values(merge_metrics([step.metrics, *(r.metrics for r in results), *critic]))
    measured = merge_drift([step.drift, *(r.drift for r in results)])
    values |= {f"drift/{k}": v for k, v in measured.metrics().items()}
    values |= {"grad_norm": results[0].grad_norm, "lr": results[0].lr}
    updates = [merge_metrics(parts) for parts in zip(*(r.updates for r in results), strict=True)]
    if "loss" in values:
        values["loss"] /= max(len(updates), 1)
    if len(updates) > 1:
        for number, found in enumerate(updates, 1):
            of_update = {name: metric for name, metric in found.items() if name in OF_UPDATE}
            values |= {f"update/{number}/{name}": value for name, value in metric_values(of_update).items()}
    trained = sum(sum(s.loss_mask) for s in step.samples)
    passed = sum(len(s.ids) for s in step.samples if s.episode_id not in step.idle)
    return StepResult(values, passed * epochs, trained)


def rank_timing(
    work: Sequence[Sequence[MicroBatches]], results: Sequence[RankResult], *, times: int = 1
) -> dict[str, float]:
    """What each rank computed in a step and how long, as metrics; {} for a single one.

    Args:
        times: how many neighbors share each part.
    """
    found: dict[str, float] = {}
    for number, (updates, result) in enumerate(zip(work, results, strict=True)):
        if len(results) > 1 and result.forward_seconds:
            tokens = sum(len(row.ids) for update in updates for rows in update.rows for row in rows)
            found[f"rank/{number * times}/forward_seconds"] = result.forward_seconds
            found[f"rank/{number * times}/tokens"] = float(tokens)
    return found


def trained_by_episode(samples: Sequence[Sample]) -> dict[str, int]:
    """Tokens under the loss, by episode."""
    counts: dict[str, int] = {}
    for sample in samples:
        counts[sample.episode_id] = counts.get(sample.episode_id, 0) + sum(sample.loss_mask)
    return counts


def _shares(samples: Sequence[Sample], ranks: int, unit: Callable[[Sample], str]) -> list[list[Sample]]:
    """Give each unit, largest first, to the rank with the fewest tokens so far."""
    units: dict[str, list[Sample]] = {}
    for sample in samples:
        units.setdefault(unit(sample), []).append(sample)
    shares: list[list[Sample]] = [[] for _ in range(ranks)]
    used = [0] * ranks
    for rows in sorted(units.values(), key=lambda rows: sum(len(s.ids) for s in rows), reverse=True):
        rank = used.index(min(used))
        shares[rank] += rows
        used[rank] += sum(len(s.ids) for s in rows)
    return shares
