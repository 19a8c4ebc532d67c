"""Rows of tokens as a tree: whatever rows have in common from their first token on is there once.

Rows of a group share their prompt; those of an episode whose history was rewritten or branched share turns as
well, and so do episodes that began alike. A prefix tree over all rows finds every such part, so that the model
computes each shared token once, with the gradients of all rows flowing through it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Row = tuple[int, ...]


class Span(NamedTuple):
    """A run of tokens without a branch.

    Attributes:
        parent: number of the span that it continues; -1 for none.
        prefix: tokens on the path before it.
        at: its first flat position.
        length: its tokens.
        end: the flat position behind its last descendant; its tokens are seen from `at` to there and nowhere else.
    """

    parent: int
    prefix: int
    at: int
    length: int
    end: int

    def first_key(self, window: int | None) -> int:
        """The first place on the path that any of its tokens sees, not counting itself."""
        return 0 if window is None else max(0, self.prefix + 1 - window)


@dataclass(frozen=True, slots=True)
class Tree:
    """Spans in flat order, each behind its parent and before its siblings' descendants, and where rows end.

    Attributes:
        spans: they cover every flat position once.
        ids_T: the token of each flat position.
        last: for each row, the span that holds its last token.
    """

    spans: Sequence[Span]
    ids_T: Ids
    last: Sequence[int]

    def positions(self, row: int) -> Ids:
        """The flat position of each token of a row."""
        return path_positions(self.spans, self.last[row])


def path_positions(spans: Sequence[Span], number: int) -> Ids:
    """The flat positions of all tokens from the root to the end of a span."""
    runs = []
    while number >= 0:
        span = spans[number]
        runs.append(np.arange(span.at, span.at + span.length))
        number = span.parent
    return np.concatenate(runs[::-1])


def prefix_tree(rows: Sequence[Row]) -> Tree:
    """The prefix tree of rows of at least one token each; rows may be equal, or the beginning of one another."""
    made = _Branches([np.asarray(row) for row in rows])
    order = sorted(range(len(rows)), key=lambda n: rows[n])
    for before, number in zip([-1, *order[:-1]], order, strict=True):
        made.add(number, common(made.rows[before], made.rows[number]) if before >= 0 else 0)
    return made.tree()


def tree_size(rows: Sequence[Row]) -> int:
    """The number of tokens in the prefix tree of these rows."""
    ordered = [np.asarray(row) for row in sorted(rows)]
    shared = sum(common(a, b) for a, b in pairwise(ordered))
    return sum(map(len, ordered)) - shared


class TreeSize:
    """The number of tokens in a prefix tree that grows row by row."""

    def __init__(self) -> None:
        self.tokens = 0
        self._rows: list[Row] = []

    def add(self, row: Row) -> None:
        """Add a row; the beginning that it shares with its neighbors in lexicographic order exists already."""
        place = bisect_left(self._rows, row)
        ids = np.asarray(row)
        near = self._rows[max(0, place - 1) : place + 1]
        self.tokens += len(row) - max((common(np.asarray(other), ids) for other in near), default=0)
        self._rows.insert(place, row)


def common(a: Ids, b: Ids) -> int:
    """The number of tokens that two rows share at their beginning."""
    length = min(len(a), len(b))
    differ = a[:length] != b[:length]
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length


@dataclass(slots=True)
class _Branch:
    """Places `start` to `stop` of a row, behind those of `parent`."""

    parent: _Branch | None
    row: int
    start: int
    stop: int
    number: int = -1


class _Branches:
    """Grows a tree by rows in lexicographic order, in which each row branches off the path of the one before."""

    def __init__(self, rows: Sequence[Ids]) -> None:
        self.rows = rows
        self._path: list[_Branch] = []
        self._last: dict[int, _Branch] = {}
        self._all: list[_Branch] = []

    def add(self, row: int, shared: int) -> None:
        """Add a row that shares its first `shared` tokens with the row before."""
        while self._path and self._path[-1].start >= shared and self._path[-1].stop > shared:
            self._path.pop()
        if self._path and self._path[-1].stop > shared:
            cut = self._path.pop()
            upper = self._make(cut.parent, cut.row, cut.start, shared)
            cut.parent, cut.start = upper, shared
            self._path.append(upper)
        if shared < len(self.rows[row]):
            self._path.append(self._make(self._path[-1] if self._path else None, row, shared, len(self.rows[row])))
        self._last[row] = self._path[-1]

    def tree(self) -> Tree:
        """The spans in depth-first order."""
        children: dict[int, list[_Branch]] = {}
        for branch in self._all:
            children.setdefault(id(branch.parent) if branch.parent else 0, []).append(branch)
        spans: list[Span] = []
        ids: list[Ids] = []
        at = 0
        waiting = children.get(0, [])[::-1]
        while waiting:
            branch = waiting.pop()
            branch.number = len(spans)
            parent = branch.parent.number if branch.parent else -1
            length = branch.stop - branch.start
            spans.append(Span(parent, branch.start, at, length, at + length))
            ids.append(self.rows[branch.row][branch.start : branch.stop])
            at += length
            waiting += children.get(id(branch), [])[::-1]
        for number in range(len(spans) - 1, -1, -1):  # children come behind their parents
            if (parent := spans[number].parent) >= 0 and spans[parent].end < spans[number].end:
                spans[parent] = spans[parent]._replace(end=spans[number].end)
        last = [self._last[row].number for row in range(len(self.rows))]
        return Tree(spans, np.concatenate(ids) if ids else np.zeros(0, np.int64), last)

    def _make(self, parent: _Branch | None, row: int, start: int, stop: int) -> _Branch:
        self._all.append(_Branch(parent, row, start, stop))
        return self._all[-1]
