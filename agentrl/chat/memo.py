"""What was worked out lately, by what it was worked out from."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_CHARS = 1 << 24
ENTRY_CHARS = 500
"""What an entry costs besides its text: its place in the table, and the objects that hold key and result."""


class Memo(Generic[T]):
    """Results of a pure function, forgotten all at once where their keys and values hold too many characters."""

    def __init__(self) -> None:
        self._found: dict[Hashable, T] = {}
        self._chars = 0

    def __call__(self, key: Hashable, chars: int, make: Callable[[], T]) -> T:
        """What `make` gave for `key`, or gives now.

        Args:
            chars: about how much it costs to keep.
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
