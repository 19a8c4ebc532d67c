"""Display episodes as text in a terminal: messages, tool results, stop reason and rewards."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from agentrl.clean import visible
from agentrl.plural import plural
from agentrl.rollout.episode_metrics import reward_parts
from agentrl.run_folder.records import EpisodeRecord
from agentrl.types import LIMITS, CallRecord, Episode, Image, Message, Task, ToolCall, Turn


def worst_first(records: Iterable[EpisodeRecord]) -> list[EpisodeRecord]:
    """Sort failed episodes first, then by ascending reward; ties are ordered by most mistakes."""

    def badness(record: EpisodeRecord) -> tuple[bool, float, float]:
        episode = record.episode
        return episode.reward is not None, episode.reward or 0.0, -sum(mistakes(episode).values())

    return sorted(records, key=badness)


def mistakes(episode: Episode) -> Mapping[str, float]:
    """Count the policy's mistakes: calls that cannot be parsed, and those whose outcome is not "ok"."""
    counts: dict[str, float] = {}
    for turn in episode.turns:
        if turn.message.parse_errors:
            counts["parse_error"] = counts.get("parse_error", 0) + len(turn.message.parse_errors)
        for call in turn.calls:
            if call.outcome != "ok":
                counts[call.outcome] = counts.get(call.outcome, 0) + 1
    return counts


def _task_name(task: Task) -> str:
    """The task's id, after the name of its env in a run of several."""
    return visible(f"{task.env}: {task.id}" if task.env else task.id)


def step_table(records: Sequence[EpisodeRecord]) -> RenderableType:
    """Return one line per episode."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("episode", no_wrap=True)
    for heading in ("reward", "advantage", "turns", "tokens"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("stopped", no_wrap=True)
    table.add_column("mistakes", overflow="fold")
    for record in records:
        episode = record.episode
        table.add_row(
            Text(visible(episode.id)),
            _reward(episode),
            _advantage(record),
            str(len(episode.turns)),
            str(num_sampled(episode)),
            Text(episode.stop_reason, style="yellow" if episode.stop_reason in LIMITS else ""),
            Text(", ".join(f"{name} {count:g}" for name, count in mistakes(episode).items()), style="yellow"),
        )
    return table


def num_sampled(episode: Episode) -> int:
    """Count the tokens that the policy sampled, or use its endpoint's count if there are no segments."""
    if not episode.segments:
        return sum(turn.tokens for turn in episode.turns)
    return sum(len(segment.ids) for segment in episode.segments if segment.origin == "sampled")


def episode_text(record: EpisodeRecord) -> RenderableType:
    """Format a whole episode, message by message."""
    episode = record.episode
    turns = list(episode.turns)
    parts: list[RenderableType] = [_head(record), ""]
    answers: dict[str, CallRecord] = {}
    for message in episode.messages:
        turn = None
        if turns and message == turns[0].message:  # others are from a branch, or written by the client
            turn = turns.pop(0)
            answers.update({call.call.id: call for call in turn.calls})
        parts += [*_message(message, turn, answers), ""]
    return Group(*parts, _foot(record))


def _head(record: EpisodeRecord) -> Text:
    episode = record.episode
    head = Text(f"episode {visible(episode.id)}", style="bold").append(
        f"  step {record.step}  group {record.group}", style="dim"
    )
    row = ", ".join(f"{key}={_short(value)}" for key, value in episode.task.row.items())
    return head.append(f"\ntask {_task_name(episode.task)}", style="dim").append(
        f"  {visible(row)}" if row else "", style="dim"
    )


def _message(message: Message, turn: Turn | None, answers: Mapping[str, CallRecord]) -> list[Text]:
    style = {"system": "blue", "user": "cyan", "assistant": "green", "tool": "magenta"}[message.role]
    head = Text(message.role, style=f"bold {style}")
    if message.role == "tool":
        answer = answers.get(message.tool_call_id or "")
        head.append(f" {visible(answer.call.name if answer else message.name or '')}", style=style)
        if answer is not None:
            ok = answer.outcome == "ok"
            head.append("" if ok else f"  {answer.outcome}", style="bold yellow")
            head.append(f"  {_seconds(answer.seconds)}", style="dim")
    elif turn is not None:
        cut = "  cut at its token limit" if turn.finish == "length" else ""
        head.append(f"  {plural(turn.tokens, 'token')}  {_seconds(turn.engine_seconds)}", style="dim").append(
            cut, style="yellow"
        )
    lines = [head]
    if message.reasoning:
        lines.append(_indented(message.reasoning, "italic dim"))
    text = message_text(message)
    if text:
        lines.append(_indented(text, "dim" if message.role == "system" else ""))
    lines += [_indented(call_text(call), "bold") for call in message.tool_calls]
    lines += [_indented(f"malformed: {error}", "yellow") for error in message.parse_errors]
    return lines


def _foot(record: EpisodeRecord) -> Text:
    episode = record.episode
    foot = Text("stopped: ").append(episode.stop_reason, style="bold")
    foot.append("  reward: ").append_text(_reward(episode))
    parts = ", ".join(f"{name} {value:g}" for name, value in reward_parts(episode).items())
    foot.append(f" ({parts})" if parts else "", style="dim")
    foot.append("  advantage: ").append_text(_advantage(record))
    foot.append(f"\n{plural(num_sampled(episode), 'token')} in {_seconds(episode.seconds)}", style="dim")
    found = ", ".join(f"{name} {count:g}" for name, count in mistakes(episode).items())
    if found:
        foot.append("  mistakes: ").append(found, style="yellow")
    if episode.error:
        foot.append(f"\nfailed: {visible(episode.error)}", style="bold red")
    if episode.crash:
        foot.append(f"\nthe agent crashed: {visible(episode.crash)}", style="yellow")
    if record.hint is not None:
        foot.append("\nthe teacher also read: ", style="magenta").append(visible(record.hint))
    for name, text in episode.faults.items():
        foot.append(f"\nfault in {visible(name)}: {visible(text)}", style="yellow")
    return foot


def message_text(message: Message) -> str:
    """Return the content of a message; an image is shown as its type and size."""
    if isinstance(message.content, str):
        return message.content
    return "".join(
        f"[{part.mime_type}, {len(part.data)} bytes]" if isinstance(part, Image) else part
        for part in message.content
    )


def call_text(call: ToolCall) -> str:
    """Format a call as Python would write it: `calculator(expression="1 + 2")`."""
    arguments = ", ".join(
        f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in call.arguments.items()
    )
    return f"{call.name}({arguments})"


def _reward(episode: Episode) -> Text:
    if episode.reward is None:
        return Text("failed", style="bold red")
    return Text(f"{episode.reward:.3g}", style="green" if episode.reward > 0 else "red")


def _advantage(record: EpisodeRecord) -> Text:
    values = sorted(set(record.advantages))
    if not values:
        scored = "not trained" if record.episode.reward is None else "none"  # a KL penalty may train it
        why = "set aside" if record.set_aside else "baseline" if record.baseline else scored
        return Text(why, style="dim")
    low, high = f"{values[0]:+.2f}", f"{values[-1]:+.2f}"
    text = low if low == high else f"{low} to {high}"
    return Text(text, style="dim" if not any(values) else "green" if values[-1] > 0 else "red")


def _indented(text: str, style: str) -> Text:
    return Text("\n".join("  " + line for line in visible(text).split("\n")), style=style)


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 200 else text[:197] + "..."
