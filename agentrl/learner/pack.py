"""Rows of tokens packed end to end, without padding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.learner.attention.packed import Span, Spans
from agentrl.types import Sample


@dataclass(frozen=True, slots=True)
class Packed:
    """One micro-batch, rows end to end, T tokens, each shared prefix once. No padding.

    Tensors with suffix _N run over the N trained tokens; `source_N` is the flat position that predicts each,
    `sequence_N` numbers the episodes from 0, and `columns` are those of the samples.
    """

    ids_T: Tensor
    positions_T: Tensor
    spans: Spans
    source_N: Tensor
    ids_N: Tensor
    sampler_logprobs_N: Tensor
    advantages_N: Tensor
    sequence_N: Tensor
    columns: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class _Layout:
    """The layout of packed rows."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    rows: list[Span] = field(default_factory=list)

    def add(self, ids: Sequence[int], first: int) -> int:
        start = len(self.ids)
        self.ids += ids
        self.positions += range(first, first + len(ids))
        return start


def pack(
    samples: Sequence[Sample], device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Packed:
    """Lay the rows of one micro-batch end to end; rows of a group share their common prefix.

    The tokens that all rows of a group have in common before the first trained one (system prompt, tools, user
    message) are computed once, with the gradient of all rows flowing through them: same result, fewer tokens.

    Raises:
        ValueError: the first token of a row is under the loss mask, if nothing predicts it.
    """
    groups = _by_group(samples)
    layout = _Layout()
    source, ids, logprobs, advantages, sequence = [], [], [], [], []
    numbers: dict[str, int] = {}
    columns: dict[str, list[float]] = {name: [] for name in (samples[0].columns if samples else ())}
    for rows in groups.values():
        shared = _shared_prefix(rows)
        prefix_at = layout.add(rows[0].ids[:shared], 0)
        if shared:
            layout.rows.append(Span(prefix_at, 0, prefix_at, shared))
        for row in rows:
            own_at = layout.add(row.ids[shared:], shared)
            layout.rows.append(Span(prefix_at, shared, own_at, len(row.ids) - shared))
            number = numbers.setdefault(row.episode_id, len(numbers))
            trained = [t for t, on in enumerate(row.loss_mask) if on]
            if trained and trained[0] == 0:
                raise ValueError(f"episode {row.episode_id}: the first token of a row cannot be trained")
            source += [prefix_at + t - 1 if t <= shared else own_at + t - 1 - shared for t in trained]
            ids += [row.ids[t] for t in trained]
            logprobs += [row.logprobs[t] for t in trained]
            advantages += [row.advantages[t] for t in trained]
            sequence += [number] * len(trained)
            for name, column in columns.items():
                column += row.columns[name]
    return Packed(
        ids_T=torch.tensor(layout.ids, device=device),
        positions_T=torch.tensor(layout.positions, device=device),
        spans=Spans(layout.rows, torch.device(device)),
        source_N=torch.tensor(source, dtype=torch.long, device=device),
        ids_N=torch.tensor(ids, dtype=torch.long, device=device),
        sampler_logprobs_N=torch.tensor(logprobs, dtype=dtype, device=device),
        advantages_N=torch.tensor(advantages, dtype=dtype, device=device),
        sequence_N=torch.tensor(sequence, dtype=torch.long, device=device),
        columns={name: torch.tensor(values, dtype=dtype, device=device) for name, values in columns.items()},
    )


def in_pack_order(samples: Sequence[Sample]) -> list[Sample]:
    """The rows in the order in which `pack` lays them, so that of their trained tokens."""
    return [row for rows in _by_group(samples).values() for row in rows]


def _by_group(samples: Sequence[Sample]) -> dict[int, list[Sample]]:
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    return groups


def _shared_prefix(rows: Sequence[Sample]) -> int:
    """How many leading tokens all rows have in common before anything is trained; 0 for a single row."""
    if len(rows) < 2:
        return 0
    first, last = min(r.ids for r in rows), max(r.ids for r in rows)  # all others are between these two
    common = next(
        (t for t, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last))
    )
    untrained = min(r.loss_mask.index(True) if True in r.loss_mask else len(r.ids) for r in rows)
    return min(common, untrained, min(len(r.ids) for r in rows) - 1)


def micro_batches(samples: Sequence[Sample], max_tokens: int) -> list[list[Sample]]:
    """Split into micro-batches of at most `max_tokens` packed tokens, groups together where they fit.

    A group's shared prefix counts once, as it is computed once; the rows of an episode stay together. Groups, or
    what fits of them, go in by size, largest first, each into the first micro-batch with room.

    Raises:
        ConfigError: one episode alone has more than `max_tokens` tokens.
    """
    units = [unit for rows in _by_group(samples).values() for unit in _fitting(rows, max_tokens)]
    bins: list[tuple[int, list[Sample]]] = []
    for size, rows in sorted(units, key=lambda unit: unit[0], reverse=True):
        place = next((i for i, (used, _) in enumerate(bins) if used + size <= max_tokens), None)
        if place is None:
            bins.append((size, rows))
        else:
            used, held = bins[place]
            bins[place] = (used + size, held + rows)
    return [rows for _, rows in bins]


def _fitting(group: Sequence[Sample], max_tokens: int) -> Iterable[tuple[int, list[Sample]]]:
    """The group in parts of whole episodes that fit, with the packed size of each."""
    episodes: dict[str, list[Sample]] = {}
    for sample in group:
        episodes.setdefault(sample.episode_id, []).append(sample)
    size, part = 0, list[Sample]()
    for name, rows in episodes.items():
        if (alone := _packed_size(rows)) > max_tokens:
            raise ConfigError(
                f"episode {name} has {alone} tokens, more than learner.tokens_per_micro_batch = {max_tokens}: "
                "raise it, or lower rollout.token_budget"
            )
        together = _packed_size([*part, *rows])
        if together > max_tokens:
            yield size, part
            size, part = alone, rows
        else:
            size, part = together, [*part, *rows]
    yield size, part


def _packed_size(rows: Sequence[Sample]) -> int:
    """How many tokens `pack` makes of rows of one group."""
    return sum(len(row.ids) for row in rows) - _shared_prefix(rows) * (len(rows) - 1)
