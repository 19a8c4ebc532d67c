"""Append-only token ids that can be shared without copying, however many there are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


def num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of tokens with which both sequences begin."""
    same = min(len(one), len(other))
    if one[:same] == other[:same]:
        return same
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), same)


class Ids(Sequence[int]):
    """A prefix of a `GrowingIds`: immutable, equal to a tuple of the same ids, with slices that are tuples.

    `numpy.asarray` of it makes no copy.
    """

    __slots__ = ("_array",)

    def __init__(self, array: IntArray) -> None:
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[int, ...]: ...
    def __getitem__(self, at: int | slice) -> int | tuple[int, ...]:
        return tuple(self._array[at].tolist()) if isinstance(at, slice) else int(self._array[at])

    def __iter__(self) -> Iterator[int]:
        return iter(self._array.tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Ids):
            return np.array_equal(self._array, other._array)
        return isinstance(other, tuple) and tuple(self) == other

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self._array, dtype=dtype, copy=copy) if copy else np.asarray(self._array, dtype=dtype)

    def __repr__(self) -> str:
        return f"Ids{tuple(self)}"


class GrowingIds:
    """Append-only token ids; views taken earlier do not change."""

    def __init__(self) -> None:
        self._buffer: IntArray = np.empty(256, dtype=np.int64)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def extend(self, ids: Sequence[int]) -> None:
        """Append `ids` in time proportional to their number (amortized: the buffer sometimes doubles)."""
        end = self._length + len(ids)
        if end > len(self._buffer):
            grown = np.empty(max(end, 2 * len(self._buffer)), dtype=np.int64)
            grown[: self._length] = self._buffer[: self._length]
            self._buffer = grown
        self._buffer[self._length : end] = ids
        self._length = end

    def view(self) -> Ids:
        """Return a view of the current ids."""
        array = self._buffer[: self._length]
        array.flags.writeable = False
        return Ids(array)
