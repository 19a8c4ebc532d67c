"""The grammars of requests as structural tags, which inference servers enforce with their own grammar engine.

Source: xgrammar, "Structural Tag"; SGLang and vLLM take them as JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.chat.template import Renderer
from agentrl.serve.call_format import CallFormat, GrammarError
from agentrl.serve.grammar import AnswerFormat, parameters

Tag = dict[str, Any]
"""A part of a structural tag."""


def structural_tag(
    renderer: Renderer,
    format: AnswerFormat | None,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    forced: bool = True,
    named: str | None = None,
    one_call: bool = False,
    thinking: bool = False,
) -> str | None:
    """Return the tag for an answer in `format`, or for calls of `tools`; None if everything is allowed.

    The arguments are those of `Grammars.mask`.

    Raises:
        GrammarError: the call format cannot be converted.
    """
    forced = forced and bool(tools)
    if format is None and not forced:
        return None
    options: list[Tag] = []
    if format is not None and not forced:
        options.append(_json(dict(format.schema) or {"type": "object"}))
    if tools:
        offered = [tool for tool in tools if named in (None, tool["function"]["name"])]
        options.append(_calls(CallFormat(renderer), renderer, offered, one_call or bool(named), forced=forced))
    answer = _thought(renderer, _either(options), thinking)
    return json.dumps({"type": "structural_tag", "format": answer})


def _calls(
    written: CallFormat, renderer: Renderer, tools: Sequence[Mapping[str, Any]], one_call: bool, *, forced: bool
) -> Tag:
    """One or more calls; where arguments are not JSON and none is forced, only the beginning of a call is held."""
    first = tools[0]["function"]["name"]
    tags, opening, separator, closing = [], set[str](), set[str](), ""
    try:
        for tool in tools:
            ids = written.around(tools, first, tool["function"]["name"])
            before, between, closing = map(renderer.decode, ids)
            begin = _common_end(before, between)
            opening.add(before.removesuffix(begin))
            separator.add(between.removesuffix(begin))
            tags.append(_tag(begin, _json(parameters(tool["function"])), ""))
    except GrammarError:
        if forced:
            raise
        begins = [renderer.decode(written.beginning(tool["function"]["name"], tools)[0]) for tool in tools]
        return _sequence([_either([_text(begin) for begin in dict.fromkeys(begins)]), {"type": "any_text"}])
    if len(opening) > 1 or len(separator) > 1:
        raise GrammarError("tool_choice", "calls of different tools begin differently; force one by its name")
    calls = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator.pop(),
        "at_least_one": True,
        "stop_after_first": one_call,
    }
    return _sequence([_text(opening.pop()), calls, _text(closing)])


def _thought(renderer: Renderer, answer: Tag, thinking: bool) -> Tag:
    """Allow a think block before the answer, if the format marks it with control tokens."""
    opening, closing = renderer.parser.think
    if not {opening, closing} <= renderer.vocabulary.control.keys():
        return answer
    block = _sequence([_tag("" if thinking else opening, {"type": "any_text"}, closing), _regex("\\n*"), answer])
    return block if thinking else _either([block, answer])


def _common_end(one: str, other: str) -> str:
    count = 0
    while count < min(len(one), len(other)) and one[-1 - count] == other[-1 - count]:
        count += 1
    return one[len(one) - count :]


def _either(options: Sequence[Tag]) -> Tag:
    return options[0] if len(options) == 1 else {"type": "or", "elements": list(options)}


def _sequence(parts: Sequence[Tag]) -> Tag:
    return {"type": "sequence", "elements": [part for part in parts if part != _text("")]}


def _text(value: str) -> Tag:
    return {"type": "const_string", "value": value}


def _regex(pattern: str) -> Tag:
    return {"type": "regex", "pattern": pattern}


def _json(schema: Mapping[str, Any]) -> Tag:
    return {"type": "json_schema", "json_schema": dict(schema)}


def _tag(begin: str, content: Tag, end: str) -> Tag:
    return {"type": "tag", "begin": begin, "content": content, "end": end}
