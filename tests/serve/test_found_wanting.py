"""What a review with real clients found: each case as a request."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.chat.template import Renderer
from agentrl.engine.checks import check_sampling
from agentrl.serve.bounds import tokens_above
from agentrl.serve.browsers import means_this_machine
from agentrl.serve.grammar import AnswerFormat
from agentrl.testing.engine import ScriptedEngine
from agentrl.types import Message, ToolCall
from tests.chat.families import FUNCTIONARY_V32
from tests.serve.serve_kit import TOOLS, call, forget_all, said, serving
from tests.serve.test_grammar import SUBTRACT, drawn

SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "maximum": 9, "minimum": 0}},
    "required": ["sum"],
    "additionalProperties": False,
}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40}


def agreeing(renderer: Renderer) -> ScriptedEngine:
    return ScriptedEngine(renderer, lambda turn: Message("assistant", "yes"), max_context=4096)


async def test_with_tools_and_a_format_a_turn_is_an_answer_or_calls(renderer: Renderer):
    found = {"answer": 0, "calls": 0}
    for seed in range(16):
        text = await drawn(renderer, seed, format=AnswerFormat(SCHEMA), tools=[*TOOLS, SUBTRACT], forced=False)
        read = renderer.read_text(text, tools=TOOLS)
        assert read.parse_errors == ()
        if read.tool_calls:
            found["calls"] += 1
            assert {one.name for one in read.tool_calls} <= {"add", "subtract"}
        else:
            found["answer"] += 1
            assert 0 <= json.loads(str(read.content).strip())["sum"] <= 9
    assert min(found.values()) > 0, found


async def test_a_forced_call_wins_over_a_format(renderer: Renderer):
    text = await drawn(renderer, 1, format=AnswerFormat(SCHEMA), tools=TOOLS, named="add")
    assert [one.name for one in renderer.read_text(text, tools=TOOLS).tool_calls] == ["add"]


async def test_long_texts_are_counted_up_to_the_limit_only(renderer: Renderer):
    vocabulary, text = renderer.vocabulary, "What is 2 plus 3? " * 200_000
    assert await tokens_above(vocabulary, ["short"], 0) is None
    assert await tokens_above(vocabulary, [text[:60_000]], 10_000_000) is None
    started = time.process_time()
    found = await tokens_above(vocabulary, [text], 4096)
    spent = time.process_time() - started
    assert found is not None
    assert 4096 < found <= vocabulary.count(text[: 1 << 16])
    whole = time.process_time()
    vocabulary.count(text)
    assert spent < (time.process_time() - whole), "most of the text was not tokenized"


async def test_a_large_prompt_is_refused_while_others_are_answered(renderer: Renderer):
    engine = agreeing(renderer)
    body = json.dumps({**CHAT, "messages": [{"role": "user", "content": "What is 2 plus 3? " * 1_000_000}]})
    async with serving(engine, renderer) as served, httpx.AsyncClient(base_url=served.url, timeout=60) as client:
        large = asyncio.create_task(client.post("/v1/chat/completions", content=body))
        answered = 0
        while not large.done():
            assert (await client.get("/health")).status_code == 200
            answered += 1
            await asyncio.sleep(0.005)
        refused = (await large).json()["error"]
        text = await client.post(
            "/v1/completions", json={"model": "tiny", "prompt": "What is 2 plus 3? " * 100_000, "max_tokens": 2}
        )
    assert refused["code"] == "context_length_exceeded"
    assert "the prompt has at least" in refused["message"]
    assert text.json()["error"]["code"] == "context_length_exceeded"
    assert answered > 2


async def test_streamed_token_ids_have_the_stop_token(renderer: Renderer):
    completion = said(renderer, Message("assistant", "yes"))
    asked = {**CHAT, "return_token_ids": True}
    async with serving(agreeing(renderer), renderer) as served, httpx.AsyncClient(base_url=served.url) as client:
        whole = (await client.post("/v1/chat/completions", json=asked)).json()
        streamed = await client.post("/v1/chat/completions", json={**asked, "stream": True})
    lines = [json.loads(x[6:]) for x in streamed.text.splitlines() if x.startswith("data: {")]
    ids = [id for line in lines for choice in line["choices"] for id in choice.get("token_ids", ())]
    assert ids == whole["choices"][0]["token_ids"] == list(completion.ids)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("allowed_token_ids", [1]),
        ("truncate_prompt_tokens", 5),
        ("grammar", "root ::= 'x'"),
        ("ebnf", "root ::= 'x'"),
        ("guided_decoding", {"json": {}}),
        ("repeat_penalty", 1.3),
        ("enable_thinking", False),
        ("echo", True),
        ("typical_p", 0.5),
        ("skip_special_tokens", False),
        ("documents", [{"text": "x"}]),
        ("chat_template_kwargs", {"enable_thinking": False}),
    ],
)
async def test_parameters_that_would_change_the_answer_are_named(renderer: Renderer, name: str, value: object):
    async with serving(agreeing(renderer), renderer) as served, httpx.AsyncClient(base_url=served.url) as client:
        answer = await client.post("/v1/chat/completions", json={**CHAT, name: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name


async def test_compressed_bodies_are_read_and_bombs_are_not(renderer: Renderer):
    engine = agreeing(renderer)
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    async with (
        serving(engine, renderer, max_body_bytes=1 << 20) as served,
        httpx.AsyncClient(base_url=served.url, headers=headers) as client,
    ):
        good = gzip.compress(json.dumps(CHAT).encode())
        assert (await client.post("/v1/chat/completions", content=good)).status_code == 200
        bomb = await client.post("/v1/chat/completions", content=gzip.compress(b" " * (64 << 20)))
        torn = await client.post("/v1/chat/completions", content=good[:-9])
        other = await client.post("/v1/chat/completions", content=b"x", headers={"content-encoding": "br"})
    assert [bomb.status_code, torn.status_code, other.status_code] == [413, 400, 415]


async def test_web_pages_need_to_be_listed(renderer: Renderer):
    engine = agreeing(renderer)
    page = {"origin": "https://app.example.com"}
    async with serving(engine, renderer) as served, httpx.AsyncClient(base_url=served.url) as client:
        foreign = await client.post("/v1/chat/completions", json=CHAT, headers=page)
        also = await client.post("/v1/messages", json=CHAT, headers=page)
        rebound = await client.get("/v1/models", headers={"host": "evil.example.com"})
        assert (await client.get("/v1/models", headers={"host": "localhost:1"})).status_code == 200
        assert (await client.get("/v1/models", headers={"origin": served.url})).status_code == 200
    assert foreign.status_code == also.status_code == 403
    assert (also.json()["type"], also.json()["error"]["type"]) == ("error", "permission_error")
    assert "--cors https://app.example.com" in foreign.json()["error"]["message"]
    assert rebound.status_code == 403
    async with (
        serving(engine, renderer, cors=("https://app.example.com",)) as served,
        httpx.AsyncClient(base_url=served.url, headers=page) as client,
    ):
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        before = await client.options("/v1/chat/completions", headers=asked)
        assert before.headers["access-control-allow-origin"] == page["origin"]
        answer = await client.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == page["origin"]
    async with serving(engine, renderer, api_key="k") as served, httpx.AsyncClient(base_url=served.url) as client:
        assert (await client.get("/v1/models", headers={"host": "lab.example.com"})).status_code == 401
        known = {"host": "lab.example.com", "authorization": "Bearer k"}
        assert (await client.get("/v1/models", headers=known)).status_code == 200


def test_names_of_this_machine():
    assert all(map(means_this_machine, ("localhost", "a.localhost", "127.0.0.1", "127.8.8.8", "::1")))
    assert not any(map(means_this_machine, ("example.com", "10.0.0.1", "localhost.example.com", "")))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stored_response_can_be_fetched(renderer: Renderer, stream: bool):
    engine = agreeing(renderer)
    async with serving(engine, renderer) as served, httpx.AsyncClient(base_url=served.url) as client:
        answer = await client.post("/v1/responses", json={"model": "tiny", "input": "hi", "stream": stream})
        if stream:
            last = [x for x in answer.text.splitlines() if x.startswith("data: ")][-1]
            body = json.loads(last[6:])["response"]
        else:
            body = answer.json()
        assert (await client.get(f"/v1/responses/{body['id']}")).json() == body
        missing = await client.get("/v1/responses/resp_nothing")
        kept = await client.post("/v1/responses", json={"model": "tiny", "input": "hi", "store": False})
        assert (await client.get(f"/v1/responses/{kept.json()['id']}")).status_code == 404
        again = await client.get(f"/v1/responses/{body['id']}?stream=true")
    assert (again.status_code, again.json()["error"]["param"]) == (400, "stream")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "response_not_found"


async def test_allowed_tools_are_the_only_ones_offered(renderer: Renderer):
    engine = ScriptedEngine(renderer, lambda turn: call(2, 3), tools=TOOLS)
    tools = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("add", "other")]

    def asked(*names: str) -> dict[str, Any]:
        allowed = [{"type": "function", "name": name} for name in names]
        choice = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
        return {"model": "tiny", "input": "2 and 3", "tools": tools, "tool_choice": choice}

    async with serving(engine, renderer) as served, httpx.AsyncClient(base_url=served.url) as client:
        answer = await client.post("/v1/responses", json=asked("add"))
        wrong = await client.post("/v1/responses", json=asked("nothing"))
    assert [item["type"] for item in answer.json()["output"]][-1] == "function_call"
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "tool_choice"


async def test_allowed_tools_of_the_chat_dialect(renderer: Renderer):
    other = {"type": "function", "function": {"name": "other"}}
    engine = ScriptedEngine(renderer, lambda turn: call(2, 3), tools=TOOLS)

    def asked(*names: str) -> dict[str, Any]:
        listed = [{"type": "function", "function": {"name": name}} for name in names]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": listed}}
        return {**CHAT, "tools": [*TOOLS, other], "tool_choice": choice}

    async with serving(engine, renderer) as served, httpx.AsyncClient(base_url=served.url) as client:
        answer = await client.post("/v1/chat/completions", json=asked("add"))
        wrong = await client.post("/v1/chat/completions", json=asked("nothing"))
        (turn,) = served.session.turns
    assert answer.status_code == 200, answer.text
    assert [tool["function"]["name"] for tool in turn.branch.tools] == ["add"]
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages", "completions"])
async def test_top_p_0_keeps_the_likeliest_token(renderer: Renderer, path: str):
    seen: list[float] = []

    class Seen(ScriptedEngine):
        async def generate(self, ids: Any, sampling: Any, *, session: str | None = None) -> Any:
            seen.append(sampling.top_p)
            check_sampling(sampling)
            return await super().generate(ids, sampling, session=session)

    engine = Seen(renderer, lambda turn: Message("assistant", "yes"))
    async with serving(engine, renderer) as served, httpx.AsyncClient(base_url=served.url) as client:
        texts = {"completions": {"prompt": "hi"}, "responses": {"input": "hi"}}
        body = {"model": "tiny", "top_p": 0, **texts.get(path, CHAT)}
        assert (await client.post(f"/v1/{path}", json=body)).status_code == 200
    assert 0 < seen[0] < 1e-3


async def test_a_client_of_anthropic_gets_models_and_errors_in_its_dialect(renderer: Renderer):
    head = {"anthropic-version": "2023-06-01"}
    async with (
        serving(agreeing(renderer), renderer) as served,
        httpx.AsyncClient(base_url=served.url, headers=head) as client,
    ):
        found = (await client.get("/v1/models/tiny")).json()
        missing = await client.get("/v1/models/nothing")
        batch = await client.post("/v1/messages/batches", json={})
    assert (found["type"], found["id"]) == ("model", "tiny")
    assert (missing.status_code, missing.json()["type"]) == (404, "error")
    assert (batch.status_code, batch.json()["error"]["type"]) == (404, "not_found_error")


async def test_log_probabilities_that_a_response_will_not_have_are_named(renderer: Renderer):
    body = {"model": "tiny", "input": "hi"}
    async with serving(agreeing(renderer), renderer) as served, httpx.AsyncClient(base_url=served.url) as client:
        asked = await client.post("/v1/responses", json={**body, "include": ["message.output_text.logprobs"]})
        codex = await client.post("/v1/responses", json={**body, "include": ["reasoning.encrypted_content"]})
        nested = await client.post("/v1/chat/completions", json={**CHAT, "extra_body": {"top_k": 5}})
    assert (asked.status_code, asked.json()["error"]["param"]) == (400, "include")
    assert codex.status_code == 200
    assert (nested.status_code, nested.json()["error"]["param"]) == (400, "extra_body")


async def test_a_stored_item_may_be_referred_to(renderer: Renderer):
    engine = ScriptedEngine(renderer, lambda turn: Message("assistant", "5") if turn else call(2, 3), tools=TOOLS)
    tools = [{"type": "function", **TOOLS[0]["function"]}]
    asked: dict[str, Any] = {"model": "tiny", "tools": tools}
    user = {"role": "user", "content": "2 and 3"}
    async with serving(engine, renderer) as served, httpx.AsyncClient(base_url=served.base_url) as client:
        first = (await client.post("/responses", json={**asked, "input": [user]})).json()
        (made,) = [item for item in first["output"] if item["type"] == "function_call"]
        known = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        given = [user, *known, {"type": "function_call_output", "call_id": made["call_id"], "output": "5"}]
        second = await client.post("/responses", json={**asked, "input": given})
        one, two = served.session.turns
        short = [user, *({"id": item["id"]} for item in first["output"]), given[-1]]
        assert (await client.post("/responses", json={**asked, "input": short})).status_code == 200
        lost = await client.post(
            "/responses", json={**asked, "input": [user, {"type": "item_reference", "id": "x"}]}
        )
        forget_all(served.session)
        forgotten = await client.post("/responses", json={**asked, "input": given})
    assert second.status_code == 200
    assert two.parent == one.number
    assert (lost.status_code, lost.json()["error"]["code"]) == (400, "item_not_found")
    assert lost.json()["error"]["param"] == "input[1]"
    assert forgotten.status_code == 400


async def test_results_of_parallel_calls_belong_to_their_calls_in_any_order(renderer: Renderer):
    both = Message(
        "assistant", "", (ToolCall("x", "add", {"a": 1, "b": 1}), ToolCall("y", "add", {"a": 2, "b": 2}))
    )
    engine = ScriptedEngine(renderer, lambda turn: both if turn == 0 else Message("assistant", "ok"), tools=TOOLS)
    asked: dict[str, Any] = {**CHAT, "tools": TOOLS}
    user = CHAT["messages"][0]
    prompts = []
    async with serving(engine, renderer) as served, httpx.AsyncClient(base_url=served.base_url) as client:
        said = (await client.post("/chat/completions", json={**asked, "max_tokens": 200})).json()
        said = said["choices"][0]["message"]
        results = [
            {"role": "tool", "tool_call_id": made["id"], "content": f"result {n}"}
            for n, made in enumerate(said["tool_calls"])
        ]
        for given in (results, results[::-1]):
            await client.post("/chat/completions", json={**asked, "messages": [user, said, *given]})
            turn = served.session.turns[-1]
            prompts.append(list(turn.branch.ids[: turn.prompt_tokens]))
            again = [user, said, *given, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "?"}]
            await client.post("/chat/completions", json={**asked, "messages": again})
            assert served.session.turns[-1].parent is not None
    assert prompts[0] == prompts[1], "no template here writes the ids of calls: only the order tells"


async def test_either_key_of_a_client_may_be_the_right_one(renderer: Renderer):
    async with (
        serving(agreeing(renderer), renderer, api_key="k") as served,
        httpx.AsyncClient(base_url=served.base_url) as client,
    ):
        for bearer, x_key, status in (
            ("other", "k", 200),
            ("k", "other", 200),
            ("other", "other", 401),
            ("none", "", 401),
        ):
            headers = {"authorization": f"Bearer {bearer}", "x-api-key": x_key}
            assert (await client.get("/models", headers=headers)).status_code == status


async def test_a_forced_call_wins_over_a_format_in_every_dialect(renderer: Renderer):
    function = TOOLS[0]["function"]
    format = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    chat = {**CHAT, "tools": TOOLS, "tool_choice": "required"}
    flat = {"type": "function", "name": "add", "parameters": function["parameters"]}
    asked: dict[str, dict[str, Any]] = {
        "/chat/completions": {**chat, "response_format": {"type": "json_schema", "json_schema": format}},
        "/responses": {"input": "hi", "tools": [flat], "tool_choice": "required", "text": {"format": format}},
        "/messages": {
            **CHAT,
            "tools": [{"name": "add", "input_schema": function["parameters"]}],
            "tool_choice": {"type": "any"},
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
    }
    async with (
        serving(ScriptedEngine(renderer, lambda turn: call(2, 3), tools=TOOLS), renderer) as served,
        httpx.AsyncClient(base_url=served.base_url) as client,
    ):
        for path, body in asked.items():
            answer = await client.post(path, json={"model": "tiny", **body})
            assert answer.status_code == 200, (path, answer.text)


async def test_a_tool_whose_name_the_format_uses_is_refused_in_every_dialect(tmp_path: Path):
    """Functionary writes text as `all`, so a call of that tool would come back as text."""
    renderer = Renderer.from_directory(FUNCTIONARY_V32.directory(tmp_path))
    function = {"name": "all", "parameters": {"type": "object", "properties": {}}}
    chat = {**CHAT, "tools": [*TOOLS, {"type": "function", "function": function}]}
    flat = {"model": "tiny", "input": "hi", "tools": [{"type": "function", **function}]}
    blocks = {**CHAT, "tools": [{"name": "all", "input_schema": function["parameters"]}]}
    async with serving(agreeing(renderer), renderer) as served, httpx.AsyncClient(trust_env=False) as client:
        for path, body in (("/chat/completions", chat), ("/responses", flat), ("/messages", blocks)):
            refused = await client.post(served.base_url + path, json=body)
            assert refused.status_code == 400, path
            text = refused.json()["error"]["message"]
            assert "tools: the tool 'all' cannot be called in the format functionary_v32" in text
        odd = {"type": "function", "function": {"name": "odd", "parameters": {"type": "object", "required": True}}}
        for fine in ({**chat, "tool_choice": "none"}, {**chat, "tools": [*TOOLS, odd]}):
            assert (await client.post(served.base_url + "/chat/completions", json=fine)).status_code == 200
