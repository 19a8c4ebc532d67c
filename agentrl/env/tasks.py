"""Sequences of tasks: computed from the index, or read from a file. Positions are stable."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, overload

from agentrl.types import Episode, Task

Split = Literal["train", "held_out"]


class GeneratedTasks(Sequence[Task]):
    """`size` tasks, where task i is `make(i)`; nothing is stored, and access time is constant."""

    def __init__(self, make: Callable[[int], Task], size: int) -> None:
        self._make, self._size = make, size

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, slice):
            return [self._make(i) for i in range(*index.indices(self._size))]
        if not -self._size <= index < self._size:
            raise IndexError(f"task {index} of {self._size}")
        return self._make(index % self._size)

    def __iter__(self) -> Iterator[Task]:
        return (self._make(i) for i in range(self._size))


class NamedTasks(GeneratedTasks):
    """The tasks of one of several envs; each names the env."""

    def __init__(self, tasks: Sequence[Task], env: str) -> None:
        super().__init__(lambda i: replace(tasks[i], env=env), len(tasks))
        self.tasks = tasks


def is_generated(tasks: Sequence[Task]) -> bool:
    """Whether the rows are made on access, which may take time for millions of them."""
    return isinstance(tasks.tasks if isinstance(tasks, NamedTasks) else tasks, GeneratedTasks)


def generated(
    name: str, split: Split, seed: int, size: int, row: Callable[[random.Random], Mapping[str, Any]]
) -> GeneratedTasks:
    """Tasks whose rows come from `row(rng)`, with a generator seeded by name, split, seed and position.

    Raises:
        ValueError: `size` is not a positive whole number.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"size must be a whole number of at least 1, got {size!r}")

    def make(index: int) -> Task:
        rng = random.Random(f"{name}/{split}/{seed}/{index}")
        task_seed = rng.getrandbits(31)
        return Task(f"{name}-{split}-{seed}-{index}", row(rng), task_seed)

    return GeneratedTasks(make, size)


def with_own_row(episode: Episode) -> Episode:
    """The episode with a copy of its task's row, for code that may change it: other episodes have the same task.

    A row that cannot be copied is shared.
    """
    try:
        row = {name: copy.deepcopy(value) for name, value in episode.task.row.items()}
    except Exception:  # whatever the copying of the user's values raises
        return episode
    return replace(episode, task=replace(episode.task, row=row))
