"""The tools of tasks, asked before any episode: an env may offer different ones for every task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from agentrl.env.env import Env
from agentrl.env.stand_in import with_stand_in
from agentrl.env.toolenv.env import ToolEnv
from agentrl.errors import InfraError
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
    """The tools of the first tasks, each name once; those of an env without a task if there is no task to ask."""
    env = make_env()
    if not may_vary(env) or not tasks:
        return list(env.tools)
    found: dict[str, ToolSchema] = {}
    for task in [tasks[i] for i in range(min(ASKED, len(tasks)))]:
        env = with_stand_in(make_env())
        try:
            await opening_messages(env, task)
            schemas = env.tools
        except InfraError:  # a service of the env may be down temporarily
            schemas = make_env().tools
        finally:
            await close_env(env, CLOSE_TIMEOUT_S)
        for schema in schemas:
            found.setdefault(schema["function"]["name"], schema)
    return list(found.values())


def task_tools_now(make_env: Callable[[], Env], tasks: Sequence[Task]) -> list[ToolSchema]:
    """`task_tools`, from a plain function; an event loop may be running in this thread."""
    env = make_env()
    if not may_vary(env) or not tasks:
        return list(env.tools)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, task_tools(make_env, tasks)).result()
