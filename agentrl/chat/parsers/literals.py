"""Calls that are not JSON: Python calls (Llama 3.2, Llama 4) and Gemma's braces. Nothing is evaluated."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from agentrl.chat.parsers.notation import NAME, WORDS, NotationReader, Wrong, python_value
from agentrl.chat.parsers.parser import MAX_DEPTH, Malformed, ParsedCall, Tools, unsound
from agentrl.chat.parsers.stream import BlockParser
from agentrl.chat.parsers.tagged_values import untexted


class Pythonic(BlockParser):
    """[name(key=value, ...), ...] as the entire answer."""

    name = "pythonic"
    misspelt = True
    blocks = (("<|python_start|>", "<|python_end|>"),)
    at_start: ClassVar[tuple[str, ...]] = ("[",)
    wraps: ClassVar[tuple[str, str]] = ("", "")
    """Text allowed around the list, if any is written."""

    _looks = re.compile(rf"\s*+\[\s*+{NAME.pattern}\(")

    def calls(self, body: str, tools: Tools) -> Iterator[ParsedCall | Malformed]:
        if not self._looks.match(body):
            if body.lstrip()[:1] != "[" or not self.at_start:
                yield Malformed(f"expected [name(key=value)], got {body.strip()[:40]!r}", (0, len(body)))
            return  # where a call has no markers, a list that contains none is an answer
        reader = NotationReader(body)
        reader.need("[")
        found: list[ParsedCall | Malformed] = []
        try:
            reader.items("]", lambda: found.append(_python_call(reader)))
            reader.skip()
            if reader.at < len(body):
                raise reader.wrong("text after the list of calls")
        except Wrong as e:  # only one notation: text before the mistake is not a list of calls
            found = [Malformed(str(e), (0, len(body)))]
        for call in found:
            yield (
                ParsedCall(call.name, untexted(call.arguments, tools, call.name), call.span)
                if isinstance(call, ParsedCall)
                else call
            )

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        opening, closing = self.wraps
        shown = (
            f"{name}({', '.join(f'{key}={_shown(value)}' for key, value in given.items())})"
            for name, given in calls
        )
        return f"{opening}[{', '.join(shown)}]{closing}"


def _python_call(reader: NotationReader) -> ParsedCall | Malformed:
    reader.skip()
    start = reader.at
    name = reader.match(NAME)
    if name is None:
        raise reader.wrong("expected a tool's name")
    reader.need("(")
    arguments: dict[str, Any] = {}

    def argument() -> None:
        key = reader.match(NAME)
        if key is None or not reader.take("="):
            raise reader.wrong(f"call of {name.group()[:80]!r}: arguments must be given as key=value")
        if key.group() in arguments:
            raise reader.wrong(f"call of {name.group()[:80]!r}: argument {key.group()[:80]!r} is given twice")
        arguments[key.group()] = python_value(reader, 1)

    reader.items(")", argument)
    span = (start, reader.at)
    problem = unsound(arguments)
    return (
        Malformed(f"call of {name.group()[:80]!r}: {problem}", span)
        if problem
        else ParsedCall(name.group(), arguments, span)
    )


def _shown(value: Any) -> str:
    """Format a value as Python would, with text quoted as in JSON."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_shown(key)}: {_shown(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_shown, value)) + "]"
    return repr(value)


class Lfm2(Pythonic):
    """<|tool_call_start|>[name(key=value, ...), ...]<|tool_call_end|> inside text: LFM2 and LFM2.5."""

    name = "lfm2"
    blocks = (("<|tool_call_start|>", "<|tool_call_end|>"),)
    at_start = ()
    wraps = blocks[0]


class Gemma(BlockParser):
    """call:name{key:value}, with format-specific text delimiters: Gemma 4 and FunctionGemma."""

    name = "gemma"
    think = ("<|channel>thought\n", "<channel|>")
    blocks = (("<|tool_call>", "<tool_call|>"), ("<start_function_call>", "<end_function_call>"))
    quotes = ('<|"|>', "<escape>")

    _head = re.compile(r"\s*+call:([^{}\s]++)\s*+(?=\{)")
    _key = re.compile(r"[^\s:{}\[\],<]++")
    _bare = re.compile(r"[^,{}\[\]<]++")

    def calls(self, body: str, tools: Tools) -> Iterator[ParsedCall | Malformed]:
        span = (0, len(body))
        head = self._head.match(body)
        if head is None:
            yield Malformed(f"expected call:name{{...}}, got {body.strip()[:40]!r}", span)
            return
        reader = NotationReader(body, head.end())
        try:
            arguments = self._value(reader, 1)
            reader.skip()
            if reader.at < len(body):
                raise reader.wrong("text after the call")
        except Wrong as e:
            yield Malformed(f"call of {head.group(1)[:80]!r}: {e}", span)
            return
        problem = unsound(arguments)
        yield Malformed(problem, span) if problem else ParsedCall(head.group(1), arguments, span)

    def _value(self, reader: NotationReader, depth: int) -> Any:
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
        if word in WORDS:
            return WORDS[word]
        try:
            value = json.loads(word)
        except ValueError:
            return word
        return value if isinstance(value, int | float) and value == value and abs(value) != float("inf") else word

    def _text(self, reader: NotationReader) -> str | None:
        for quote in self.quotes:
            if reader.take(quote):
                end = reader.text.find(quote, reader.at)
                if end < 0:
                    raise reader.wrong(f"text is not closed by {quote}")
                text = reader.text[reader.at : end]
                reader.at = end + len(quote)
                return text
        return None
