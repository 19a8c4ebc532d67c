"""Policies that do not solve tasks: they send a text, repeat the prompt, or call tools with it."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.env.env import Env
from agentrl.env.play import Policy, RandomPolicy, call, random_arguments, say
from agentrl.env.toolenv.observe import plain_text
from agentrl.exam.arena import ExamEpisode, MakePolicy, parameters_of
from agentrl.types import Message, StopReason, Task, ToolSchema

_FINAL = re.compile(
    r"submit|answer|final|finish|give_?up|surrender|quit|skip|abstain|pass|end|done|stop|respond", re.I
)
_GIVE_UP = re.compile(r"give_?up|surrender|quit|skip|abstain|pass|forfeit|resign|abort|cancel_task", re.I)
NUM_TOURED = 7
"""Tools that are called one after another in one episode."""
NUM_TOOLS = 6
"""Tools of a task that get texts as arguments."""


def random_policy(seed: int) -> MakePolicy:
    """Random calls with valid arguments, and random words of the conversation as answers."""
    return lambda env, task: RandomPolicy(lambda: env.tools, seed)


def tour(env: Env, task: Task) -> Policy:
    """Calls every tool twice with valid arguments, those that hand in an answer last, then says nothing."""
    script: list[Message] | None = None

    def policy(messages: Sequence[Message]) -> Message:
        nonlocal script
        if script is None:  # the tools of the task are known from the first turn
            tools = sorted(env.tools[:NUM_TOURED], key=lambda t: bool(_FINAL.search(t["function"]["name"])))
            rng = random.Random(0)
            script = [
                call(f["name"], **random_arguments(f.get("parameters") or {}, rng))
                for f in (tool["function"] for tool in tools * 2)
            ]
        return script.pop(0) if script else say("")

    return policy


def saying(text: str) -> MakePolicy:
    """Sends the same message in every turn."""
    return lambda env, task: lambda messages: say(text)


def echo(env: Env, task: Task) -> Policy:
    """Repeats the last message that is not its own."""

    def policy(messages: Sequence[Message]) -> Message:
        others = [m for m in messages if m.role != "assistant"]
        return say(plain_text(others[-1].content) if others else "")

    return policy


def calling(name: str, text: str | None, then: str = "", *, repeat: bool = False) -> MakePolicy:
    """Calls the tool with `text` as every text argument, or with empty arguments, then says `then`.

    Args:
        name: the tool; tasks without it get `then` only.
        text: None stands for the first user message of the task.
        repeat: call it in every turn.
    """

    def make(env: Env, task: Task) -> Policy:
        turn = 0

        def policy(messages: Sequence[Message]) -> Message:
            nonlocal turn
            turn += 1
            tool = next((t for t in env.tools if t["function"]["name"] == name), None)
            given = prompt_of(messages) if text is None else text
            if tool is None or (turn > 1 and not repeat):
                return say(then)
            return call(name, **arguments_with(tool, given))

        return policy

    return make


def prompt_of(messages: Sequence[Message]) -> str:
    """The first user message."""
    return next((plain_text(m.content) for m in messages if m.role == "user"), "")


def arguments_with(tool: ToolSchema, text: str) -> Mapping[str, Any]:
    """Valid arguments with `text` wherever text is free; empty values for an empty text."""
    schema = tool["function"].get("parameters") or {}
    found = random_arguments(schema, random.Random(0), ("a",)) if schema else {}
    for name, part in parameters_of(tool).items():
        if name not in found and name not in schema.get("required", ()):
            continue
        if is_text(part):
            found[name] = text
        elif not text and part.get("type") in ("integer", "number", "array"):
            found[name] = [] if part["type"] == "array" else 0
    return dict(found)


def is_text(part: Mapping[str, object]) -> bool:
    """Whether an argument is free text."""
    return part.get("type") == "string" and "enum" not in part and "const" not in part


def takes_text(tool: ToolSchema) -> bool:
    """Whether some argument is free text, and no other one is a choice that could be right by chance."""
    parts = parameters_of(tool).values()
    return any(map(is_text, parts)) and not any("enum" in p or p.get("type") == "boolean" for p in parts)


def takes_nothing(tool: ToolSchema) -> bool:
    """Whether the tool has no required arguments."""
    return not (tool["function"].get("parameters") or {}).get("required")


def gives_up(tool: ToolSchema) -> bool:
    """Whether the tool's name says that it gives up."""
    return bool(_GIVE_UP.search(tool["function"]["name"]))


def final_tools(tools: Sequence[ToolSchema], seen: Sequence[ExamEpisode]) -> list[ToolSchema]:
    """The tools that hand in an answer: those that ended an episode or are named like it, then others."""
    ended = {
        p.episode.turns[-1].message.tool_calls[-1].name
        for p in seen
        if p.episode is not None
        and p.episode.stop_reason in (StopReason.STOPPED_BY_TOOL, StopReason.TERMINATED)
        and p.episode.turns
        and p.episode.turns[-1].message.tool_calls
    }

    def rank(tool: ToolSchema) -> int:
        name = tool["function"]["name"]
        return 0 if name in ended else 1 if _FINAL.search(name) else 2

    return sorted(tools, key=rank)[:NUM_TOOLS]
