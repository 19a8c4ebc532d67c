"""Calls written as tags around each argument: Qwen3-Coder, GLM-4.5 and 4.6, MiniMax M2.

Text arguments are written verbatim, all others as JSON; the tool's schema determines which is which.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, ClassVar

from agentrl.chat.parsers.parser import Malformed, ParsedCall, Span, Tools
from agentrl.chat.parsers.stream import BlockParser
from agentrl.chat.parsers.tagged_values import from_json, parameters_of, typed, types_of

_MORE = re.compile(r"\S")


class Qwen3Coder(BlockParser):
    """<function=name> <parameter=key> value </parameter> </function>"""

    name = "qwen3_coder"
    blocks = (("<tool_call>", "</tool_call>"),)

    _function = re.compile(r"\s*+<function=([^<>\n]+)>\s*")
    _parameter = re.compile(r"\s*+<parameter=([^<>\n]+)>\n?")
    _end = re.compile(r"\s*+</function>\s*\Z")

    def calls(self, body: str, tools: Tools) -> Iterator[ParsedCall | Malformed]:
        span = (0, len(body))
        head = self._function.match(body)
        if head is None:
            yield Malformed(f"expected <function=name>, got {body.strip()[:40]!r}", span)
            return
        yield read_tagged(
            body, span, head.group(1).strip(), head.end(), self._parameter, "</parameter>", self._end, tools
        )


class SeedOss(Qwen3Coder):
    """Same as Qwen3-Coder, in <seed:tool_call> and without line breaks around values."""

    name = "seed_oss"
    think = ("<seed:think>", "</seed:think>")
    blocks = (("<seed:tool_call>", "</seed:tool_call>"),)

    _parameter = re.compile(r"\s*+<parameter=([^<>\n]+)>")


class MiniMaxM2(BlockParser):
    """<invoke name="..."> <parameter name="key">value</parameter> </invoke>, one or more per block."""

    name = "minimax_m2"
    blocks: ClassVar[tuple[tuple[str, str], ...]] = (("<minimax:tool_call>", "</minimax:tool_call>"),)
    prefix: ClassVar[str] = ""
    """Prefix of the tag names."""

    _invoke = re.compile(r"\s*+<invoke name=\"([^\"<>]+)\">\s*")
    _parameter = re.compile(r"\s*+<parameter name=\"([^\"<>]+)\">")
    _end = re.compile(r"\s*+\Z")

    def calls(self, body: str, tools: Tools) -> Iterator[ParsedCall | Malformed]:
        at = 0
        while at == 0 or _MORE.search(body, at):
            head = self._invoke.match(body, at)
            if head is None:
                yield Malformed(
                    f'expected <{self.prefix}invoke name="...">, got {body[at : at + 60].strip()[:40]!r}',
                    (at, len(body)),
                )
                return
            name = head.group(1)
            closing = f"</{self.prefix}invoke>"
            end = body.find(closing, head.end())
            if end < 0:
                yield Malformed(f"call of {name[:80]!r}: {closing} is missing", (at, len(body)))
                return
            after = end + len(closing)
            span = (at, after)
            inside = body[head.end() : end]
            yield read_tagged(
                inside, span, name, 0, self._parameter, f"</{self.prefix}parameter>", self._end, tools
            )
            at = after


class DeepSeekV32(MiniMaxM2):
    """The same tags with ｜DSML｜ before each name; parameters say if they are text: DeepSeek V3.2, V4."""

    name = "deepseek_v32"
    prefix = "｜DSML｜"
    blocks = (
        ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
        ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
    )

    _invoke = re.compile(r"\s*+<｜DSML｜invoke name=\"([^\"<>]+)\">\s*")
    _parameter = re.compile(r"\s*+<｜DSML｜parameter name=\"([^\"<>]+)\"(?: string=\"(true|false)\")?>")


class Glm(BlockParser):
    """name, then <arg_key>key</arg_key> <arg_value>value</arg_value> for each argument."""

    name = "glm"
    blocks = (("<tool_call>", "</tool_call>"),)

    _key = re.compile(r"\s*+<arg_key>([^<>]*)</arg_key>\s*<arg_value>")
    _end = re.compile(r"\s*+\Z")

    def calls(self, body: str, tools: Tools) -> Iterator[ParsedCall | Malformed]:
        span = (0, len(body))
        at = body.find("<")
        at = len(body) if at < 0 else at
        name = body[:at].strip()
        if not name or "\n" in name:
            yield Malformed(f"expected the tool's name, got {body.strip()[:40]!r}", span)
            return
        yield read_tagged(body, span, name, at, self._key, "</arg_value>", self._end, tools)


def read_tagged(
    body: str,
    span: Span,
    name: str,
    at: int,
    opening: re.Pattern[str],
    closing: str,
    end: re.Pattern[str],
    tools: Tools,
) -> ParsedCall | Malformed:
    """Read arguments: `opening` matches the tag with the key, `closing` ends the value, `end` ends the call."""
    arguments: dict[str, Any] = {}
    parameters = parameters_of(tools, name)
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
        said = match.group(2) if opening.groups > 1 else None
        if said is None:
            arguments[key] = typed(value, types_of(parameters, key))
        else:
            arguments[key] = value if said == "true" else from_json(value)
    if end.match(body, at) is None:
        return Malformed(f"call of {name[:80]!r}: unexpected {body[at : at + 40].strip()!r}", span)
    return ParsedCall(name, arguments, span)
