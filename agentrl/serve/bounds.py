"""Bound a request before it is parsed and its texts before they are rendered, without blocking the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from agentrl.chat.vocabulary import Vocabulary

SLICE = 1 << 16
"""Characters that are tokenized at once."""
PER_CUT = 16
"""A cut between two slices may add at most this many tokens; they are not counted."""
LONG_TEXT = 50_000
"""Texts with fewer characters together are not counted: rendering them does not block others."""


SMALL_BODY = 1 << 18
"""Smaller bodies are parsed without looking at them first."""
VALUES_PER_TOKEN = 2
FEW_VALUES = 40_000
"""A request may have this many JSON keys and values, and some more for each token of the context."""


def has_more_values(data: bytes, most: int) -> bool:
    """Whether JSON text has more than about `most` keys and values; stops counting there.

    A parser holds the interpreter's lock until it has read everything: 30 MB take it milliseconds as one text, but
    seconds as a million small values. This runs on another thread, and gives the lock away.
    """
    found = at = 0
    while found <= most:
        begin = data.find(b'"', at)
        end = begin if begin >= 0 else len(data)
        found += 1
        for start in range(at, end, SMALL_BODY):
            between = data[start : min(end, start + SMALL_BODY)]
            found += between.count(b",") + between.count(b"[") + between.count(b"{")
        if begin < 0:
            break
        at = _end_of_text(data, begin)
    return found > most


def _end_of_text(data: bytes, begin: int) -> int:
    """Where the text that opens at `begin` has ended."""
    end = data.find(b'"', begin + 1)
    while end >= 0:
        before = end
        while data[before - 1] == 0x5C:  # a backslash
            before -= 1
        if (end - before) % 2 == 0:
            return end + 1
        end = data.find(b'"', end + 1)
    return len(data)


async def tokens_above(vocabulary: Vocabulary, texts: Iterable[str], limit: int) -> int | None:
    """A lower bound of the number of tokens of these texts if it exceeds `limit`; None if they may fit.

    Counting stops at the limit, on another thread and without the interpreter's lock, so that a request of any
    size costs no more than one that fits.
    """
    text = "".join(texts)  # what separates them in the prompt only adds to it
    if len(text) < LONG_TEXT:
        return None
    found = 0
    for start in range(0, len(text), SLICE):
        part = text[start : start + SLICE]
        found += max(0, await asyncio.to_thread(vocabulary.count, part) - PER_CUT)
        if found > limit:
            return found
    return None
