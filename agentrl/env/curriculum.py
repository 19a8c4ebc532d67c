"""Task order: seeded, resumable sampling with optional weights from recent solve rates."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.env.permutation import Permutation
from agentrl.env.solved import solve_rate
from agentrl.types import Group, Task

MOST_SHUFFLED = 1 << 17
"""The order of more tasks is computed position by position: shuffling a million takes most of a second."""


@dataclass
class TaskSampler:
    """Sample tasks from a sequence; the whole state is a small dict.

    Args:
        tasks: the sequence to sample from; may be very long.
        seed: seed of the order.
        order: "sequential" cycles through the tasks; "shuffled" uses a new random order each epoch; "weighted"
            samples by solve rate.
        window: number of recent results that a task's solve rate averages ("weighted").
        floor: weight of a task that is always or never solved, relative to the highest ("weighted").
    """

    tasks: Sequence[Task]
    seed: int = 0
    order: str = "sequential"
    window: int = 8
    floor: float = 0.1
    _drawn: int = 0
    _results: dict[int, list[float]] = field(default_factory=dict)
    _permutation: tuple[int, Permutation | list[int]] | None = None

    def __post_init__(self) -> None:
        if not len(self.tasks):
            raise ValueError("no tasks to draw from")
        if self.order not in ("sequential", "shuffled", "weighted"):
            raise ValueError(f"order {self.order!r} must be sequential, shuffled or weighted")

    @property
    def rated(self) -> bool:
        """Whether results are reported, because the order depends on them."""
        return self.order == "weighted"

    def task(self, position: int) -> Task:
        """The task at a position."""
        return self.tasks[position]

    def replacement(self, position: int) -> tuple[int, Task]:
        """The next task, in place of the one at `position`, whose group had no signal."""
        return self.take(1)[0]

    def take(self, num: int) -> list[tuple[int, Task]]:
        """The next `num` tasks with their positions, which `report` takes."""
        found = []
        for _ in range(num):
            position = self._position(self._drawn)
            self._drawn += 1
            found.append((position, self.tasks[position]))
        return found

    def report(self, position: int, group: Group) -> None:
        """Record the solve rate of one group on the task at `position`.

        Raises:
            ConfigError: nothing declares when its episodes are solved.
        """
        recent = self._results.setdefault(position, [])
        recent.append(solve_rate(group, "data.sampler.order: weighted"))
        del recent[: -self.window]

    def weight(self, position: int) -> float:
        """1 for a task that is solved half the time or was never tried; `floor` at solve rates 0 and 1."""
        recent = self._results.get(position)
        if not recent:
            return 1.0
        rate = sum(recent) / len(recent)
        return max(self.floor, 4 * rate * (1 - rate))

    def state(self) -> dict[str, Any]:
        """The state needed to resume, as JSON data."""
        results = {str(k): list(v) for k, v in self._results.items()}
        return {"drawn": self._drawn, "results": results, "size": len(self.tasks)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved `state`. Results belong to positions: another number of tasks drops them."""
        self._drawn = int(state["drawn"])
        same = state.get("size", len(self.tasks)) == len(self.tasks)
        self._results = {int(k): list(v) for k, v in state["results"].items()} if same else {}

    def _position(self, number: int) -> int:
        size = len(self.tasks)
        if self.order == "sequential":
            return number % size
        if self.order == "shuffled":
            return self._shuffled(number // size)[number % size]
        # Rejection sampling: no table over all tasks, and each draw depends only on its index and the results.
        rng = random.Random(f"{self.seed}/{number}")
        while True:
            position = rng.randrange(size)
            if rng.random() <= self.weight(position):
                return position

    def _shuffled(self, lap: int) -> Permutation | list[int]:
        if self._permutation is None or self._permutation[0] != lap:
            size, key = len(self.tasks), f"{self.seed}/lap/{lap}"
            order: Permutation | list[int] = Permutation(size, key) if size > MOST_SHUFFLED else list(range(size))
            if isinstance(order, list):
                random.Random(key).shuffle(order)
            self._permutation = (lap, order)
        return self._permutation[1]


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether a group carries a training signal: its rewards are not all equal."""
    return len(rewards) > 1 and max(rewards) - min(rewards) > 1e-9
