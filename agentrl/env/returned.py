"""What an author's `reset` and `step` return, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.env.env import StepInfo
from agentrl.env.toolenv.json_schema import shorten
from agentrl.types import Message


def opening_of(found: Any, who: str = "it") -> Sequence[Message]:
    """The messages that a reset returned. Raises TypeError if it returned something else."""
    messages, _ = found if isinstance(found, Sequence) and len(found) == 2 else (None, None)
    if isinstance(messages, Sequence) and all(isinstance(message, Message) for message in messages):
        return messages
    raise TypeError(f"{who} returned {shorten(found)}; return (messages, info) with a list of Message")


def answer_of(found: Any, who: str = "it") -> tuple[Sequence[Message], float, bool, bool, StepInfo]:
    """What a step returned. Raises TypeError if it has another form."""
    messages, *rest = found if isinstance(found, Sequence) and len(found) == 5 else (None, None)
    readable = isinstance(messages, Sequence) and all(isinstance(message, Message) for message in messages)
    if readable and isinstance(rest[-1], StepInfo):
        return (messages, *rest)
    raise TypeError(
        f"{who} returned {shorten(found)}; return (messages, reward, terminated, truncated, StepInfo(...))"
    )
