"""Calls in notations of their own: Python calls (Llama 3.2, Llama 4) and Gemma's braces. Nothing is evaluated."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from agentrl.chat.parsers.base import MAX_DEPTH, Call, Malformed, Tools, unsound
from agentrl.chat.parsers.stream import BlockParser

_WORDS: dict[str, Any] = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_LIST = re.compile(r"[\[(]")
_SPACE = re.compile(r"\s*+")
_NAME = re.compile(r"[^\W\d][\w.]*+")
_NUMBER = re.compile(r"[+-]?(?:\d++(?:\.\d*+)?+|\.\d++)(?:[eE][+-]?\d++)?+")
_STRING = re.compile(r"'([^'\\]*+(?:\\.[^'\\]*+)*+)'|\"([^\"\\]*+(?:\\.[^\"\\]*+)*+)\"", re.DOTALL)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|[0-7]{1,3}|.)", re.DOTALL)
_PLAIN = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\n": ""}


class _Wrong(Exception):
    """What was read is not in the notation; `at` is where."""

    def __init__(self, message: str, at: int) -> None:
        super().__init__(message)
        self.at = at


class _Reader:
    """A position in a text, and what may stand there."""

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

    def wrong(self, message: str) -> _Wrong:
        near = self.text[self.at : self.at + 20]
        return _Wrong(f"{message} at character {self.at}, near {near!r}", self.at)

    def items(self, closing: str, read: Callable[[], None]) -> None:
        """Comma-separated items up to `closing`; a comma may stand before it."""
        while not self.take(closing):
            read()
            if not self.take(","):
                self.need(closing)
                return


class Pythonic(BlockParser):
    """[name(key=value, ...), ...] as the whole answer."""

    name = "pythonic"
    blocks = (("<|python_start|>", "<|python_end|>"),)
    at_start = "["

    _looks = re.compile(r"\s*+\[\s*+[^\W\d][\w.]*+\(")

    def calls(self, body: str, tools: Tools, repair: bool) -> Iterator[Call | Malformed]:
        if not self._looks.match(body):
            if body.lstrip()[:1] != "[":
                yield Malformed(f"expected [name(key=value)], got {body.strip()[:40]!r}", (0, len(body)))
            return  # a list that holds no call is an answer
        reader = _Reader(body)
        reader.need("[")
        found: list[Call | Malformed] = []
        try:
            reader.items("]", lambda: found.append(_python_call(reader)))
            reader.skip()
            if reader.at < len(body):
                raise reader.wrong("text after the list of calls")
        except _Wrong as e:  # one notation: what stands before the mistake is not a list of calls
            found = [Malformed(str(e), (0, len(body)))]
        yield from found


def _python_call(reader: _Reader) -> Call | Malformed:
    reader.skip()
    start = reader.at
    name = reader.match(_NAME)
    if name is None:
        raise reader.wrong("expected a tool's name")
    reader.need("(")
    arguments: dict[str, Any] = {}

    def argument() -> None:
        key = reader.match(_NAME)
        if key is None or not reader.take("="):
            raise reader.wrong(f"call of {name.group()[:80]!r}: arguments must be given as key=value")
        if key.group() in arguments:
            raise reader.wrong(f"call of {name.group()[:80]!r}: argument {key.group()[:80]!r} is given twice")
        arguments[key.group()] = _python_value(reader, 1)

    reader.items(")", argument)
    span = (start, reader.at)
    problem = unsound(arguments)
    return (
        Malformed(f"call of {name.group()[:80]!r}: {problem}", span)
        if problem
        else Call(name.group(), arguments, span)
    )


def _python_value(reader: _Reader, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise reader.wrong(f"nested more than {MAX_DEPTH} deep")
    if (listed := reader.match(_LIST)) is not None:
        values: list[Any] = []
        closing = "]" if listed.group() == "[" else ")"
        reader.items(closing, lambda: values.append(_python_value(reader, depth + 1)))
        return values
    if reader.take("{"):
        mapping: dict[str, Any] = {}

        def entry() -> None:
            key = reader.match(_STRING)
            if key is None:
                raise reader.wrong("expected a key in quotes")
            reader.need(":")
            mapping[_unescape(key)] = _python_value(reader, depth + 1)

        reader.items("}", entry)
        return mapping
    if (text := reader.match(_STRING)) is not None:
        return _unescape(text)
    if (number := reader.match(_NUMBER)) is not None:
        return _number(number.group(), reader)
    word = reader.match(_NAME)
    if word is None or word.group() not in _WORDS:
        raise reader.wrong("expected a value: text in quotes, a number, True, False, None, a list or a dict")
    return _WORDS[word.group()]


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


def _number(text: str, reader: _Reader) -> int | float:
    try:
        return int(text) if text.lstrip("+-").isdecimal() else float(text)
    except ValueError:
        raise reader.wrong("a number that is too long") from None


class Gemma(BlockParser):
    """call:name{key:value}, text between marks of its own: Gemma 4 and FunctionGemma."""

    name = "gemma"
    think = ("<|channel>thought\n", "<channel|>")
    blocks = (("<|tool_call>", "<tool_call|>"), ("<start_function_call>", "<end_function_call>"))
    quotes = ('<|"|>', "<escape>")

    _head = re.compile(r"\s*+call:([^{}\s]++)\s*+(?=\{)")
    _key = re.compile(r"[^\s:{}\[\],<]++")
    _bare = re.compile(r"[^,{}\[\]<]++")

    def calls(self, body: str, tools: Tools, repair: bool) -> Iterator[Call | Malformed]:
        span = (0, len(body))
        head = self._head.match(body)
        if head is None:
            yield Malformed(f"expected call:name{{...}}, got {body.strip()[:40]!r}", span)
            return
        reader = _Reader(body, head.end())
        try:
            arguments = self._value(reader, 1)
            reader.skip()
            if reader.at < len(body):
                raise reader.wrong("text after the call")
        except _Wrong as e:
            yield Malformed(f"call of {head.group(1)[:80]!r}: {e}", span)
            return
        problem = unsound(arguments)
        yield Malformed(problem, span) if problem else Call(head.group(1), arguments, span)

    def _value(self, reader: _Reader, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise reader.wrong(f"nested more than {MAX_DEPTH} deep")
        if reader.take("{"):
            mapping: dict[str, Any] = {}

            def entry() -> None:
                key = self._text(reader)
                if key is None and (bare := reader.match(self._key)) is not None:
                    key = bare.group()
                if key is None:
                    raise reader.wrong("expected a key")
                reader.need(":")
                mapping[key] = self._value(reader, depth + 1)

            reader.items("}", entry)
            return mapping
        if reader.take("["):
            values: list[Any] = []
            reader.items("]", lambda: values.append(self._value(reader, depth + 1)))
            return values
        text = self._text(reader)
        if text is not None:
            return text
        bare = reader.match(self._bare)
        if bare is None:
            raise reader.wrong("expected a value")
        word = bare.group().strip()
        if word in _WORDS:
            return _WORDS[word]
        try:
            value = json.loads(word)
        except ValueError:
            return word
        return value if isinstance(value, int | float) and value == value and abs(value) != float("inf") else word

    def _text(self, reader: _Reader) -> str | None:
        for quote in self.quotes:
            if reader.take(quote):
                end = reader.text.find(quote, reader.at)
                if end < 0:
                    raise reader.wrong(f"text is not closed by {quote}")
                text = reader.text[reader.at : end]
                reader.at = end + len(quote)
                return text
        return None
