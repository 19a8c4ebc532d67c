"""What every real inference server must hold: forced calls, JSON answers, log-probabilities of given tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.config.run import TinyModel
from agentrl.config.teacher import TeacherConfig
from agentrl.learner.teacher_server import TeacherServer
from agentrl.models.tiny import make_tiny_model
from agentrl.trainer.teacher_check import check_texts
from tests.serve.serve_kit import TOOLS
from tests.serve.test_grammar import SUBTRACT

SCHEMA = {
    "type": "object",
    "properties": {"sum": {"enum": [1, 2, 3]}, "sure": {"type": "boolean"}},
    "required": ["sum", "sure"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
CHOICE = {"type": "object", "properties": {"x": {"enum": ["one", "two"]}}, "required": ["x"]}
PICK = {"type": "function", "function": {"name": "pick", "parameters": {**CHOICE, "additionalProperties": False}}}
ASKED: dict[str, Any] = {
    "model": "small",
    "messages": [{"role": "user", "content": "What is 2 plus 3?"}],
    "max_tokens": 160,
    "return_token_ids": True,
}
FORCED: dict[str, Any] = {
    **ASKED,
    "tools": [PICK, SUBTRACT],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}


def make_policy(folder: Path, hidden: int, seed: int = 0) -> Path:
    """An untrained policy whose tokenizer knows the tools."""
    words = ["What is 2 plus 3? The answer is 5.", json.dumps([PICK, SUBTRACT])] * 20
    shape = TinyModel(hidden=hidden, layers=1, heads=2, intermediate=64, vocab=420, max_context=1024)
    make_tiny_model(folder, words, shape, seed=seed)
    return folder


def logprobs_after(folder: Path, prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
    """The policy's log-probabilities of `ids` behind `prompt`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()


def it_scores_as_a_teacher(url: str, model: str, folder: Path) -> None:
    """The server gives the log-probabilities of given tokens, and its tokenizer is known to be the policy's."""
    ids = [7, *(5 * n % 300 for n in range(1, 90))]
    server = TeacherServer(TeacherConfig(url=f"{url}/v1", model=model))
    try:
        values, _ = server.scored(ids)
        check_texts(server, folder)
    finally:
        server.close()
    assert values[0] is None
    assert values[1:] == pytest.approx(logprobs_after(folder, ids[:1], ids[1:]), abs=2e-3)


async def ask(client: httpx.AsyncClient, **more: Any) -> Any:
    """An answer that is complete: an untrained model may think until its limit."""
    for _ in range(20):
        answer = await client.post("/chat/completions", json={**ASKED, **more})
        assert answer.status_code == 200, answer.text
        if answer.json()["choices"][0]["finish_reason"] != "length":
            return answer.json()
    raise AssertionError(f"no answer within the limit: {answer.text}")


async def calls_are_forced(client: httpx.AsyncClient, folder: Path) -> None:
    """A required call is one of those offered, with arguments as its schema says, and scored by the policy."""
    for choice, name in (("required", None), ({"type": "function", "function": {"name": "subtract"}}, "subtract")):
        said = await ask(client, **{**FORCED, "tool_choice": choice, "logprobs": True})
        (one,) = said["choices"][0]["message"]["tool_calls"]
        assert one["function"]["name"] == (name or one["function"]["name"])
        assert json.loads(one["function"]["arguments"])["x"] in ("one", "two")
        wanted = logprobs_after(folder, said["prompt_token_ids"], said["choices"][0]["token_ids"])
        found = [token["logprob"] for token in said["choices"][0]["logprobs"]["content"]]
        assert found == pytest.approx(wanted[: len(found)], abs=1e-4)


async def answers_follow_a_format(client: httpx.AsyncClient) -> None:
    """A format holds, streamed or not, and with tools a turn is an answer in it or calls."""
    ended = False
    while not ended:
        body = {**ASKED, "response_format": FORMAT, "stream": True}
        streamed = await client.post("/chat/completions", json=body)
        ended = '"finish_reason":"stop"' in streamed.text
    lines = [json.loads(x[6:]) for x in streamed.text.splitlines() if x.startswith("data: {")]
    text = "".join(c["delta"].get("content") or "" for line in lines for c in line["choices"])
    assert json.loads(text)["sum"] in (1, 2, 3)
    assert len(lines) > 5
    either = await ask(client, response_format=FORMAT, tools=TOOLS)
    message = either["choices"][0]["message"]
    assert message.get("tool_calls") or json.loads(message["content"])


async def an_impossible_format_is_refused(client: httpx.AsyncClient) -> None:
    """The server's own words come back, and it answers the next request."""
    format = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "no such type"}}}
    refused = await client.post("/chat/completions", json={**ASKED, "response_format": format})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format")
    assert (await client.post("/chat/completions", json={**ASKED, "max_tokens": 4})).status_code == 200
