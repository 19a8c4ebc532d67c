"""The state machine behind most parsers: text, think blocks and call blocks between markers."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import ClassVar

from agentrl.chat.parsers.parser import Event, Malformed, ParsedCall, Parser, ParserStream, Reasoning, Text, Tools
from agentrl.chat.parsers.partial import PartialCalls

_WINDOW = 4096  # white space looked through before a completion counts as beginning with text


class BlockParser(Parser):
    """A format with calls in blocks between markers.

    Class attributes:
        blocks: (opening, closing) markers of the blocks that `calls` reads; an empty closing means up to the end
        of the turn.
        call_head: the text before a call's JSON arguments (see `PartialCalls`); None if they are not JSON.
        json_body: treat a closing marker inside a JSON string of the block as text.
        at_start: prefixes with which a block may start without its marker, at the start of the content.
        unseen: markers around content that are not part of it.
    """

    blocks: ClassVar[tuple[tuple[str, str], ...]]
    call_head: ClassVar[re.Pattern[str] | None] = None
    json_body: ClassVar[bool] = False
    at_start: ClassVar[tuple[str, ...]] = ()
    unseen: ClassVar[tuple[str, ...]] = ()

    @property
    def closings(self) -> frozenset[str]:
        return frozenset(closing for _, closing in self.blocks if closing)

    @abstractmethod
    def calls(self, body: str, tools: Tools) -> Iterator[ParsedCall | Malformed]:
        """Read the inside of one block; spans are relative to it."""

    def stream(self, *, tools: Tools = (), thinking: bool = False, partial: bool = False) -> ParserStream:
        return BlockStream(self, tools=tools, thinking=thinking, partial=partial)


class BlockStream(ParserStream):
    """Split a completion at the markers of `parser`; each character is examined a bounded number of times."""

    def __init__(self, parser: BlockParser, *, tools: Tools, thinking: bool, partial: bool = False) -> None:
        self._parser, self._tools = parser, tools
        self._close_of = dict(parser.blocks)
        self._openers = _openers(tuple(filter(None, (parser.think[0], *self._close_of, *parser.unseen))))
        self._buffer = ""
        self._offset = 0  # of the buffer in the completion
        self._events: list[Event] = []
        self._state = "text"
        # content
        self._space: list[str] = []  # white space held back: kept before text, dropped before a block
        self._fresh = True  # nothing but white space and reasoning so far
        self._after = ""  # "think" or "block" where the newest thing read is one
        self._said = False
        # reasoning
        self._thoughts: list[str] = []
        self._newlines: list[str] = []  # held back: dropped before the closing marker
        self._head = True  # nothing of this think block read yet
        # calls
        self._opening = ""  # marker of the block that is open
        self._scan = _BlockScan("", False, 0)
        self._lookahead = parser.json_body
        self._calls = 0
        self._call_head = parser.call_head if partial else None
        self._partial: PartialCalls | None = None
        if thinking:
            self._begin_thinking()

    def feed(self, text: str) -> list[Event]:
        return self._run(text, final=False)

    def close(self) -> list[Event]:
        return self._run("", final=True)

    def _run(self, text: str, final: bool) -> list[Event]:
        buffer, self._buffer = self._buffer, ""
        buffer += text  # in place: this frame holds the only reference
        at = 0
        while (end := self._step(buffer, at, final)) is not None:
            at = end
        if final:
            self._finish(self._offset + len(buffer))
            at = len(buffer)
        self._buffer = buffer[at:] if at else buffer
        self._scan.shift(at)
        self._offset += at
        events, self._events = self._events, []
        return events

    # Each state consumes what it can from `at` and returns where to continue, or None if it needs more text.

    def _step(self, buffer: str, at: int, final: bool) -> int | None:
        if self._state == "text":
            return self._text(buffer, at, final)
        return self._think(buffer, at, final) if self._state == "think" else self._block(buffer, at, final)

    def _text(self, buffer: str, at: int, final: bool) -> int | None:
        if self._fresh and self._parser.at_start:
            head = buffer[at : at + _WINDOW]
            begun = head.lstrip()
            if begun.startswith(self._parser.at_start):
                self._say(head[: len(head) - len(begun)])
                return self._open("", at + len(head) - len(begun))
            may_begin = any(start.startswith(begun) for start in self._parser.at_start)
            if may_begin and not final and len(head) < _WINDOW:
                return None
        match = self._openers.marker.search(buffer, at)
        if match is None:
            end = len(buffer) - (0 if final else self._openers.begun(buffer, at))
            self._say(buffer[at:end])
            return end if end > at else None
        self._say(buffer[at : match.start()])
        if match.group() == self._parser.think[0]:
            self._begin_thinking()
            return match.end()
        if match.group() in self._parser.unseen:
            return match.end()
        return self._open(match.group(), match.end())

    def _begin_thinking(self) -> None:
        self._state, self._head = "think", True
        self._space, self._newlines = [], []
        if self._thoughts:
            self._events.append(Reasoning("\n"))
        self._events.append(Reasoning(""))
        self._thoughts.append("")

    def _think(self, buffer: str, at: int, final: bool) -> int | None:
        closing = self._parser.think[1]
        found = buffer.find(closing, at)
        if found >= 0:
            self._reason(buffer[at:found])
            self._state, self._space, self._after = "text", [], "think"
            return found + len(closing)
        end = len(buffer) - (0 if final else _overlap(buffer, at, closing))
        self._reason(buffer[at:end])
        return end if end > at else None

    def _open(self, opening: str, at: int) -> int:
        self._state, self._opening = "block", opening
        self._partial = PartialCalls(self._call_head) if self._call_head is not None else None
        self._scan = _BlockScan(self._close_of.get(opening, ""), self._lookahead, at)
        return at

    def _block(self, buffer: str, at: int, final: bool) -> int | None:
        found = self._scan.find(buffer, final)
        if found is None:
            if self._partial is not None:
                self._events += self._partial.read(buffer[at:])
            return None
        end, after, closed = found
        if self._scan.gave_up:
            self._lookahead = False  # at most one block is scanned in vain past its first closing marker
        self._state = "text"
        self._read(buffer[at:end], self._offset + at, buffer[end:after], closed)
        return after

    def _read(self, body: str, at: int, closing: str, closed: bool) -> None:
        """Convert the inside of a block that starts at `at` in the completion to events."""
        whole = (at - len(self._opening), at + len(body) + len(closing))
        if self._partial is not None:
            self._events += self._partial.read(body)
        found: list[ParsedCall | Malformed]
        if closed:
            found = list(self._parser.calls(body, self._tools))
        else:
            marker = self._close_of.get(self._opening, "")
            found = [Malformed(f"{marker} is missing: the call was cut off", (0, len(body)))]
        if not self._opening and not found:  # it only looked like a call
            self._fresh = False
            self._say(body)
            return
        space, self._space, self._fresh = self._space, [], False
        for event in found:
            self._calls += 1
            span = whole if event.span == (0, len(body)) else (at + event.span[0], at + event.span[1])
            if isinstance(event, Malformed):
                self._events.append(Malformed(f"tool call {self._calls}: {event.message}", span))
            else:
                self._events.append(replace(event, span=span))
        told = self._partial is not None and self._partial.any
        if not told and any(isinstance(event, Malformed) for event in found):  # it stays in place, as text
            self._say("".join(space) + self._opening + body + closing)
        else:
            self._after = "block"

    def _say(self, text: str) -> None:
        """Emit content: white space next to a block belongs to the block, all other white space is kept."""
        kept = text.rstrip()
        if not kept:
            self._space.append(text)
            return
        space, self._space = "".join(self._space), [text[len(kept) :]]
        kept = space + kept
        if self._after:
            kept = kept.lstrip("\n" if self._after == "think" else None)
            kept = "\n" + kept if self._said else kept
        self._after, self._fresh, self._said = "", False, True
        self._events.append(Text(kept))

    def _reason(self, text: str) -> None:
        """Emit reasoning: line breaks next to the markers belong to the markers."""
        if self._head:
            text = text.lstrip("\n")
            self._head = not text
        kept = text.rstrip("\n")
        if not kept:
            self._newlines.append(text)
            return
        kept, self._newlines = "".join(self._newlines) + kept, [text[len(kept) :]]
        self._thoughts.append(kept)
        self._events.append(Reasoning(kept))

    def _finish(self, end: int) -> None:
        if self._state == "think":
            inside = "".join(self._thoughts)
            count = sum(inside.count(opening) for opening in self._close_of if opening)
            calls = f"; {count} tool call(s) inside it were not executed" if count else ""
            self._events.append(Malformed(f"the think block was not closed{calls}", (end, end)))
        elif not self._after and (space := "".join(self._space)):
            self._events.append(Text(space))


class _Openers:
    """Finds opening markers, whole ones and the beginning of one at the end of a buffer."""

    def __init__(self, markers: Sequence[str]) -> None:
        self.marker = re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))) or "(?!)")
        self._starts = frozenset(marker[0] for marker in markers)
        self._beginnings = frozenset(marker[:end] for marker in markers for end in range(1, len(marker)))
        self._longest = max(map(len, self._beginnings), default=0)

    def begun(self, buffer: str, at: int) -> int:
        """Return the length of the longest suffix of buffer[at:] that may become a marker."""
        tail = buffer[max(at, len(buffer) - self._longest) :]
        if self._starts.isdisjoint(tail):
            return 0
        for start, character in enumerate(tail):
            if character in self._starts and tail[start:] in self._beginnings:
                return len(tail) - start
        return 0


_openers = lru_cache(_Openers)  # the same for all completions in a format


class _BlockScan:
    """Find a block's closing marker, ignoring it inside JSON strings. Positions are relative to the buffer."""

    def __init__(self, closing: str, json_body: bool, at: int) -> None:
        self.closing, self.json_body = closing, json_body
        self.at = at  # scanned up to here
        self.first = -1  # first closing marker, whether or not inside a string
        self.in_string = False
        self.gave_up = False
        self.token = re.compile(rf'\\.|"|{re.escape(closing)}', re.DOTALL)

    def shift(self, by: int) -> None:
        self.at -= by
        self.first -= by if self.first >= 0 else 0

    def find(self, buffer: str, final: bool) -> tuple[int, int, bool] | None:
        """Return (end of the body, end of the block, whether it was closed); None while undecided."""
        if not self.closing:
            return (len(buffer), len(buffer), True) if final else None
        if not self.json_body:
            found = buffer.find(self.closing, self.at)
            if found >= 0:
                return found, found + len(self.closing), True
            self.at = max(self.at, len(buffer) - len(self.closing) + 1)
            return (len(buffer), len(buffer), False) if final else None
        return self._find_outside_strings(buffer, final)

    def _find_outside_strings(self, buffer: str, final: bool) -> tuple[int, int, bool] | None:
        safe = len(buffer) if final else len(buffer) - max(1, _overlap(buffer, self.at, self.closing))
        for match in self.token.finditer(buffer, self.at):
            if match.start() >= safe:
                break
            self.at = match.end()
            found = match.group()
            if found == '"':
                self.in_string = not self.in_string
            elif found == self.closing:
                if not self.in_string:
                    return match.start(), match.end(), True
                self.first = match.start() if self.first < 0 else self.first
        self.at = max(self.at, safe)
        if not final:
            return None
        if self.first >= 0:
            self.gave_up = True
            return self.first, self.first + len(self.closing), True
        return len(buffer), len(buffer), False


def _overlap(buffer: str, at: int, marker: str) -> int:
    """Return the length of the longest suffix of buffer[at:] that is an incomplete start of `marker`."""
    tail = buffer[max(at, len(buffer) - len(marker) + 1) :]
    start = tail.find(marker[:1])
    while start >= 0:
        if marker.startswith(tail[start:]):
            return len(tail) - start
        start = tail.find(marker[:1], start + 1)
    return 0
