"""How a chat template writes tool calls: the tokens around their arguments, found by rendering known calls.

Formats that do not write arguments as JSON have none; only the beginning of their calls is known.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from agentrl.chat.template import Renderer, Tools
from agentrl.types import Message, ToolCall

_MARK = {"agentrl_argument": "agentrl_value"}


class GrammarError(ValueError):
    """The request cannot be converted to a grammar; `param` names the parameter at fault."""

    def __init__(self, param: str, why: str) -> None:
        super().__init__(why)
        self.param = param


class CallFormat:
    """The calls of one renderer."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self.control = frozenset(renderer.vocabulary.control.values())

    def beginning(self, name: str, tools: Tools) -> tuple[list[int], frozenset[int]]:
        """Return the ids of a call up to the name of its function, and the control tokens in the whole call."""
        message = Message("assistant", "", (ToolCall("c00000000", name, _MARK),))
        ids = self._renderer.unstopped(self._renderer.completion_ids(message, tools))
        return self._until(ids, name), self.control.intersection(ids)

    def _until(self, ids: Sequence[int], name: str) -> list[int]:
        """The ids of a call up to and including the name of its function."""
        for end in range(1, len(ids) + 1):
            text = self._renderer.decode(ids[:end])
            if name in text:
                before = text[: text.index(name) + len(name)]
                fixed = next(n for n in range(end, -1, -1) if before.startswith(self._renderer.decode(ids[:n])))
                rest = before[len(self._renderer.decode(ids[:fixed])) :]
                return [*ids[:fixed], *self._renderer.vocabulary.encode_text(rest)]
        return list(ids)

    def around(self, tools: Tools, first: str, name: str) -> tuple[list[int], list[int], list[int]]:
        """Return the ids before a first call's arguments, between them and a second call's, and after the last."""
        one = self._written([name], tools)
        two = self._written([first, name], tools)
        if len(one) != 2 or len(two) != 3:
            raise GrammarError(
                "tool_choice",
                f"the tool-call format {self._renderer.parser.name!r} does not write arguments as JSON, "
                "so a call cannot be forced; use 'auto'",
            )
        return one[0], two[1], one[1]

    def _written(self, names: Sequence[str], tools: Tools) -> list[list[int]]:
        """Return the ids around the arguments of these calls, as the template writes them, without stop token."""
        renderer = self._renderer
        calls = tuple(ToolCall(f"c{0:05d}{n:03d}", name, _MARK) for n, name in enumerate(names))
        ids = renderer.unstopped(renderer.completion_ids(Message("assistant", "", calls), tools))
        parts: list[list[int]] = [[]]
        for piece in split(ids, self.control):
            if isinstance(piece, int):
                parts[-1].append(piece)
                continue
            first, *rest = renderer.decode(piece).split(json.dumps(_MARK))
            parts[-1] += renderer.vocabulary.encode_text(first)
            for text in rest:
                parts.append(list(renderer.vocabulary.encode_text(text)))
        return parts


def split(ids: Sequence[int], control: frozenset[int]) -> list[int | list[int]]:
    """Split ids into single control tokens and runs of other ids."""
    pieces: list[int | list[int]] = []
    for id in ids:
        if id in control:
            pieces.append(id)
        elif pieces and isinstance(pieces[-1], list):
            pieces[-1].append(id)
        else:
            pieces.append([id])
    return pieces
