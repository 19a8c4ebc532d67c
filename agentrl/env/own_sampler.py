"""Task order of the user's: `data.sampler.order: path/to/file.py:Class`."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from agentrl.env.load import said_by
from agentrl.errors import AgentRLError, ConfigError, traceback_of
from agentrl.importing import check_call, load_object
from agentrl.types import Group, Task

TRIED = 16
"""Number of choices of the trial; the state is saved after half of them."""
STATE_CHARS = 200
"""Maximum number of characters of a state in a message."""


_ARGUMENTS = {"choose": ("number",), "report": ("position", "group"), "state": (), "restore": ("state",)}
"""The methods of an order, with what they are called with."""


class OwnSampler:
    """Tasks in the order that an object of the user's chooses, whose results are checked.

    The object has `choose(number) -> position`, and may have `report(position, group)`, which needs `state()` and
    `restore(state)`.

    Args:
        use: `module:Class` or `path/to/file.py:Class`, which is called with the tasks, the seed and the options.
        tasks: the sequence to choose from. A list is copied: sorting it would move the tasks of other objects.
        seed: seed of the order.
        options: keyword arguments of the class.
        key: the configuration key that names the class, for messages.

    Raises:
        ConfigError: the class cannot be loaded or created, or lacks a method; later, a method raises or returns
            something wrong.
    """

    def __init__(
        self,
        use: str,
        tasks: Sequence[Task],
        seed: int,
        options: Mapping[str, Any],
        key: str = "data.sampler.order",
    ) -> None:
        self.where = f"{key} {use}"
        self.tasks = tuple(tasks) if isinstance(tasks, list) else tasks
        try:
            make = load_object(use)
        except ConfigError as e:
            raise ConfigError(f"{key} {e}") from None
        if not callable(make):
            raise ConfigError(f"{self.where}: must be a class, got a value of type {type(make).__name__}")
        named = make
        while isinstance(named, partial):
            named = named.func
        self.kind = getattr(named, "__qualname__", type(named).__qualname__)
        self._make: Callable[[], Any] = lambda: make(self.tasks, seed, **options)
        self._chooser = self._new()
        self._drawn = 0
        self._reports = 0
        self._check_methods()

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
        self._reports += 1
        if self._reports.bit_count() == 1:  # 1, 2, 4, 8, ...: before a checkpoint depends on it, at little cost
            self._check_state()

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

    def try_out(self, certain: int) -> None:
        """Choose some tasks, and the same ones with a stop and a resume, with new objects. Call it before a run.

        Args:
            certain: number of tasks that the run chooses before anything is reported. The choices after them may
                depend on reports, so the trial ends where one fails.

        Raises:
            ConfigError: a choice fails, or a resumed run would choose others.
        """
        unbroken = self._first_choices(certain)
        half = (len(unbroken) + 1) // 2
        chooser, after = self._new(), "in another new object"
        for number, position in enumerate(unbroken):
            if number == half:
                state, chooser, after = self._state(chooser), self._new(), "after restore(state()) in a new object"
                self._restore(chooser, state)
            if (again := self._choose(chooser, number)) != position:
                raise ConfigError(
                    f"{self.where}: choose({number}) returned {position}, and {again} {after}, so a resumed run "
                    "would play other tasks: derive random numbers from `seed` and `number`, and keep everything "
                    "else that changes in the object (not in its class or module) and in the state"
                )

    def _first_choices(self, certain: int) -> list[int]:
        chooser, found = self._new(), list[int]()
        for number in range(TRIED):
            try:
                found.append(self._choose(chooser, number))
            except ConfigError:
                if number < certain:
                    raise
                break
        return found

    def _new(self) -> Any:
        return self._call(self._make, f"{self.kind}(tasks, seed, **options)")

    def _check_methods(self) -> None:
        """Raises ConfigError if a method is missing, or cannot be called."""
        have = [name for name in ("report", "state", "restore") if hasattr(self._chooser, name)]
        for name in ("choose", *(("state", "restore") if have else ())):
            if not hasattr(self._chooser, name):
                reason = "" if name == "choose" else f", which `{have[0]}` needs"
                raise ConfigError(f"{self.where}: has no method `{name}`{reason}")
        for name, arguments in _ARGUMENTS.items():
            method = getattr(self._chooser, name, None)
            if callable(method):
                check_call(method, f"{self.where}: `{name}`", *arguments)
            elif hasattr(self._chooser, name):
                raise ConfigError(
                    f"{self.where}: `{name}` must be a method, got a value of type {type(method).__name__}"
                )

    def _check_state(self) -> None:
        """Raises ConfigError if a new object does not take the state over."""
        again = self._new()
        self._restore(again, self._state(self._chooser))
        before, after = self._state(self._chooser), self._state(again)
        if before != after:
            raise ConfigError(
                f"{self.where}: after restore(state()), a new object has another state: {_shown(before)} "
                f"became {_shown(after)}"
            )

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
