"""Functionary: <function=name>{json}</function> (v3.1) and messages to recipients after >>> (v3.2)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from agentrl.chat.parsers.parser import (
    Begun,
    Event,
    Fragment,
    Malformed,
    ParsedCall,
    Parser,
    ParserStream,
    Text,
    Tools,
    read_arguments,
)
from agentrl.chat.parsers.stream import BlockParser


class FunctionaryV31(BlockParser):
    """<function=name>{json}</function>, one block per call."""

    name = "functionary_v31"
    blocks = (("<function=", "</function>"),)
    json_body = True
    call_head = re.compile(r"\A(?P<name>[^<>\s]++)>\s*+(?=\{)")

    def calls(self, body: str, tools: Tools) -> Iterator[ParsedCall | Malformed]:
        name, found, arguments = body.partition(">")
        if not found:
            yield Malformed(f"expected <function=name>{{...}}, got {body.strip()[:40]!r}", (0, len(body)))
            return
        yield read_arguments(name.strip(), arguments, (0, len(body)))


_HEAD = re.compile(r"(?:>>>)?([A-Za-z_][\w.\-]{0,127})\n")
_HEAD_BEGUN = re.compile(r">{0,2}|(?:>>>)?(?:[A-Za-z_][\w.\-]{0,127})?")


class FunctionaryV32(Parser):
    """all\\ntext>>>name\\n{json}: messages to recipients; the generation prompt has written the first >>>."""

    name = "functionary_v32"
    think = ("", "")

    def stream(self, *, tools: Tools = (), thinking: bool = False, partial: bool = False) -> ParserStream:
        return _Recipients(partial)


class _Recipients(ParserStream):
    """Text goes to the most recently named recipient; text before the first name is content."""

    def __init__(self, partial: bool) -> None:
        self._partial = partial
        self._buffer, self._offset = "", 0
        self._to, self._begun = "all", False  # _begun: the first name has been looked for
        self._body: list[str] = []  # of a call, until it is complete
        self._started = 0
        self._calls = 0

    def feed(self, text: str) -> list[Event]:
        return self._run(text, final=False)

    def close(self) -> list[Event]:
        return [*self._run("", final=True), *self._end(self._offset)]

    def _run(self, text: str, final: bool) -> list[Event]:
        buffer, self._buffer = self._buffer + text, ""
        events: list[Event] = []
        at = 0
        while at < len(buffer):
            start = buffer.find(">>>", at) if self._begun else at
            if start < 0:
                tail = buffer[max(at, len(buffer) - 2) :]  # it may end with the beginning of a >>>
                end = len(buffer) if final else len(buffer) - len(tail) + len(tail.rstrip(">"))
                events += self._say(buffer[at:end])
                at = end
                break
            head = _HEAD.match(buffer, start)
            if head is not None:
                events += [*self._say(buffer[at:start]), *self._end(self._offset + start)]
                events += self._open(head.group(1), self._offset + head.end())
                at, self._begun = head.end(), True
                continue
            open_end = _HEAD_BEGUN.fullmatch(buffer, start)
            if open_end is not None and not final:  # it may become one
                events += self._say(buffer[at:start])
                at = start
                break
            self._begun = True
            events += self._say(buffer[at : start + 1])
            at = start + 1
        self._buffer = buffer[at:]
        self._offset += at
        return events

    def _open(self, name: str, at: int) -> list[Event]:
        self._to, self._started, self._body = name, at, []
        return [] if name == "all" or not self._partial else [Begun(name)]

    def _say(self, text: str) -> list[Event]:
        if not text:
            return []
        if self._to == "all":
            return [Text(text)]
        self._body.append(text)
        return [Fragment(text)] if self._partial else []

    def _end(self, at: int) -> list[Event]:
        if self._to == "all":
            return []
        self._calls += 1
        found = read_arguments(self._to, "".join(self._body).strip(), (self._started, at))
        self._to, self._body = "all", []
        if isinstance(found, Malformed):
            return [Malformed(f"tool call {self._calls}: {found.message}", found.span)]
        return [found]
