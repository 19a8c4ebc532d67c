"""A bounded cache for results of pure functions."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_CHARS = 1 << 24
ENTRY_CHARS = 500
"""Cost of an entry in addition to its text: its slot in the table and the objects for key and result."""


class Memo(Generic[T]):
    """Results of a pure function, cleared all at once when their keys and values hold too many characters."""

    def __init__(self) -> None:
        self._found: dict[Hashable, T] = {}
        self._chars = 0

    def __call__(self, key: Hashable, chars: int, make: Callable[[], T]) -> T:
        """Return the cached result for `key`, computing it with `make` if necessary.

        Args:
            chars: approximate size of the entry.
        """
        found = self._found.get(key)
        if found is None:
            found = make()
            cost = chars + ENTRY_CHARS
            if self._chars + cost > MAX_CHARS:
                self._found, self._chars = {}, 0
            self._found[key] = found
            self._chars += cost
        return found
