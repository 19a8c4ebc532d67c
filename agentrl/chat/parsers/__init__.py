"""Tool-call parsers, one a format, chosen from the chat template or by name."""

from __future__ import annotations

from agentrl.chat.parsers.base import Call, Event, Malformed, Parsed, Parser, Reasoning, Stream, Text, collect
from agentrl.chat.parsers.choose import choose_parser, parser_names

__all__ = [
    "Call",
    "Event",
    "Malformed",
    "Parsed",
    "Parser",
    "Reasoning",
    "Stream",
    "Text",
    "choose_parser",
    "collect",
    "parser_names",
]
