"""The number of distinct tokens in a growing tree of segments."""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Sequence
from typing import TYPE_CHECKING

from agentrl.chat.ids import num_shared

if TYPE_CHECKING:
    from agentrl.types import Segment

Tokens = tuple[int, ...]


class BranchTokens:
    """Counts the tokens of all branches that have a completion; where branches begin alike, they count once.

    An episode asks for its size before every turn, so each segment is looked at once, however often that is.

    Args:
        segments: the tree; the list may grow, and its segments keep their ids.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = segments
        self._alike = Alike()
        self._counted: set[int] = set()  # the first ones alike to the segments of branches with a completion
        self._after: dict[int, list[Tokens]] = {}  # what continues each context, in lexicographic order
        self._size = 0

    def with_branch(self, node: int) -> int:
        """The size, including the branch that ends at `node` even if it has no completion yet."""
        for i in range(len(self._alike.first), len(self._segments)):
            self._alike.add(self._segments[i])
            if self._segments[i].origin == "sampled":
                self._count(i)
        return self._size + sum(self._added(i) for i in self._uncounted(node))

    def apart(self, segments: Sequence[Segment]) -> BranchTokens:
        """An independent copy for a copy of the segments."""
        other = BranchTokens(segments)
        other._alike = self._alike.copy()
        other._counted, other._size = set(self._counted), self._size
        other._after = {context: list(alternatives) for context, alternatives in self._after.items()}
        return other

    def _uncounted(self, node: int) -> list[int]:
        """The segments at the end of a branch that are not counted; those before them are."""
        found = []
        while node >= 0 and self._alike.first[node] not in self._counted:
            found.append(node)
            node = self._segments[node].parent
        return found

    def _count(self, node: int) -> None:
        for i in self._uncounted(node):
            self._size += self._added(i)
            self._counted.add(self._alike.first[i])
            insort(self._after.setdefault(self._context(i), []), self._segments[i].ids)

    def _added(self, i: int) -> int:
        """The tokens of a segment that no counted one begins with in the same context."""
        ids, others = self._segments[i].ids, self._after.get(self._context(i), [])
        place = bisect(others, ids)
        neighbors = others[max(place - 1, 0) : place + 1]
        return len(ids) - max((num_shared(ids, other) for other in neighbors), default=0)

    def _context(self, i: int) -> int:
        parent = self._segments[i].parent
        return self._alike.first[parent] if parent >= 0 else -1


class Alike:
    """Finds for each segment the first one with the same ids in the same context.

    Attributes:
        first: its index, for each segment that was added.
    """

    def __init__(self) -> None:
        self.first: list[int] = []
        self._seen: dict[tuple[int, Tokens], int] = {}

    def add(self, segment: Segment) -> int:
        """Add the next segment, and return its first one."""
        context = self.first[segment.parent] if segment.parent >= 0 else -1
        self.first.append(self._seen.setdefault((context, segment.ids), len(self.first)))
        return self.first[-1]

    def copy(self) -> Alike:
        """An independent copy."""
        other = Alike()
        other.first, other._seen = list(self.first), dict(self._seen)
        return other
