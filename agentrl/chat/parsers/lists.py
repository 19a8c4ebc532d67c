"""Calls as JSON objects, or lists of them, between markers: Granite, Phi-4-mini, Hunyuan, xLAM and others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from agentrl.chat.parsers.parser import Malformed, ParsedCall, Tools, call_from_json, read_json, read_leading_json
from agentrl.chat.parsers.stream import BlockParser

_ARGUMENTS = ("arguments", "parameters")


class JsonCalls(BlockParser):
    """One or more objects, or a list of them, each {"name": ..., "arguments": {...}}.

    Class attributes:
        between: text allowed between two objects outside a list.
    """

    json_body = True
    between: ClassVar[re.Pattern[str]] = re.compile(r"[\s;,]*+")
    call_head: ClassVar[re.Pattern[str] | None] = re.compile(
        r'(?:\A[^{}]*+|[\[,}]\s*+)\{\s*+"name"\s*+:\s*+"(?P<name>[^"\\]++)"\s*+,\s*+"(?:arguments|parameters)"'
        r"\s*+:\s*+(?=\{)"
    )

    def calls(self, body: str, tools: Tools) -> Iterator[ParsedCall | Malformed]:
        at = self._past(body, 0)
        if at == len(body):
            yield Malformed("expected a JSON object or list of calls, got nothing", (0, len(body)))
        while at < len(body):
            found, end = read_leading_json(body, at)
            if found.error:
                yield Malformed(f"not valid JSON: {found.error}", (at, len(body)))
                return
            for value in found.value if isinstance(found.value, list) else [found.value]:
                yield self.one(value, (at, end))
            at = self._past(body, end)

    def one(self, value: object, span: tuple[int, int]) -> ParsedCall | Malformed:
        """Convert one JSON value to a call."""
        return call_from_json(_read_text_arguments(value), span, arguments=_ARGUMENTS)

    def write(self, calls: Sequence[tuple[str, Mapping[str, object]]]) -> str:
        opening, closing = self.blocks[0]
        return opening + _listed(calls) + closing

    def _past(self, body: str, at: int) -> int:
        match = self.between.match(body, at)
        return match.end() if match else at


def _listed(calls: Sequence[tuple[str, Mapping[str, object]]]) -> str:
    return json.dumps([{"name": name, "arguments": dict(given)} for name, given in calls], ensure_ascii=False)


def _read_text_arguments(value: object) -> object:
    """Arguments encoded as JSON inside JSON text, as some templates write them."""
    if isinstance(value, dict):
        for key in _ARGUMENTS:
            if isinstance(value.get(key), str):
                inner = read_json(value[key])
                if isinstance(inner.value, dict) and not inner.error:
                    return {**value, key: inner.value}
    return value


class Granite(JsonCalls):
    """<|tool_call|> and a JSON list up to the end of the turn; <function_call> {json} for Granite 20B FC."""

    name = "granite"
    blocks = (("<|tool_call|>", ""), ("<function_call>", ""))
    between = re.compile(r"(?:[\s;,]|<function_call>|<\|tool_call\|>)*+")


class Phi4Mini(JsonCalls):
    """<|tool_call|>[...]<|/tool_call|>, or functools[...] as the entire answer."""

    name = "phi4_mini"
    blocks = (("<|tool_call|>", "<|/tool_call|>"),)
    at_start = ("functools[",)
    between = re.compile(r"(?:[\s;,]|functools(?=\[))*+")


class Functools(Phi4Mini):
    """The same, for templates that ask for functools[...] (vLLM's template for Phi-4-mini, Firefunction)."""

    name = "functools"
    misspelt = True

    def write(self, calls: Sequence[tuple[str, Mapping[str, object]]]) -> str:
        return "functools" + _listed(calls)


class Hunyuan(JsonCalls):
    """<tool_calls>[...]</tool_calls>: Hunyuan, Jamba, Apriel; MiniMax M1 with one object per line."""

    name = "hunyuan"
    blocks = (("<tool_calls>", "</tool_calls>"),)


class InternLM(JsonCalls):
    """<|action_start|><|plugin|>{json}<|action_end|>, one block per call."""

    name = "internlm"
    blocks = (("<|action_start|><|plugin|>", "<|action_end|>"), ("<|action_start|> <|plugin|>", "<|action_end|>"))

    def write(self, calls: Sequence[tuple[str, Mapping[str, object]]]) -> str:
        opening, closing = self.blocks[0]
        one = [json.dumps({"name": name, "parameters": dict(given)}, ensure_ascii=False) for name, given in calls]
        return "".join(f"{opening}\n{text}{closing}" for text in one)


class Nemotron(JsonCalls):
    """<TOOLCALL>[...]</TOOLCALL>: Nemotron Nano v2 and Llama-Nemotron."""

    name = "nemotron"
    blocks = (("<TOOLCALL>", "</TOOLCALL>"),)


class GigaChat(JsonCalls):
    """<|function_call|>{json} up to the end of the turn: GigaChat 3.1."""

    name = "gigachat"
    blocks = (("<|function_call|>", ""),)
    between = re.compile(r"(?:[\s;,]|<\|function_call\|>)*+")


class Xlam(JsonCalls):
    """A JSON list of calls as the entire answer: xLAM 2."""

    name = "xlam"
    blocks = ()
    at_start = ("[",)
    call_head = re.compile(  # a list that begins otherwise is text
        r'(?:\A\s*+\[|\}\s*+,)\s*+\{\s*+"name"\s*+:\s*+"(?P<name>[^"\\]++)"\s*+,\s*+"(?:arguments|parameters)"'
        r"\s*+:\s*+(?=\{)"
    )

    _looks = re.compile(r'\s*+\[\s*+\{\s*+"(?:name|arguments|parameters)"')

    def calls(self, body: str, tools: Tools) -> Iterator[ParsedCall | Malformed]:
        if self._looks.match(body):
            yield from super().calls(body, tools)
        elif body.lstrip()[:1] != "[":
            yield Malformed(f"expected a JSON list of calls, got {body.strip()[:40]!r}", (0, len(body)))

    def write(self, calls: Sequence[tuple[str, Mapping[str, object]]]) -> str:
        return _listed(calls)


class Apertus(JsonCalls):
    """<|tools_prefix|>[{"name": {arguments}}, ...]<|tools_suffix|>"""

    name = "apertus"
    think = ("<|inner_prefix|>", "<|inner_suffix|>")
    blocks = (("<|tools_prefix|>", "<|tools_suffix|>"),)
    call_head = None

    def one(self, value: object, span: tuple[int, int]) -> ParsedCall | Malformed:
        if isinstance(value, dict) and len(value) == 1:
            [(name, arguments)] = value.items()
            value = {"name": name, "arguments": arguments}
        return super().one(value, span)

    def write(self, calls: Sequence[tuple[str, Mapping[str, object]]]) -> str:
        opening, closing = self.blocks[0]
        return opening + json.dumps([{name: dict(given)} for name, given in calls], ensure_ascii=False) + closing


class Cohere(JsonCalls):
    """<|START_ACTION|>[{"tool_name": ..., "parameters": {...}}]<|END_ACTION|>: Command R7B and Command A."""

    name = "cohere"
    think = ("<|START_THINKING|>", "<|END_THINKING|>")
    blocks = (("<|START_ACTION|>", "<|END_ACTION|>"),)
    unseen = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
    call_head = None

    def one(self, value: object, span: tuple[int, int]) -> ParsedCall | Malformed:
        if isinstance(value, dict) and "tool_name" in value:
            value = {**value, "name": value["tool_name"]}
        return super().one(value, span)

    def write(self, calls: Sequence[tuple[str, Mapping[str, object]]]) -> str:
        opening, closing = self.blocks[0]
        listed = [
            {"tool_call_id": str(n), "tool_name": name, "parameters": dict(given)}
            for n, (name, given) in enumerate(calls)
        ]
        return opening + json.dumps(listed, ensure_ascii=False) + closing
