"""Task order of the user's: `data.sampler.order: path/to/file.py:Class`."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrl.env.load import said_by
from agentrl.errors import AgentRLError, ConfigError, traceback_of
from agentrl.importing import load_object
from agentrl.types import Group, Task

TRIED = 8
"""Number of choices of the trial before the state is saved, and after it is restored."""
STATE_CHARS = 200
"""Maximum number of characters of a state in a message."""


class OwnSampler:
    """Tasks in the order that an object of the user's chooses, whose results are checked.

    The object has `choose(number) -> position`, and may have `report(position, group)`, which needs `state()` and
    `restore(state)`.

    Args:
        use: `module:Class` or `path/to/file.py:Class`, which is called with the tasks, the seed and the options.
        tasks: the sequence to choose from.
        seed: seed of the order.
        options: keyword arguments of the class.

    Raises:
        ConfigError: the class cannot be loaded or created, or lacks a method; later, a method raises or returns
            something wrong.
    """

    def __init__(self, use: str, tasks: Sequence[Task], seed: int, options: Mapping[str, Any]) -> None:
        self.tasks, self.where = tasks, f"data.sampler.order {use}"
        try:
            make = load_object(use)
        except ConfigError as e:
            raise ConfigError(f"data.sampler.order {e}") from None
        if not callable(make):
            raise ConfigError(f"{self.where}: must be a class, got a value of type {type(make).__name__}")
        self.kind = getattr(make, "__qualname__", type(make).__qualname__)
        self._make: Callable[[], Any] = lambda: make(tasks, seed, **options)
        self._chooser = self._call(self._make, f"{self.kind}(tasks, seed, **options)")
        self._drawn = 0
        self._reported = False
        for needed, reason in (("choose", ""), *self._pairs()):
            if not callable(getattr(self._chooser, needed, None)):
                raise ConfigError(f"{self.where}: has no method `{needed}`{reason}")

    @property
    def rated(self) -> bool:
        """Whether results are reported."""
        return hasattr(self._chooser, "report")

    def task(self, position: int) -> Task:
        """The task at a position."""
        return self.tasks[position]

    def take(self, num: int) -> list[tuple[int, Task]]:
        """The next `num` tasks with their positions."""
        found = []
        for _ in range(num):
            position = self._choose(self._chooser, self._drawn)
            self._drawn += 1
            found.append((position, self.tasks[position]))
        return found

    def replacement(self, position: int) -> tuple[int, Task]:
        """The next task, in place of the one at `position`."""
        return self.take(1)[0]

    def report(self, position: int, group: Group) -> None:
        """Tell the object how the group on the task at `position` ended."""
        self._call(lambda: self._chooser.report(position, group), f"report({position}, group)")
        if not self._reported:  # before a checkpoint depends on it
            self._reported = True
            again = self._call(self._make, f"{self.kind}(tasks, seed, **options)")
            self._restore(again, state := self._state(self._chooser))
            if self._state(again) != state:
                raise ConfigError(
                    f"{self.where}: after restore(state()), a new object has another state: {_shown(state)} "
                    f"became {_shown(self._state(again))}"
                )

    def state(self) -> dict[str, Any]:
        """The state needed to resume, as JSON data."""
        own = {"class": self.kind, "state": self._state(self._chooser)}
        return {"drawn": self._drawn, "results": {}, "size": len(self.tasks), "own": own}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved `state`; from that of another order or number of tasks, take only how many were
        drawn."""
        self._drawn = int(state["drawn"])
        own = state.get("own", {})
        if own.get("class") == self.kind and state["size"] == len(self.tasks):
            self._restore(self._chooser, own["state"])

    def try_out(self) -> None:
        """Choose some tasks, and the same ones after a resume, with new objects. Call it before a run.

        Raises:
            ConfigError: a resumed run would choose others.
        """
        one, other = (self._call(self._make, f"{self.kind}(tasks, seed, **options)") for _ in range(2))
        for number in range(TRIED):
            self._choose(one, number)
        self._restore(other, self._state(one))
        for number in range(TRIED, 2 * TRIED):
            first, second = self._choose(one, number), self._choose(other, number)
            if first != second:
                raise ConfigError(
                    f"{self.where}: choose({number}) returned {first}, and {second} after restore(state()) in a "
                    "new object, so a resumed run would play other tasks: derive random numbers from `seed` and "
                    "`number`, and keep everything else that changes in the state"
                )

    def _pairs(self) -> list[tuple[str, str]]:
        """The methods that others need, with the reason."""
        have = [name for name in ("report", "state", "restore") if hasattr(self._chooser, name)]
        return [(name, f", which `{have[0]}` needs") for name in ("state", "restore") if have]

    def _choose(self, chooser: Any, number: int) -> int:
        chosen = self._call(lambda: chooser.choose(number), f"choose({number})")
        last = len(self.tasks) - 1
        try:
            position = -1 if isinstance(chosen, bool) else operator.index(chosen)
        except TypeError:
            position = -1
        if not 0 <= position <= last:
            raise ConfigError(
                f"{self.where}: choose({number}) must return the position of a task, 0 to {last}, "
                f"got {chosen!r:.200}"
            )
        return position

    def _state(self, chooser: Any) -> Any:
        """The state of the object, which must be what JSON gives back."""
        if not hasattr(chooser, "state"):
            return None
        state = self._call(chooser.state, "state()")
        try:
            kept = json.loads(json.dumps(state))
        except (TypeError, ValueError, RecursionError) as e:
            raise ConfigError(f"{self.where}: state() must return JSON data: {e}") from None
        if kept != state:
            raise ConfigError(
                f"{self.where}: state() must return JSON data (text as keys, lists instead of tuples, no NaN): "
                f"{_shown(state)} would become {_shown(kept)}"
            )
        return kept

    def _restore(self, chooser: Any, state: Any) -> None:
        if hasattr(chooser, "restore"):
            self._call(lambda: chooser.restore(state), f"restore({_shown(state)})")

    def _call(self, call: Callable[[], Any], what: str) -> Any:
        try:
            return call()
        except AgentRLError:
            raise
        except (Exception, SystemExit) as e:
            raise ConfigError(f"{self.where}: {what} raised {said_by(e)}\n{traceback_of(e)}") from e


def _shown(state: Any) -> str:
    text = repr(state)
    return text if len(text) <= STATE_CHARS else text[:STATE_CHARS] + " [...]"
