"""Grammar-constrained completions: JSON answers, and required tool calls.

The call format is derived from the chat template: a call with known arguments is rendered, and the text around
them becomes the grammar of that format. Formats that do not write arguments as JSON cannot be constrained this
way. Source of the grammar language and its engine: llguidance.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypedDict, cast

import numpy as np
from numpy.typing import NDArray

from agentrl.chat.template import Renderer
from agentrl.engine.base import Mask
from agentrl.errors import TemplateError
from agentrl.serve.call_format import CallFormat, GrammarError, split

log = logging.getLogger(__name__)

KEPT = 32
"""Number of compiled grammars to keep."""
_MOST_WHY = 400
"""Maximum characters kept of a grammar engine error; the reason is often at its end."""
_SHOWN = re.compile(r"\s*\^?\s*|\s*\d+ \| .*")
"""A line of the grammar, or the mark below it."""
_STYLE = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
"""JSON as `json.dumps` writes it: one way to write each value, so that white space cannot continue forever."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The schema that an answer must follow; {} allows any JSON object."""

    schema: Mapping[str, Any]


class HeldTo(TypedDict):
    """Constraints of a completion in addition to a format; see `Grammars.mask`."""

    tools: Sequence[Mapping[str, Any]]
    forced: bool
    named: str | None
    one_call: bool
    thinking: bool


class _Matcher(Protocol):
    def compute_bitmask(self) -> bytes: ...
    def consume_token(self, token: int) -> bool: ...
    def deep_copy(self) -> _Matcher: ...


class GrammarMask:
    """The state of one completion in a grammar: a `Mask`.

    A grammar that fails on the way (its limits are bounded) ends the completion; raising here would end the
    engine's thread because of one client.
    """

    def __init__(self, matcher: _Matcher, size: int, stop_ids: frozenset[int]) -> None:
        self._matcher, self._size, self._stop_ids = matcher, size, sorted(stop_ids)

    def allowed(self) -> NDArray[np.bool_]:
        """(V,) True for tokens that may be sampled now."""
        try:
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            found = np.unpackbits(bits, bitorder="little")[: self._size].astype(np.bool_)
        except Exception as e:
            log.warning("a grammar gave up: %s", e)
            found = np.zeros(self._size, dtype=np.bool_)
        if not found.any():
            found[self._stop_ids] = True
        return found

    def take(self, id: int) -> None:
        """Advance past a sampled token."""
        with contextlib.suppress(Exception):  # `allowed` says so
            self._matcher.consume_token(id)


class _Tokens:
    """A vocabulary in llguidance's format: every control token is a separate token."""

    def __init__(self, renderer: Renderer) -> None:
        vocabulary = renderer.vocabulary
        self._encode = vocabulary.encode_text
        self.eos_token_id = min(renderer.stop_ids)
        self.bos_token_id = None
        self.special_token_ids = sorted(set(vocabulary.control.values()) | set(renderer.stop_ids))
        self.tokens = [vocabulary.token_bytes(id) for id in range(vocabulary.size)]

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))


class Grammars:
    """Create grammars for one renderer, and cache the most recent ones.

    Args:
        renderer: writes the calls.
        base: grammars of a renderer with the same vocabulary, which then is read once.
    """

    def __init__(self, renderer: Renderer, base: Grammars | None = None) -> None:
        self._renderer, self._base = renderer, base
        self._format = CallFormat(renderer)
        self._kept: OrderedDict[str, _Matcher] = OrderedDict()

    async def mask(
        self,
        format: AnswerFormat | None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        forced: bool = True,
        named: str | None = None,
        one_call: bool = False,
        thinking: bool = False,
    ) -> Mask | None:
        """Return the mask for an answer in `format`, or for calls of `tools`; None if everything is allowed.

        Args:
            format: the format of an answer; has no effect on a turn that must call.
            tools: what may be called.
            forced: the turn must call. Otherwise it is an answer in `format`, or calls.
            named: the one tool that must be called.
            one_call: exactly one call.
            thinking: the prompt has opened a think block, which must end first.

        Raises:
            GrammarError: the schema or the call format cannot be converted to a grammar.
        """
        forced = forced and bool(tools)
        if format is None and not forced:
            return None
        schema = None if format is None or forced else dict(format.schema)
        key = json.dumps([schema, list(tools), named, one_call, thinking], sort_keys=True)
        if key not in self._kept:
            offered = [tool for tool in tools if named in (None, tool["function"]["name"])]
            matcher = await asyncio.to_thread(self._compile, schema, offered, one_call or bool(named), thinking)
            self._kept[key] = matcher
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return GrammarMask(self._kept[key].deep_copy(), self._renderer.vocabulary.size, self._renderer.stop_ids)

    @cached_property
    def _tokenizer(self) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper

        if self._base is not None:
            return self._base._tokenizer
        return LLTokenizer(TokenizerWrapper(_Tokens(self._renderer)), eos_token=sorted(self._renderer.stop_ids))

    def _compile(
        self, schema: dict[str, Any] | None, tools: Sequence[Mapping[str, Any]], one_call: bool, thinking: bool
    ) -> _Matcher:
        from llguidance import LLMatcher

        param = "response_format" if schema is not None else "tool_choice"
        try:
            if schema is None:
                body = f"answer: calls\n{self._calls(tools, one_call)}"
            else:
                body = f"answer: json{' | calls' if tools else ''}\njson: {_json(schema or {'type': 'object'})}\n"
                body += self._calls_or_loose(tools, one_call) if tools else ""
            text = f"start: {self._thoughts(thinking)}answer\n{body}THOUGHT: /(.|\\n)*/\n"
            if problem := LLMatcher.validate_grammar(text, self._tokenizer):
                raise GrammarError(param, f"cannot be made a grammar: {_why(str(problem))}")
            matcher = LLMatcher(self._tokenizer, text, log_level=0)
        except TemplateError as e:
            raise GrammarError(param, f"the chat template does not show how a call is written: {e}") from e
        return cast(_Matcher, matcher)

    def _thoughts(self, thinking: bool) -> str:
        """Allow a think block before the answer, if the format marks it with control tokens."""
        opening, closing = (self._renderer.vocabulary.control.get(mark) for mark in self._renderer.parser.think)
        if opening is None or closing is None:
            return ""
        if thinking:
            return f"THOUGHT <[{closing}]> /\\n*/ "
        return f"(<[{opening}]> THOUGHT <[{closing}]> /\\n*/)? "

    def _calls_or_loose(self, tools: Sequence[Mapping[str, Any]], one_call: bool) -> str:
        """Return the grammar of calls; where arguments are not JSON, only the beginning of a call is held."""
        try:
            return self._calls(tools, one_call)
        except GrammarError:
            begins, marks = [], set[int]()
            for tool in tools:
                ids, control = self._format.beginning(tool["function"]["name"], tools)
                begins.append(self._pattern(ids))
                marks |= control
            rest = " | ".join(["THOUGHT", *(f"<[{id}]>" for id in sorted(marks))])
            return f"calls: ({' | '.join(dict.fromkeys(begins))}) ({rest})*\n"

    def _calls(self, tools: Sequence[Mapping[str, Any]], one_call: bool) -> str:
        """Return the grammar of one or more calls of these tools."""
        first = tools[0]["function"]["name"]
        rules, options, more = [], [], []
        closing = ""
        for n, tool in enumerate(tools):
            function = tool["function"]
            before, between, after = self._format.around(tools, first, function["name"])
            rules.append(f"arguments{n}: {_json(parameters(function))}\n")
            options.append(f"{self._pattern(before)} arguments{n}")
            more.append(f"{self._pattern(between)} arguments{n}")
            closing = self._pattern(after)
        again = "" if one_call else f" ({' | '.join(more)})*"
        return f"calls: ({' | '.join(options)}){again} {closing}\n" + "".join(rules)

    def _pattern(self, ids: Sequence[int]) -> str:
        """Write these ids in the grammar language."""
        pieces = [
            f"<[{piece}]>" if isinstance(piece, int) else json.dumps(self._renderer.decode(piece))
            for piece in split(ids, self._format.control)
        ]
        return " ".join(pieces) or '""'


def parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of a call's arguments; without one there are no arguments, as in OpenAI's API."""
    if function.get("parameters") is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return function["parameters"] or {"type": "object"}


def _why(problem: str) -> str:
    """Return the grammar engine's error on one line, without the grammar source that it includes."""
    lines = problem.splitlines()
    while len(lines) > 1 and _SHOWN.fullmatch(lines[-1]):
        lines.pop()
    text = " ".join(line.strip() for line in lines if line.strip(" ^"))
    return text if len(text) <= _MOST_WHY else f"{text[: _MOST_WHY // 2]} ... {text[-_MOST_WHY // 2 :]}"


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, **_STYLE})
