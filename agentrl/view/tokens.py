"""Display an episode's tokens in color: prompt, sampled and observed tokens, and which ones train."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.text import Text

from agentrl.clean import visible
from agentrl.plural import plural
from agentrl.types import Origin, Segment
from agentrl.view.pieces import token_pieces

STYLES: dict[Origin, str] = {
    "prompt": "blue",
    "sampled": "bold green",
    "observation": "magenta",
    "glue": "dim",
}
"""Color of each origin; sampled tokens with a negative advantage are red, those with none are plain."""


def tokens_text(
    segments: Sequence[Segment],
    decode: Callable[[Sequence[int]], str],
    advantages: Sequence[float] = (),
    *,
    observed: bool = False,
) -> Text:
    """Format every token of an episode, segment by segment; underlines separate neighboring tokens.

    Tokens that only together form a character are one piece.

    Args:
        segments: the episode's token segments.
        decode: converts ids to text, control tokens included.
        advantages: one per sampled segment; empty if the episode is not used for training.
        observed: whether answers train that a later turn reads (`algorithm.observation_coef`).
    """
    out = Text()
    sampled = iter(advantages)
    last = max((i for i, segment in enumerate(segments) if segment.origin == "sampled"), default=-1)
    for i, segment in enumerate(segments):
        advantage = next(sampled, None) if segment.origin == "sampled" else None
        style = _style(segment.origin, advantage)
        label = _label(segment, advantage, observed=observed and i < last)
        out.append(f"{label}\n", style="reverse " + style)
        before = segments[segment.parent].ids if segment.parent >= 0 else ()
        pieces = filter(None, token_pieces(segment.ids, decode, before))
        for number, piece in enumerate(pieces):
            out.append(visible(piece), style=f"{style} underline" if number % 2 else style)
        out.append("\n")
    return out


def _style(origin: Origin, advantage: float | None) -> str:
    if origin != "sampled":
        return STYLES[origin]
    return "bold" if not advantage else "bold green" if advantage > 0 else "bold red"


def _label(segment: Segment, advantage: float | None, *, observed: bool) -> str:
    label = f" {segment.origin}: {plural(len(segment.ids), 'token')}"
    if segment.origin == "observation" and observed:
        return f"{label}, in the observation loss "
    if segment.origin != "sampled":
        return f"{label}, not trained "
    return f"{label}, not trained " if advantage is None else f"{label}, advantage {advantage:+.2f} "
