"""How a completion is read: text to reasoning, content, tool calls and errors, in one linear pass.

A `Parser` knows one family's format. Its `stream()` takes the text piece by piece and gives events; reading a
whole completion is the same machine fed once, so both always agree. Nothing here raises on what a policy wrote.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

Span = tuple[int, int]
"""(start, end) in characters of the completion's text."""

Tools = Sequence[Mapping[str, Any]]

MAX_DEPTH = 64
"""Deepest nesting of a call's arguments."""

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
    """A complete tool call; `id` where the format carries one."""

    name: str
    arguments: Mapping[str, Any]
    span: Span
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Malformed:
    """Something that was meant to be a call (or a think block) and is not one."""

    message: str
    span: Span


@dataclass(frozen=True, slots=True)
class Begun:
    """A call of this tool is being written; its `ParsedCall` or `Malformed` follows. Only in partial streams."""

    name: str


@dataclass(frozen=True, slots=True)
class Fragment:
    """The next piece of the argument text of the call begun last, exactly as written. Only in partial streams."""

    text: str


Event = Text | Reasoning | ParsedCall | Malformed | Begun | Fragment


@dataclass(frozen=True, slots=True)
class Parsed:
    """A whole completion. `reasoning` is None where there was no think block, "" where it was empty."""

    content: str
    reasoning: str | None
    calls: tuple[ParsedCall, ...]
    errors: tuple[Malformed, ...]


class Parser(ABC):
    """One tool-call format. Instances hold no state and may be shared.

    Class attributes:
        name: what the user writes to choose it.
        think: the markers around reasoning; empty where the format has none.
        misspelt: templates of this format are known to write calls unlike their model (without quotes,
            without the marker); where the template shows its signs, the parser's own writing takes their place.
    """

    name: ClassVar[str]
    think: ClassVar[tuple[str, str]] = ("<think>", "</think>")
    misspelt: ClassVar[bool] = False

    @abstractmethod
    def stream(self, *, tools: Tools = (), thinking: bool = False, partial: bool = False) -> ParserStream:
        """A reader that takes a completion piece by piece; the arguments are those of `parse`.

        Args:
            partial: also tell calls while they are being written, where the format writes arguments as JSON. A
                malformed call that was told so does not come as text again.
        """

    def parse(self, text: str, *, tools: Tools = (), thinking: bool = False) -> Parsed:
        """Read a whole completion (stop token already removed).

        Args:
            text: the completion, control tokens included.
            tools: the schemas offered, for formats whose values are typed by them.
            thinking: the generation prompt has already opened the think block.
        """
        stream = self.stream(tools=tools, thinking=thinking)
        return collect([*stream.feed(text), *stream.close()])

    def call_id(self, name: str, number: int) -> str:
        """An id of the call of tool `name`, the n-th of its message, as the format wants it."""
        return f"call{number:05d}"

    def takes_id(self, id: str, name: str) -> bool:
        """Whether a call of tool `name` may have this id in this format; most write none."""
        return True

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str | None:
        """(name, arguments) of calls in this format, for templates that do not write calls; None where unknown."""
        return None


class ParserStream(ABC):
    """Reads one completion piece by piece."""

    @abstractmethod
    def feed(self, text: str) -> list[Event]:
        """What the next piece of text settles."""

    @abstractmethod
    def close(self) -> list[Event]:
        """What the end of the completion settles. Called once, last."""


def collect(events: Sequence[Event]) -> Parsed:
    """Put the events of one completion together."""
    reasoning = [event.text for event in events if isinstance(event, Reasoning)]
    return Parsed(
        content="".join(event.text for event in events if isinstance(event, Text)),
        reasoning="".join(reasoning) if reasoning else None,
        calls=tuple(event for event in events if isinstance(event, ParsedCall)),
        errors=tuple(event for event in events if isinstance(event, Malformed)),
    )


@dataclass(slots=True)
class Json:
    """Outcome of reading JSON that a policy wrote: a value, or an error that says where."""

    value: Any = None
    error: str = ""
    at: int = 0


def read_json(text: str) -> Json:
    """Strict JSON: no NaN, no lone surrogates."""
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
    """Strict JSON that begins at `at`, and where it ends; text may follow it."""
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
    """A call from its name and the JSON text of its arguments."""
    if not name:
        return Malformed("the tool's name is missing", span)
    found = read_json(text)
    if found.error:
        return Malformed(f"call of {name[:80]!r}: arguments are not valid JSON: {found.error}", span)
    if not isinstance(found.value, dict):
        return Malformed(f"call of {name[:80]!r}: arguments must be a JSON object, got {_kind(found.value)}", span)
    return ParsedCall(name, found.value, span, id=id or None)


def unsound(value: Any) -> str:
    """Why a value cannot be handed on (nested too deeply, half of a surrogate pair in its text), or ""."""
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
        if not inner:
            return ""
        level = inner
    return f"nested more than {MAX_DEPTH} deep"


def call_from_json(value: Any, span: Span, *, arguments: Sequence[str] = ("arguments",)) -> ParsedCall | Malformed:
    """A call from {"name": ..., "arguments": {...}}; `arguments` lists the accepted spellings of the key."""
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
