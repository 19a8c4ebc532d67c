"""Parse Python and brace notations: a cursor over text, and Python literals. Nothing is evaluated."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from agentrl.chat.parsers.parser import MAX_DEPTH

WORDS: dict[str, Any] = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_LIST = re.compile(r"[\[(]")
_SPACE = re.compile(r"\s*+")
NAME = re.compile(r"[^\W\d][\w.-]*+")
_NUMBER = re.compile(r"[+-]?(?:\d++(?:\.\d*+)?+|\.\d++)(?:[eE][+-]?\d++)?+")
_STRING = re.compile(r"'([^'\\]*+(?:\\.[^'\\]*+)*+)'|\"([^\"\\]*+(?:\\.[^\"\\]*+)*+)\"", re.DOTALL)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|[0-7]{1,3}|.)", re.DOTALL)
_PLAIN = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\n": ""}


class Wrong(Exception):
    """The text is not in the expected notation; `at` is the position."""

    def __init__(self, message: str, at: int) -> None:
        super().__init__(message)
        self.at = at


class NotationReader:
    """A position in a text, with methods to consume what is expected there."""

    def __init__(self, text: str, at: int = 0) -> None:
        self.text, self.at = text, at

    def skip(self) -> None:
        match = _SPACE.match(self.text, self.at)
        self.at = match.end() if match else self.at

    def take(self, what: str) -> bool:
        self.skip()
        if self.text.startswith(what, self.at):
            self.at += len(what)
            return True
        return False

    def need(self, what: str) -> None:
        if not self.take(what):
            raise self.wrong(f"expected {what!r}")

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        self.skip()
        match = pattern.match(self.text, self.at)
        if match is not None:
            self.at = match.end()
        return match

    def wrong(self, message: str) -> Wrong:
        near = self.text[self.at : self.at + 20]
        return Wrong(f"{message} at character {self.at}, near {near!r}", self.at)

    def items(self, closing: str, read: Callable[[], None]) -> None:
        """Read comma-separated items up to `closing`; a trailing comma is allowed."""
        while not self.take(closing):
            read()
            if not self.take(","):
                self.need(closing)
                return


def python_value(reader: NotationReader, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise reader.wrong(f"nested more than {MAX_DEPTH} deep")
    if (listed := reader.match(_LIST)) is not None:
        values: list[Any] = []
        closing = "]" if listed.group() == "[" else ")"
        reader.items(closing, lambda: values.append(python_value(reader, depth + 1)))
        return values
    if reader.take("{"):
        mapping: dict[str, Any] = {}

        def entry() -> None:
            key = reader.match(_STRING)
            if key is None:
                raise reader.wrong("expected a key in quotes")
            reader.need(":")
            mapping[_unescape(key)] = python_value(reader, depth + 1)

        reader.items("}", entry)
        return mapping
    if (text := reader.match(_STRING)) is not None:
        return _unescape(text)
    if (number := reader.match(_NUMBER)) is not None:
        return _number(number.group(), reader)
    word = reader.match(NAME)
    if word is None or word.group() not in WORDS:
        raise reader.wrong("expected a value: text in quotes, a number, True, False, None, a list or a dict")
    return WORDS[word.group()]


def _unescape(match: re.Match[str]) -> str:
    def one(escape: re.Match[str]) -> str:
        code = escape.group(1)
        if code[0] in "uUx" and len(code) > 1:
            value = int(code[1:], 16)
            return chr(value) if value < 0x110000 else "\ufffd"
        if code[0] in "01234567":
            return chr(int(code, 8))
        return _PLAIN.get(code, code)

    text = _ESCAPE.sub(one, match.group(1) if match.group(1) is not None else match.group(2))
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _number(text: str, reader: NotationReader) -> int | float:
    try:
        return int(text) if text.lstrip("+-").isdecimal() else float(text)
    except ValueError:
        raise reader.wrong("a number that is too long") from None


def read_literal(text: str) -> Any:
    """Parse a single Python literal.

    Raises:
        Wrong: `text` is not a Python literal.
    """
    reader = NotationReader(text)
    value = python_value(reader, 1)
    reader.skip()
    if reader.at < len(text):
        raise reader.wrong("text after the value")
    return value
