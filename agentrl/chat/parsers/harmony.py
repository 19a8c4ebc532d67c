"""gpt-oss: messages on channels, <|channel|>name to=recipient<|message|>text<|end|>, several in one completion."""

from __future__ import annotations

import re
from dataclasses import replace

from agentrl.chat.parsers.parser import (
    Begun,
    Event,
    Fragment,
    Malformed,
    Parser,
    ParserStream,
    Reasoning,
    Text,
    Tools,
    read_arguments,
)

_MARK = re.compile(r"<\|(?:start|channel|message|constrain|end|call|return)\|>")
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
        while (match := _MARK.search(buffer, at)) is not None:
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
            header = "".join(self._header)
            to = _TO.search(header)
            self._recipient = to.group(1) if to else None
            channel = header.rpartition("<|channel|>")[2].split()
            self._channel = channel[0] if channel else "final"
            self._in_header, self._open = False, False
            if self._recipient is not None and self._partial:
                self._events.append(Begun(self._recipient.removeprefix("functions.")))
            if self._channel == "analysis" and self._recipient is None and not self._thoughts:
                self._events.append(Reasoning(""))
        elif mark in ("<|end|>", "<|call|>", "<|return|>", "<|start|>"):
            self._end(end)
            self._started = start
        elif self._in_header:
            self._header.append(mark)
        else:
            self._take(mark)

    def _end(self, at: int, final: bool = False) -> None:
        if not self._in_header and self._recipient is not None:
            self._calls += 1
            name = self._recipient.removeprefix("functions.")
            found = read_arguments(name, "".join(self._body), (self._started, at))
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
