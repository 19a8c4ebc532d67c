"""The tool-call round trip: check that the parser reads what the template writes.

If it does not, no tool of a run is ever called, and nothing else would reveal that. `parser: auto` selects the
first parser that passes this check.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentrl.chat.parsers import all_parsers, signs_of
from agentrl.errors import TemplateError
from agentrl.types import Message, ToolCall

if TYPE_CHECKING:
    from agentrl.chat.parsers import Parser
    from agentrl.chat.template import Renderer

TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look something up.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "What to look for."},
                "limit": {"type": "integer", "description": "How many."},
                "ratio": {"type": "number", "description": "A share."},
                "exact": {"type": "boolean", "description": "To the letter."},
                "terms": {"type": "array", "items": {"type": "integer"}, "description": "Numbers."},
                "filter": {"type": "object", "description": "What must hold."},
                "since": {"anyOf": [{"type": "integer"}, {"type": "null"}], "description": "First year."},
            },
            "required": ["query"],
        },
    },
}

REQUIRED: Mapping[str, Mapping[str, Any]] = {
    "a call": {"query": "plain words", "limit": 3},
    "typed arguments": {"query": "one", "limit": -1, "ratio": 0.5, "exact": True, "terms": [1, 2]},
}
"""Arguments that a format must carry to qualify as the template's format."""

FURTHER: Mapping[str, Mapping[str, Any]] = {
    "no arguments": {},
    "nested arguments": {"query": "a", "filter": {"a": {"b": [1, "x", False]}}},
    "null": {"query": "a", "since": None, "exact": False},
    "a number as text": {"query": "3"},
    "a boolean as text": {"query": "True"},
    "empty text": {"query": ""},
    "unicode": {"query": "Grüße 日本語 👩‍🔬"},
    "line breaks": {"query": "one\n\n  two\n"},
    "quotes": {"query": '"it\'s" \\ done'},
    "angle brackets": {"query": "<b>a</b> > [c] {d: 1}"},
}


@dataclass(frozen=True, slots=True)
class Misread:
    """A message whose calls parse back differently from how they were given."""

    shape: str
    written: str
    read: str

    def __str__(self) -> str:
        return f"{self.shape}: the template writes {self.written!r}, read as {self.read}"


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """The result: `readable` says whether the parser reads the template's calls at all."""

    readable: bool
    misread: tuple[Misread, ...] = ()
    refused: tuple[str, ...] = ()

    @property
    def lost(self) -> tuple[str, ...]:
        """The shapes that do not survive the round trip."""
        return tuple(found.shape for found in self.misread)


def round_trip(renderer: Renderer) -> RoundTrip:
    """Write and parse calls of every shape."""
    misread, refused, readable = [], [], True
    for shape, message in messages(renderer.parser):
        found = read_back(renderer, shape, message)
        if found is None:
            continue
        if isinstance(found, Misread):
            misread.append(found)
        else:
            refused.append(f"{shape}: {found}")
        readable = readable and shape not in REQUIRED
    return RoundTrip(readable, tuple(misread), tuple(refused))


def reads_calls(renderer: Renderer) -> bool:
    """Whether the calls that every format must carry survive."""
    return all(
        read_back(renderer, shape, message) is None
        for shape, message in messages(renderer.parser)
        if shape in REQUIRED
    )


def name_problem(renderer: Renderer, schema: Mapping[str, Any]) -> str:
    """Return why a tool of this name cannot be called, or nothing: some formats use a name for something else.

    The call has the arguments that the tool requires: a template may write the calls of one tool in its own way.
    """
    name, parameters = schema["function"]["name"], schema["function"].get("parameters")
    required = parameters.get("required") if isinstance(parameters, Mapping) else None
    names = required if isinstance(required, list | tuple) else ()  # a client may write anything
    own = [each for each in names if isinstance(each, str) and each.isidentifier()]
    tool = {**TOOL, "function": {**TOOL["function"], "name": name}}
    arguments = {**dict.fromkeys(own, "plain words"), **REQUIRED["a call"]}
    call = ToolCall(renderer.parser.call_id(name, 0), name, arguments)
    try:
        ids = renderer.completion_ids(Message("assistant", tool_calls=(call,)), [tool])
        read = renderer.parse(ids, tools=[tool])
        if [call.name for call in read.tool_calls] == [name]:
            return ""
        lost = str(_misread(renderer, "a call", ids, read))
    except TemplateError as e:
        lost = str(e)
    return (
        f"the tool {name!r} cannot be called in the format {renderer.parser.name} of this chat template: {lost}; "
        "rename the tool"
    )


def messages(parser: Parser) -> Iterator[tuple[str, Message]]:
    """Return messages with calls, by shape; those of `REQUIRED` come first."""

    def say(*arguments: Mapping[str, Any], content: str = "") -> Message:
        calls = (ToolCall(parser.call_id("look_up", n), "look_up", given) for n, given in enumerate(arguments))
        return Message("assistant", content, tool_calls=tuple(calls))

    for shape, arguments in {**REQUIRED, **FURTHER}.items():
        yield shape, say(arguments)
    yield "parallel calls", say({"query": "a"}, {"query": "b", "limit": 2})
    yield "text before a call", say({"query": "a"}, content="Let me see.")


def read_back(renderer: Renderer, shape: str, message: Message) -> Misread | str | None:
    """Return None if calls and text survive; otherwise what was parsed instead, or why the template refuses."""
    try:
        ids = renderer.completion_ids(message, [TOOL])
    except TemplateError as e:
        return str(e)
    read = renderer.parse(ids, tools=[TOOL])
    if calls_of(read) == calls_of(message) and str(read.content).split() == str(message.content).split():
        return None
    return _misread(renderer, shape, ids, read)


def _misread(renderer: Renderer, shape: str, ids: Sequence[int], read: Message) -> Misread:
    came = f"{read.content!r}" if not read.tool_calls else ", ".join(f"{n}({a})" for n, a in calls_of(read))
    return Misread(shape, renderer.decode(ids), "; ".join([came, *read.parse_errors]))


def calls_of(message: Message) -> list[tuple[str, dict[str, Any]]]:
    """Return (name, arguments) of each call, comparing types too: 1 is not True."""
    return [(call.name, Strictly(call.arguments)) for call in message.tool_calls]


class Strictly(dict[str, Any]):
    """Arguments that are equal only if the types agree too."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and repr(_sorted(self)) == repr(_sorted(other))

    __hash__ = None


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list | tuple) else value


def candidates(template: str, control: Iterable[str]) -> tuple[list[Parser], list[Parser]]:
    """Return the parsers to try: those whose signs appear in the template (or its control tokens), then all
    others."""
    signs = list(signs_of(template)) or list(signs_of(" ".join(control)))
    names = {parser.name for parser in signs}
    return signs, [parser for parser in all_parsers() if parser.name not in names]
