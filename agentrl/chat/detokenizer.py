"""From ids that arrive one at a time to text."""

from __future__ import annotations

from collections.abc import Callable

_HALF = 3
"""Maximum bytes of an incomplete character."""
_MOST_CONTEXT = 64
"""Approximate number of ids decoded again with each new one."""


class Detokenizer:
    """Decode ids that arrive one at a time; incomplete characters are held back until they are complete.

    Incomplete bytes decode to U+FFFD: one for all of them, or one per byte. Everything before them is final, so
    that the pieces together are the text of all ids, even if the bytes are not valid UTF-8. The exception is a
    decoder that retracts complete characters (byte fallback, when an invalid byte follows them).
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []  # the context for decoding the next text
        self._settled = 0  # ids among them whose text has been emitted completely
        self._given = 0  # characters of their text that have been emitted

    def feed(self, id: int) -> str:
        """Return the text that is final with this id."""
        self._ids.append(id)
        text = self._decode(self._ids)
        held = next((n for n in range(_HALF) if not text[: len(text) - n].endswith("\ufffd")), _HALF)
        if held and len(self._ids) - self._settled <= _HALF:
            return ""  # with byte fallback, an incomplete character temporarily hides the complete ones before it
        new = self._give(text, len(text) - held)
        if not held:
            newest = self._ids[self._settled :]
            if count := len(self._decode(newest)):  # keep the newest ids with text: decoders look back one token
                self._ids, self._settled, self._given = newest, len(newest), count
            elif not new and (self._given or len(self._ids) > _MOST_CONTEXT):
                self._ids.pop()  # an id that the tokenizer does not know: decoders look past it
        elif len(self._ids) > _MOST_CONTEXT:
            self._forget(text)
        return new

    def close(self) -> str:
        """Return the text held back."""
        text = self._decode(self._ids)
        return self._give(text, len(text))

    def _give(self, text: str, end: int) -> str:
        new = text[self._given : end]
        self._given += len(new)
        return new

    def _forget(self, text: str) -> None:
        """Keep only the newest of many ids that form no character, cut at a character boundary."""
        for kept in range(_HALF + 1, 2 * _HALF + 2):
            before = self._decode(self._ids[:-kept])
            if len(before) <= self._given and before + self._decode(self._ids[-kept:]) == text:
                self._ids, self._settled = self._ids[-kept:], 0
                self._given -= len(before)
                return
