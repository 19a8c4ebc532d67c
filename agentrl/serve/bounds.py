"""Bound the length of a request's texts before they are rendered, without blocking the event loop."""

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
