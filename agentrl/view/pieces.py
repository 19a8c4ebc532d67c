"""The text of each token of a sequence, as it stands in the text of the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

CONTEXT = 4
"""Tokens before a piece that are decoded with it: alone, the first one would lose its leading space."""
LONGEST = 4
"""Bytes, and so at most tokens, of a character."""
STRETCH = 16
"""Tokens decoded together before the oldest ones are dropped."""
UNFINISHED = "\ufffd"

Decode = Callable[[Sequence[int]], str]


def token_pieces(ids: Sequence[int], decode: Decode, before: Sequence[int] = ()) -> list[str]:
    """Return the text that each token adds; a character that several tokens form belongs to the last of them.

    Args:
        ids: consecutive tokens.
        decode: converts ids to text, control tokens included.
        before: tokens right before `ids`; without them, the first token is the beginning of a text.
    """
    joined = [*before[-CONTEXT:], *ids]
    first = len(joined) - len(ids)
    start, known = 0, decode(joined[:first]).rstrip(UNFINISHED) if first else ""
    found: list[str] = []
    held = 0  # tokens since the last that ended with a whole character
    for at in range(first, len(joined)):
        text = decode(joined[start : at + 1])
        held = held + 1 if text.endswith(UNFINISHED) else 0
        whole = text if at + 1 == len(joined) or held >= LONGEST else text.rstrip(UNFINISHED)
        if known.startswith(whole):  # nothing new, or nothing whole since what is known
            found.append("")
        else:
            appended = whole.startswith(known)  # else, the decoder rewrites what came before
            found.append(whole[len(known) :] if appended else decode(joined[at : at + 1]))
            known = whole
        held = 0 if held >= LONGEST else held
        if at - start >= STRETCH and not held:
            start = at + 1 - CONTEXT
            known = decode(joined[start : at + 1])
    return found


def span_pieces(ids: Sequence[int], low: int, high: int, decode: Decode, before: Sequence[int] = ()) -> list[str]:
    """The pieces of `ids[low:high]`, whatever part of the sequence is asked for.

    Args:
        ids: all tokens of the segment.
        low: the first token wanted.
        high: after the last token wanted.
        decode: as for `token_pieces`.
        before: the tokens before `ids`.
    """
    start, end = max(0, low - LONGEST), min(len(ids), high + LONGEST)
    lead = ids[max(0, start - CONTEXT) : start]
    context = [*before[-CONTEXT:], *lead] if len(lead) < CONTEXT else lead
    return token_pieces(ids[start:end], decode, context)[low - start : high - start]
