"""Parse completions: text to reasoning, content, tool calls and errors, in one linear pass.

A `Parser` implements the format of one model family. Its `stream()` takes text incrementally and returns events; a
complete parse feeds the same machine once, so both always agree. Nothing here raises because of what a policy
wrote.
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

Span = tuple[int, int]
"""(start, end) in characters of the completion's text."""

Tools = Sequence[Mapping[str, Any]]

MAX_DEPTH = 64
"""Maximum nesting of a call's arguments."""

_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of content."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of a think block."""

    text: str


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A complete tool call; `id` is set if the format has one."""

    name: str
    arguments: Mapping[str, Any]
    span: Span
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Malformed:
    """An attempted call (or think block) that is malformed."""

    message: str
    span: Span


@dataclass(frozen=True, slots=True)
class Begun:
    """A call to this tool has started; `ParsedCall` or `Malformed` follows. Partial streams only."""

    name: str


@dataclass(frozen=True, slots=True)
class Fragment:
    """The next piece of argument text of the current call, exactly as written. Partial streams only."""

    text: str


Event = Text | Reasoning | ParsedCall | Malformed | Begun | Fragment


@dataclass(frozen=True, slots=True)
class Parsed:
    """A complete parse. `reasoning` is None without a think block, and "" if the block was empty."""

    content: str
    reasoning: str | None
    calls: tuple[ParsedCall, ...]
    errors: tuple[Malformed, ...]


class Parser(ABC):
    """One tool-call format. Instances are stateless and may be shared.

    Class attributes:
        name: what users write to choose it.
        think: the markers around reasoning; empty if the format has none.
        misspelt: templates of this format are known to write calls differently from their model (without quotes or
        without the marker); if the template shows its signs, calls are written by this parser instead.
    """

    name: ClassVar[str]
    think: ClassVar[tuple[str, str]] = ("<think>", "</think>")
    misspelt: ClassVar[bool] = False

    @property
    def closings(self) -> frozenset[str]:
        """Markers that end a block of calls; a stop token among them is part of what is parsed."""
        return frozenset()

    @abstractmethod
    def stream(self, *, tools: Tools = (), thinking: bool = False, partial: bool = False) -> ParserStream:
        """Return an incremental reader of a completion; it takes the same arguments as `parse`.

        Args:
            partial: also report calls while they are being written, for formats with JSON arguments. A malformed
            call that was reported this way is not repeated as text.
        """

    def parse(self, text: str, *, tools: Tools = (), thinking: bool = False) -> Parsed:
        """Parse a complete completion (with the stop token removed).

        Args:
            text: the completion, control tokens included.
            tools: the schemas offered, for formats that use them to type values.
            thinking: the generation prompt has already opened the think block.
        """
        stream = self.stream(tools=tools, thinking=thinking)
        return collect([*stream.feed(text), *stream.close()])

    def call_id(self, name: str, number: int) -> str:
        """Return a call id in this format for tool `name`, the n-th call of its message."""
        return f"call{number:05d}"

    def takes_id(self, id: str, name: str) -> bool:
        """Whether this format allows this id for a call of tool `name`; most formats write no ids."""
        return True

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str | None:
        """Write (name, arguments) calls in this format, for templates that do not write calls; None if unknown."""
        return None


class ParserStream(ABC):
    """Read one completion incrementally."""

    @abstractmethod
    def feed(self, text: str) -> list[Event]:
        """Return the events that the next piece of text settles."""

    @abstractmethod
    def close(self) -> list[Event]:
        """Return the events that the end of the completion settles. Called once, last."""


def collect(events: Sequence[Event]) -> Parsed:
    """Combine the events of one completion."""
    reasoning = [event.text for event in events if isinstance(event, Reasoning)]
    return Parsed(
        content="".join(event.text for event in events if isinstance(event, Text)),
        reasoning="".join(reasoning) if reasoning else None,
        calls=tuple(event for event in events if isinstance(event, ParsedCall)),
        errors=tuple(event for event in events if isinstance(event, Malformed)),
    )


@dataclass(slots=True)
class Json:
    """Result of parsing policy-written JSON: a value, or an error with its position."""

    value: Any = None
    error: str = ""
    at: int = 0


def read_json(text: str) -> Json:
    """Parse strict JSON: no NaN, no lone surrogates, no numbers that become infinite."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
        return Json(value, error=unsound(value))
    except json.JSONDecodeError as e:
        return Json(error=f"{e.msg} at character {e.pos}{_near(text, e.pos)}", at=e.pos)
    except RecursionError:
        return Json(error="nested too deeply")
    except ValueError as e:
        return Json(error=str(e).split(";")[0])


def read_leading_json(text: str, at: int) -> tuple[Json, int]:
    """Parse strict JSON starting at `at` and return where it ends; text may follow it."""
    try:
        value, end = _DECODER.raw_decode(text, at)
        return Json(value, error=unsound(value)), end
    except json.JSONDecodeError as e:
        return Json(error=f"{e.msg} at character {e.pos - at}{_near(text, e.pos)}", at=e.pos), at
    except RecursionError:
        return Json(error="nested too deeply"), at
    except ValueError as e:
        return Json(error=str(e).split(";")[0]), at


def read_arguments(name: str, text: str, span: Span, *, id: str | None = None) -> ParsedCall | Malformed:
    """Build a call from its name and the JSON text of its arguments."""
    if not name:
        return Malformed("the tool's name is missing", span)
    found = read_json(text)
    if found.error:
        return Malformed(f"call of {name[:80]!r}: arguments are not valid JSON: {found.error}", span)
    if not isinstance(found.value, dict):
        return Malformed(f"call of {name[:80]!r}: arguments must be a JSON object, got {_kind(found.value)}", span)
    return ParsedCall(name, found.value, span, id=id or None)


def unsound(value: Any) -> str:
    """Return why a value cannot be used (too deep, a lone surrogate, a number that is not finite), or ""."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.keys()
                inner += item.values()
            elif isinstance(item, list):
                inner += item
            elif isinstance(item, str) and _SURROGATE.search(item):
                return "a \\u escape is half of a surrogate pair"
            elif isinstance(item, float) and not math.isfinite(item):
                return "a number is not finite"
        if not inner:
            return ""
        level = inner
    return f"nested more than {MAX_DEPTH} deep"


def call_from_json(value: Any, span: Span, *, arguments: Sequence[str] = ("arguments",)) -> ParsedCall | Malformed:
    """Build a call from {"name": ..., "arguments": {...}}; `arguments` lists the accepted names of the key."""
    if not isinstance(value, dict):
        return Malformed(f"a call must be a JSON object, got {_kind(value)}", span)
    name = value.get("name")
    if not isinstance(name, str) or not name:
        what = "is missing" if "name" not in value else f"must be text, got {_kind(name)}"
        return Malformed(f'the key "name" {what}', span)
    key = next((key for key in arguments if key in value), None)
    if key is None:
        return Malformed(f'call of {name[:80]!r}: the key "{arguments[0]}" is missing', span)
    if not isinstance(value[key], dict):
        return Malformed(f'call of {name[:80]!r}: "{key}" must be a JSON object, got {_kind(value[key])}', span)
    id = value.get("id")
    return ParsedCall(name, value[key], span, id=id if isinstance(id, str) and id else None)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _near(text: str, at: int) -> str:
    return f", near {text[max(0, at - 15) : at + 15]!r}" if text else ""


def _kind(value: Any) -> str:
    names = {
        str: "text",
        bool: "a truth value",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), "null")
