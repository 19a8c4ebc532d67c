"""Environments of OpenEnv servers, played unchanged: `openenv:URL`.

The typed action of a server becomes a tool with the fields of `/schema` as arguments (one tool per variant if the
action is a union); the tools of an MCP environment are offered under their names. The sum of the server's step
rewards is the reward. Actions that the server rejects are observations. A connection that is lost in an action may
be the policy's doing: if a new session can be opened, that and every later action are observations; otherwise the
server is down, which is an infrastructure failure.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from agentrl.env.adapter import Adapter
from agentrl.env.env import DeclaredReward
from agentrl.env.tasks import GeneratedTasks, Split, generated
from agentrl.env.toolenv.background import background
from agentrl.env.toolenv.declare import Content, ToolResult
from agentrl.env.toolenv.dispatch import BoundTool
from agentrl.env.toolenv.env import ToolEnv
from agentrl.env.toolenv.jsonschema import check_arguments
from agentrl.env.toolenv.observe import ToolError
from agentrl.envs.others.openenv_session import Json, JsonObject, OpenEnvServer, OpenEnvSession
from agentrl.errors import ConfigError, InfraError
from agentrl.types import Image, Part, Task

_typed_listings: dict[OpenEnvServer, tuple[RemoteAction, ...] | None] = {}
_mcp_listings: dict[OpenEnvServer, Sequence[RemoteAction]] = {}
LIST_S = 30.0
"""Timeout of listing the tools."""
_SPLITS: Mapping[Split, Sequence[str]] = {"train": ("train",), "held_out": ("test", "validation")}


@dataclass(frozen=True, slots=True)
class RemoteAction:
    """One tool: what the policy sees, and the fixed part of the action it stands for."""

    name: str
    description: str
    parameters: JsonObject
    fixed: JsonObject
    mcp: bool = False

    def action(self, arguments: JsonObject) -> JsonObject:
        """The action that a call represents."""
        return {**self.fixed, "arguments": arguments} if self.mcp else {**arguments, **self.fixed}


@dataclass(frozen=True)
class OpenEnvOptions:
    """Options of `openenv:URL`."""

    system: str = ""
    """System prompt; by default, one sentence."""
    tools: tuple[str, ...] = ()
    """Names of the tools to offer; all if empty."""
    connect_timeout_s: float = 60.0
    """Timeout for a session, including the wait for a free one."""
    api_key_env: str = ""
    """Environment variable with a bearer token for the server."""


class OpenEnv(ToolEnv, Adapter):
    """Use the tools to act in the environment. Reply without a tool call when you are done."""

    Options = OpenEnvOptions
    options: OpenEnvOptions

    def __init__(self) -> None:
        self.server = self.server_of()

    @classmethod
    def server_of(cls) -> OpenEnvServer:
        """The server at the address. Raises ConfigError."""
        return OpenEnvServer(cls.rest, cls.options.connect_timeout_s, cls.options.api_key_env)

    @classmethod
    def check_name(cls) -> None:
        """Raises ConfigError if `rest` is no address."""
        needed_s = cls.server_of().connect_timeout_s + LIST_S + 5.0
        cls.settings = replace(cls.settings, setup_timeout_s=max(cls.settings.setup_timeout_s, needed_s))

    @classmethod
    def tasks(cls, split: Split = "train", seed: int = 0, *, size: int = 10_000) -> Sequence[Task]:
        """The server's tasks if it has the Task API (`train`; `test` or `validation`), else seeds."""
        found = _split(cls.server_of(), split)
        if found is None:
            return generated("openenv", split, seed, size, lambda rng: {})
        name, count = found

        def make(index: int) -> Task:
            return Task(f"{name}-{index}", {"split": name, "index": index}, seed + index)

        return GeneratedTasks(make, count)

    def system(self) -> str:
        """The configured system prompt."""
        return self.options.system or super().system()

    def more_tools(self) -> Sequence[BoundTool]:
        """The typed actions of the server, or the tools of an MCP environment, which `setup` lists again."""
        actions = _typed_actions(self.server)
        return [
            _ActionTool(self, a) for a in self._only(_mcp_actions(self.server) if actions is None else actions)
        ]

    def declared_rewards(self) -> Mapping[str, DeclaredReward] | None:
        """Those of a subclass; undeclared if it has none, because the server's rewards are rewards of turns."""
        return super().declared_rewards() or None

    async def prepare(self) -> None:
        """Acquire what a class declares, and a session."""
        await super().prepare()
        self.session = OpenEnvSession(self.server)

    async def setup(self, prompt: str = "", **row: object) -> Content:
        """Reset the server with the task's seed and row; `prompt` precedes the first observation."""
        first = await self.session.open(cast(JsonObject, {"seed": self.task.seed, **row}))
        if first.get("done"):
            raise InfraError(f"openenv: {self.server.address}: task {self.task.id!r} is already done after reset")
        if _typed_actions(self.server) is None:
            actions = await _list_tools(self.session)
            if not actions:
                raise InfraError(
                    f"openenv: {self.server.address}: the server lists no tools for task {self.task.id!r}"
                )
            self._tools = {a.name: _ActionTool(self, a) for a in self._only(actions)}
        opening = observed(_object(first.get("observation")), opening=True)
        if not isinstance(opening, str):
            return (prompt, *opening) if prompt else opening
        return "\n\n".join(part for part in (prompt, opening) if part) or "Begin."

    async def release(self) -> None:
        """End the session."""
        if session := getattr(self, "session", None):
            await session.close()
        await super().release()

    def _only(self, actions: Sequence[RemoteAction]) -> Sequence[RemoteAction]:
        names = [action.name for action in actions]
        if actions and (missing := [name for name in self.options.tools if name not in names]):
            raise ConfigError(
                f"openenv: {self.server.address} has no tool {missing[0]!r}; it has: {', '.join(names)}"
            )
        return [action for action in actions if not self.options.tools or action.name in self.options.tools]


class _ActionTool:
    """A tool of one episode."""

    parallel = False
    timeout_s: float | None = None

    def __init__(self, env: OpenEnv, action: RemoteAction) -> None:
        self._env, self._action, self.name = env, action, action.name
        function = {"name": action.name, "description": action.description, "parameters": action.parameters}
        self.schema: Mapping[str, object] = {
            "type": "function",
            "function": {key: value for key, value in function.items() if value or key == "parameters"},
        }

    def validate(self, arguments: Mapping[str, object]) -> JsonObject:
        """Check the arguments against the server's schema. Raises InvalidArguments."""
        return check_arguments(self._action.parameters, arguments)

    async def call(self, arguments: JsonObject, timeout_s: float | None) -> ToolResult:
        """Take the action."""
        result = await self._env.session.step(self._action.action(arguments), timeout_s)
        return read_step(result)


def read_step(result: JsonObject) -> ToolResult:
    """The observation, reward and end in the answer to a step.

    Raises:
        ToolError: a tool failed, with no reward and no end.
        InfraError: the reward is not a number.
    """
    reward, done = result.get("reward"), bool(result.get("done"))
    if not isinstance(reward, int | float | None):
        raise InfraError(f"openenv: the reward {reward!r} is not a number")
    observation = _object(result.get("observation"))
    error = observation.get("error") if "tool_name" in observation else None
    failed = str(_object(error).get("message", error)) if error else ""
    answer = _object(observation.get("result"))
    if not failed and (answer.get("is_error") or answer.get("isError")):
        content = _mcp_content(answer)
        failed = content if isinstance(content, str) else "the tool failed"
    if failed and not reward and not done:
        raise ToolError(failed)
    content = f"Error: {failed}" if failed else observed(observation)
    return ToolResult(content, float(reward or 0.0), stop=done)


def observed(observation: JsonObject, *, opening: bool = False) -> Content:
    """What the policy sees of an observation: the text of a tool or of the only field, else JSON."""
    if "tool_name" in observation and "result" in observation:
        return _mcp_content(observation["result"])
    hidden = ("metadata", "reward", "done")
    shown: JsonObject = {k: v for k, v in observation.items() if k not in hidden and v is not None}
    if not shown and opening:
        shown = _object(observation.get("metadata"))
    if len(shown) == 1 and isinstance(only := next(iter(shown.values())), str):
        return only
    return json.dumps(shown, ensure_ascii=False) if shown else ""


def _mcp_content(result: Json) -> Content:
    items = _object(result).get("content") if isinstance(result, dict) else None
    if not isinstance(items, list):
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    parts: list[Part] = []
    for item in _objects(items):
        if item.get("type") == "text":
            parts.append(str(item.get("text", "")))
        elif item.get("type") == "image":
            kind = item.get("mimeType") or item.get("mime_type") or "image/png"
            parts.append(Image(base64.b64decode(str(item.get("data", ""))), str(kind)))
        else:
            parts.append(f"[{item.get('type')}]")
    if all(isinstance(part, str) for part in parts):
        return "\n".join(str(part) for part in parts)
    return tuple(parts)


def _typed_actions(server: OpenEnvServer) -> tuple[RemoteAction, ...] | None:
    """The server's typed actions, asked once per process; None for an MCP environment."""
    if server not in _typed_listings:
        schema = server.http("/schema")
        action = _object(schema).get("action")
        if not isinstance(action, dict):
            raise ConfigError(f"openenv: {server.base}/schema describes no action; is this an OpenEnv server?")
        _typed_listings[server] = _actions_of(action)
    return _typed_listings[server]


def _mcp_actions(server: OpenEnvServer) -> Sequence[RemoteAction]:
    """The tools of an MCP environment before any episode, asked once per process."""

    async def ask() -> Sequence[RemoteAction]:
        session = OpenEnvSession(server)
        try:
            await session.open({})
            return await _list_tools(session)
        except ToolError as e:
            raise InfraError(f"openenv: {server.address}: list_tools: {e}") from None
        finally:
            await session.close()

    if server not in _mcp_listings:
        try:
            _mcp_listings[server] = background.run(ask())
        except InfraError as e:
            raise ConfigError(str(e)) from e
    return _mcp_listings[server]


async def _list_tools(session: OpenEnvSession) -> Sequence[RemoteAction]:
    listed = await session.ask("step", {"type": "list_tools"}, LIST_S)
    return [_mcp_action(tool) for tool in _objects(_object(listed.get("observation")).get("tools"))]


def _actions_of(schema: JsonObject) -> tuple[RemoteAction, ...] | None:
    definitions = _object(schema.get("$defs"))
    variants = schema.get("oneOf") or schema.get("anyOf")
    if variants:
        shapes = [_resolved(shape, definitions) for shape in _objects(variants)]
        actions = [_typed(shape, definitions, _tool_name(shape)) for shape in shapes if not _is_mcp(shape)]
        return tuple(actions) or None
    return None if _is_mcp(schema) else (_typed(schema, definitions, "act"),)


def _is_mcp(schema: JsonObject) -> bool:
    fields = set(_object(schema.get("properties"))) - {"metadata", "type"}
    empty = not fields and schema.get("title") in ("Action", "ListToolsAction")
    return empty or fields == {"tool_name", "arguments"}


def _typed(schema: JsonObject, definitions: JsonObject, name: str) -> RemoteAction:
    properties = {k: v for k, v in _object(schema.get("properties")).items() if k != "metadata"}
    fixed: JsonObject = {k: c for k, v in properties.items() if (c := _object(v).get("const")) is not None}
    required = schema.get("required")
    parameters: JsonObject = {
        "type": "object",
        "properties": {k: v for k, v in properties.items() if k not in fixed},
        "required": [k for k in required if k not in fixed] if isinstance(required, list) else [],
    }
    if definitions:
        parameters["$defs"] = definitions
    return RemoteAction(name, str(schema.get("description", "")), parameters, fixed)


def _mcp_action(tool: JsonObject) -> RemoteAction:
    name = str(tool.get("name", ""))
    parameters = _object(tool.get("input_schema", tool.get("inputSchema")))
    fixed: JsonObject = {"type": "call_tool", "tool_name": name}
    return RemoteAction(name, str(tool.get("description") or ""), parameters, fixed, mcp=True)


def _resolved(schema: JsonObject, definitions: JsonObject) -> JsonObject:
    reference = schema.get("$ref")
    return _object(definitions.get(reference.rsplit("/", 1)[-1])) if isinstance(reference, str) else schema


def _tool_name(schema: JsonObject) -> str:
    for value in _object(schema.get("properties")).values():
        if isinstance(const := _object(value).get("const"), str):
            return re.sub(r"\W+", "_", const)
    title = str(schema.get("title") or "act").removesuffix("Action") or "act"
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|\W+", "_", title).lower()


def _split(server: OpenEnvServer, split: Split) -> tuple[str, int] | None:
    """The server's name and size of a split; None without the Task API."""
    names = server.http("/list_environments")
    if not isinstance(names, list) or not names:
        return None
    splits = server.http(f"/{names[0]}/splits")
    if not isinstance(splits, list):
        return None
    offered = [(str(s.get("name", "")), str(s.get("type", ""))) for s in _objects(splits)]
    for wanted in _SPLITS[split]:
        for name, kind in offered:
            if wanted in (name, kind):
                count = _object(server.http(f"/{names[0]}/num_tasks", {"split": name})).get("num_tasks")
                if isinstance(count, int) and count > 0:
                    return name, count
    said = ", ".join(name for name, _ in offered) or "none"
    wanted = " or ".join(_SPLITS[split])
    raise ConfigError(f"openenv: {server.base} has no tasks for {split} (split {wanted}); its splits are: {said}")


def _object(value: object) -> JsonObject:
    return cast(JsonObject, value) if isinstance(value, dict) else {}


def _objects(value: object) -> list[JsonObject]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
