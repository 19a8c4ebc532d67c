"""Run verl-style tools and reward functions unchanged.

A `class_name` / `config` / `tool_schema` entry becomes a tool with one instance per episode:
`create` once, `execute` for every call, `calc_reward` once, `release` always. Files that import verl's base
classes load without verl: stand-ins with the same names are provided during import.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any
from uuid import uuid4

from agentrl.env.toolenv.declare import ToolResult, tool
from agentrl.env.toolenv.dispatch import call_function
from agentrl.env.toolenv.json_schema import shorten
from agentrl.env.toolenv.jsonschema import check_arguments
from agentrl.env.toolenv.observe import plain_text
from agentrl.errors import ConfigError
from agentrl.extras import installed
from agentrl.importing import load_object
from agentrl.types import Episode, Image, Segment, Task, Turn


class ToolResponse:
    """The return value of `execute`: text, and images as encoded bytes or objects with a `save` method."""

    def __init__(self, text: str | None = None, image: object = None, video: object = None) -> None:
        if video:
            raise ValueError("video in a ToolResponse is not supported")
        self.text, self.image, self.video = text, image, video


class ToolSchema(dict[str, object]):
    """The OpenAI tool schema, accessible as a dict and by attribute (`schema.function.name`)."""

    def __getattr__(self, name: str) -> object:
        try:
            value = self[name]
        except KeyError:
            raise AttributeError(name) from None
        return ToolSchema(value) if isinstance(value, dict) else value

    def model_dump(self, **_: object) -> dict[str, object]:
        """The schema as a plain dict."""
        return dict(self)

    @classmethod
    def model_validate(cls, value: Mapping[str, object]) -> ToolSchema:
        """The same schema; no fields are dropped."""
        return cls(value)


class BaseTool:
    """Stand-in for verl's base class for tools."""

    def __init__(self, config: dict[str, object], tool_schema: Any = None) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        if self.tool_schema is None:
            raise ValueError("the tool has no schema")
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> Any:
        """The schema, if a subclass builds it."""
        return getattr(self, "tool_schema", None)

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> object:
        """Create an instance."""
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, object], **kwargs: object) -> object:
        """Run one call."""
        return ToolResponse(text="nothing was done"), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: object) -> float:
        """The reward of the instance."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: object) -> None:
        """Release the instance."""
        return None


def _function_tool(*names: Any, name: str | None = None, **_: object) -> object:
    """Stand-in for verl's function decorator, with or without arguments; the schema comes from the type hints."""
    if names and callable(names[0]):
        return tool(names[0])
    return tool(name=name or (names[0] if names else None))


_lock = threading.Lock()


@contextlib.contextmanager
def verl_names() -> Iterator[None]:
    """Provide `verl.tools.base_tool` and `verl.tools.schemas` during an import, unless verl is installed."""
    with _lock:
        if installed("verl"):
            yield
            return
        contents: dict[str, dict[str, object]] = {
            "verl": {"__path__": []},
            "verl.tools": {"__path__": []},
            "verl.tools.base_tool": {"BaseTool": BaseTool},
            "verl.tools.schemas": {"OpenAIFunctionToolSchema": ToolSchema, "ToolResponse": ToolResponse},
            "verl.tools.function_tool": {"function_tool": _function_tool},
            "verl.utils": {"__path__": []},
            "verl.utils.rollout_trace": {"rollout_trace_op": lambda function: function},
        }
        for name, values in contents.items():
            module = types.ModuleType(name)
            module.__dict__.update(values)
            sys.modules[name] = module
        try:
            yield
        finally:
            for name in contents:
                del sys.modules[name]


@dataclass(frozen=True, slots=True)
class VerlToolEntry:
    """One `class_name` entry of a tools.yaml, its class already loaded."""

    cls: Callable[..., object]
    config: Mapping[str, object]
    schema: Mapping[str, object] | None

    @classmethod
    def load(cls, entry: Mapping[str, Any], base: Path | None) -> VerlToolEntry:
        """Read the entry; `class_name` may be `pkg.module.Class`, `module:Class` or `file.py:Class`.

        Raises:
            ConfigError: an unknown key, or a class that cannot be loaded.
        """
        if unknown := [key for key in entry if key not in ("class_name", "config", "tool_schema")]:
            raise ConfigError(
                f"tools: unknown key {unknown[0]!r} next to class_name; known: class_name, config, tool_schema"
            )
        name = str(entry["class_name"])
        if ":" not in name and "." in name:
            name = ":".join(name.rsplit(".", 1))
        with verl_names():
            found = load_object(name, base=base)
        schema = entry.get("tool_schema")
        if schema is not None and not (isinstance(schema, Mapping) and "name" in schema.get("function", {})):
            raise ConfigError(f"tools: {name}: tool_schema must be an OpenAI function schema with function.name")
        return cls(found, dict(entry.get("config") or {}), schema)

    def make(self) -> VerlTool:
        """A new instance for one episode. Raises ConfigError if the class rejects its config."""
        schema = None if self.schema is None else ToolSchema(self.schema)
        try:
            tool = self.cls(config=dict(self.config), tool_schema=schema)
        except Exception as e:
            where = getattr(self.cls, "__name__", self.cls)
            raise ConfigError(f"tools: {where}(config, tool_schema) raised {type(e).__name__}: {e}") from e
        own = getattr(tool, "tool_schema", None) or schema
        if own is None:
            raise ConfigError(f"tools: {getattr(self.cls, '__name__', self.cls)} has no tool_schema")
        plain = dict(own) if isinstance(own, Mapping) else own.model_dump(exclude_none=True)
        return VerlTool(plain["function"]["name"], plain, tool)


@dataclass(slots=True)
class VerlTool:
    """A `BoundTool` around an instance of a BaseTool-shaped class."""

    name: str
    schema: Mapping[str, Any]
    tool: Any
    parallel: bool = False
    timeout_s: float | None = None
    rewards: list[float] = field(default_factory=list)
    _kwargs: Mapping[str, Any] = field(default_factory=dict)
    _instance: str | None = None

    def validate(self, arguments: Mapping[str, object]) -> dict[str, object]:
        """Validate the arguments. Raises InvalidArguments."""
        parameters = self.schema["function"].get("parameters", {"type": "object"})
        return check_arguments(parameters, arguments)

    async def begin(self, kwargs: Mapping[str, Any]) -> None:
        """`create`, with the row's `tools_kwargs` of this tool."""
        self._kwargs, self._instance = kwargs, str(uuid4())
        given = dict(kwargs.get("create_kwargs") or {})
        # Both conventions work: reading the kwargs one by one, and reading kwargs["create_kwargs"].
        created = await self._ask("create", self._instance, **given, create_kwargs=given)
        if isinstance(created, tuple) and created and isinstance(created[0], str):
            self._instance = created[0]

    async def call(self, arguments: dict[str, object], timeout_s: float | None) -> object:
        """`execute`; its step reward is added to the turn's reward, its metrics to the episode's."""
        extra = dict(self._kwargs.get("execute_kwargs") or {})
        function = self.tool.execute
        bound = functools.partial(function, self._instance, arguments, **accepted(function, extra))
        value = await call_function(bound, {}, timeout_s, inline=_is_async(function))
        response, step_reward, metrics = value if isinstance(value, tuple) else (value, 0.0, {})
        step_reward = float(step_reward or 0.0)
        self.rewards.append(step_reward)
        numbers = {f"{self.name}/{k}": float(v) for k, v in (metrics or {}).items() if isinstance(v, Real)}
        return ToolResult(_content(response), reward=step_reward, metrics=numbers)

    async def calc_reward(self) -> float:
        """The tool's reward for the episode."""
        return float(
            await self._ask("calc_reward", self._instance, **(self._kwargs.get("calc_reward_kwargs") or {}))
        )

    @property
    def judges(self) -> bool:
        """Whether the class computes a reward."""
        function = getattr(type(self.tool), "calc_reward", None)
        return function is not None and function.__qualname__ != "BaseTool.calc_reward"

    async def end(self) -> None:
        """`release`, called once."""
        instance, self._instance = self._instance, None
        if instance is not None:
            await self._ask("release", instance, **(self._kwargs.get("release_kwargs") or {}))

    async def _ask(self, method: str, instance: str | None, **kwargs: object) -> Any:
        function = getattr(self.tool, method)
        bound = functools.partial(function, instance, **accepted(function, kwargs))
        return await call_function(bound, {}, None, inline=_is_async(function))


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(inspect.unwrap(function))


def accepted(function: Callable[..., object], kwargs: Mapping[str, object]) -> dict[str, object]:
    """Those of `kwargs` that `function` takes."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(kwargs)
    names = {p.name for p in parameters}
    return {name: value for name, value in kwargs.items() if name in names}


def _content(response: object) -> object:
    text = getattr(response, "text", None)
    images = getattr(response, "image", None)
    if text is None and images is None:
        return response if isinstance(response, str | dict | list) else ""
    if not images:
        return text or ""
    parts: list[object] = [text] if text else []
    for image in images if isinstance(images, list | tuple) else [images]:
        parts.append(Image(image) if isinstance(image, bytes) else Image(_png(image)))
    return tuple(parts)


def _png(image: Any) -> bytes:
    import io

    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


SCORE_ARGUMENTS = {"data_source", "solution_str", "ground_truth", "extra_info"}
"""What verl passes to `compute_score`, by name."""


def is_compute_score(function: Callable[..., object]) -> bool:
    """Whether `function` takes verl's `solution_str`, alone or with the other `SCORE_ARGUMENTS`."""
    return "solution_str" in inspect.signature(function).parameters


def column(task: Task, name: str) -> Mapping[str, Any]:
    """A column of verl's rows, which is a mapping; empty if absent. Raises ConfigError for any other value."""
    value = task.row.get(name) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"task {task.id!r}: the column {name!r} must be a mapping, as verl writes it, got {shorten(value)}"
        )
    return value


def check_ground_truth(task: Task, reward: str, function: Callable[..., object]) -> None:
    """Raises ConfigError if a row lacks the `ground_truth` that a `compute_score` takes."""
    given = column(task, "reward_model")
    argument = inspect.signature(function).parameters.get("ground_truth")
    if argument is not None and argument.default is argument.empty and "ground_truth" not in given:
        raise ConfigError(
            f"task {task.id!r}: the reward {reward!r} takes `ground_truth`, and the row has no "
            "`reward_model.ground_truth`, where verl's rows have it; add it, give the argument a default, or "
            "write a reward f(episode) that reads the answer from `episode.task.row`"
        )


def score_arguments(
    episode: Episode, tools: Sequence[VerlTool], decode: Callable[[Sequence[int]], str] | None
) -> dict[str, object]:
    """The arguments of `compute_score`; see `solution_text` for `solution_str`."""
    row = episode.task.row
    extra = dict(column(episode.task, "extra_info"))
    extra["num_turns"] = 1 + len(episode.turns) + sum(bool(turn.observation) for turn in episode.turns)
    extra["tool_rewards"] = [value for tool in tools for value in tool.rewards]
    return {
        "data_source": row.get("data_source", ""),
        "solution_str": solution_text(episode, decode),
        "ground_truth": column(episode.task, "reward_model").get("ground_truth"),
        "extra_info": extra,
    }


def solution_text(episode: Episode, decode: Callable[[Sequence[int]], str] | None = None) -> str:
    """The policy's text, turn by turn, like verl's `solution_str`: thinking and calls included.

    It is the text of the sampled tokens without special tokens. verl's text also contains tool output, which a
    reward could then credit; it is omitted here. For an episode without tokens (played against an endpoint),
    messages are written in the Hermes format instead.
    """
    sampled = iter([s for s in episode.segments if s.origin == "sampled" and s.message is not None])
    return "\n".join(_turn_text(turn, sampled, episode, decode) for turn in episode.turns)


def _turn_text(
    turn: Turn, sampled: Iterator[Segment], episode: Episode, decode: Callable[[Sequence[int]], str] | None
) -> str:
    message = turn.message
    if decode is not None:
        for segment in sampled:  # those of other branches are skipped
            said = episode.messages[segment.message or 0]
            if segment.message == turn.place or (turn.place is None and said == message):
                return decode(segment.ids)
    thinking = f"<think>\n{message.reasoning}\n</think>" if message.reasoning else ""
    calls = [
        "<tool_call>\n"
        + json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)
        + "\n</tool_call>"
        for call in message.tool_calls
    ]
    return "\n".join(part for part in (thinking, plain_text(message.content), *calls) if part)
