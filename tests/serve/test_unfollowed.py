"""Parameters that would change the answer: each dialect follows them, or refuses them by name."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from agentrl.chat.template import Renderer
from agentrl.serve.dialects.unfollowed import HARMLESS
from agentrl.serve.dialects.wire import ChatRequest, CompletionRequest
from agentrl.serve.dialects.wire_anthropic import MessagesRequest
from agentrl.serve.dialects.wire_responses import ResponsesRequest
from tests.serve.serve_kit import Fixed, serving

HI = [{"role": "user", "content": "hi"}]
DIALECTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "/chat/completions": (ChatRequest, {"messages": HI}),
    "/completions": (CompletionRequest, {"prompt": "hi"}),
    "/responses": (ResponsesRequest, {"input": "hi"}),
    "/messages": (MessagesRequest, {"messages": HI, "max_tokens": 20}),
}
SEEN = [
    "seed",
    "stop",
    "stop_sequences",
    "n",
    "min_p",
    "logit_bias",
    "guided_json",
    "max_completion_tokens",
    "logprobs",
]


@pytest.mark.parametrize("path", DIALECTS)
async def test_what_a_dialect_does_not_follow_is_refused_by_name(renderer: Renderer, path: str):
    model, body = DIALECTS[path]
    unknown = HARMLESS.keys() - model.model_fields.keys()
    assert len(unknown) > 60
    assert set(SEEN) <= unknown | model.model_fields.keys()
    async with (
        serving(Fixed(renderer), renderer) as served,
        httpx.AsyncClient(base_url=served.base_url) as client,
    ):
        for name in sorted(unknown):
            answer = await client.post(path, json={"model": "tiny", **body, name: "something"})
            assert answer.status_code == 400, name
            assert answer.json()["error"]["message"].startswith(f"{name}: "), name
        for name in sorted(unknown):
            for value in (None, *HARMLESS[name]):
                answer = await client.post(path, json={"model": "tiny", **body, name: value})
                assert answer.status_code == 200, (name, value, answer.text)


@pytest.mark.parametrize("path", ["/chat/completions", "/completions"])
async def test_the_filters_of_an_evaluation_reach_the_engine(renderer: Renderer, path: str):
    seen = []

    class Watched(Fixed):
        async def generate(self, ids, sampling, *, session=None):
            seen.append((sampling.top_p, sampling.top_k, sampling.min_p))
            return await super().generate(ids, sampling, session=session)

    async with serving(Watched(renderer), renderer) as served, httpx.AsyncClient(base_url=served.base_url) as http:
        filters = {"top_p": 0.9, "top_k": 5, "min_p": 0.1}
        answer = await http.post(path, json={"model": "tiny", **DIALECTS[path][1], **filters})
        assert answer.status_code == 200, answer.text
    assert seen == [(0.9, 5, 0.1)]


async def test_a_request_may_be_counted_as_it_is_going_to_be_sent(renderer: Renderer):
    asked = {"model": "tiny", "messages": HI, "max_tokens": 5, "stop_sequences": ["x"], "temperature": 0.5}
    async with (
        serving(Fixed(renderer), renderer) as served,
        httpx.AsyncClient(base_url=served.base_url) as client,
    ):
        counted = await client.post("/messages/count_tokens", json=asked)
        edited = await client.post("/messages/count_tokens", json={**asked, "context_management": 5})
    assert counted.status_code == 200
    assert edited.status_code == 400


@pytest.mark.parametrize(
    ("path", "sent", "named"),
    [
        ("/chat/completions", {"functions": [{"name": "add"}]}, "tools"),
        ("/chat/completions", {"input": "hi"}, "messages"),
        ("/completions", {"max_completion_tokens": 5}, "max_tokens"),
        ("/responses", {"max_tokens": 5}, "max_output_tokens"),
        ("/responses", {"messages": HI}, "input"),
        ("/messages", {"stop": ["x"]}, "stop_sequences"),
    ],
)
async def test_a_parameter_of_another_dialect_is_told_its_name_in_this_one(
    renderer: Renderer, path: str, sent: dict[str, Any], named: str
):
    body = {"model": "tiny", **DIALECTS[path][1], **sent}
    async with serving(Fixed(renderer), renderer) as served, httpx.AsyncClient(base_url=served.base_url) as http:
        answer = await http.post(path, json=body)
    assert answer.status_code == 400
    assert f"send `{named}`" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("path", "body"), [(path, body) for path, (_, body) in list(DIALECTS.items())[:2]])
async def test_only_the_last_chunk_of_a_stream_has_its_usage(renderer: Renderer, path: str, body: dict[str, Any]):
    asked = {"model": "tiny", **body, "stream": True, "stream_options": {"include_usage": True}}
    async with serving(Fixed(renderer), renderer) as served, httpx.AsyncClient(base_url=served.base_url) as http:
        answer = await http.post(path, json=asked)
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["total_tokens"] > 0) == ([], True)
