"""Calls written as elements: <function name="f"><param name="key">value</param></function> (MiniCPM5), and one
element for each key, nested as the value is (MiniMax M3)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from dataclasses import dataclass, field, replace
from typing import ClassVar

from agentrl.chat.parsers.parser import MAX_DEPTH, Malformed, ParsedCall, Span, Tools
from agentrl.chat.parsers.stream import BlockParser
from agentrl.chat.parsers.tagged import read_tagged
from agentrl.chat.parsers.tagged_values import parameters_of, schema_inside, typed, types_in, untexted

_CDATA = ("<![CDATA[", "]]>")


class MiniCPM5(BlockParser):
    """<function name="f"><param name="key">value</param></function>; values with markup are CDATA sections."""

    name = "minicpm5"
    blocks = (("<function name=", "</function>"),)

    _head = re.compile(r"\"([^\"<>]+)\">")
    _parameter = re.compile(r"\s*+<param name=\"([^\"<>]+)\">")
    _end = re.compile(r"\s*+\Z")

    def calls(self, body: str, tools: Tools) -> Iterator[ParsedCall | Malformed]:
        span = (0, len(body))
        head = self._head.match(body)
        if head is None:
            yield Malformed(f'expected <function name="...">, got {body.strip()[:40]!r}', span)
            return
        name = head.group(1)
        call = read_tagged(body, span, name, head.end(), self._parameter, "</param>", self._end, tools)
        if isinstance(call, ParsedCall):
            arguments = {key: _without_cdata(value) for key, value in call.arguments.items()}
            call = replace(call, arguments=untexted(arguments, tools, name))
        yield call


def _without_cdata(value: object) -> object:
    opening, closing = _CDATA
    if isinstance(value, str) and value.startswith(opening) and value.endswith(closing):
        return value[len(opening) : -len(closing)]
    return value


@dataclass(slots=True)
class _Element:
    """An open element: the text after its tag, and the elements inside it."""

    key: str
    text: str
    inside: list[tuple[str, object]] = field(default_factory=list)

    def value(self, types: Set[str]) -> object:
        """Its value: a list of what is called item, an object of other names, or what its text says."""
        if not self.inside:
            containers = types & {"array", "object"}
            if self.text or "string" in types or len(containers) != 1:
                return typed(self.text, types)
            return [] if containers == {"array"} else {}
        if ("array" in types or "object" not in types) and all(key == "item" for key, _ in self.inside):
            return [value for _, value in self.inside]
        return dict(self.inside)


class MiniMaxM3(BlockParser):
    """]<]minimax[>[ before each tag: <invoke name="f">, <key>value, </key>; lists are elements called item."""

    name = "minimax_m3"
    think = ("<mm:think>", "</mm:think>")
    mark: ClassVar[str] = "]<]minimax[>["
    blocks = (("]<]minimax[>[<tool_call>", "]<]minimax[>[</tool_call>"),)
    unseen = ("</mm:think>",)

    _invoke = re.compile(r"<invoke name=\"([^\"<>]+)\">\s*+\Z")
    _tag = re.compile(r"<(/?)([^<>/][^<>]*)>")

    def calls(self, body: str, tools: Tools) -> Iterator[ParsedCall | Malformed]:
        at = body.find(self.mark)
        if at < 0:
            yield Malformed(f'expected {self.mark}<invoke name="...">, got {body.strip()[:40]!r}', (0, len(body)))
        while at >= 0:
            end = body.find(f"{self.mark}</invoke>", at)
            if end < 0:
                yield Malformed(f"{self.mark}</invoke> is missing", (at, len(body)))
                return
            after = end + len(f"{self.mark}</invoke>")
            yield self._call(body[at + len(self.mark) : end].split(self.mark), (at, after), tools)
            at = body.find(self.mark, after)

    def _call(self, parts: list[str], span: Span, tools: Tools) -> ParsedCall | Malformed:
        head = self._invoke.match(parts[0])
        if head is None:
            return Malformed(f'expected <invoke name="...">, got {parts[0].strip()[:40]!r}', span)
        name = head.group(1)
        open_ = [_Element("", "")]
        root = parameters_of(tools, name)
        schemas: list[object] = [root]
        for part in parts[1:]:
            tag = self._tag.match(part)
            if tag is None:
                return Malformed(f"call of {name[:80]!r}: expected a tag, got {part[:40]!r}", span)
            key, text = tag.group(2), part[tag.end() :]
            if not tag.group(1):
                if len(open_) > MAX_DEPTH:
                    return Malformed(f"call of {name[:80]!r}: nested more than {MAX_DEPTH} deep", span)
                schemas.append(schema_inside(schemas[-1], key, len(open_[-1].inside), root))
                open_.append(_Element(key, text))
                continue
            if key != open_[-1].key or text.strip() or len(open_) == 1:
                return Malformed(f"call of {name[:80]!r}: unexpected {part[:40]!r}", span)
            element = open_.pop()
            open_[-1].inside.append((key, element.value(types_in(schemas.pop(), root))))
        if len(open_) > 1:
            return Malformed(f"call of {name[:80]!r}: <{open_[-1].key[:80]}> is not closed", span)
        arguments = dict(open_[0].inside)
        if len(arguments) < len(open_[0].inside):
            return Malformed(f"call of {name[:80]!r}: an argument is given twice", span)
        return ParsedCall(name, arguments, span)
