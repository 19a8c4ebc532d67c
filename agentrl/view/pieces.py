"""The text of each token of a sequence, as it stands in the text of the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agentrl.chat.detokenizer import Detokenizer

CONTEXT = 4
"""Tokens before a piece that are decoded with it: alone, the first one would lose its leading space."""
LONGEST = 4
"""Bytes, and so at most tokens, of a character."""
UNFINISHED = "\ufffd"

Decode = Callable[[Sequence[int]], str]


def token_pieces(ids: Sequence[int], decode: Decode, before: Sequence[int] = ()) -> list[str]:
    """Return the text that each token adds; a character that several tokens form belongs to the last of them.

    Args:
        ids: consecutive tokens.
        decode: converts ids to text, control tokens included.
        before: tokens right before `ids`; without them, the first token is the beginning of a text.
    """
    for count in range(CONTEXT, CONTEXT + LONGEST):
        reader = Detokenizer(decode)
        if not "".join(map(reader.feed, before[-count:])).startswith(UNFINISHED):  # not from inside a character
            break
    found = [reader.feed(id) for id in ids]
    if found:
        found[-1] += reader.close()
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
    longest = CONTEXT + LONGEST
    context = [*before[-longest:], *ids[max(0, start - longest) : start]]
    return token_pieces(ids[start:end], decode, context)[low - start : high - start]
