"""Anthropic's Messages API as requests over HTTP: blocks, events in their order, errors, tokens of an episode."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from agentrl.agents.recorder import Recorder
from agentrl.chat.template import Renderer
from agentrl.rollout.limits import EpisodeLimits
from agentrl.serve.listen import running
from agentrl.testing.engine import ScriptedEngine
from agentrl.types import Message, ToolCall
from tests.serve.serve_kit import TOOLS, Fixed, call, serving

ADD = {"name": "add", "description": "Add two numbers.", "input_schema": TOOLS[0]["function"]["parameters"]}
QUESTION = {"role": "user", "content": [{"type": "text", "text": "What is 2 plus 3?"}]}
SYSTEM = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
SCRIPT = [call(2, 3), Message("assistant", "The answer is 5.")]


def asking(*messages: Any, **options: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 200, "messages": list(messages or (QUESTION,)), **options}


def events_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for block in text.strip().split("\n\n"):
        name, _, data = block.partition("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


async def post(url: str, body: Any, path: str = "/messages", **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.post(url + path, json=body, headers=headers)


async def test_one_episode_has_the_same_ids_in_every_dialect(renderer: Renderer):
    ids: dict[str, list[list[int]]] = {}
    async with serving(ScriptedEngine(renderer, SCRIPT, tools=TOOLS), renderer) as served:
        first = (await post(served.base_url, asking(system=SYSTEM, tools=[ADD]))).json()
        (use,) = [block for block in first["content"] if block["type"] == "tool_use"]
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "5"}]}
        turn = [
            QUESTION,
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": [result]},
        ]
        second = (await post(served.base_url, asking(*turn, system=SYSTEM, tools=[ADD]))).json()
        assert (first["stop_reason"], second["stop_reason"]) == ("tool_use", "end_turn")
        assert second["content"] == [{"type": "text", "text": "The answer is 5."}]
        assert use["input"] == {"a": 2, "b": 3}
        ids["anthropic"] = [list(turn.branch.ids) for turn in served.session.turns]
        assert served.session.turns[1].parent == served.session.turns[0].number
    async with serving(ScriptedEngine(renderer, SCRIPT, tools=TOOLS), renderer) as served:
        messages: list[Any] = [{"role": "system", "content": "Be brief."}, QUESTION]
        body = {"model": "tiny", "max_tokens": 200, "tools": TOOLS}
        answer = await post(served.base_url, {**body, "messages": messages}, "/chat/completions")
        said = answer.json()["choices"][0]["message"]
        messages += [said, {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "5"}]
        await post(served.base_url, {**body, "messages": messages}, "/chat/completions")
        ids["chat"] = [list(turn.branch.ids) for turn in served.session.turns]
    async with serving(ScriptedEngine(renderer, SCRIPT, tools=TOOLS), renderer) as served:
        flat = {"type": "function", **TOOLS[0]["function"]}
        body = {"model": "tiny", "tools": [flat], "instructions": "Be brief."}
        first = (await post(served.base_url, {**body, "input": "What is 2 plus 3?"}, "/responses")).json()
        (made,) = [item for item in first["output"] if item["type"] == "function_call"]
        output = [{"type": "function_call_output", "call_id": made["call_id"], "output": "5"}]
        body |= {"previous_response_id": first["id"], "input": output}
        await post(served.base_url, body, "/responses")
        ids["responses"] = [list(turn.branch.ids) for turn in served.session.turns]
    assert ids["anthropic"] == ids["chat"] == ids["responses"]


async def test_events_come_in_the_official_order_and_join_to_the_plain_answer(renderer: Renderer):
    said = Message("assistant", "I will call.", call(2, 3).tool_calls, reasoning="Two and three.")
    async with serving(ScriptedEngine(renderer, [said], tools=TOOLS), renderer) as served:
        plain = (await post(served.base_url, asking(tools=[ADD]))).json()
        text = (await post(served.base_url, asking(tools=[ADD], stream=True))).text
    events = events_of(text)
    assert all(name == data["type"] for name, data in events)
    names = [name for name, _ in events if name not in ("ping", "content_block_delta")]
    blocks = ["content_block_start", "content_block_stop"] * len(plain["content"])
    assert names == ["message_start", *blocks, "message_delta", "message_stop"]
    content: list[dict[str, Any]] = []
    for name, data in events:
        if name == "content_block_start":
            assert data["index"] == len(content)
            content.append(dict(data["content_block"]))
        elif name == "content_block_delta":
            delta = data["delta"]
            (key,) = set(delta) - {"type"}
            place = {"partial_json": "raw"}.get(key, key)
            content[data["index"]][place] = content[data["index"]].get(place, "") + delta[key]
    for block in content:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block.pop("raw"))
    for block in (*content, *plain["content"]):
        for varies in ("id", "signature"):
            block.pop(varies, None)
    assert content == plain["content"]
    assert [block["type"] for block in content] == ["thinking", "text", "tool_use"]
    usage = dict(events)["message_delta"]["usage"]
    assert usage["output_tokens"] == plain["usage"]["output_tokens"] > 0


async def test_thinking_that_is_sent_back_or_dropped_continues_the_same_tokens(renderer: Renderer):
    said = Message("assistant", "Five.", reasoning="Two and three.")
    async with serving(ScriptedEngine(renderer, [said, said, said]), renderer) as served:
        first = (await post(served.base_url, asking())).json()
        for kept in (first["content"], [b for b in first["content"] if b["type"] == "text"]):
            more = [QUESTION, {"role": "assistant", "content": kept}, {"role": "user", "content": "Again."}]
            await post(served.base_url, asking(*more))
        turns = sorted(served.session.turns, key=lambda turn: turn.number)
        assert [turn.parent for turn in turns] == [None, turns[0].number, turns[0].number]


async def test_malformed_arguments_are_an_object_and_are_recognized(renderer: Renderer):
    text = 'I call.\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": }}\n</tool_call>'
    script = [text, Message("assistant", "Sorry.")]
    for stream in (False, True):
        async with serving(ScriptedEngine(renderer, script, tools=TOOLS), renderer) as served:
            answer = await post(served.base_url, asking(tools=[ADD], stream=stream))
            if stream:
                found = [data["delta"] for _, data in events_of(answer.text) if "delta" in data]
                json.loads("".join(delta.get("partial_json", "") for delta in found) or "{}")
                continue
            content = answer.json()["content"]
            uses = [block for block in content if block["type"] == "tool_use"]
            assert all(isinstance(use["input"], dict) for use in uses)
            results = [{"type": "tool_result", "tool_use_id": use["id"], "is_error": True} for use in uses]
            back = {"role": "user", "content": [*results, {"type": "text", "text": "Not valid."}]}
            await post(
                served.base_url, asking(QUESTION, {"role": "assistant", "content": content}, back, tools=[ADD])
            )
            first, second = served.session.turns
            assert second.parent == first.number


async def test_results_and_text_of_one_message_keep_their_order(renderer: Renderer):
    calls = (ToolCall("x", "add", {"a": 1, "b": 1}), ToolCall("y", "add", {"a": 2, "b": 2}))
    script = [Message("assistant", "", calls), Message("assistant", "Done.")]
    async with serving(ScriptedEngine(renderer, script, tools=TOOLS), renderer) as served:
        first = (await post(served.base_url, asking(tools=[ADD]))).json()
        uses = [block["id"] for block in first["content"]]
        back = [{"type": "tool_result", "tool_use_id": id, "content": str(n)} for n, id in enumerate(uses)]
        more = {"role": "user", "content": [*back, {"type": "text", "text": "Go on."}]}
        await post(
            served.base_url,
            asking(QUESTION, {"role": "assistant", "content": first["content"]}, more, tools=[ADD]),
        )
        context = served.session.turns[1].branch.context
    assert [(m.role, m.content) for m in context[-4:-1]] == [("tool", "0"), ("tool", "1"), ("user", "Go on.")]


async def test_stop_sequences_limits_and_filters(renderer: Renderer):
    async with serving(ScriptedEngine(renderer, [Message("assistant", "One STOP two")]), renderer) as served:
        body = (await post(served.base_url, asking(stop_sequences=["STOP"]))).json()
        assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "STOP")
        assert body["content"] == [{"type": "text", "text": "One "}]
    async with serving(Fixed(renderer), renderer) as served:
        body = (await post(served.base_url, asking(max_tokens=2))).json()
        assert (body["stop_reason"], body["usage"]["output_tokens"]) == ("max_tokens", 2)


async def test_counting_is_exact_and_leaves_no_trace(renderer: Renderer):
    async with serving(Fixed(renderer), renderer) as served:
        asked = asking(system="Be brief.", tools=[ADD])
        counted = {key: value for key, value in asked.items() if key != "max_tokens"}
        number = (await post(served.base_url, counted, "/messages/count_tokens")).json()["input_tokens"]
        assert not served.session.turns
        usage = (await post(served.base_url, asked)).json()["usage"]
        assert number == usage["input_tokens"] + usage["cache_read_input_tokens"]


TEXT = {"type": "text", "text": "hi"}
CALLED = {"type": "tool_use", "id": "a", "name": "add", "input": {"malformed_arguments": "{"}}
FORMAT = {"type": "json_schema", "schema": {"type": "object"}}
BAD: list[tuple[dict[str, Any], int, str, str]] = [
    ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
    ({"messages": []}, 400, "invalid_request_error", "messages"),
    ({"model": "other"}, 404, "not_found_error", "other"),
    ({"temperature": 1.5}, 400, "invalid_request_error", "temperature"),
    ({"messages": [{"role": "tool", "content": "x"}]}, 400, "invalid_request_error", "role"),
    (
        {"messages": [QUESTION, {"role": "assistant", "content": "The"}]},
        400,
        "invalid_request_error",
        "messages[1]",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        400,
        "invalid_request_error",
        "image",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        400,
        "invalid_request_error",
        "content[0].text",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        400,
        "invalid_request_error",
        "tool_use_id",
    ),
    (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        400,
        "invalid_request_error",
        "tools[0].type",
    ),
    ({"tools": [ADD, ADD]}, 400, "invalid_request_error", "tools[1].name"),
    ({"tools": [{"name": "add"}]}, 400, "invalid_request_error", "tools[0].input_schema"),
    ({"tool_choice": {"type": "tool"}, "tools": [ADD]}, 400, "invalid_request_error", "tool_choice.name"),
    ({"mcp_servers": [{"url": "x"}]}, 400, "invalid_request_error", "mcp_servers"),
    (
        {
            "system": "Be brief.",
            "messages": [
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "z"}, TEXT]},
                {"role": "assistant", "content": [TEXT, CALLED]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]},
            ],
        },
        400,
        "invalid_request_error",
        "messages[1].content[1].input: must be a JSON object",
    ),
    (
        {"output_format": FORMAT, "output_config": {"format": FORMAT}},
        400,
        "invalid_request_error",
        "output_format: conflicts",
    ),
    (
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        400,
        "invalid_request_error",
        "history",
    ),
    (
        {"messages": [{"role": "user", "content": "word " * 9000}]},
        400,
        "invalid_request_error",
        "prompt is too long",
    ),
]


@pytest.mark.parametrize(("change", "status", "kind", "names"), BAD, ids=[names for *_, names in BAD])
async def test_an_error_is_in_the_dialect_and_names_what_is_wrong(
    renderer: Renderer, change: dict[str, Any], status: int, kind: str, names: str
):
    async with serving(Fixed(renderer), renderer) as served:
        answer = await post(served.base_url, asking() | change)
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"type", "error"}
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert names in body["error"]["message"]
    assert answer.headers["request-id"]


async def test_what_coding_agents_send_along_is_accepted(renderer: Renderer):
    asked = asking(
        system=[*SYSTEM, {"type": "text", "text": " And kind."}],
        thinking={"type": "enabled", "budget_tokens": 1024},
        metadata={"user_id": "u"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "low"},
        tools=[ADD | {"cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}],
        service_tier="auto",
    )
    async with serving(Fixed(renderer), renderer) as served:
        answer = await post(served.base_url, asked, "/messages?beta=true", **{"anthropic-version": "2023-06-01"})
        assert answer.status_code == 200, answer.text
        (turn,) = served.session.turns
        assert turn.branch.context[0].content == "Be brief. And kind."
        async with httpx.AsyncClient(trust_env=False) as client:
            listed = await client.get(served.base_url + "/models", headers={"anthropic-version": "2023-06-01"})
        assert [(model["type"], model["id"]) for model in listed.json()["data"]] == [("model", "tiny")]


async def test_a_key_may_come_as_x_api_key(renderer: Renderer):
    async with serving(Fixed(renderer), renderer, api_key="secret") as served:
        refused = await post(served.base_url, asking(), **{"x-api-key": "wrong"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        assert (await post(served.base_url, asking(), **{"x-api-key": "secret"})).status_code == 200


async def test_an_episode_is_recorded_through_it_and_a_retry_is_one_turn(renderer: Renderer):
    recorder = Recorder(ScriptedEngine(renderer, SCRIPT, tools=TOOLS), renderer, EpisodeLimits(token_budget=4000))
    async with running(recorder.app()) as address:
        recording = recorder.open(temperature=1.0, seed=7)
        url, key = address + recording.path, {"x-api-key": recording.key}
        counted = {k: v for k, v in asking(tools=[ADD]).items() if k != "max_tokens"}
        assert (await post(url, counted, "/messages/count_tokens", **key)).status_code == 200
        first = await post(url, asking(tools=[ADD]), **key)
        again = await post(url, asking(tools=[ADD]), **key, **{"x-stainless-retry-count": "1"})
        assert first.json()["content"] == again.json()["content"]
        (use,) = [block for block in first.json()["content"] if block["type"] == "tool_use"]
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use["id"], "content": "5"}]}
        said = {"role": "assistant", "content": first.json()["content"]}
        await post(url, asking(QUESTION, said, result, tools=[ADD]), **key)
        recording.seal()
        ended = await post(url, asking(), **key)
        assert ended.status_code == 410
        assert ended.json()["type"] == "error"
        assert recording.num_turns == 2
        assert recording.metrics()["agent/retries"] == 1
        assert recording.metrics().get("agent/forks", 0) == 0
        origins = [segment.origin for segment in recording.ledger.segments]
        assert origins.count("sampled") == 2
        await recorder.close(recording)
