"""Serve an env until told to end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from agentrl.config.run import RunConfig
from agentrl.config.schemes import scheme_of
from agentrl.env_server.app import create_env_app
from agentrl.env_server.open_sessions import Sessions
from agentrl.env_server.served import EnvSource
from agentrl.rollout.content import load_content
from agentrl.sandbox.shared_pools import close_pools
from agentrl.serve.listen import running
from agentrl.types import Task


def load_source(config: RunConfig, *, max_turns: int) -> EnvSource:
    """The env of a run with its tasks.

    Raises:
        ConfigError: it cannot be loaded, or has no tasks.
    """
    content = load_content(config)
    splits: Mapping[str, Sequence[Task]] = {"train": content.train_tasks, "test": content.held_out_tasks}
    there = {name: tasks for name, tasks in splits.items() if len(tasks)}
    return EnvSource(env_name(config.sole_env.shown), content.make_env, there, max_turns, config.rollout.timeout_s)


def env_name(use: str) -> str:
    """A name without characters that need escaping in a URL: the class, or scheme and rest."""
    name = use if scheme_of(use) else use.rpartition(":")[2] or Path(use).stem
    return "".join(c if c.isalnum() or c in "-._" else "-" for c in name).lower().strip("-")


@contextlib.asynccontextmanager
async def serving_env(
    sessions: Sessions, *, host: str = "127.0.0.1", port: int = 0, token: str | None = None
) -> AsyncIterator[str]:
    """Serve the env during the block; yields the address.

    Raises:
        ConfigError: the port is not available.
    """
    watching = asyncio.create_task(sessions.watch())
    try:
        async with running(create_env_app(sessions, token), host=host, port=port, websockets=True) as url:
            try:
                yield url
            finally:
                await sessions.close_all()  # or the server would wait for calls in progress
    finally:
        watching.cancel()
        await sessions.close_all()
        await close_pools()
