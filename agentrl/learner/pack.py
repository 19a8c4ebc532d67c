"""Rows of tokens packed end to end, without padding, what they share once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.learner.attention.packed import Spans
from agentrl.learner.prefix_tree import Tree, TreeSize, common, prefix_tree, tree_size
from agentrl.learner.sequence import SequenceRanks
from agentrl.types import Sample


def _no_tokens() -> Tensor:
    return torch.zeros(0, dtype=torch.long)


@dataclass(frozen=True, slots=True)
class Packed:
    """One micro-batch, a prefix tree of T tokens, shared ones once. No padding.

    Tensors with suffix _N run over the N trained tokens; `source_N` is the flat position that predicts each,
    `sequence_N` numbers the episodes from 0, and `columns` are those of the samples. `routes_TLk` are the experts
    that the sampler's routers chose, -1 where they are not known; None if none is. `observed_ids_O` are the O
    tokens of the env's answers, predicted at `observed_source_O`.
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
    routes_TLk: Tensor | None = None
    observed_source_O: Tensor = field(default_factory=_no_tokens)
    observed_ids_O: Tensor = field(default_factory=_no_tokens)

    def with_observed(self) -> Packed:
        """The same tokens, and the observed ones are predicted as well: N + O, the trained ones first."""
        if not len(self.observed_ids_O):
            return self
        source = torch.cat([self.source_N, self.observed_source_O])
        return replace(self, source_N=source, ids_N=torch.cat([self.ids_N, self.observed_ids_O]))

    def part(self) -> PackedPart:
        """What this rank computes of it: all, unless ranks split the rows."""
        ranks = self.spans.sequence
        if ranks is None:
            return PackedPart(
                self.ids_T, self.positions_T, self.spans, self.source_N, self.ids_N, routes_TLk=self.routes_TLk
            )
        piece = ranks.piece(len(self.ids_T))
        owner_N = self.source_N // piece
        own_N = owner_N == ranks.place
        return PackedPart(
            ranks.own(self.ids_T),
            ranks.own(self.positions_T),
            self.spans,
            self.source_N[own_N] - ranks.place * piece,
            self.ids_N[own_N],
            owner_N,
            None if self.routes_TLk is None else ~ranks.own(~self.routes_TLk),  # -1 in the padding
        )


@dataclass(frozen=True, slots=True)
class PackedPart:
    """What one rank computes of a packed batch: t of its tokens, and the trained tokens that these predict.

    `ids_N` are targets: the token behind the last one of a piece belongs to the next rank's.
    """

    ids_T: Tensor
    positions_T: Tensor
    spans: Spans
    source_N: Tensor
    ids_N: Tensor
    owner_N: Tensor | None = None
    routes_TLk: Tensor | None = None

    def own(self, given_N: Tensor) -> Tensor:
        """The part of this rank, from what is known of all trained tokens of the batch."""
        ranks = self.spans.sequence
        return given_N if ranks is None or self.owner_N is None else given_N[self.owner_N == ranks.place]

    def whole(self, found_N: Tensor) -> Tensor:
        """What was found for all trained tokens of the batch, from what each rank found for its own."""
        ranks = self.spans.sequence
        return found_N if ranks is None or self.owner_N is None else ranks.gathered(found_N, self.owner_N)


def pack(
    samples: Sequence[Sample],
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    together: SequenceRanks | None = None,
) -> Packed:
    """Lay the rows of one micro-batch end to end as a prefix tree.

    Tokens that rows have in common from their first one on (system prompt, tools, user message, turns before an
    episode branched) are computed once, with the gradients of all rows flowing through them: same result, fewer
    tokens. A sampled token that several rows train is predicted once and has a loss in each. Tokens that are
    computed once have one route: that of the first row that knows it.

    Args:
        together: the ranks that compute it, a piece each; None if one computes all of it.

    Raises:
        ValueError: the first token of a row is under the loss mask, if nothing predicts it.
    """
    rows = in_pack_order(samples)
    tree = prefix_tree([row.ids for row in rows])
    source, ids, logprobs, advantages, sequence = [], [], [], [], []
    observed_source, observed_ids = [np.zeros(0, np.int64)], list[int]()
    numbers: dict[str, int] = {}
    columns: dict[str, list[float]] = {name: [] for name in (samples[0].columns if samples else ())}
    for place, row in enumerate(rows):
        number = numbers.setdefault(row.episode_id, len(numbers))
        trained = [t for t, on in enumerate(row.loss_mask) if on]
        if trained and trained[0] == 0:
            raise ValueError(f"episode {row.episode_id}: the first token of a row cannot be trained")
        source.append(tree.positions(place)[np.asarray(trained, np.int64) - 1])
        ids += [row.ids[t] for t in trained]
        logprobs += [row.logprobs[t] for t in trained]
        advantages += [row.advantages[t] for t in trained]
        sequence += [number] * len(trained)
        for name, column in columns.items():
            column += row.columns[name]
        if observed := [t for t, on in enumerate(row.observed) if on]:
            observed_source.append(tree.positions(place)[np.asarray(observed, np.int64) - 1])
            observed_ids += [row.ids[t] for t in observed]
    spans = Spans(tree.spans, torch.device(device), together)
    return Packed(
        ids_T=torch.from_numpy(tree.ids_T).to(device),
        positions_T=spans.places(),
        spans=spans,
        source_N=torch.from_numpy(np.concatenate(source)).to(device),
        ids_N=torch.tensor(ids, dtype=torch.long, device=device),
        sampler_logprobs_N=torch.tensor(logprobs, dtype=dtype, device=device),
        advantages_N=torch.tensor(advantages, dtype=dtype, device=device),
        sequence_N=torch.tensor(sequence, dtype=torch.long, device=device),
        columns={name: torch.tensor(values, dtype=dtype, device=device) for name, values in columns.items()},
        routes_TLk=_routes(rows, tree, device),
        observed_source_O=torch.from_numpy(np.concatenate(observed_source)).to(device),
        observed_ids_O=torch.tensor(observed_ids, dtype=torch.long, device=device),
    )


def _routes(rows: Sequence[Sample], tree: Tree, device: torch.device | str) -> Tensor | None:
    """[T, L, k] the experts of each flat position."""
    first = next((row.routes for row in rows if row.routes is not None), None)
    if first is None:
        return None
    kind, shape = np.dtype(f"i{first.width}"), (-1, first.layers, first.top_k)
    routes_TLk = np.full((len(tree.ids_T), *shape[1:]), -1, kind)
    for place, row in enumerate(rows):
        if row.routes is not None:
            at = tree.positions(place)
            new = routes_TLk[at, 0, 0] < 0
            routes_TLk[at[new]] = np.frombuffer(row.routes.data, kind).reshape(shape)[new]
    return torch.from_numpy(routes_TLk).to(device)


def longest_ids(row: Sample) -> tuple[int, ...]:
    """The tokens of a row with its hint, if it has one: the most that any model reads of it."""
    return row.ids if row.hinted is None else row.hinted.ids + row.ids[row.hinted.length :]


def as_taught(row: Sample) -> Sample:
    """The row as its teacher reads it: with its hint, and the same tokens under the loss."""
    if row.hinted is None:
        return row
    cut, ids = row.hinted.length, row.hinted.ids
    zeros = (0.0,) * len(ids)
    return replace(
        row,
        ids=longest_ids(row),
        loss_mask=(False,) * len(ids) + row.loss_mask[cut:],
        logprobs=zeros + row.logprobs[cut:],
        advantages=zeros + row.advantages[cut:],
        versions=(0,) * len(ids) + row.versions[cut:],
        routes=None,
        hinted=None,
        observed=(),
    )


def in_pack_order(samples: Sequence[Sample]) -> list[Sample]:
    """The rows in the order in which `pack` lays them, so that of their trained tokens."""
    return [row for rows in _by_group(samples).values() for row in rows]


def _by_group(samples: Sequence[Sample]) -> dict[int, list[Sample]]:
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    return groups


def micro_batches(samples: Sequence[Sample], max_tokens: int, *, apart: bool = False) -> list[list[Sample]]:
    """Split into micro-batches of at most `max_tokens` packed tokens, groups together where they fit.

    What rows share counts once, as it is computed once; the rows of an episode stay together. Hints count, because
    a teacher reads the same micro-batches. A group that does not fit is cut where its episodes share least. Groups
    or parts of them go in by size, largest first, each into the first micro-batch with room.

    Args:
        apart: rows are lines of a padded batch (see `agentrl.learner.apart`): every row counts, at the length of
            the longest one of its micro-batch. Rows of like length go together; an episode whose rows do not fit
            together has a micro-batch to itself.

    Raises:
        ConfigError: one episode alone has more than `max_tokens` tokens.
    """
    if apart:
        return _padded_batches(samples, max_tokens)
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


def _padded_batches(samples: Sequence[Sample], max_tokens: int) -> list[list[Sample]]:
    episodes: dict[str, list[Sample]] = {}
    for sample in samples:
        episodes.setdefault(sample.episode_id, []).append(sample)
    lengths = {name: max(len(longest_ids(row)) for row in rows) for name, rows in episodes.items()}
    found: list[list[Sample]] = []
    longest = 0
    for name, rows in sorted(episodes.items(), key=lambda item: lengths[item[0]], reverse=True):
        if lengths[name] > max_tokens:
            raise _too_long(name, lengths[name], max_tokens)
        if not found or (len(found[-1]) + len(rows)) * longest > max_tokens:
            found.append([])
            longest = lengths[name]
        found[-1] += rows
    return found


def _too_long(episode: str, tokens: int, max_tokens: int) -> ConfigError:
    return ConfigError(
        f"episode {episode} has {tokens} tokens, and a micro-batch takes {max_tokens} "
        "(learner.tokens_per_micro_batch x learner.sequence_ranks): raise one of the two, or lower "
        "rollout.token_budget"
    )


def _fitting(group: Sequence[Sample], max_tokens: int) -> Iterable[tuple[int, list[Sample]]]:
    """The group in parts of whole episodes that fit, with the packed size of each.

    Episodes that began alike are neighbors in lexicographic order. A part takes as many as fit and ends, in its
    last quarter, where the neighbors have least in common.
    """
    whole = packed_size(group)
    if whole <= max_tokens:
        yield whole, list(group)
        return
    episodes: dict[str, list[Sample]] = {}
    for sample in group:
        episodes.setdefault(sample.episode_id, []).append(sample)
    ordered = sorted(episodes.items(), key=lambda item: min(map(longest_ids, item[1])))
    firsts = [np.asarray(min(map(longest_ids, rows))) for _, rows in ordered]
    shared = [0, *(common(a, b) for a, b in pairwise(firsts))]  # of each with its neighbor before
    start = 0
    while start < len(ordered):
        sizes = _sizes(ordered[start:], max_tokens)
        if not sizes:
            name, rows = ordered[start]
            raise _too_long(name, packed_size(rows), max_tokens)
        stop = start + len(sizes)
        if stop < len(ordered):
            late = range(stop, start + max(1, 3 * len(sizes) // 4) - 1, -1)
            stop = min(late, key=lambda place: shared[place])
        yield sizes[stop - start - 1], [row for _, rows in ordered[start:stop] for row in rows]
        start = stop


def _sizes(ordered: Sequence[tuple[str, Sequence[Sample]]], max_tokens: int) -> list[int]:
    """The packed sizes of the first episode, the first two, and so on, as long as they fit."""
    tree, sizes = TreeSize(), list[int]()
    for _, rows in ordered:
        for row in rows:
            tree.add(longest_ids(row))
        if tree.tokens > max_tokens:
            break
        sizes.append(tree.tokens)
    return sizes


def packed_size(rows: Sequence[Sample]) -> int:
    """How many tokens `pack` makes of rows, hints included."""
    return tree_size(list(map(longest_ids, rows)))
