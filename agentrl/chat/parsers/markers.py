"""Calls with name and JSON arguments between special tokens: DeepSeek V3 and V3.1, Kimi K2, Mistral."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from agentrl.chat.parsers.parser import (
    Malformed,
    ParsedCall,
    Span,
    Tools,
    call_from_json,
    read_arguments,
    read_json,
    read_leading_json,
)
from agentrl.chat.parsers.stream import BlockParser


class _Listed(BlockParser):
    """A section of calls, each between two markers."""

    item: tuple[str, str]

    def calls(self, body: str, tools: Tools) -> Iterator[ParsedCall | Malformed]:
        opening, closing = self.item
        at = 0
        while (start := body.find(opening, at)) >= 0:
            inside = start + len(opening)
            end = body.find(closing, inside)
            if end < 0:
                yield Malformed(f"{closing} is missing", (start, len(body)))
                return
            at = end + len(closing)
            yield self.one(body[inside:end], (start, at))
        if at == 0:
            yield Malformed(f"no {opening} in the section of tool calls", (0, len(body)))

    def one(self, text: str, span: Span) -> ParsedCall | Malformed:
        """Read the text between the two markers."""
        raise NotImplementedError


class DeepSeekV31(_Listed):
    """name <sep> {json}"""

    name = "deepseek_v31"
    blocks = (("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),)
    item = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    separator = "<｜tool▁sep｜>"
    call_head = re.compile(r"<｜tool▁call▁begin｜>\s*+(?P<name>[^<]++)<｜tool▁sep｜>\s*+(?=\{)")

    def one(self, text: str, span: Span) -> ParsedCall | Malformed:
        name, found, arguments = text.partition(self.separator)
        if not found:
            return Malformed(f"{self.separator} is missing between name and arguments", span)
        return read_arguments(name.strip(), arguments, span)


class DeepSeekV3(DeepSeekV31):
    """type <sep> name, then {json} in a fenced block."""

    name = "deepseek_v3"
    call_head = re.compile(
        r"<｜tool▁call▁begin｜>\s*+function\s*+<｜tool▁sep｜>\s*+(?P<name>[^`\s]++)\s*+```json\s*+(?=\{)"
    )

    def one(self, text: str, span: Span) -> ParsedCall | Malformed:
        kind, found, rest = text.partition(self.separator)
        if not found or kind.strip() != "function":
            return Malformed(f"a call must begin with function{self.separator}", span)
        name, fence, arguments = rest.partition("```json")
        arguments, closed, _ = arguments.rpartition("```")
        if not fence or not closed:
            return Malformed(f"call of {name.strip()[:80]!r}: arguments must be in a ```json block", span)
        return read_arguments(name.strip(), arguments, span)


class KimiK2(_Listed):
    """functions.name:index <argument marker> {json}; the whole first part is the call id."""

    name = "kimi_k2"
    blocks = (("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),)
    item = ("<|tool_call_begin|>", "<|tool_call_end|>")
    separator = "<|tool_call_argument_begin|>"
    call_head = re.compile(
        r"<\|tool_call_begin\|>\s*+(?:functions\.)?(?P<name>[^<]+):\d++\s*+<\|tool_call_argument_begin\|>\s*+(?=\{)"
    )

    def call_id(self, name: str, number: int) -> str:
        return f"functions.{name}:{number}"

    def takes_id(self, id: str, name: str) -> bool:
        head, _, index = id.rpartition(":")
        return head.removeprefix("functions.") == name and index.isdecimal()

    def one(self, text: str, span: Span) -> ParsedCall | Malformed:
        id, found, arguments = text.partition(self.separator)
        if not found:
            return Malformed(f"{self.separator} is missing between id and arguments", span)
        id = id.strip()
        name, colon, index = id.removeprefix("functions.").rpartition(":")
        if not colon or not index.isdecimal():
            return Malformed(f"the id {id[:80]!r} must look like functions.name:0", span)
        call = read_arguments(name, arguments, span)
        return replace(call, id=id) if isinstance(call, ParsedCall) else call


class Mistral(BlockParser):
    """[TOOL_CALLS], then either a JSON list of calls, or name[ARGS]{json} for each call."""

    name = "mistral"
    think = ("[THINK]", "[/THINK]")
    blocks = (("[TOOL_CALLS]", ""),)
    call_head = re.compile(
        r'(?:(?:\A\s*+\[|,)\s*+\{\s*+"name"\s*+:\s*+"|(?:\A|\[TOOL_CALLS\])\s*+)(?P<name>[^\[\]{}\s",]++)'
        r'(?:"\s*+,\s*+"arguments"\s*+:|\s*+(?:\[CALL_ID\][^\[\]\s]*+)?\s*+\[ARGS\])\s*+(?=\{)'
    )

    def takes_id(self, id: str, name: str) -> bool:
        return len(id) == 9 and id.isalnum() and id.isascii()

    _head = re.compile(r"\s*+([^\[\]{}\s]++)\s*+(?:\[CALL_ID\]([^\[\]\s]*+))?\s*+(?:\[ARGS\])?\s*+(?=\{)")
    _between = re.compile(r"\s*+(?:\[TOOL_CALLS\])?\s*+")

    def calls(self, body: str, tools: Tools) -> Iterator[ParsedCall | Malformed]:
        if body.lstrip().startswith("["):
            yield from self._list(body)
            return
        at = 0
        while at == 0 or at < len(body):
            match = self._head.match(body, at)
            if match is None:
                what = body[at : at + 40]
                yield Malformed(f"expected name[ARGS]{{...}} after [TOOL_CALLS], got {what!r}", (at, len(body)))
                return
            value, end = read_leading_json(body, match.end())
            if value.error:
                yield Malformed(f"call of {match.group(1)[:80]!r}: not valid JSON: {value.error}", (at, len(body)))
                return
            yield read_arguments(match.group(1), body[match.end() : end], (at, end), id=match.group(2))
            between = self._between.match(body, end)
            at = between.end() if between else end

    def _list(self, body: str) -> Iterator[ParsedCall | Malformed]:
        span = (0, len(body))
        found = read_json(body)
        if found.error:
            yield Malformed(f"not valid JSON: {found.error}", span)
        elif not isinstance(found.value, list):
            yield Malformed("after [TOOL_CALLS] a JSON list is expected", span)
        else:
            for value in found.value:
                call = call_from_json(value, span)
                yield call


class Llama3Json(BlockParser):
    """{"name": ..., "parameters": {...}} as the entire answer or after <|python_tag|>; several are joined by
    ";"."""

    name = "llama3_json"
    blocks: ClassVar[tuple[tuple[str, str], ...]] = (("<|python_tag|>", ""),)
    at_start = ("{",)
    call_head = re.compile(
        r'(?:\A|[;,])\s*+\{\s*+"name"\s*+:\s*+"(?P<name>[^"\\]++)"\s*+,\s*+"(?:parameters|arguments)"\s*+:\s*+(?=\{)'
    )

    _more = re.compile(r"[^\s;,]")
    _looks = re.compile(r'\s*+\{\s*+"(?:name|type|parameters|arguments|function)"')

    def calls(self, body: str, tools: Tools) -> Iterator[ParsedCall | Malformed]:
        at = 0
        if not self._looks.match(body):
            if body.lstrip()[:1] == "{" and _is_json(body):
                return  # a JSON answer that is not a call
            if body.lstrip()[:1] != "{":
                yield Malformed("expected a JSON object with a name and parameters", (0, len(body)))
                return
        while (more := self._more.search(body, at)) is not None:
            start = more.start()
            value, end = read_leading_json(body, start)
            if value.error:
                yield Malformed(f"not valid JSON: {value.error}", (start, len(body)))
                return
            yield call_from_json(value.value, (start, end), arguments=("parameters", "arguments"))
            at = end


class Llama4Json(Llama3Json):
    """Same as Llama 3; text before the calls is between <|python_start|> and <|python_end|>."""

    name = "llama4_json"
    blocks = (("<|python_end|>", ""), ("<|python_tag|>", ""))
    unseen = ("<|python_start|>",)

    def calls(self, body: str, tools: Tools) -> Iterator[ParsedCall | Malformed]:
        return super().calls(body, tools) if body.strip() else iter(())


class Plain(BlockParser):
    """Text and thinking but no calls, for when the call format is unknown."""

    name = "plain"
    blocks = ()

    def calls(self, body: str, tools: Tools) -> Iterator[ParsedCall | Malformed]:
        return iter(())


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
