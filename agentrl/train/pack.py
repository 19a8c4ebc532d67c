"""Rows of tokens packed end to end, without padding, and the attention that keeps them apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from agentrl.types import Sample

PACKED_ATTENTION = "agentrl_packed"
"""Name under which `packed_attention` is known to transformers (`attn_implementation`)."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """B rows of similar length that continue a shared prefix of the same length P, in one attention call.

    `query_BL` and `key_BK` (K = P + L) are flat positions; short rows repeat their last one, which nothing before
    it attends to. `cell_N` says which of the B x L queries are real, `flat_N` where their results belong.
    `mask_LK` is None where P is 0 (plain causal attention).
    """

    query_BL: Tensor
    key_BK: Tensor
    cell_N: Tensor
    flat_N: Tensor
    mask_LK: Tensor | None


@dataclass(frozen=True, slots=True)
class Packed:
    """One micro-batch, rows end to end, T tokens, each shared prefix once. No padding.

    Tensors with suffix _N run over the N trained tokens; `source_N` is the flat position that predicts each,
    `sequence_N` numbers the episodes from 0, and `columns` are those of the samples.
    """

    ids_T: Tensor
    positions_T: Tensor
    buckets: tuple[Bucket, ...]
    source_N: Tensor
    ids_N: Tensor
    sampler_logprobs_N: Tensor
    advantages_N: Tensor
    sequence_N: Tensor
    columns: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class _Layout:
    """Where rows come to lie: row r is `prefix[r]` flat positions of its group's prefix, then its own tokens."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    rows: list[tuple[int, int, int, int]] = field(default_factory=list)
    """(start of the prefix, its length, start of the row's own tokens, their number)."""

    def add(self, ids: Sequence[int], first: int) -> int:
        start = len(self.ids)
        self.ids += ids
        self.positions += range(first, first + len(ids))
        return start


def pack(
    samples: Sequence[Sample], device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Packed:
    """Lay the rows of one micro-batch end to end; rows of one group share what they begin with.

    The tokens that all rows of a group have in common before the first trained one (system prompt, tools, user
    message) are computed once, with the gradient of all rows flowing through them: same result, fewer tokens.

    Raises:
        ValueError: the first token of a row is under the loss mask, where nothing predicts it.
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
            layout.rows.append((prefix_at, 0, prefix_at, shared))
        for row in rows:
            own_at = layout.add(row.ids[shared:], shared)
            layout.rows.append((prefix_at, shared, own_at, len(row.ids) - shared))
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
        buckets=tuple(_buckets(layout.rows, device)),
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
    first, last = min(r.ids for r in rows), max(r.ids for r in rows)  # all others lie between these two
    common = next(
        (t for t, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last))
    )
    untrained = min(r.loss_mask.index(True) if True in r.loss_mask else len(r.ids) for r in rows)
    return min(common, untrained, min(len(r.ids) for r in rows) - 1)


def _buckets(rows: Sequence[tuple[int, int, int, int]], device: torch.device | str) -> Iterable[Bucket]:
    """Rows with a prefix of the same length whose own lengths differ by at most a quarter."""
    waiting = sorted(rows, key=lambda row: (row[1], row[3]))
    while waiting:
        _, shared, _, shortest = waiting[0]
        taken = [r for r in waiting if r[1] == shared and r[3] <= max(shortest * 1.25, shortest + 8)]
        waiting = waiting[len(taken) :]
        prefix_B, _, own_B, length_B = torch.tensor(taken, device=device).T
        width = taken[-1][3]
        within_L = torch.arange(width, device=device)
        query_BL = own_B[:, None] + torch.minimum(within_L[None, :], length_B[:, None] - 1)
        real_BL = within_L[None, :] < length_B[:, None]
        key_BK, mask_LK = query_BL, None
        if shared:
            key_BK = torch.cat([prefix_B[:, None] + torch.arange(shared, device=device)[None, :], query_BL], dim=1)
            mask_LK = torch.arange(shared + width, device=device)[None, :] <= shared + within_L[:, None]
        yield Bucket(query_BL, key_BK, real_BL.flatten().nonzero().squeeze(1), query_BL[real_BL], mask_LK)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    buckets: Sequence[Bucket] = (),
    scaling: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Causal attention within each row of a packed batch; equal to attention over the rows one by one.

    Args:
        module: the attention layer that calls.
        query, key, value: [1, H or H_kv, T, D] over all rows end to end.
        attention_mask: always None; causality and row borders come from the buckets.
        buckets: rows by length, covering every one of the T positions exactly once.
        scaling: factor of the scores; 1/sqrt(D) when None.

    Returns:
        [1, T, H, D] and no weights.
    """
    assert buckets, "packed attention needs the buckets of the packed batch"
    q_THD, k_THD, v_THD = (x[0].transpose(0, 1) for x in (query, key, value))
    grouped = q_THD.shape[1] != k_THD.shape[1]
    pieces = []
    for bucket in buckets:
        q_BHLD = q_THD[bucket.query_BL].transpose(1, 2)
        k_BHKD, v_BHKD = (x[bucket.key_BK].transpose(1, 2) for x in (k_THD, v_THD))
        out_BHLD = F.scaled_dot_product_attention(
            q_BHLD,
            k_BHKD,
            v_BHKD,
            attn_mask=bucket.mask_LK,
            is_causal=bucket.mask_LK is None,
            scale=scaling,
            enable_gqa=grouped,
        )
        pieces.append(out_BHLD.transpose(1, 2).flatten(0, 1)[bucket.cell_N])
    place_T = torch.argsort(torch.cat([bucket.flat_N for bucket in buckets]))
    return torch.cat(pieces)[place_T][None], None


def register_attention() -> None:
    """Make `packed_attention` known to transformers; idempotent."""
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    AttentionMaskInterface.register(PACKED_ATTENTION, lambda *_, **__: None)


def micro_batches(samples: Sequence[Sample], max_tokens: int) -> list[list[Sample]]:
    """Split into micro-batches of at most `max_tokens` packed tokens, groups together where they fit.

    What a group shares counts once, as it is computed once; the rows of one episode are never apart. Groups, or
    what fits of them, go in by size, largest first, each into the first micro-batch with room.

    Raises:
        ValueError: one episode alone has more than `max_tokens` tokens.
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
            raise ValueError(
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
