"""What a reward usually wants from a finished episode. All of it is what the policy itself wrote."""

from __future__ import annotations

from agentrl.env.toolenv.observe import plain_text
from agentrl.types import CallRecord, Episode, Message


def final_message(episode: Episode) -> Message | None:
    """The policy's last message if it made no call in it (its answer); None where there is no such message."""
    if not episode.turns:
        return None
    message = episode.turns[-1].message
    return None if message.tool_calls or message.parse_errors else message


def final_answer(episode: Episode) -> str:
    """The text of the policy's answer, stripped; empty where the episode ended without one."""
    message = final_message(episode)
    return plain_text(message.content).strip() if message is not None else ""


def assistant_text(episode: Episode) -> str:
    """Everything the policy wrote outside calls and reasoning, turn by turn. Nothing a tool printed is in it."""
    return "\n".join(plain_text(turn.message.content) for turn in episode.turns)


def all_calls(episode: Episode) -> tuple[CallRecord, ...]:
    """Every tool call with its result, outcome and time."""
    return tuple(record for turn in episode.turns for record in turn.calls)
