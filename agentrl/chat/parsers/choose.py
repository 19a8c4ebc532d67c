"""Choose the parser for the tool-call format that a chat template teaches."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from agentrl.chat.parsers.elements import MiniCPM5, MiniMaxM3
from agentrl.chat.parsers.functionary import FunctionaryV31, FunctionaryV32
from agentrl.chat.parsers.harmony import Harmony, MuseGlimmer
from agentrl.chat.parsers.hermes import Hermes
from agentrl.chat.parsers.lists import (
    Apertus,
    Cohere,
    Functools,
    GigaChat,
    Granite,
    Hunyuan,
    InternLM,
    Nemotron,
    Phi4Mini,
    Xlam,
)
from agentrl.chat.parsers.literals import Gemma, Lfm2, Pythonic
from agentrl.chat.parsers.markers import DeepSeekV3, DeepSeekV31, KimiK2, Llama3Json, Llama4Json, Mistral, Plain
from agentrl.chat.parsers.parser import Parser
from agentrl.chat.parsers.tagged import DeepSeekV32, Glm, MiniMaxM2, Qwen3Coder, SeedOss
from agentrl.errors import ConfigError
from agentrl.suggest import did_you_mean

_LLAMA = "<|start_header_id|>"
_LLAMA4 = "<|header_start|>"

_SIGNS: tuple[tuple[type[Parser], Callable[[str], bool]], ...] = (
    (KimiK2, lambda t: "<|tool_calls_section_begin|>" in t or "<|im_middle|>" in t),
    (MuseGlimmer, lambda t: "<atem:function_calls>" in t),
    (Harmony, lambda t: "<|channel|>" in t and "<|message|>" in t),
    (MiniMaxM2, lambda t: "<minimax:tool_call>" in t),
    (MiniMaxM3, lambda t: "]<]minimax[>[" in t),
    (MiniCPM5, lambda t: "<function name=" in t and "<param name=" in t),
    (DeepSeekV32, lambda t: "DSML" in t),
    (DeepSeekV3, lambda t: "<｜tool▁calls▁begin｜>" in t and "```json" in t),
    (DeepSeekV31, lambda t: "<｜tool▁calls▁begin｜>" in t),
    (Glm, lambda t: "<arg_key>" in t),
    (SeedOss, lambda t: "<seed:tool_call>" in t),
    (Qwen3Coder, lambda t: "<function=" in t and "<parameter=" in t),
    (Gemma, lambda t: "<|tool_call>" in t or "<start_function_call>" in t),
    (Lfm2, lambda t: "<|tool_call_start|>" in t or "<|tool_list_start|>" in t),
    (Functools, lambda t: "functools[" in t),
    (Phi4Mini, lambda t: "<|/tool_call|>" in t or "<|/tool|>" in t),
    (Granite, lambda t: "<|start_of_role|>" in t and "<tool_call>" not in t.replace("<|tool_call|>", "")),
    (InternLM, lambda t: "<|action_start|>" in t),
    (Apertus, lambda t: "<|tools_prefix|>" in t),
    (Cohere, lambda t: "<|START_ACTION|>" in t),
    (Nemotron, lambda t: "<TOOLCALL>" in t),
    (GigaChat, lambda t: "<|function_call|>" in t),
    (Hunyuan, lambda t: "<tool_calls>" in t),
    (FunctionaryV32, lambda t: ">>>all" in t),
    (FunctionaryV31, lambda t: "<function=" in t),
    (Mistral, lambda t: "[TOOL_CALLS]" in t),
    (Hermes, lambda t: "<tool_call>" in t),
    (Pythonic, lambda t: "<|python_start|>" in t or ((_LLAMA in t or _LLAMA4 in t) and "(params_name1=" in t)),
    (Llama4Json, lambda t: _LLAMA4 in t),
    (Llama3Json, lambda t: _LLAMA in t or "<|python_tag|>" in t),
    (Xlam, lambda t: False),
    (Plain, lambda t: False),
)
"""Parsers in the order they are tried; formats whose signs also occur in other formats come later."""


def parser_names() -> tuple[str, ...]:
    """Return the names that `choose_parser` accepts besides "auto"."""
    return tuple(parser.name for parser, _ in _SIGNS)


def signs_of(template: str) -> Iterator[Parser]:
    """Return the parsers whose signs appear in the template source, most specific first."""
    return (parser() for parser, fits in _SIGNS if fits(template))


def all_parsers() -> Iterator[Parser]:
    """Return one instance of each parser, in the order they are tried."""
    return (parser() for parser, _ in _SIGNS)


def choose_parser(name: str) -> Parser:
    """Return the parser with that name.

    Raises:
        ConfigError: no parser has that name.
    """
    for parser, _ in _SIGNS:
        if parser.name == name:
            return parser()
    names = ", ".join(["auto", *parser_names()])
    choices = f"choose one of {names}, or name your own as module:Name"
    hint = did_you_mean(name, parser_names(), otherwise=choices)
    raise ConfigError(f"model.parser: unknown name {name!r}; {hint}")
