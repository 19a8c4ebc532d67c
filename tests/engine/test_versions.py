"""Tokens and scores carry the version of the weights that made them, whatever happens in the meantime."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.engine.base import GenerateOptions, Structure, TokenLogprob
from agentrl.errors import EngineError
from agentrl.testing.sglang_server import LoopbackServer, LoopbackVLLM
from agentrl.types import Sampling
from tests.engine.test_served import (
    PROMPT,
    assert_same_weights,
    engine_over,
    expected,
    model,
    sent_again,
    servers,
    until,
    weights,
)
from tests.engine.test_vllm import opened

__all__ = ["model"]


class Holding(LoopbackServer):
    """Holds back what it is asked, where `holds` says so, until it is let go."""

    def __init__(self, holds: Callable[[str, dict[str, Any]], bool], **options: Any) -> None:
        super().__init__(**options)
        self.holds, self.come, self.free = holds, asyncio.Event(), asyncio.Event()
        self.free.set()

    async def _handle(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, object]:
        if self.holds(path, body):
            self.come.set()
            await self.free.wait()
        return await super()._handle(method, path, body)


def is_score(path: str, body: dict[str, Any]) -> bool:
    return "logprob_start_len" in body


def is_resumption(path: str, body: dict[str, Any]) -> bool:
    return path == "/continue_generation"


async def test_a_score_that_an_update_overtakes_has_the_version_of_its_weights(model: Path) -> None:
    async with Holding(is_score) as server, engine_over(model, server) as engine:
        server.free.clear()
        scoring = asyncio.create_task(engine.prompt_logprobs(PROMPT))
        await server.come.wait()
        await engine.update_weights(weights(1), version=5)
        server.free.set()
        assert {one.version for one in await scoring} == {5}


async def test_a_score_that_ends_during_an_update_has_the_version_of_its_weights(model: Path) -> None:
    """Its server has the new weights already, and another one does not."""
    async with (
        Holding(is_score) as quick,
        Holding(is_resumption) as slow,
        engine_over(model, quick, slow) as engine,
    ):
        quick.free.clear()
        scoring = asyncio.create_task(engine.prompt_logprobs(PROMPT))
        await quick.come.wait()
        slow.free.clear()
        quick.log.clear()
        update = asyncio.create_task(engine.update_weights(weights(1), version=5))
        await until(lambda: "/continue_generation" in quick.log)
        quick.free.set()
        await asyncio.wait({scoring}, timeout=0.2)
        assert not scoring.done()
        slow.free.set()
        await update
        assert {one.version for one in await scoring} == {5}


async def test_what_was_drawn_before_an_update_and_scored_after_it_is_drawn_again(model: Path) -> None:
    async with Holding(is_score) as server, engine_over(model, server) as engine:
        server.write = lambda tag: [1, 2, 3]
        server.free.clear()
        options = GenerateOptions(structure=Structure("{}", scored=True))
        drawing = asyncio.create_task(engine.generate_streaming(PROMPT, Sampling(max_tokens=9), options))
        await server.come.wait()
        await engine.update_weights(weights(1), version=5)
        server.free.set()
        completion = await drawing
        assert (completion.ids, set(completion.versions), len(server.tags)) == ((1, 2, 3), {5}, 2)


async def test_a_completion_under_a_grammar_leaves_room_for_its_scores(model: Path) -> None:
    async with servers(1) as (server,), engine_over(model, server) as engine:
        server.write = lambda tag: [1, 2, 3]
        options = GenerateOptions(structure=Structure("{}", scored=True))
        completion = await engine.generate_streaming([5] * 254, Sampling(max_tokens=9), options)
        assert (completion.ids, completion.finish) == ((1,), "length")


async def test_what_was_reported_of_an_abandoned_completion_under_a_grammar_is_not_begun_again(
    model: Path,
) -> None:
    async with servers(1, token_s=0.01) as (server,), engine_over(model, server) as engine:
        server.write = lambda tag: [1] * 200
        told: list[TokenLogprob] = []
        options = GenerateOptions(told.append, structure=Structure("{}"))
        drawing = asyncio.create_task(engine.generate_streaming(PROMPT, Sampling(max_tokens=200), options))
        await until(lambda: len(told) >= 3)
        next(iter(server.running.values())).aborted = True
        with pytest.raises(EngineError, match="cannot be continued"):
            await drawing
        assert len(server.tags) == 1


async def test_a_completion_that_ends_during_an_update_is_no_reason_to_restart_its_server(model: Path) -> None:
    said: list[str] = []
    async with (
        LoopbackServer(token_s=0.01) as quick,
        Holding(is_resumption) as slow,
        engine_over(model, quick, slow, said=said, health_every_s=60.0) as engine,
    ):
        slow.free.clear()
        drawing = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=20)))
        await until(lambda: quick.running and next(iter(quick.running.values())).ids)
        quick._go.clear()  # it draws the rest after the update
        update = asyncio.create_task(engine.update_weights(weights(1), version=5))
        completion = await drawing
        assert not update.done()
        assert list(completion.ids) == expected(PROMPT, 20)
        assert set(completion.versions) == {0, 5}
        slow.free.set()
        await update
        assert said == []
        assert engine._pool.replicas[0].limit == 256, "the weights were the reason to retract it, not memory"


async def test_a_server_that_comes_back_during_an_update_gets_the_new_weights_alone(model: Path) -> None:
    said: list[str] = []
    async with (
        servers(1) as (lost,),
        Holding(is_resumption) as slow,
        engine_over(model, lost, slow, said=said, restarts=50) as engine,
    ):
        await lost.die()
        await until(lambda: said)
        slow.free.clear()
        slow.come.clear()
        update = asyncio.create_task(engine.update_weights(weights(1), version=5))
        await slow.come.wait()
        lost.weights.clear()
        lost.log.clear()
        await lost.start()
        await until(lambda: lost.log)
        await asyncio.sleep(0.2)
        assert not lost.weights
        slow.free.set()
        await update
        await until(lambda: len(engine._pool.ready) == 2)
        assert [str(body["weight_version"]).partition("@")[0] for _, body in lost.weights] == ["5"]


async def test_a_server_that_comes_back_gets_the_weights_as_they_were_when_they_were_sent(model: Path) -> None:
    """The learner has changed its own since."""
    said: list[str] = []
    async with servers(1) as (server,), engine_over(model, server, said=said, restarts=50) as engine:
        own = weights(1)
        await engine.update_weights(own, version=1)
        for tensor in own.values():
            tensor.fill_(9.0)
        assert_same_weights(await sent_again(engine, server, said), weights(1))


async def test_the_rest_of_a_completion_is_drawn_with_another_seed(model: Path) -> None:
    """Servers count positions per request, so that the same seed would draw the same numbers again."""
    async with servers(1, token_s=0.01) as (server,), engine_over(model, server) as engine:
        for _ in range(2):
            task = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=12, seed=3)))
            await until(lambda: server.running and len(next(iter(server.running.values())).ids) >= 3)
            next(iter(server.running.values())).aborted = True
            await task
        seeds = [asked["sampling_seed"] for asked in server.sampled_with]
        assert seeds[0] == seeds[2] == 3
        assert 3 not in (seeds[1], seeds[3])
        lengths = [len(prompt) for prompt in server.prompts]
        assert (seeds[1] == seeds[3]) == (lengths[1] == lengths[3]), "the same rest has the same seed"


class LateVLLM(LoopbackVLLM):
    """Its answer to a completion that an update has ended arrives after the new weights."""

    async def _post_completions(self, body: dict[str, Any]) -> tuple[int, object]:
        answer = await super()._post_completions(body)
        if "/collective_rpc" in self.log:
            return answer
        await until(lambda: "/update_weight_version" in self.log)
        return answer


async def test_tokens_that_arrive_after_the_update_that_ended_them_have_the_version_before(model: Path) -> None:
    async with LateVLLM(token_s=0.01) as server, opened(model, server) as engine:
        server.log.clear()
        drawing = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=100)))
        await until(lambda: server.running and len(next(iter(server.running.values())).ids) >= 4)
        await engine.update_weights({"a": torch.ones(2)}, version=5)
        completion = await drawing
        assert list(completion.ids) == expected(PROMPT, 100)
        assert set(completion.versions) == {0, 5}
        assert completion.versions.count(0) == len(server.prompts[1]) - len(PROMPT)
