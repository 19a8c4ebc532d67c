"""Experts that servers report, against real HTTP servers on the loopback."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.engine.base import GenerateOptions
from agentrl.engine.servers.client import ServerAnswer
from agentrl.engine.servers.reported_routes import RouteLayout, RoutesAsked, joined, layout_of, read_routes
from agentrl.errors import ConfigError, EngineError
from agentrl.testing.sglang_server import LoopbackServer
from agentrl.types import Routes, Sampling
from tests.engine.test_served import PROMPT, engine_over, servers, until, weights
from tests.engine.test_served import model as model

LAYOUT = RouteLayout(layers=3, top_k=2, width=2)


def chosen(routes: Routes | None) -> np.ndarray[Any, np.dtype[np.int16]]:
    """[T, L, k]"""
    assert routes is not None
    assert (routes.layers, routes.top_k, routes.width) == (3, 2, 2)
    return np.frombuffer(routes.data, np.int16).reshape(-1, 3, 2)


def expected(server: LoopbackServer, ids: list[int]) -> list[list[list[int]]]:
    return [[[server.expert(token, n, k) for k in range(2)] for n in range(3)] for token in ids]


async def test_a_completion_has_the_experts_of_all_tokens_that_were_read(model: Path):
    async with servers(1) as (server,):
        server.experts = (3, 2)
        async with engine_over(model, server, routes=LAYOUT) as engine:
            assert engine.capabilities.routes
            found = await engine.generate(PROMPT, Sampling(max_tokens=6))
            assert chosen(found.routes).tolist() == expected(server, [*PROMPT, *found.ids[:-1]])
            streamed = await engine.generate_streaming(PROMPT, Sampling(max_tokens=6), GenerateOptions())
            assert streamed == found
        async with engine_over(model, server) as engine:
            assert not engine.capabilities.routes
            assert (await engine.generate(PROMPT, Sampling(max_tokens=6))).routes is None


async def test_later_turns_ask_for_what_is_not_known_yet(model: Path):
    async with servers(1) as (server,):
        server.experts = (3, 2)
        async with engine_over(model, server, routes=LAYOUT) as engine:
            first = await engine.generate(PROMPT, Sampling(max_tokens=6), session="s")
            turn = [*PROMPT, *first.ids, 1, 2, 3]
            second = await engine.generate(turn, Sampling(max_tokens=5), session="s")
            assert second.routes is not None
            assert second.routes.start == len(PROMPT) + 5
            whole = [*turn, *second.ids]
            assert chosen(second.routes).tolist() == expected(server, whole[len(PROMPT) + 5 : -1])
            for prompt, session in ((turn[:-4] + turn[-3:], "s"), (turn, "t"), (turn, None)):
                other = await engine.generate(prompt, Sampling(max_tokens=5), session=session)
                assert chosen(other.routes).tolist() == expected(server, [*prompt, *other.ids[:-1]])
            await engine.release("s")
            again = await engine.generate(whole, Sampling(max_tokens=5), session="s")
            assert again.routes is not None
            assert again.routes.start == 0


async def test_a_server_that_was_not_started_for_it_is_refused(model: Path):
    async with servers(2) as (server, other):
        server.experts = (3, 2)
        with pytest.raises(ConfigError, match=r"start it with --enable-return-routed-experts"):
            async with engine_over(model, server, other, routes=LAYOUT):
                pass


async def test_experts_of_a_context_that_new_weights_computed_are_not_those_of_earlier_tokens(model: Path):
    async with servers(1, token_s=0.01) as (server,):
        server.experts = (3, 2)
        async with engine_over(model, server, routes=LAYOUT) as engine:
            asked = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=40)))
            await until(lambda: any(len(request.ids) > 10 for request in server.running.values()))
            await engine.update_weights(weights(1), 1)
            found = await asked
            assert set(found.versions) == {0, 1}
            first = found.versions.index(1)
            rows = chosen(found.routes)
            assert len(rows) == len(PROMPT) + 39
            assert (rows[: len(PROMPT) + first - 1] == -1).all()
            assert rows[len(PROMPT) + first - 1 :].tolist() == expected(server, list(found.ids[first - 1 : -1]))


async def test_a_completion_that_another_server_continues_keeps_what_is_known(model: Path):
    async with servers(2, token_s=0.01) as pair:
        for server in pair:
            server.experts = (3, 2)
        async with engine_over(model, *pair, routes=LAYOUT) as engine:
            asked = asyncio.create_task(
                engine.generate_streaming(PROMPT, Sampling(max_tokens=40), GenerateOptions(), session="s")
            )
            await until(lambda: any(len(r.ids) > 10 for server in pair for r in server.running.values()))
            lost = next(server for server in pair if server.running)
            await lost.die()
            found = await asked
            (other,) = [server for server in pair if server is not lost]
            told = len(other.prompts[-1]) - len(PROMPT)
            assert 10 < told < 40
            rows = chosen(found.routes)
            assert (rows[: len(PROMPT) + told - 1] == -1).all(), "the server that knew is gone"
            assert rows[len(PROMPT) + told - 1 :].tolist() == expected(other, list(found.ids[told - 1 : -1]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: None, "the answer lacks routed_experts, which learner.replay_routes needs"),
        (lambda text: text[:-8], "routed_experts"),
        (lambda text: "!" + text[1:], "routed_experts cannot be read"),
        (lambda text: base64.b64encode(bytes(7)).decode(), "routed_experts cannot be read"),
        (
            lambda text: base64.b64encode(bytes(4 * 3 * 2)).decode(),
            "has 6 numbers, not 2 for each of 8 tokens in 3",
        ),
        (lambda text: base64.b64encode(b"\xff" * 4 * 48).decode(), "routed_experts has the expert -1"),
        (lambda text: base64.b64encode(b"\x00\x00\x01\x00" * 48).decode(), "routed_experts has the expert 65536"),
    ],
)
async def test_a_wrong_answer_is_an_error_of_the_server(model: Path, change: Any, said: str):
    def changed(answer: dict[str, Any]) -> dict[str, Any]:
        answer["meta_info"]["routed_experts"] = change(answer["meta_info"]["routed_experts"])
        return answer

    async with servers(1) as (server,):
        server.experts = (3, 2)
        server.answer = changed
        async with engine_over(model, server, routes=LAYOUT) as engine:
            with pytest.raises(EngineError, match=said):
                await engine.generate(PROMPT, Sampling(max_tokens=6))


def part(count: int, versions: list[int], *, prompt: int, number: int | None) -> ServerAnswer:
    """A part of a completion whose rows are all `number`."""
    text = base64.b64encode(np.full((prompt + count - 1) * 6, number or 0, "<i4").tobytes()).decode()
    routes = None if number is None else read_routes(text, RoutesAsked(LAYOUT, 0), prompt + count, "here")
    return ServerAnswer((1,) * count, (-1.0,) * count, tuple(versions), "abort", routes=routes)


@pytest.mark.parametrize(
    ("parts", "rows"),
    [
        ([(3, [0, 0, 0], 7)], [7] * 6),
        ([(3, [0, 0, 1], 7)], [-1] * 5 + [7]),
        ([(3, [0, 1, 1], 7)], [-1] * 4 + [7] * 2),
        ([(3, [0, 1, 0], 7)], [-1] * 5 + [7]),
        ([(1, [5], 7)], [7] * 4),
        ([(2, [0, 0], 7), (2, [0, 0], 8)], [7] * 5 + [8] * 2),
        ([(2, [0, 0], None), (2, [0, 0], 8)], [-1] * 5 + [8] * 2),
        ([(2, [0, 0], 7), (2, [0, 0], None)], [7] * 5 + [-1] * 2),
        ([(2, [0, 0], 7), (3, [0, 1, 1], 8)], [7] * 5 + [-1] + [8] * 2),
        ([(2, [0, 0], 7), (2, [1, 1], 8)], [7] * 5 + [8] * 2),
        ([(0, [], None), (2, [1, 1], 8)], [8] * 5),
        ([(2, [0, 0], None), (2, [0, 0], None)], None),
    ],
)
def test_parts_are_joined(parts: list[tuple[int, list[int], int | None]], rows: list[int] | None):
    answers, length = [], 4
    for count, versions, number in parts:
        answers.append(part(count, versions, prompt=length, number=number))
        length += count
    found = joined(answers, 4, RoutesAsked(LAYOUT, 0))
    assert rows == (None if found is None else chosen(found)[:, 2, 1].tolist())


def test_a_model_that_does_not_say_its_layout_is_refused(model: Path, tmp_path: Path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen3_moe", "num_hidden_layers": 5, "num_experts_per_tok": 3}'
    )
    assert layout_of(tmp_path) == (5, 3, 1), "Qwen3-MoE has 128 experts unless it says otherwise"
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "num_hidden_layers": 5}')
    with pytest.raises(ConfigError, match=r"does not say num_hidden_layers and num_experts_per_tok"):
        layout_of(tmp_path)
