"""The client of endpoints: what is asked again, who has to act on a refusal, and which call an answer is for."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agentrl.engine.chat_client import ChatClient, ContextFullError, Conversation, Endpoint
from agentrl.errors import ConfigError, EngineError
from agentrl.types import Message
from tests.eval.eval_server import Answer, Server, refusal, serving

ASKED = [{"role": "user", "content": "?"}]


@asynccontextmanager
async def asking(endpoint: Endpoint) -> AsyncIterator[ChatClient]:
    client = ChatClient(endpoint)
    try:
        yield client
    finally:
        await client.close()  # a server on loopback waits for its connections


def fails_at_first(answer: Answer) -> Server:
    return Server(lambda messages: {"content": "fine"}, lambda number: answer if number == 1 else None)


@pytest.mark.parametrize(
    ("status", "told", "again"),
    [
        (408, None, True), (409, None, True), (429, None, True), (500, None, True), (503, None, True),
        (400, None, False), (422, None, False), (400, "true", True), (429, "false", False), (500, "false", False),
    ],
)  # fmt: skip
async def test_what_may_succeed_later_is_asked_again(
    status: int, told: str | None, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: 0.0)
    _, body, _ = refusal(status)
    headers = {} if told is None else {"x-should-retry": told}
    with serving(fails_at_first((status, body, headers))) as server:
        async with asking(Endpoint(server.url, "m", retries=1)) as client:
            if again:
                assert (await client.ask(ASKED, (), temperature=0, max_tokens=9))[1].message.content == "fine"
            else:
                with pytest.raises(EngineError, match=f"status {status}: no"):
                    await client.ask(ASKED, (), temperature=0, max_tokens=9)
    assert len(server.requests) == (2 if again else 1)


@pytest.mark.parametrize(
    ("status", "error", "kind", "said"),
    [
        (401, {}, ConfigError, "--api-key-env NAME"),
        (403, {}, ConfigError, "--api-key-env NAME"),
        (402, {}, ConfigError, "the account needs credit"),
        (429, {"code": "insufficient_quota"}, ConfigError, "the account needs credit"),
        (404, {}, ConfigError, "give the base URL with its /v1"),
        (400, {"param": "temperature"}, ConfigError, "give another --temperature"),
        (400, {"param": "reasoning_effort"}, ConfigError, "refuses `reasoning_effort`"),
        (400, {"param": "messages"}, EngineError, "status 400"),
        (400, {"code": "context_length_exceeded"}, ContextFullError, "no"),
    ],
)
async def test_who_has_to_act_on_a_refusal(
    status: int, error: dict[str, str], kind: type[Exception], said: str
) -> None:
    with serving(fails_at_first(refusal(status, **error))) as server:
        endpoint = Endpoint(server.url, "m", retries=0, request={"reasoning_effort": "low"})
        async with asking(endpoint) as client:
            with pytest.raises(kind, match=said):
                await client.ask(ASKED, (), temperature=0, max_tokens=9)


def wired(id: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "add", "arguments": arguments}}


async def test_every_call_is_answered_once_and_by_its_own_answer() -> None:
    """Unreadable calls too, which the env answers without an id, or not at all."""
    drawn: list[Mapping[str, Any]] = [
        {"tool_calls": [wired("a", "{"), wired("b", '{"n": 1}'), wired("b", "["), wired("c", '"no"')]},
        {"tool_calls": [wired("d", "{")]},
        {"content": "done"},
    ]
    with serving(Server(lambda messages: drawn.pop(0))) as server:
        async with asking(Endpoint(server.url, "m")) as client:
            conversation = Conversation(client)
            conversation.extend([Message("user", "Go.")])
            first = await conversation.answer(temperature=0, max_tokens=9)
            assert [call.id for call in first.message.tool_calls] == ["b"]
            assert len(first.message.parse_errors) == 3
            conversation.extend(
                [Message("tool", "first"), Message("tool", "one", tool_call_id="b"), Message("tool", "second")]
            )
            await conversation.answer(temperature=0, max_tokens=9)
            conversation.extend([Message("tool", "third"), Message("tool", "for nobody")])
            await conversation.answer(temperature=0, max_tokens=9)
    opening, calls, *answers = server.requests[1]["messages"]
    ids = [call["id"] for call in calls["tool_calls"]]
    assert (opening["content"], len(set(ids)), ids[0], ids[1], ids[3]) == ("Go.", 4, "a", "b", "c")
    assert [(one["tool_call_id"], one["content"]) for one in answers] == [
        ("a", "first"),
        ("b", "one"),
        (ids[2], "second"),
        ("c", "Error: the arguments are not a JSON object"),
    ]
    assert [one.get("tool_call_id") for one in server.requests[2]["messages"][-2:]] == ["d", None]
    assert server.requests[2]["messages"][-1] == {"role": "user", "content": "for nobody"}


async def test_an_answer_in_parts_is_their_text_and_is_sent_back_as_it_came() -> None:
    parts = [{"type": "text", "text": "It is "}, {"type": "text", "text": "42."}]
    drawn: list[Mapping[str, Any]] = [{"content": parts}, {"content": []}]
    with serving(Server(lambda messages: drawn.pop(0))) as server:
        async with asking(Endpoint(server.url, "m")) as client:
            conversation = Conversation(client)
            conversation.extend([Message("user", "What is it?")])
            assert (await conversation.answer(temperature=0, max_tokens=9)).message.content == "It is 42."
            assert (await conversation.answer(temperature=0, max_tokens=9)).message.content == ""
    assert server.requests[1]["messages"][-1] == {"role": "assistant", "content": parts}
