"""Calls written as tags around each argument: Qwen3-Coder, GLM-4.5 and 4.6, MiniMax M2.

Text arguments stand there as they are, all others as JSON; the tool's schema says which is which.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from agentrl.chat.parsers.base import Call, Malformed, Span, Tools, unsound
from agentrl.chat.parsers.stream import BlockParser

_MORE = re.compile(r"\S")


class Qwen3Coder(BlockParser):
    """<function=name> <parameter=key> value </parameter> </function>"""

    name = "qwen3_coder"
    blocks = (("<tool_call>", "</tool_call>"),)

    _function = re.compile(r"\s*+<function=([^<>\n]+)>\s*")
    _parameter = re.compile(r"\s*+<parameter=([^<>\n]+)>\n?")
    _end = re.compile(r"\s*+</function>\s*\Z")

    def calls(self, body: str, tools: Tools, repair: bool) -> Iterator[Call | Malformed]:
        span = (0, len(body))
        head = self._function.match(body)
        if head is None:
            yield Malformed(f"expected <function=name>, got {body.strip()[:40]!r}", span)
            return
        yield _tagged(
            body, span, head.group(1).strip(), head.end(), self._parameter, "</parameter>", self._end, tools
        )


class MiniMaxM2(BlockParser):
    """<invoke name="..."> <parameter name="key">value</parameter> </invoke>, one or more in a block."""

    name = "minimax_m2"
    blocks = (("<minimax:tool_call>", "</minimax:tool_call>"),)

    _invoke = re.compile(r"\s*+<invoke name=\"([^\"<>]+)\">\s*")
    _parameter = re.compile(r"\s*+<parameter name=\"([^\"<>]+)\">")
    _end = re.compile(r"\s*+\Z")

    def calls(self, body: str, tools: Tools, repair: bool) -> Iterator[Call | Malformed]:
        at = 0
        while at == 0 or _MORE.search(body, at):
            head = self._invoke.match(body, at)
            if head is None:
                yield Malformed(
                    f'expected <invoke name="...">, got {body[at : at + 60].strip()[:40]!r}', (at, len(body))
                )
                return
            name = head.group(1)
            end = body.find("</invoke>", head.end())
            if end < 0:
                yield Malformed(f"call of {name[:80]!r}: </invoke> is missing", (at, len(body)))
                return
            after = end + len("</invoke>")
            span = (at, after)
            inside = body[head.end() : end]
            yield _tagged(inside, span, name, 0, self._parameter, "</parameter>", self._end, tools)
            at = after


class Glm(BlockParser):
    """name, then <arg_key>key</arg_key> <arg_value>value</arg_value> for each argument."""

    name = "glm"
    blocks = (("<tool_call>", "</tool_call>"),)

    _key = re.compile(r"\s*+<arg_key>([^<>]*)</arg_key>\s*<arg_value>")
    _end = re.compile(r"\s*+\Z")

    def calls(self, body: str, tools: Tools, repair: bool) -> Iterator[Call | Malformed]:
        span = (0, len(body))
        at = body.find("<")
        at = len(body) if at < 0 else at
        name = body[:at].strip()
        if not name or "\n" in name:
            yield Malformed(f"expected the tool's name, got {body.strip()[:40]!r}", span)
            return
        yield _tagged(body, span, name, at, self._key, "</arg_value>", self._end, tools)


def _tagged(
    body: str,
    span: Span,
    name: str,
    at: int,
    opening: re.Pattern[str],
    closing: str,
    end: re.Pattern[str],
    tools: Tools,
) -> Call | Malformed:
    """Read arguments: `opening` matches the tag with the key, `closing` ends the value, `end` ends the call."""
    arguments: dict[str, Any] = {}
    while (match := opening.match(body, at)) is not None:
        key = match.group(1).strip()
        stop = body.find(closing, match.end())
        while stop >= 0:  # a closing tag inside the value is text unless a tag or the end follows
            at = stop + len(closing)
            if opening.match(body, at) or end.match(body, at):
                break
            stop = body.find(closing, at)
        if stop < 0:
            return Malformed(f"call of {name[:80]!r}: argument {key[:80]!r} is not closed by {closing}", span)
        if key in arguments:
            return Malformed(f"call of {name[:80]!r}: argument {key[:80]!r} is given twice", span)
        value = body[match.end() : stop]
        value = value.removesuffix("\n") if match.group().endswith("\n") else value
        arguments[key] = _typed(value, _schema(tools, name).get(key))
    if end.match(body, at) is None:
        return Malformed(f"call of {name[:80]!r}: unexpected {body[at : at + 40].strip()!r}", span)
    return Call(name, arguments, span)


def _schema(tools: Tools, name: str) -> Mapping[str, Any]:
    """The properties of a tool's parameters; empty where the tool is not known."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties")
            return properties if isinstance(properties, Mapping) else {}
    return {}


def _types(schema: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    if isinstance(schema.get("enum"), list):
        return {_json_type(value) for value in schema["enum"]}
    kind = schema.get("type")
    types = {kind} if isinstance(kind, str) else set(kind) if isinstance(kind, list) else set()
    for branch in ("anyOf", "oneOf"):
        types |= {t for option in schema.get(branch, ()) for t in _types(option)}
    return types


def _json_type(value: Any) -> str:
    names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _typed(text: str, schema: Any) -> Any:
    """The value that `text` stands for: JSON where the schema does not say text; text where it is not JSON."""
    types = _types(schema)
    if types == {"string"}:
        return text
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text
    kind = _json_type(value)
    if kind == "string" or unsound(value):
        return text
    fits = not types or kind in types or (kind == "integer" and "number" in types) or "string" not in types
    return value if fits else text


def _refuse(name: str) -> None:
    raise ValueError(name)
