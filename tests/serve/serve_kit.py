"""What the tests of the endpoint share: a tiny renderer, tools, messages as clients write them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentrl.chat.demonstrate import completion_of
from agentrl.chat.template import Renderer
from agentrl.engine.base import Engine
from agentrl.models.tiny import make_tokenizer
from agentrl.serve.conversations import Conversations
from agentrl.serve.endpoint import Settings, create_app
from agentrl.serve.listen import running
from agentrl.serve.prometheus import Metrics
from agentrl.serve.service import ChatService, Gate
from agentrl.serve.turns import Incoming
from agentrl.testing.engine import ScriptedEngine
from agentrl.types import Completion, Message, Sampling, ToolCall

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    }
]
CORPUS = [
    "What is 2 plus 3? The answer is 5.",
    'I will call the tool. {"name": "add", "arguments": {"a": 2, "b": 3}}',
    json.dumps(TOOLS),
    "You are a helpful assistant.",
] * 20


def make_renderer(directory: Path) -> Renderer:
    """ChatML with Hermes tool calls over a small byte-level tokenizer."""
    make_tokenizer(directory, CORPUS, vocab=420, max_context=4096)
    return Renderer.from_directory(directory)


def incoming(role: str, content: str = "", *calls: tuple[str, str, str], id: str | None = None) -> Incoming:
    """A message as sent; calls are (id, name, arguments as text)."""
    parsed = tuple(ToolCall(call_id, name, json.loads(text)) for call_id, name, text in calls)
    message = Message(role, content, parsed, tool_call_id=id)  # type: ignore[arg-type]
    return Incoming(message, tuple(text for _, _, text in calls))


def said(renderer: Renderer, message: Message) -> Completion:
    """The completion with which a policy says `message`."""
    return completion_of(renderer, message, TOOLS)


def call(a: int, b: int) -> Message:
    """An assistant turn that calls `add`."""
    return Message("assistant", "I will call.", (ToolCall("x", "add", {"a": a, "b": b}),))


@contextlib.asynccontextmanager
async def serving(engine: Engine, renderer: Renderer, **settings: Any) -> AsyncIterator[Served]:
    """The endpoint over an engine, on a port of its own."""
    limit = settings.pop("max_requests", 64)
    head_timeout_s = settings.pop("head_timeout_s", 30.0)
    service = ChatService(engine, renderer, gate=Gate(limit), metrics=Metrics())
    session = service.open_session(200_000)
    app = create_app(
        service, Settings(**{"names": ("tiny",), "fingerprint": "fp_test", **settings}), session=session
    )
    async with running(app, head_timeout_s=head_timeout_s) as url:
        yield Served(url, service, session)


@dataclass(frozen=True)
class Served:
    """Where it is, and what is behind it."""

    url: str
    service: ChatService
    session: Conversations

    @property
    def base_url(self) -> str:
        """What clients are given."""
        return f"{self.url}/v1"


class Fixed(ScriptedEngine):
    """Says one sentence, as cheaply as can be."""

    def __init__(self, renderer: Renderer) -> None:
        super().__init__(renderer, [], max_context=4096)
        self._completion = completion_of(renderer, Message("assistant", "The answer is 5."))

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, session: str | None = None) -> Completion:
        """The same every time, up to the limit."""
        kept = min(sampling.max_tokens, len(self._completion.ids))
        finish: Any = "stop" if kept == len(self._completion.ids) else "length"
        return replace(
            self._completion,
            ids=self._completion.ids[:kept],
            logprobs=(0.0,) * kept,
            versions=(0,) * kept,
            finish=finish,
        )


def forget_all(session: Conversations) -> None:
    """Forget every turn, as `Conversations` does one by one when its memory is full."""
    while session.turns:
        session._drop_oldest()
