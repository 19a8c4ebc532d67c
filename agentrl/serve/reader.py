"""Convert sampled ids to what the client receives: text, reasoning and calls, piece by piece.

Streamed and plain answers consist of the same pieces, so their content is always equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.chat.detokenizer import Detokenizer
from agentrl.chat.parsers.parser import (
    Begun,
    Event,
    Fragment,
    Malformed,
    ParsedCall,
    Reasoning,
    Text,
    collect,
    read_json,
)
from agentrl.chat.template import Renderer, to_message
from agentrl.serve.conversations import arguments_text
from agentrl.serve.turns import Incoming
from agentrl.types import Message, ToolCall


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """A piece of content."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of a think block."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """Start of a call; `index` counts the calls of the completion."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


Delta = ContentDelta | ReasoningDelta | CallBegun | ArgumentsDelta


class StopTexts:
    """End a text at the first stop text; text that may be the start of one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = tuple(stops), ""
        self.any = bool(stops)
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """Return the text that is final by now."""
        if not self._stops or self.found is not None:
            return "" if self.found is not None else text
        text = self._held + text
        hits = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            at, self.found = min(hits, key=lambda hit: (hit[0], -len(hit[1])))
            self._held = ""
            return text[:at]
        hold = max(self._beginning(text, stop) for stop in self._stops)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def close(self) -> str:
        """Return the text held back."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _beginning(text: str, stop: str) -> int:
        return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(slots=True)
class _Said:
    """What the client has received so far."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[tuple[str, str, list[str]]] = field(default_factory=list)  # id, name, arguments


class TextReader:
    """Read a completion that is plain text."""

    def __init__(self, renderer: Renderer, stops: Sequence[str] = ()) -> None:
        self._stop_ids, self._decode = renderer.stop_ids, renderer.decode
        self._detokenizer = Detokenizer(renderer.decode)
        self._stops = StopTexts(stops)
        self._text: list[str] = []

    @property
    def may_cut(self) -> bool:
        """Whether the completion can end before the policy ends it."""
        return self._stops.any

    @property
    def cut(self) -> bool:
        """Whether a stop text ended it."""
        return self._stops.found is not None

    @property
    def text(self) -> str:
        """The whole text so far."""
        return "".join(self._text)

    def feed_all(self, ids: Sequence[int]) -> list[Delta]:
        """Return the pieces of a whole completion that cannot be cut."""
        return self._tell(self._decode([id for id in ids if id not in self._stop_ids]))

    def feed(self, id: int) -> list[Delta]:
        """Return the pieces that the next id completes."""
        return [] if id in self._stop_ids else self._tell(self._stops.feed(self._detokenizer.feed(id)))

    def close(self) -> list[Delta]:
        """Return the pieces that the end of the completion settles. Called once, last."""
        return self._tell(self._stops.feed(self._detokenizer.close()) + self._stops.close())

    def _tell(self, text: str) -> list[Delta]:
        self._text.append(text)
        return [ContentDelta(text)] if text else []


class MessageReader:
    """Read one completion as an assistant message.

    Args:
        renderer: provides the tokenizer and the call format.
        tools: the schemas offered.
        thinking: whether the prompt ends inside an open think block.
        stops: texts that end the completion; they are not sent.
        read_calls: False treats calls as text, because there are no tools or they must not be called.
        one_call: the completion ends with its first call.
        call_id: returns the id of call `index`.
    """

    def __init__(
        self,
        renderer: Renderer,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: bool = False,
        stops: Sequence[str] = (),
        read_calls: bool = True,
        one_call: bool = False,
        call_id: Callable[[int], str],
    ) -> None:
        self._renderer, self._call_id = renderer, call_id
        self._read_calls, self._one_call = read_calls, one_call
        self._detokenizer = Detokenizer(renderer.decode)
        self._stops = StopTexts(stops)
        self._parser = renderer.parser.stream(tools=tools, thinking=thinking, partial=read_calls)
        self._text: list[str] = []
        self._events: list[Event] = []
        self._said = _Said()
        self._begun: list[int] = []  # calls that have started and are incomplete, by index
        self._called = False  # its only call is complete
        self._beyond = False  # another one has started after it
        self._whole_at_once = False

    @property
    def cut(self) -> bool:
        """Whether the completion was cut before the policy ended it: at a stop text, or after its only call."""
        return self._called or self._stops.found is not None

    @property
    def stopped_by(self) -> str | None:
        """The stop text that ended the completion."""
        return self._stops.found

    @property
    def may_cut(self) -> bool:
        """Whether the completion can end before the policy ends it."""
        return self._one_call or self._stops.any

    def feed_all(self, ids: Sequence[int]) -> list[Delta]:
        """Return the pieces of a whole completion that cannot be cut: as id by id, but much cheaper."""
        self._whole_at_once = True
        return self._read(self._renderer.decode([id for id in ids if id not in self._renderer.unread_ids]))

    def feed(self, id: int) -> list[Delta]:
        """Return the pieces that the next id completes; nothing more once the completion is cut."""
        if self.cut or id in self._renderer.unread_ids:
            return []
        return self._read(self._detokenizer.feed(id))

    def close(self) -> list[Delta]:
        """Return the pieces that the end of the completion settles. Called once, last."""
        deltas: list[Delta] = []
        if not self.cut:
            deltas += self._read(self._detokenizer.close())
        if not self.cut:
            deltas += self._tell(self._parse(self._stops.close()))
        events = self._parser.close()
        if not self._called:
            self._events += events
            deltas += self._tell(events)
            if not any(isinstance(event, ParsedCall) for event in events):
                self._called = False  # a call that its completion left unfinished did not cut it
        return deltas

    def _read(self, text: str) -> list[Delta]:
        if not text:
            return []
        return self._tell(self._parse(self._stops.feed(text)))

    def _parse(self, text: str) -> list[Event]:
        if not text:
            return []
        self._text.append(text)
        events = self._parser.feed(text)
        self._events += events
        return events

    def _tell(self, events: Sequence[Event]) -> list[Delta]:
        deltas: list[Delta] = []
        for event in events:
            if self._called:
                break
            for delta in self._deltas(event):
                self._note(delta)
                deltas.append(delta)
        return deltas

    def _deltas(self, event: Event) -> list[Delta]:
        if isinstance(event, Text):
            return [ContentDelta(event.text)]
        if isinstance(event, Reasoning):
            return [ReasoningDelta(event.text)] if event.text else []
        if isinstance(event, Begun | Fragment) and self._one_call and self._said.calls:
            self._beyond |= isinstance(event, Begun)  # a list of calls, which is read at its end
            if self._beyond:
                return []
        if isinstance(event, Begun):
            index = len(self._said.calls)
            self._begun.append(index)
            return [CallBegun(index, self._call_id(index), event.name)]
        if isinstance(event, Fragment):
            return [ArgumentsDelta(len(self._said.calls) - 1, event.text)]
        if isinstance(event, Malformed):
            if self._begun:
                self._called = self._one_call  # the client has it
            return []
        return self._whole(event)

    def _whole(self, call: ParsedCall) -> list[Delta]:
        """Complete a call: return the pieces that have not been sent yet."""
        if not self._read_calls:
            return [ContentDelta("".join(self._text)[slice(*call.span)])]
        self._called = self._one_call
        if self._has_been_told(call):
            return []
        index = len(self._said.calls)
        arguments = arguments_text(ToolCall("", call.name, call.arguments))
        return [CallBegun(index, self._call_id(index), call.name), ArgumentsDelta(index, arguments)]

    def _has_been_told(self, call: ParsedCall) -> bool:
        """Whether it is one of the calls that have started; those before it have turned out malformed."""
        for place, index in enumerate(self._begun):
            _, name, pieces = self._said.calls[index]
            if name.strip() == call.name and read_json("".join(pieces)).value == call.arguments:
                del self._begun[: place + 1]
                return True
        return False

    def _note(self, delta: Delta) -> None:
        if isinstance(delta, ContentDelta):
            self._said.content.append(delta.text)
        elif isinstance(delta, ReasoningDelta):
            self._said.reasoning.append(delta.text)
        elif isinstance(delta, CallBegun):
            self._said.calls.append((delta.id, delta.name, []))
        else:
            self._said.calls[delta.index][2].append(delta.text)

    def sent(self) -> Incoming:
        """Return the message as the client received it, and will send it back."""
        raw = tuple("".join(pieces) for _, _, pieces in self._said.calls)
        calls = tuple(ToolCall(id, name, {}) for id, name, _ in self._said.calls)
        reasoning = "".join(self._said.reasoning) if self._said.reasoning else None
        return Incoming(Message("assistant", "".join(self._said.content), calls, reasoning=reasoning), raw)

    def message(self, number: int) -> Message | None:
        """Return the message of the completion; None if it can be parsed from the tokens and has not been yet.

        Args:
            number: index of the message in its transcript.
        """
        calls = (n for n, event in enumerate(self._events, 1) if isinstance(event, ParsedCall))
        parsed = collect(self._events[: next(calls, None)] if self._one_call else self._events)
        if self._read_calls and (not self.cut or (parsed.errors and self.stopped_by is None)):
            # Parsed as `Renderer.parse` does, except for a malformed call's text, which is not sent twice.
            return to_message(parsed, number) if self._whole_at_once and not parsed.errors else None
        if not self._read_calls:
            return Message("assistant", "".join(self._said.content), reasoning=parsed.reasoning)
        said = to_message(parsed, number)
        if not self._one_call:
            return said
        return Message("assistant", said.content, said.tool_calls[:1], reasoning=said.reasoning)
