"""Demonstrations played by the env's oracle, for envs without `demonstrations`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from agentrl.config.run import RunConfig
from agentrl.env.env import Env
from agentrl.env.load import said_by
from agentrl.env.play import play
from agentrl.errors import AgentRLError, ConfigError
from agentrl.types import Message, Task, ToolSchema

_AT_ONCE = 8


class Demonstration(list[Message]):
    """The messages of a conversation for the cold start.

    Args:
        messages: the conversation, up to the last assistant message.
        tools: the tools offered in it; None for those of the env.
    """

    def __init__(self, messages: Iterable[Message], tools: Sequence[ToolSchema] | None = None) -> None:
        super().__init__(messages)
        self.tools = tools


def author_method(env_class: type[Env], name: str) -> Callable[..., Any] | None:
    """An optional class method; None if it is not defined. Raises ConfigError for a plain method."""
    if inspect.isfunction(inspect.getattr_static(env_class, name, None)):
        raise ConfigError(f"{env_class.__name__}.{name} must be a class method: write @classmethod above it")
    return getattr(env_class, name, None)


def oracle_demonstrations(
    env_class: type[Env], config: RunConfig, make_env: Callable[[], Env], tasks: Sequence[Task]
) -> list[Demonstration]:
    """Let the env's `oracle` play `warmup.num` training tasks in the real env.

    Raises:
        ConfigError: the env has no oracle, `warmup.options` is given, or an episode failed.
    """
    warmup, oracle = config.warmup, author_method(env_class, "oracle")
    assert warmup is not None
    if oracle is None and warmup.use == "oracle":
        raise ConfigError(
            f"warmup.use: {config.sole_env.shown} has no oracle: add `@classmethod def oracle(cls, task)` that "
            "returns a policy for the task"
        )
    if oracle is None:
        raise ConfigError(
            f"{config.sole_env.shown} does not generate demonstrations: name a file under warmup.demonstrations, "
            "add a `demonstrations` or an `oracle` classmethod, or leave `warmup:` out"
        )
    if warmup.options:
        raise ConfigError(
            f"warmup.options has no effect: the oracle of {config.sole_env.shown} writes the demonstrations; "
            "remove it"
        )
    chosen = [tasks[i] for i in range(min(warmup.num, len(tasks)))]
    with ThreadPoolExecutor(1) as thread:  # a loop may already be running in this thread
        return thread.submit(asyncio.run, _play_all(config, oracle, make_env, chosen)).result()


async def _play_all(
    config: RunConfig, oracle: Callable[[Task], Any], make_env: Callable[[], Env], tasks: Sequence[Task]
) -> list[Demonstration]:
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(task: Task) -> Demonstration:
        async with places:
            try:
                episode = await play(make_env(), task, oracle(task), max_turns=config.rollout.max_turns)
            except AgentRLError:
                raise
            except Exception as e:
                raise ConfigError(f"{config.sole_env.shown}.oracle on task {task.id!r}: {said_by(e)}") from e
        messages = list(episode.messages)
        while messages and messages[-1].role != "assistant":  # messages after the last turn are never used
            messages.pop()
        return Demonstration(messages, episode.tools)

    return list(await asyncio.gather(*[one(task) for task in tasks]))
