"""Which parser reads what a chat template teaches."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from agentrl.chat.parsers.base import Parser
from agentrl.chat.parsers.harmony import Harmony
from agentrl.chat.parsers.hermes import Hermes
from agentrl.chat.parsers.literals import Gemma, Pythonic
from agentrl.chat.parsers.markers import DeepSeekV3, DeepSeekV31, KimiK2, Llama3Json, Mistral
from agentrl.chat.parsers.tagged import Glm, MiniMaxM2, Qwen3Coder
from agentrl.errors import ConfigError

_LLAMA = "<|start_header_id|>"

_SIGNS: tuple[tuple[type[Parser], Callable[[str], bool]], ...] = (
    (KimiK2, lambda t: "<|tool_calls_section_begin|>" in t or "<|im_middle|>" in t),
    (Harmony, lambda t: "<|channel|>" in t and "<|message|>" in t),
    (MiniMaxM2, lambda t: "<minimax:tool_call>" in t),
    (DeepSeekV3, lambda t: "<｜tool▁calls▁begin｜>" in t and "```json" in t),
    (DeepSeekV31, lambda t: "<｜tool▁calls▁begin｜>" in t),
    (Glm, lambda t: "<arg_key>" in t),
    (Qwen3Coder, lambda t: "<function=" in t and "<parameter=" in t),
    (Gemma, lambda t: "<|tool_call>" in t or "<start_function_call>" in t),
    (Mistral, lambda t: "[TOOL_CALLS]" in t),
    (Hermes, lambda t: "<tool_call>" in t),
    (Pythonic, lambda t: "<|python_start|>" in t or (_LLAMA in t and "(params_name1=" in t)),
    (Llama3Json, lambda t: _LLAMA in t or "<|python_tag|>" in t),
)
"""In the order in which they are tried: a sign that another format also has comes later."""


def parser_names() -> tuple[str, ...]:
    """The names that `choose_parser` knows besides "auto"."""
    return tuple(parser.name for parser, _ in _SIGNS)


def choose_parser(name: str, template: str) -> Parser:
    """The parser of that name; "auto" reads it off the template's source (hermes where nothing tells).

    Raises:
        ConfigError: no parser has that name.
    """
    if name == "auto":
        return next((parser for parser, fits in _SIGNS if fits(template)), Hermes)()
    for parser, _ in _SIGNS:
        if parser.name == name:
            return parser()
    close = difflib.get_close_matches(name, parser_names(), 1)
    hint = f"did you mean {close[0]!r}?" if close else "choose one of " + ", ".join(["auto", *parser_names()])
    raise ConfigError(f"parser: unknown name {name!r}; {hint}")
