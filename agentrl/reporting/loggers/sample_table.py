"""The table of sample episodes: which episodes, and their rows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import astuple, fields

from agentrl.reporting.loggers.protocol import SampleEpisode
from agentrl.types import Episode

TEXT_CHARACTERS = 4000
_MARKUP = re.compile(r"[&<>|\[\]!*_`\\#~]")
"""What Markdown or HTML would act on: an image in a policy's text is fetched by the reader's browser."""
COLUMNS = tuple(field.name for field in fields(SampleEpisode))


def sample_rows(episodes: Sequence[Episode], most: int) -> tuple[SampleEpisode, ...]:
    """At most `most` scored episodes, evenly from the best to the worst reward."""
    scored = sorted((e for e in episodes if e.reward is not None), key=lambda e: -(e.reward or 0.0))
    if len(scored) > most:
        scored = [scored[round(i * (len(scored) - 1) / max(most - 1, 1))] for i in range(most)]
    return tuple(_row(episode) for episode in scored)


def markdown_table(rows: Sequence[SampleEpisode]) -> str:
    """The rows as a table in Markdown."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *(tuple(map(_cell, astuple(row))) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
    return "<br>".join(_MARKUP.sub(lambda sign: f"&#{ord(sign[0])};", line) for line in text.splitlines())


def _row(episode: Episode) -> SampleEpisode:
    return SampleEpisode(
        episode.id,
        episode.task.id,
        episode.reward,
        episode.solved,
        episode.stop_reason.value,
        len(episode.turns),
        _text(episode),
    )


def _text(episode: Episode) -> str:
    parts: list[str] = []
    for message in episode.messages:
        content = message.content if isinstance(message.content, str) else "[content with images]"
        calls = "".join(f"\n-> {call.name}({call.arguments})" for call in message.tool_calls)
        parts.append(f"[{message.role}] {content}{calls}")
    text = "\n".join(parts).encode("utf-8", "replace").decode("utf-8")
    half = TEXT_CHARACTERS // 2
    return text if len(text) <= TEXT_CHARACTERS else f"{text[:half]}\n[...]\n{text[-half:]}"
