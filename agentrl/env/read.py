"""Helpers for rewards to read a finished episode; all of the text was written by the policy."""

from __future__ import annotations

from agentrl.env.toolenv.observe import plain_text
from agentrl.types import CallRecord, Episode, Message


def final_message(episode: Episode) -> Message | None:
    """The policy's answer: its last message if that has no tool call, else None."""
    if not episode.turns:
        return None
    message = episode.turns[-1].message
    return None if message.tool_calls or message.parse_errors else message


def final_answer(episode: Episode) -> str:
    """The text of the policy's answer, stripped; empty if the episode ended without one."""
    message = final_message(episode)
    return plain_text(message.content).strip() if message is not None else ""


def assistant_text(episode: Episode) -> str:
    """Everything the policy wrote outside calls and reasoning, turn by turn. Tool output is not included."""
    return "\n".join(plain_text(turn.message.content) for turn in episode.turns)


def all_calls(episode: Episode) -> tuple[CallRecord, ...]:
    """Every tool call with its result, outcome and time."""
    return tuple(record for turn in episode.turns for record in turn.calls)
