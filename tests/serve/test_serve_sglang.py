"""Grammars of a real SGLang server, which `agentrl serve` starts with its tokenizer; see scripts/ci-sglang."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.cli.serve import _find
from agentrl.config.run import TinyModel
from agentrl.engine.open import open_engine
from agentrl.models.tiny import make_tiny_model
from tests.serve.serve_kit import TOOLS, serving
from tests.serve.test_grammar import SUBTRACT

PYTHON = os.environ.get("AGENTRL_SGLANG_PYTHON", "")
pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default::UserWarning", "default::FutureWarning"),
    pytest.mark.skipif(not PYTHON, reason="AGENTRL_SGLANG_PYTHON is not set: see scripts/ci-sglang"),
]
ASKED: dict[str, Any] = {
    "model": "small",
    "messages": [{"role": "user", "content": "What is 2 plus 3?"}],
    "max_tokens": 160,
    "return_token_ids": True,
}
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"enum": [1, 2, 3]}, "sure": {"type": "boolean"}},
    "required": ["sum", "sure"],
    "additionalProperties": False,
}
CHOICE = {"type": "object", "properties": {"x": {"enum": ["one", "two"]}}, "required": ["x"]}
TOOL = {"type": "function", "function": {"name": "pick", "parameters": {**CHOICE, "additionalProperties": False}}}


async def test_forced_calls_and_json_answers_are_held_by_the_server(tmp_path: Path):
    folder, words = tmp_path / "small", ["What is 2 plus 3? The answer is 5.", json.dumps([TOOL, SUBTRACT])] * 20
    make_tiny_model(
        folder, words, TinyModel(hidden=32, layers=1, heads=2, intermediate=64, vocab=420, max_context=1024)
    )
    overrides = ["engine.kind=sglang", "engine.device=cpu", f"engine.server.python={PYTHON}", "engine.max_slots=8"]
    policy = _find(folder, overrides)
    engine = await open_engine(policy.engine, policy.directory)
    try:
        async with (
            serving(engine, policy.renderer, names=("small",)) as served,
            httpx.AsyncClient(timeout=300, base_url=served.base_url) as client,
        ):

            async def ask(**more: Any) -> Any:
                """An answer that is complete: an untrained model may think until its limit."""
                for _ in range(20):
                    answer = await client.post("/chat/completions", json={**ASKED, **more})
                    assert answer.status_code == 200, answer.text
                    if answer.json()["choices"][0]["finish_reason"] != "length":
                        return answer.json()
                raise AssertionError(f"no answer within the limit: {answer.text}")

            for choice, name in (
                ("required", None),
                ({"type": "function", "function": {"name": "subtract"}}, "subtract"),
            ):
                said = await ask(
                    tools=[TOOL, SUBTRACT], tool_choice=choice, parallel_tool_calls=False, logprobs=True
                )
                (one,) = said["choices"][0]["message"]["tool_calls"]
                assert one["function"]["name"] == (name or one["function"]["name"])
                assert json.loads(one["function"]["arguments"])["x"] in ("one", "two")
                prompt, ids = said["prompt_token_ids"], said["choices"][0]["token_ids"]
                model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
                with torch.no_grad():
                    logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
                wanted = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[:, None])[:, 0]
                found = [token["logprob"] for token in said["choices"][0]["logprobs"]["content"]]
                assert found == pytest.approx(wanted[: len(found)].tolist(), abs=1e-4)
            format = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
            ended = False
            while not ended:
                streamed = await client.post(
                    "/chat/completions", json={**ASKED, "response_format": format, "stream": True}
                )
                ended = '"finish_reason":"stop"' in streamed.text
            lines = [json.loads(x[6:]) for x in streamed.text.splitlines() if x.startswith("data: {")]
            text = "".join(c["delta"].get("content") or "" for line in lines for c in line["choices"])
            assert json.loads(text)["sum"] in (1, 2, 3)
            assert len(lines) > 5
            either = await ask(response_format=format, tools=TOOLS)
            message = either["choices"][0]["message"]
            assert message.get("tool_calls") or json.loads(message["content"])
            refused = await client.post(
                "/chat/completions",
                json={
                    **ASKED,
                    "response_format": {
                        "type": "json_schema",
                        "json_schema": {"name": "s", "schema": {"type": "no such type"}},
                    },
                },
            )
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format")
    finally:
        await engine.close()
