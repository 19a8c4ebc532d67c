"""The tools of tasks, asked before any episode: an env may offer different ones for every task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from agentrl.env.env import Env
from agentrl.env.stand_in import with_stand_in
from agentrl.env.toolenv.env import ToolEnv
from agentrl.env.toolenv.json_schema import shorten
from agentrl.errors import ConfigError, InfraError
from agentrl.rollout.lifecycle import CLOSE_TIMEOUT_S, close_env, opening_messages
from agentrl.types import Task, ToolSchema

ASKED = 8
"""Tasks that are asked for their tools."""


def may_vary(env: Env) -> bool:
    """Whether the tools of the env may depend on the task, judged by what its class overrides."""
    if isinstance(env, ToolEnv):
        return type(env).more_tools is not ToolEnv.more_tools or type(env).tools is not ToolEnv.tools
    return type(env).tools is not Env.tools


async def task_tools(make_env: Callable[[], Env], tasks: Sequence[Task]) -> list[ToolSchema]:
    """The tools of the first tasks, each name once; those of an env without a task if there is no task to ask.

    Raises:
        ConfigError: the env's `tools` are no list of schemas.
    """
    env = make_env()
    if not may_vary(env) or not tasks:
        return _offered(env)
    found: dict[str, ToolSchema] = {}
    for task in [tasks[i] for i in range(min(ASKED, len(tasks)))]:
        env = with_stand_in(make_env())
        try:
            await opening_messages(env, task)
            schemas = _offered(env)
        except InfraError:  # a service of the env may be down temporarily
            schemas = _offered(make_env())
        finally:
            await close_env(env, CLOSE_TIMEOUT_S)
        for schema in schemas:
            found.setdefault(schema["function"]["name"], schema)
    return list(found.values())


def task_tools_now(make_env: Callable[[], Env], tasks: Sequence[Task]) -> list[ToolSchema]:
    """`task_tools`, from a plain function; an event loop may be running in this thread."""
    env = make_env()
    if not may_vary(env) or not tasks:
        return _offered(env)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, task_tools(make_env, tasks)).result()


def _offered(env: Env) -> list[ToolSchema]:
    found = env.tools
    if not isinstance(found, Sequence) or not all(map(_is_schema, found)):
        raise ConfigError(
            f"{type(env).__name__}.tools is {shorten(found)}: it must be a property (or attribute) with a list of "
            'schemas such as {"type": "function", "function": {"name": ...}}'
        )
    return list(found)


def _is_schema(tool: object) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)
