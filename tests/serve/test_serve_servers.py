"""The endpoint over inference servers: the tokens that they are asked to continue are those of training."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.agents.recorder import Recorder
from agentrl.chat.template import Renderer
from agentrl.cli.serve import _find, _with_engine
from agentrl.config.engine import EngineConfig, ServerConfig
from agentrl.config.run import TinyModel
from agentrl.engine.base import GenerateOptions, Structure
from agentrl.engine.open import open_engine
from agentrl.engine.servers.opening import launch_recipe
from agentrl.models.tiny import make_tiny_model
from agentrl.rollout.limits import EpisodeLimits
from agentrl.serve.listen import running
from agentrl.testing.sglang_server import LoopbackServer, LoopbackVLLM
from agentrl.types import Message, Sampling, ToolCall
from tests.serve.serve_kit import TOOLS, serving

SHAPE = TinyModel(hidden=32, layers=1, heads=2, intermediate=64, vocab=400, max_context=512)
ASKED = {"model": "small", "messages": [{"role": "user", "content": "What is 2 plus 3?"}], "max_tokens": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small untrained model."""
    folder = tmp_path_factory.mktemp("served") / "small"
    make_tiny_model(folder, ["What is 2 plus 3? The answer is 5.", json.dumps(TOOLS)] * 20, SHAPE)
    return folder


async def test_sglang_behind_the_endpoint_gets_the_weights_and_the_tokens_of_training(model: Path):
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    async with LoopbackServer(vocabulary=vocabulary, max_context=512) as server:
        policy = _find(model, ["engine.kind=sglang", f"engine.server.urls=['{server.url}']"])
        engine = await open_engine(policy.engine, policy.directory)
        try:
            async with (
                serving(engine, policy.renderer, names=("small",)) as served,
                httpx.AsyncClient(timeout=30) as client,
            ):
                assert [path for path, _ in server.weights] == ["/update_weights_from_disk"]
                chat = served.base_url + "/chat/completions"
                plain = (await client.post(chat, json={**ASKED, "return_token_ids": True})).json()
                prompt = policy.renderer.encode([Message("user", "What is 2 plus 3?")], generation_prompt=True)
                assert plain["prompt_token_ids"] == prompt == server.prompts[0]
                sampled = plain["choices"][0]["token_ids"]
                assert len(sampled) == plain["usage"]["completion_tokens"] <= 8
                await _streamed(client, chat, server, plain["choices"][0]["message"]["content"] or "")
                await _continued(client, served.base_url, server, policy.renderer)
                await _scored(client, served.base_url, prompt)
                assert (await client.get(served.url + "/health")).json()["status"] == "ok"
        finally:
            await engine.close()


async def _streamed(client: httpx.AsyncClient, chat: str, server: LoopbackServer, content: str) -> None:
    """A stream says the same, while the server is still drawing; a client that hangs up ends what is drawn."""
    assert _text_of((await client.post(chat, json={**ASKED, "stream": True})).text) == content
    server.token_s = 0.05
    async with client.stream("POST", chat, json={**ASKED, "stream": True, "max_tokens": 400}) as answer:
        said = (line async for line in answer.aiter_lines() if '"content":' in line and '"content":""' not in line)
        await anext(said)
        assert len(server.running) == 1
    async with asyncio.timeout(10):
        while server.running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert "/abort_request" in server.log
    server.token_s = 0.0


async def _continued(client: httpx.AsyncClient, base_url: str, server: LoopbackServer, renderer: Renderer) -> None:
    """A response that another goes on from is continued with the tokens that the server drew."""
    body = {"model": "small", "input": "Are you there?", "max_output_tokens": 8}
    first = (await client.post(base_url + "/responses", json=body)).json()
    opening = server.prompts[-1]
    body |= {"input": "Sure?", "previous_response_id": first["id"]}
    second = await client.post(base_url + "/responses", json=body)
    assert second.status_code == 200, second.text
    count, drawn = len(opening), first["usage"]["output_tokens"]
    assert server.prompts[-1][:count] == opening
    ids = list(opening)
    for _ in range(drawn):
        ids.append((sum(ids) + len(ids)) % server.vocabulary)
    assert server.prompts[-1][: len(ids)] == ids


async def _scored(client: httpx.AsyncClient, base_url: str, prompt: list[int]) -> None:
    """What evaluation harnesses ask for: the log-probabilities of a prompt, and what was likeliest there."""
    body = {"model": "small", "prompt": [prompt], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    answer = (await client.post(base_url + "/completions", json=body)).json()
    found = answer["choices"][0]["logprobs"]
    assert found["token_logprobs"][0] is None
    assert found["token_logprobs"][1 : len(prompt)] == [-1.0 - token / 100 for token in prompt[1:]]
    assert [max(top.values()) for top in found["top_logprobs"][1 : len(prompt)]] == [-0.1] * (len(prompt) - 1)


def _text_of(events: str) -> str:
    chunks: list[Any] = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def test_a_signal_while_the_engine_is_starting_ends_the_command(model: Path):
    policy = _find(model, ["engine.kind=sglang", "engine.server.urls=['http://127.0.0.1:9']"])  # nobody answers

    async def never(engine: Any, ended: asyncio.Event) -> None:
        raise AssertionError("the engine cannot have started")

    async def main() -> None:
        asyncio.get_running_loop().call_later(0.5, os.kill, os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(_with_engine(policy, never), 60)

    asyncio.run(main())


CALL = Message("assistant", "", (ToolCall("c00000000", "add", {"a": 2, "b": 3}),))
FORCED = {**ASKED, "max_tokens": 60, "tools": TOOLS, "tool_choice": "required"}
SUM = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
JSON = {"type": "json_schema", "json_schema": {"name": "s", "schema": SUM}}
SERVERS = {"sglang": LoopbackServer, "vllm": LoopbackVLLM}


@contextlib.asynccontextmanager
async def behind(model: Path, kind: str) -> AsyncIterator[tuple[LoopbackServer, Any, Renderer]]:
    """A server of this kind that writes a call of `add` under a grammar for calls, and otherwise a sum as JSON."""
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    async with SERVERS[kind](vocabulary=vocabulary, max_context=512) as server:
        policy = _find(model, [f"engine.kind={kind}", f"engine.server.urls=['{server.url}']"])

        def write(tag: Any) -> list[int]:
            said = CALL if "tool_call" in json.dumps(tag) else Message("assistant", '{"sum": 5}')
            return policy.renderer.completion_ids(said, TOOLS)

        server.write = write
        engine = await open_engine(policy.engine, policy.directory)
        try:
            yield server, engine, policy.renderer
        finally:
            await engine.close()


@pytest.mark.parametrize("kind", SERVERS)
async def test_servers_hold_forced_calls_and_formats_with_their_own_grammar(model: Path, kind: str):
    async with (
        behind(model, kind) as (server, engine, renderer),
        serving(engine, renderer, names=("small",)) as served,
        httpx.AsyncClient(timeout=30, base_url=served.base_url) as client,
    ):
        whole = (await client.post("/chat/completions", json=FORCED)).json()["choices"][0]
        streamed = await client.post("/chat/completions", json={**FORCED, "stream": True})
        (call,) = whole["message"]["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 2, "b": 3})
        assert streamed.text.count('"arguments":"') > 3, "piece by piece"
        answer = (await client.post("/chat/completions", json={**ASKED, "response_format": JSON})).json()
        assert answer["choices"][0]["message"]["content"] == '{"sum": 5}'
        asked = {**FORCED, "tool_choice": "auto", "logprobs": True}
        free = await client.post("/chat/completions", json=asked)
        assert free.status_code == 200
        scored = (await client.post("/chat/completions", json={**FORCED, "logprobs": True})).json()["choices"][0]
        ids = [id for id in renderer.completion_ids(CALL, TOOLS) if id not in renderer.stop_ids]
        assert [one["logprob"] for one in scored["logprobs"]["content"]] == [-1.0 - id / 100 for id in ids]
        warm = await client.post("/chat/completions", json={**FORCED, "logprobs": True, "temperature": 0.5})
        assert (warm.status_code, warm.json()["error"]["param"]) == (400, "tool_choice")
        assert "at temperature 1 only" in warm.json()["error"]["message"]
        assert [tag["type"] for tag in server.tags] == ["structural_tag"] * 4

        def refuse(tag: Any) -> list[int]:
            raise ValueError("no such type")

        server.write = refuse
        refused = await client.post("/chat/completions", json={**ASKED, "response_format": JSON})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format")
        assert "no such type" in refused.json()["error"]["message"]
        assert (await client.post("/chat/completions", json=ASKED)).status_code == 200


async def test_what_a_server_wrote_under_its_grammar_trains_with_the_log_probabilities_of_the_policy(model: Path):
    async with behind(model, "sglang") as (_, engine, renderer):
        for temperature, status in ((1.0, 200), (0.7, 400)):
            recorder = Recorder(engine, renderer, EpisodeLimits(token_budget=512))
            recording = recorder.open(temperature=temperature, seed=1)
            async with running(recorder.app()) as url, httpx.AsyncClient(timeout=30) as client:
                headers = {"authorization": f"Bearer {recording.key}"}
                answer = await client.post(f"{url}{recording.path}/chat/completions", json=FORCED, headers=headers)
            assert answer.status_code == status, answer.text
            if status == 200:
                (drawn,) = [s for s in recording.ledger.segments if s.origin == "sampled"]
                assert list(drawn.ids) == renderer.completion_ids(CALL, TOOLS)
                assert list(drawn.logprobs) == [-1.0 - id / 100 for id in drawn.ids]
                assert set(drawn.versions) == {engine.policy_version}


async def test_a_server_without_a_tokenizer_has_no_grammars(model: Path):
    async with LoopbackServer(vocabulary=400, max_context=512) as server:
        server.grammars = False
        policy = _find(model, ["engine.kind=sglang", f"engine.server.urls=['{server.url}']"])
        engine = await open_engine(policy.engine, policy.directory)
        try:
            async with (
                serving(engine, policy.renderer, names=("small",)) as served,
                httpx.AsyncClient(timeout=30) as client,
            ):
                forced = await client.post(served.base_url + "/chat/completions", json=FORCED)
        finally:
            await engine.close()
    error = forced.json()["error"]
    assert (forced.status_code, error["param"]) == (400, "tool_choice")
    assert "set engine.server.grammars" in error["message"]
    assert "in engine.server.urls: start them without --skip-tokenizer-init" in error["message"]
    assert "--skip-tokenizer-init" not in _started(model, grammars=True)
    assert "--skip-tokenizer-init" in _started(model, grammars=False)


def _started(model: Path, *, grammars: bool) -> list[str]:
    config = EngineConfig(kind="sglang", device="cpu", server=ServerConfig(grammars=grammars))
    return launch_recipe(config, model, "python", 0).command(1)


async def test_a_completion_under_a_grammar_that_a_server_abandons_begins_again(model: Path):
    async with behind(model, "sglang") as (server, engine, renderer):
        server.token_s = 0.01
        prompt = renderer.encode([Message("user", "2 and 3?")], generation_prompt=True)
        options = GenerateOptions(structure=Structure(json.dumps({"tool_call": 1}), scored=True))
        sampling = Sampling(max_tokens=60, stop_ids=renderer.stop_ids)
        drawing = asyncio.ensure_future(engine.generate_streaming(prompt, sampling, options))
        while not server.running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for request in list(server.running.values()):
            request.aborted = True
        assert list((await drawing).ids) == renderer.completion_ids(CALL, TOOLS)
        assert len(server.tags) == 2
