"""The endpoint over inference servers: the tokens that they are asked to continue are those of training."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.chat.template import Renderer
from agentrl.cli.serve import _find, _with_engine
from agentrl.config.run import TinyModel
from agentrl.engine.open import open_engine
from agentrl.models.tiny import make_tiny_model
from agentrl.testing.sglang_server import LoopbackServer
from agentrl.types import Message
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
                forced = await client.post(chat, json={**ASKED, "tools": TOOLS, "tool_choice": "required"})
                error = forced.json()["error"]
                assert (forced.status_code, error["param"]) == (400, "tool_choice")
                assert "does not support grammars" in error["message"]
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
