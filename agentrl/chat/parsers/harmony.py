"""Several messages in one completion, <|channel|>name to=tool<|message|>text<|end|>: gpt-oss, Muse Glimmer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

from agentrl.chat.parsers.parser import (
    Begun,
    Event,
    Fragment,
    Malformed,
    ParsedCall,
    Parser,
    ParserStream,
    Reasoning,
    Span,
    Text,
    Tools,
    read_arguments,
)
from agentrl.chat.parsers.tagged import MiniMaxM2

_LONGEST = len("<|constrain|>")
_TO = re.compile(r"\bto=([^\s<]++)")


class Harmony(Parser):
    """analysis is reasoning, a message to functions.name is a call, and everything else is content."""

    name = "harmony"
    think = ("", "")

    def stream(self, *, tools: Tools = (), thinking: bool = False, partial: bool = False) -> ParserStream:
        return _HarmonyStream(partial)


class _HarmonyStream(ParserStream):
    """Alternates between a message's header and its text."""

    marks: ClassVar[re.Pattern[str]] = re.compile(r"<\|(?:start|channel|message|constrain|end|call|return)\|>")
    ends: ClassVar[tuple[str, ...]] = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")

    def __init__(self, partial: bool) -> None:
        self._partial = partial
        self._buffer = ""
        self._offset = 0
        self._scan = 0
        self._header: list[str] = []
        self._in_header = True
        self._body: list[str] = []  # of a call, until it is complete
        self._started = 0
        self._thoughts = self._texts = self._calls = 0
        self._open = False  # this message has content
        self._events: list[Event] = []

    def feed(self, text: str) -> list[Event]:
        return self._run(text, final=False)

    def close(self) -> list[Event]:
        return self._run("", final=True)

    def _run(self, text: str, final: bool) -> list[Event]:
        buffer, self._buffer = self._buffer, ""
        buffer += text
        at = 0
        while (match := self.marks.search(buffer, at)) is not None:
            self._take(buffer[at : match.start()])
            self._mark(match.group(), self._offset + match.start(), self._offset + match.end())
            at = match.end()
        rest = buffer[at:]
        cut = len(rest) if final else max(rest.rfind("<", max(0, len(rest) - _LONGEST + 1)), -1)
        cut = len(rest) if cut < 0 else cut
        self._take(rest[:cut])
        self._buffer = rest[cut:]
        self._offset += at + cut
        if final:
            self._end(self._offset, final=True)
        events, self._events = self._events, []
        return events

    def _take(self, text: str) -> None:
        if not text:
            return
        if self._in_header:
            self._header.append(text)
        elif self._recipient is not None:
            self._body.append(text)
            if self._partial:
                self._events.append(Fragment(text))
        elif self._channel == "analysis":
            self._say(Reasoning(text), self._thoughts)
            self._thoughts += 1
        else:
            self._say(Text(text), self._texts)
            self._texts += 1

    def _say(self, event: Text | Reasoning, earlier: int) -> None:
        if not self._open and earlier:
            event = replace(event, text="\n" + event.text)
        self._open = True
        self._events.append(event)

    _recipient: str | None = None
    _channel = "final"

    def _mark(self, mark: str, start: int, end: int) -> None:
        if mark == "<|message|>" and self._in_header:
            self._recipient, self._channel = self._addressed("".join(self._header))
            self._in_header, self._open = False, False
            if self._recipient is not None and self._partial:
                self._events.append(Begun(self._recipient.removeprefix("functions.")))
            if self._channel == "analysis" and self._recipient is None and not self._thoughts:
                self._events.append(Reasoning(""))
        elif mark in self.ends:
            self._end(end)
            self._started = start
        elif self._in_header:
            self._header.append(mark)
        else:
            self._take(mark)

    def _addressed(self, header: str) -> tuple[str | None, str]:
        """Return the tool that a message is for, if any, and its channel."""
        to = _TO.search(header)
        channel = header.rpartition("<|channel|>")[2].split()
        return to.group(1) if to else None, channel[0] if channel else "final"

    def _read(self, recipient: str, text: str, span: Span) -> Iterable[ParsedCall | Malformed]:
        """Read a message to a tool."""
        return [read_arguments(recipient.removeprefix("functions."), text, span)]

    def _end(self, at: int, final: bool = False) -> None:
        if not self._in_header and self._recipient is not None:
            for found in self._read(self._recipient, "".join(self._body), (self._started, at)):
                self._calls += 1
                if isinstance(found, Malformed):
                    found = replace(found, message=f"tool call {self._calls}: {found.message}")
                self._events.append(found)
        elif self._in_header and final and _TO.search("".join(self._header)):
            self._events.append(
                Malformed("a message to a tool has no text: the call was cut off", (self._started, at))
            )
        elif self._in_header and final and not (self._texts or self._thoughts or self._calls):
            plain = "".join(self._header)
            if plain and "<|channel|>" not in plain:
                self._events.append(Text(plain))
        self._header, self._body = [], []
        self._in_header, self._recipient = True, None
        self._started = at


class MuseGlimmer(Parser):
    """to=self is reasoning, to=user is content, and a message to any other holds <atem:function_calls>."""

    name = "muse_glimmer"
    think = ("", "")

    def stream(self, *, tools: Tools = (), thinking: bool = False, partial: bool = False) -> ParserStream:
        return _MuseStream(tools)


class _AtemCalls(MiniMaxM2):
    """The tags inside a message to a tool."""

    name = "atem"
    blocks = (("<atem:function_calls>", "</atem:function_calls>"),)
    prefix = "atem:"

    _invoke = re.compile(r"\s*+<atem:invoke name=\"([^\"<>]+)\">\s*")
    _parameter = re.compile(r"\s*+<atem:parameter name=\"([^\"<>]+)\">")


class _MuseStream(_HarmonyStream):
    marks = re.compile(r"<\|(?:start|message|eom|eot)\|>")
    ends = ("<|eom|>", "<|eot|>", "<|start|>")

    def __init__(self, tools: Tools) -> None:
        super().__init__(partial=False)
        self._tools = tools

    def _addressed(self, header: str) -> tuple[str | None, str]:
        to, _ = super()._addressed(header)
        return None if to in ("self", "user") else to, "analysis" if to == "self" else "final"

    def _read(self, recipient: str, text: str, span: Span) -> Iterable[ParsedCall | Malformed]:
        [(opening, closing)] = _AtemCalls.blocks
        body = text.strip()
        if not body.startswith(opening) or not body.endswith(closing):
            return [Malformed(f"a message to {recipient[:80]!r} must be one block {opening}...{closing}", span)]
        inside = body[len(opening) : -len(closing)]
        return [replace(found, span=span) for found in _AtemCalls().calls(inside, self._tools)]
