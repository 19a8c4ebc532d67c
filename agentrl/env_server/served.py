"""What a server plays: an env, its tasks by split, and the limits of an episode."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from agentrl.env.env import Env
from agentrl.types import Task, ToolSchema

JsonObject: TypeAlias = "dict[str, Json]"
Json: TypeAlias = "JsonObject | list[Json] | str | float | bool | None"

SEND_MESSAGE = "send_message"
"""The tool that stands for a message without a tool call, for clients that can only call tools."""


class RequestError(Exception):
    """A request that cannot be answered: what is wrong with it."""


@dataclass(slots=True)
class EnvSource:
    """An env with its tasks.

    Attributes:
        name: the name clients see.
        make_env: makes the env of one episode.
        splits: tasks by the name of the split.
        max_turns: turns of an episode; after the last one, the episode is scored as it stands.
        timeout_s: limit of starting, of each turn and of scoring.
    """

    name: str
    make_env: Callable[[], Env]
    splits: Mapping[str, Sequence[Task]]
    max_turns: int = 50
    timeout_s: float = 300.0
    _next: itertools.count[int] = field(default_factory=itertools.count)

    def task(self, wanted: Mapping[str, object]) -> Task:
        """The task of a reset: by `split` and `index`, by `seed`, or the next one.

        Raises:
            RequestError: there is no such task.
        """
        split = wanted.get("split") or next(iter(self.splits))
        tasks = self.tasks(split)
        index, seed = wanted.get("index"), wanted.get("seed")
        for key, value in (("index", index), ("seed", seed)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise RequestError(f"{key} {value!r}: must be a whole number of at least 0")
        if isinstance(index, int):
            if index >= len(tasks):
                raise RequestError(f"index {index}: the split {split!r} has {len(tasks):,} tasks, counted from 0")
            return tasks[index]
        return tasks[(seed if isinstance(seed, int) else next(self._next)) % len(tasks)]

    def tasks(self, split: object) -> Sequence[Task]:
        """The tasks of a split. Raises RequestError if there is no such split."""
        if not isinstance(split, str) or split not in self.splits:
            raise RequestError(f"split {split!r}: unknown; the splits are: {', '.join(self.splits)}")
        return self.splits[split]

    @property
    def own_tools(self) -> Sequence[ToolSchema]:
        """The tools of the env before any task."""
        return self.make_env().tools


def listed_tools(schemas: Sequence[ToolSchema], schema_key: str) -> list[JsonObject]:
    """Tools as MCP lists them, with `send_message` last; `schema_key` is the name of the field with the schema."""
    found: list[JsonObject] = []
    for schema in schemas:
        function = schema["function"]
        found.append(
            {
                "name": function["name"],
                "description": function.get("description", ""),
                schema_key: dict(function.get("parameters") or {"type": "object", "properties": {}}),
            }
        )
    if all(tool["name"] != SEND_MESSAGE for tool in found):
        found.append({"name": SEND_MESSAGE, "description": _ABOUT_MESSAGES, schema_key: _TEXT})
    return found


_ABOUT_MESSAGES = "Send a message without a tool call: the final answer, or a reply to the user."
_TEXT: JsonObject = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
