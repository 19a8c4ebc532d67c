"""Tool-call parsers, one a format, chosen from the chat template or by name."""

from __future__ import annotations

from agentrl.chat.parsers.base import Call, Event, Malformed, Parsed, Parser, Reasoning, Stream, Text, collect
from agentrl.chat.parsers.choose import all_parsers, choose_parser, parser_names, signs_of

__all__ = [
    "Call",
    "Event",
    "Malformed",
    "Parsed",
    "Parser",
    "Reasoning",
    "Stream",
    "Text",
    "all_parsers",
    "choose_parser",
    "collect",
    "parser_names",
    "signs_of",
]
