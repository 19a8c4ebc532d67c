"""{"name": ..., "arguments": {...}} between <tool_call> and </tool_call>: Hermes, Qwen2.5, Qwen3."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentrl.chat.parsers.parser import Malformed, ParsedCall, Tools, call_from_json, read_json
from agentrl.chat.parsers.stream import BlockParser


class Hermes(BlockParser):
    name = "hermes"
    blocks = (("<tool_call>", "</tool_call>"),)
    json_body = True
    call_head = re.compile(r'\A\s*+\{\s*+"name"\s*+:\s*+"(?P<name>[^"\\]++)"\s*+,\s*+"arguments"\s*+:\s*+(?=\{)')

    def calls(self, body: str, tools: Tools) -> Iterator[ParsedCall | Malformed]:
        span = (0, len(body))
        found = read_json(body)
        if found.error:
            yield Malformed(f"not valid JSON: {found.error}", span)
            return
        yield call_from_json(found.value, span)

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        shown = (json.dumps({"name": name, "arguments": dict(given)}, ensure_ascii=False) for name, given in calls)
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in shown)
