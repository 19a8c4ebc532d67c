"""Find tasks whose prompt does not fit before any episode; prompts are never cut."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from agentrl.chat.template import Renderer
from agentrl.chat.transcript import Transcript
from agentrl.config.run import RunConfig
from agentrl.env.load import drop_overlong
from agentrl.env.stand_in import with_stand_in
from agentrl.errors import AgentRLError, ConfigError, InfraError
from agentrl.reporting.report import Reporter
from agentrl.rollout.content import Content
from agentrl.rollout.lifecycle import CLOSE_TIMEOUT_S, close_env, opening_messages
from agentrl.types import Task

MOST_TASKS = 100_000
"""Maximum tasks of a split that are checked; setting up more takes too long before a run."""
AT_ONCE = 64
FIRST = 8
"""Prompts of each split that are measured in every run."""


async def fitting(
    content: Content, config: RunConfig, renderer: Renderer, max_context: int, reporter: Reporter | None
) -> Content:
    """Remove the tasks whose opening messages leave no room for a completion.

    Every task of both splits is set up and rendered once, tools included. Without `data.overlong_prompts`, only
    the first few of each split are checked, and a split is rejected if none fits. The reporter shows what is
    removed.

    Raises:
        ConfigError: `refuse` found one, none fits, there are too many tasks to check, or one cannot be set up.
    """
    if content.parts:
        views = config.by_env
        parts = [
            (name, await fitting(part, views[name], renderer, max_context, reporter))
            for name, part in content.parts.items()
        ]
        return replace(content, parts=dict(parts))
    policy = config.data.overlong_prompts
    most = min(max_context, config.rollout.token_budget) - 1
    if policy is None:
        if config.agent is None:  # programs write their prompts themselves
            await _check_room(content, config, renderer, max_context, most)
        return content
    train = await _fitting(content, content.train_tasks, "training", renderer, most, policy, reporter)
    held_out = await _fitting(content, content.held_out_tasks, "held-out", renderer, most, policy, reporter)
    eval_sets = {
        name: await _fitting(content, tasks, f"eval.sets.{name}", renderer, most, policy, reporter)
        for name, tasks in content.eval_sets.items()
    }
    return replace(content, train_tasks=train, held_out_tasks=held_out, eval_sets=eval_sets)


async def _check_room(
    content: Content, config: RunConfig, renderer: Renderer, max_context: int, most: int
) -> None:
    """Check the first prompts of each split.

    Raises:
        ConfigError: no prompt of a split leaves room for a completion. If others fit, a task that does not is
            still played and ends without a token.
    """

    async def measured(task: Task) -> tuple[int, Task]:
        try:
            return await _measure(content, task, renderer), task
        except InfraError:  # a service of the env may be down temporarily; the run retries such episodes
            return 0, task

    for split in (content.train_tasks, content.held_out_tasks, *content.eval_sets.values()):
        first = [split[i] for i in range(min(len(split), FIRST))]
        found = await asyncio.gather(*map(measured, first))
        tokens, task = min(found, key=lambda pair: pair[0], default=(0, None))
        if task is None or tokens <= most:
            continue
        tight = "the model takes" if max_context <= config.rollout.token_budget else "rollout.token_budget is"
        raise ConfigError(
            f"the prompt of task {task.id!r} has {tokens:,} tokens and {tight} {most + 1:,}: nothing can be "
            "sampled; allow more tokens, shorten the prompt (tools are part of it), or leave such tasks out with "
            "`data.overlong_prompts: drop`"
        )


async def _fitting(
    content: Content,
    tasks: Sequence[Task],
    name: str,
    renderer: Renderer,
    most: int,
    policy: str,
    reporter: Reporter | None,
) -> Sequence[Task]:
    if not tasks:
        return tasks
    if len(tasks) > MOST_TASKS:
        raise ConfigError(
            f"data.overlong_prompts looks at every task, and {len(tasks):,} {name} tasks are too many (at most "
            f"{MOST_TASKS:,}): name a file or make fewer with data.options, or leave the key out"
        )
    listed, places = list(tasks), asyncio.Semaphore(AT_ONCE)

    async def measured(task: Task) -> int:
        async with places:
            return await prompt_tokens(content, task, renderer)

    counts: list[int] = []
    for first in range(0, len(listed), 1000):
        counts += await asyncio.gather(*map(measured, listed[first : first + 1000]))
    by_task = {id(task): count for task, count in zip(listed, counts, strict=True)}
    kept, dropped = drop_overlong(listed, lambda task: by_task[id(task)], most, policy)
    if dropped and reporter is not None:
        longest, tokens = max(dropped, key=lambda pair: pair[1])
        reporter.note(
            f"{len(dropped)} of {len(listed)} {name} tasks are left out: their prompts have more than {most} "
            f"tokens (the longest, {longest}, has {tokens})"
        )
    return kept


async def prompt_tokens(content: Content, task: Task, renderer: Renderer) -> int:
    """Tokens of the context in which the first completion of a task is sampled.

    Raises:
        ConfigError: the env cannot be set up.
    """
    try:
        return await _measure(content, task, renderer)
    except ConfigError:
        raise
    except AgentRLError as e:
        raise ConfigError(f"task {task.id}: its prompt cannot be measured: {e}") from e


async def _measure(content: Content, task: Task, renderer: Renderer) -> int:
    env = with_stand_in(content.make_env())
    try:
        messages = await opening_messages(env, task)
        transcript = Transcript(renderer, env.tools)
        transcript.extend(messages)
        return len(transcript.ids)
    finally:
        await close_env(env, CLOSE_TIMEOUT_S)
