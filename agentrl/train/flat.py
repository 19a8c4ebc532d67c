"""The trained tokens of several rows as flat tensors, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import blake2b

import torch
from torch import Tensor

from agentrl.types import Sample


class Flat:
    """All trained tokens of some rows, end to end in the order of the rows, and back."""

    def __init__(self, rows: Sequence[Sample], counts: list[int], sequence_N: Tensor) -> None:
        self.rows, self.counts, self.sequence_N = list(rows), counts, sequence_N

    @classmethod
    def of(cls, rows: Sequence[Sample], episodes: Iterable[str] | None = None) -> Flat:
        """Numbers the episodes in the order of `episodes`, else as they come."""
        number = {e: i for i, e in enumerate(dict.fromkeys(episodes or (row.episode_id for row in rows)))}
        counts = [sum(row.loss_mask) for row in rows]
        sequence = [number[row.episode_id] for row, n in zip(rows, counts, strict=True) for _ in range(n)]
        return cls(rows, counts, torch.tensor(sequence, dtype=torch.long))

    @property
    def keys_N(self) -> Tensor:
        """A number for each token that depends on its episode's id and its place there only."""
        order = sorted(range(len(self.rows)), key=lambda r: (self.rows[r].episode_id, self.rows[r].ids))
        start_of, seen = [0] * len(self.rows), dict[str, int]()
        for r in order:
            start_of[r] = seen.get(self.rows[r].episode_id, 0)
            seen[self.rows[r].episode_id] = start_of[r] + self.counts[r]
        keys: list[int] = []
        for row, count, start in zip(self.rows, self.counts, start_of, strict=True):
            base = int.from_bytes(blake2b(row.episode_id.encode(), digest_size=8).digest(), "big") >> 2
            keys += range(base + start, base + start + count)
        return torch.tensor(keys, dtype=torch.long)

    def trained(self, name: str) -> Tensor:
        """[N] a field of the rows that has one number for each token of the row."""
        return torch.tensor(
            [v for row in self.rows for v, on in zip(getattr(row, name), row.loss_mask, strict=True) if on],
            dtype=torch.float64,
        )

    def column(self, name: str) -> Tensor:
        """[N] a column of the rows."""
        return torch.tensor([v for row in self.rows for v in row.columns[name]], dtype=torch.float64)

    def add(self, name: str, values_N: Tensor) -> None:
        """Give the rows a column."""
        parts = torch.split(values_N, self.counts)
        self.rows = [
            replace(row, columns={**row.columns, name: tuple(part.tolist())})
            for row, part in zip(self.rows, parts, strict=True)
        ]

    def kept(self, keep_N: Tensor) -> list[Sample]:
        """The rows with only the kept tokens under the loss mask; rows without any are left out."""
        out = []
        for row, part in zip(self.rows, torch.split(keep_N, self.counts), strict=True):
            keep = part.tolist()
            if not any(keep):
                continue
            flags = iter(keep)
            mask = tuple(on and next(flags) for on in row.loss_mask)
            columns = {
                name: tuple(v for v, on in zip(values, keep, strict=True) if on)
                for name, values in row.columns.items()
            }
            out.append(replace(row, loss_mask=mask, columns=columns))
        return out
