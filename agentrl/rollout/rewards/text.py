"""Conversations as text for reward models."""

from __future__ import annotations

import json
from collections.abc import Sequence

from agentrl.env.judge_text import neutral
from agentrl.env.toolenv.observe import plain_text
from agentrl.types import Message


def conversation_text(messages: Sequence[Message]) -> str:
    """A conversation as text: each message under its role, calls as JSON."""
    return "\n\n".join(
        f"{m.role}{f' {m.name}' if m.role == 'tool' and m.name else ''}:\n{_body(m)}" for m in messages
    )


def plain_roles(messages: Sequence[Message], *, system: bool = True) -> list[dict[str, str]]:
    """A conversation with the roles every chat template supports: tool answers become user messages, and so do
    system messages unless the template has `system`."""
    users = ("tool",) if system else ("tool", "system")
    out: list[dict[str, str]] = []
    for message in messages:
        role = "user" if message.role in users else message.role
        body = f"Tool result: {_body(message)}" if message.role == "tool" else _body(message)
        if out and out[-1]["role"] == role:
            out[-1]["content"] += f"\n{body}"
        else:
            out.append({"role": role, "content": body})
    return out


def _body(message: Message) -> str:
    calls = [json.dumps({"name": c.name, "arguments": dict(c.arguments)}, default=str) for c in message.tool_calls]
    said = "\n".join(part for part in (plain_text(message.content), *(f"call: {call}" for call in calls)) if part)
    return neutral(said)
