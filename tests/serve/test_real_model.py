"""A real (tiny) policy behind the endpoint: the tokens of training, logprobs, grammars, seeds."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from openai import AsyncOpenAI

from agentrl import Stop, ToolEnv, reward, tool
from agentrl.chat.demonstrate import imitate
from agentrl.chat.template import Renderer
from agentrl.config.run import TinyModel
from agentrl.engine.local.local_engine import LocalEngine
from agentrl.models.tiny import make_tiny_model
from agentrl.rollout.episode import Player, run_episode
from agentrl.rollout.limits import EpisodeLimits
from agentrl.types import Message, Sampling, Task, ToolCall
from tests.serve.serve_kit import CORPUS, TOOLS, Served, serving


class Adder(ToolEnv):
    """Add the numbers with the tool, then say the sum."""

    def setup(self, a: int, b: int) -> str:
        self.sum = a + b
        return f"What is {a} plus {b}?"

    @tool
    def add(self, a: int, b: int) -> str | Stop:
        """Add two numbers."""
        return str(a + b)

    @reward
    def solved(self) -> bool:
        return True


TASKS = [Task(f"t{n}", {"a": n, "b": n + 2}) for n in range(4)]
SHAPE = TinyModel(hidden=64, layers=2, heads=4, intermediate=128, vocab=420, max_context=1024)


async def demonstration(task: Task) -> list[Message]:
    env = Adder()
    opening, _ = await env.reset(task)
    said = Message("assistant", "", (ToolCall("c00002000", "add", dict(task.row)),))
    result, *_ = await env.step(said)
    await env.close()
    return [*opening, said, *result, Message("assistant", f"The answer is {task.row['a'] + task.row['b']}.")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learned two of the tasks by heart, so that it calls the tool."""
    from transformers import AutoModelForCausalLM

    path = tmp_path_factory.mktemp("policy") / "model"
    tools = Adder().tools
    make_tiny_model(path, [*CORPUS, json.dumps(list(tools))], SHAPE)
    renderer = Renderer.from_directory(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    rows = [imitate(renderer, await demonstration(task), tools).rows()[0] for task in TASKS[:2]]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        loss = torch.zeros(())
        for row in rows:
            labels = torch.tensor([[id if on else -100 for id, on in zip(row.ids, row.loss_mask, strict=True)]])
            loss = loss + model(torch.tensor([row.ids]), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(path)
    return path


@pytest_asyncio.fixture
async def served(directory: Path) -> AsyncIterator[Served]:
    """The endpoint over the local engine."""
    renderer = Renderer.from_directory(directory)
    engine = LocalEngine.from_directory(directory)
    try:
        async with serving(engine, renderer) as found:
            yield found
    finally:
        await engine.close()


def sdk(served: Served) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=served.base_url, api_key="none", max_retries=0)


def wire(message: Message) -> dict[str, Any]:
    """A message of the env as a client sends it."""
    body: dict[str, Any] = {"role": message.role, "content": message.content}
    return body if message.tool_call_id is None else {**body, "tool_call_id": message.tool_call_id}


async def play_with_sdk(client: AsyncOpenAI, env: Adder, task: Task, *, stream: bool) -> None:
    """The loop that a user writes: ask, run the calls, send the results."""
    observation, _ = await env.reset(task)
    messages: list[Any] = [wire(message) for message in observation]
    for _ in range(4):
        request = {
            "model": "tiny",
            "messages": messages,
            "tools": list(env.tools),
            "temperature": 0,
            "max_tokens": 60,
        }
        if stream:
            async with client.chat.completions.stream(**request) as events:
                answer = await events.get_final_completion()
        else:
            answer = await client.chat.completions.create(**request)
        said = answer.choices[0].message
        messages.append(said)
        calls = tuple(
            ToolCall(call.id, call.function.name, json.loads(call.function.arguments))
            for call in said.tool_calls or ()
        )
        observation, _, terminated, truncated, _ = await env.step(Message("assistant", said.content or "", calls))
        if terminated or truncated:
            break
        messages += [wire(message) for message in observation]
    await env.close()


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_greedy_episodes_have_the_ids_of_the_trainer(served: Served, stream: bool):
    service = served.service
    player = Player(
        service.engine,
        service.renderer,
        Adder,
        EpisodeLimits(max_turns=4, max_tokens=60, token_budget=1024),
        Sampling(temperature=0.0, max_tokens=60, stop_ids=service.renderer.stop_ids),
    )
    turns = []
    async with sdk(served) as client:
        for task in TASKS:
            episode = await run_episode(player, task, episode_id=task.id, seed=0)
            assert episode.error is None
            trained = tuple(id for segment in episode.segments for id in segment.ids)
            await play_with_sdk(client, Adder(), task, stream=stream)
            last = served.session.turns[-1]
            assert tuple(last.branch.ids) == trained
            logprobs = [p for segment in episode.segments for p in segment.logprobs]
            np.testing.assert_allclose(last.completion.logprobs, logprobs[-len(last.completion.ids) :], atol=2e-3)
            turns.append(len(episode.turns))
    assert turns[:2] == [2, 2]  # those that it has learned: a call, then the answer


async def test_logprobs_name_every_token_with_its_alternatives(served: Served):
    async with sdk(served) as client:
        request: dict[str, Any] = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "Hello"}],
            "temperature": 0,
            "max_tokens": 8,
            "logprobs": True,
            "top_logprobs": 3,
        }
        answer = await client.chat.completions.create(**request, extra_body={"return_token_ids": True})
        choice = answer.choices[0]
        assert choice.logprobs is not None
        entries = choice.logprobs.content or []
        vocabulary = served.service.renderer.vocabulary
        ids = [id for id in choice.token_ids if id not in served.service.renderer.stop_ids]
        assert [bytes(entry.bytes or []) for entry in entries] == [vocabulary.token_bytes(id) for id in ids]
        assert all(entry.logprob == pytest.approx(entry.top_logprobs[0].logprob) for entry in entries)
        assert all(len(entry.top_logprobs) == 3 for entry in entries)
        streamed = [
            entry
            async for chunk in await client.chat.completions.create(**request, stream=True)
            for choice in chunk.choices
            if choice.logprobs
            for entry in choice.logprobs.content or []
        ]
        assert [entry.token for entry in streamed] == [entry.token for entry in entries]
        np.testing.assert_allclose([e.logprob for e in streamed], [e.logprob for e in entries], atol=2e-3)


async def test_a_prompt_is_scored_as_harnesses_ask_for_it(served: Served):
    prompt = list(served.service.renderer.vocabulary.encode_text("What is 2 plus 3? The answer is 5."))
    async with sdk(served) as client:
        answer = await client.completions.create(
            model="tiny", prompt=[prompt], echo=True, logprobs=1, max_tokens=1, temperature=0
        )
        free = await client.completions.create(
            model="tiny", prompt=[prompt], max_tokens=1, temperature=0, logprobs=1
        )
    found = answer.choices[0].logprobs
    assert found is not None
    assert free.choices[0].logprobs is not None
    assert found.token_logprobs is not None
    assert found.token_logprobs[0] is None
    engine = served.service.engine
    assert isinstance(engine, LocalEngine)
    ((expected,),) = (await engine.logprobs_by_server([prompt])).values()
    np.testing.assert_allclose(found.token_logprobs[1 : len(prompt)], expected, atol=2e-3)
    assert found.token_logprobs[len(prompt)] == pytest.approx(free.choices[0].logprobs.token_logprobs[0], abs=2e-3)
    assert answer.choices[0].text.startswith("What is 2 plus 3? The answer is 5.")
    assert found.text_offset is not None
    shown = list(zip(found.text_offset, found.tokens or (), strict=True))[: len(prompt)]
    assert all(answer.choices[0].text[at:].startswith(token) for at, token in shown)


@pytest.mark.parametrize("echo", [True, False])
async def test_a_streamed_completion_has_the_tokens_of_the_whole(served: Served, echo: bool):
    prompts = [list(served.service.renderer.vocabulary.encode_text(text)) for text in ("What is 2", "Hi")]
    request: dict[str, Any] = {
        **{"model": "tiny", "prompt": prompts, "echo": echo, "logprobs": 2, "max_tokens": 6, "seed": 3, "n": 2},
        "extra_body": {"return_token_ids": True},
    }
    async with sdk(served) as client:
        whole = await client.completions.create(**request)
        pieces = [
            choice async for c in await client.completions.create(**request, stream=True) for choice in c.choices
        ]
    for choice in whole.choices:
        own = [piece for piece in pieces if piece.index == choice.index]
        assert "".join(piece.text for piece in own) == choice.text
        found = choice.logprobs
        assert found is not None
        for name in ("tokens", "text_offset"):
            streamed = [one for piece in own if piece.logprobs for one in getattr(piece.logprobs, name)]
            assert streamed == getattr(found, name), name
        values = [one for piece in own if piece.logprobs for one in piece.logprobs.token_logprobs or ()]
        assert values[0] is None if echo else values[0] is not None
        np.testing.assert_allclose(values[echo:], (found.token_logprobs or [])[echo:], atol=2e-3)
        assert [id for piece in own for id in getattr(piece, "token_ids", ())] == choice.model_extra["token_ids"]
        assert own[0].model_extra["prompt_token_ids"] == choice.model_extra["prompt_token_ids"]


async def test_seeds_repeat_and_choices_differ(served: Served):
    async with sdk(served) as client:
        request: dict[str, Any] = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 12,
        }
        first, again = [
            [
                choice.message.content
                for choice in (await client.chat.completions.create(**request, n=3, seed=7)).choices
            ]
            for _ in range(2)
        ]
    assert first == again
    assert len(set(first)) > 1


async def test_a_schema_and_a_forced_call_hold_even_for_a_policy_that_knows_neither(served: Served):
    schema = {
        "type": "object",
        "properties": {
            "mood": {"enum": ["good", "bad"]},
            "level": {"type": "integer", "minimum": 0, "maximum": 9},
        },
        "required": ["mood", "level"],
        "additionalProperties": False,
    }
    messages: Any = [{"role": "user", "content": "How are you?"}]
    async with sdk(served) as client:
        answer = await client.chat.completions.create(
            model="tiny",
            messages=messages,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "mood", "schema": schema, "strict": True},
            },
            temperature=0,
            max_tokens=200,
        )
        value = json.loads(answer.choices[0].message.content or "")
        assert value["mood"] in ("good", "bad")
        assert 0 <= value["level"] <= 9
        for choice in ("required", {"type": "function", "function": {"name": "add"}}):
            forced = await client.chat.completions.create(
                model="tiny", messages=messages, tools=TOOLS, tool_choice=choice, temperature=0, max_tokens=200
            )
            assert forced.choices[0].finish_reason == "tool_calls"
            for call in forced.choices[0].message.tool_calls or ():
                assert call.function.name == "add"
                assert set(json.loads(call.function.arguments)) == {"a", "b"}


async def test_a_conversation_is_computed_once(served: Served):
    messages: list[Any] = [{"role": "user", "content": "What is 2 plus 3? " * 8}]
    async with sdk(served) as client:
        first = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=8)
        messages += [first.choices[0].message, {"role": "user", "content": "And 4?"}]
        second = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=8)
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= first.usage.prompt_tokens
