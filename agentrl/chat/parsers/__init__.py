"""Tool-call parsers, one per format, chosen by chat template or by name."""

from __future__ import annotations

from agentrl.chat.parsers.choose import all_parsers, choose_parser, parser_names, signs_of
from agentrl.chat.parsers.parser import (
    Event,
    Malformed,
    Parsed,
    ParsedCall,
    Parser,
    ParserStream,
    Reasoning,
    Text,
    collect,
)

__all__ = [
    "Event",
    "Malformed",
    "Parsed",
    "ParsedCall",
    "Parser",
    "ParserStream",
    "Reasoning",
    "Text",
    "all_parsers",
    "choose_parser",
    "collect",
    "parser_names",
    "signs_of",
]
