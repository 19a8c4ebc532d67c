"""Grammars of a real vLLM server: for clients of `agentrl serve`, for agents that train, across new weights.

`scripts/ci-vllm` installs one; AGENTRL_VLLM_PYTHON names its Python.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from agentrl.agents.recorder import Recorder
from agentrl.chat.template import Renderer
from agentrl.cli.serve import _find
from agentrl.config.engine import EngineConfig, ServerConfig
from agentrl.engine.base import Engine, GenerateOptions, Structure
from agentrl.engine.open import open_engine
from agentrl.engine.servers.opening import launch_recipe
from agentrl.engine.servers.server_engine import load_folder
from agentrl.rollout.limits import EpisodeLimits
from agentrl.serve.grammar import AnswerFormat
from agentrl.serve.listen import running
from agentrl.serve.structure import structural_tag
from agentrl.types import Message, Sampling
from tests.serve.real_grammars import (
    FORCED,
    FORMAT,
    PICK,
    SCHEMA,
    an_impossible_format_is_refused,
    answers_follow_a_format,
    calls_are_forced,
    it_scores_as_a_teacher,
    logprobs_after,
    make_policy,
)
from tests.serve.serve_kit import serving
from tests.serve.test_grammar import SUBTRACT
from tests.trainer import real_servers

PYTHON = os.environ.get("AGENTRL_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not PYTHON,
        reason=os.environ.get("AGENTRL_VLLM_MISSING") or "AGENTRL_VLLM_PYTHON is not set: see scripts/ci-vllm",
    ),
]
HIDDEN = 64  # vLLM on a CPU has no smaller attention heads than 32


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two policies with one tokenizer."""
    root = tmp_path_factory.mktemp("policies")
    return [make_policy(root / str(seed), HIDDEN, seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def url(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server over the first policy."""
    server = ServerConfig(python=PYTHON, environment={"VLLM_CPU_KVCACHE_SPACE": "1"})
    recipe = launch_recipe(
        EngineConfig(kind="vllm", device="cpu", max_slots=8, server=server), folders[0], PYTHON, 0
    )
    with real_servers.serving(recipe, tmp_path_factory.mktemp("server") / "log") as url:
        yield url


@asynccontextmanager
async def opened(url: str, folder: Path) -> AsyncIterator[tuple[Engine, Renderer]]:
    policy = _find(folder, ["engine.kind=vllm", f"engine.server.urls=['{url}']"])
    engine = await open_engine(policy.engine, policy.directory)
    try:
        yield engine, policy.renderer
    finally:
        await engine.close()


def test_it_scores_as_a_teacher(url: str, folders: list[Path]):
    it_scores_as_a_teacher(url, "policy", folders[0])


async def test_forced_calls_and_json_answers_are_held_by_the_server(url: str, folders: list[Path]):
    async with (
        opened(url, folders[0]) as (engine, renderer),
        serving(engine, renderer, names=("small",)) as served,
        httpx.AsyncClient(timeout=300, base_url=served.base_url) as client,
    ):
        await calls_are_forced(client, folders[0])
        await answers_follow_a_format(client)
        await an_impossible_format_is_refused(client)


async def test_what_is_drawn_under_a_grammar_trains_with_the_numbers_of_the_policy(url: str, folders: list[Path]):
    async with opened(url, folders[0]) as (engine, renderer):
        for temperature, status in ((1.0, 200), (0.7, 400)):
            recorder = Recorder(engine, renderer, EpisodeLimits(max_turns=8, token_budget=1000))
            recording = recorder.open(temperature=temperature, seed=1)
            headers = {"authorization": f"Bearer {recording.key}"}
            async with (
                running(recorder.app()) as at,
                httpx.AsyncClient(timeout=300, base_url=at + recording.path, headers=headers) as client,
            ):
                for more in ({}, {"stream": True}, {"response_format": FORMAT, "tool_choice": "auto"}):
                    answer = await client.post("/chat/completions", json={**FORCED, **more})
                    assert answer.status_code == status, answer.text
            rows = [row for row in recording.ledger.rows() if any(row.loss_mask)]
            assert len(rows) == (3 if status == 200 else 0)
            for row in rows:
                start = row.loss_mask.index(True)
                assert all(row.loss_mask[start:])
                wanted = logprobs_after(folders[0], row.ids[:start], row.ids[start:])
                assert row.logprobs[start:] == pytest.approx(wanted, abs=1e-4)
                assert set(row.versions[start:]) == {engine.policy_version}
            await recorder.close(recording)


@pytest.mark.parametrize("format", [None, AnswerFormat(SCHEMA)], ids=["call", "json"])
async def test_a_grammar_that_new_weights_cut_off_begins_again_with_them(
    url: str, folders: list[Path], format: AnswerFormat | None
):
    tools: list[Any] = [PICK, SUBTRACT]
    async with opened(url, folders[0]) as (engine, renderer):
        prompt = renderer.encode([Message("user", "What is 2 plus 3?")], tools, generation_prompt=True)
        tag = structural_tag(renderer, format, tools=tools, forced=format is None, one_call=True)
        assert tag is not None
        sampling = Sampling(max_tokens=300, stop_ids=renderer.stop_ids)
        options = GenerateOptions(structure=Structure(tag, scored=True))
        drawing = [asyncio.create_task(engine.generate_streaming(prompt, sampling, options)) for _ in range(6)]
        await asyncio.sleep(0.2)
        await engine.update_weights(load_folder(folders[1], torch.float32), version=1)
        done = [await one for one in drawing]
        done.append(await engine.generate_streaming(prompt, sampling, options))
        for one in done:
            (version,) = set(one.versions)
            assert one.logprobs == pytest.approx(logprobs_after(folders[version], prompt, one.ids), abs=1e-4)
            read = renderer.read_text(renderer.decode(one.ids[:-1]), tools=tools)
            if one.finish == "stop" and format is None:
                assert [call.name for call in read.tool_calls] in (["pick"], ["subtract"])
            elif one.finish == "stop" and not read.tool_calls:
                assert json.loads(str(read.content))["sum"] in (1, 2, 3)
        assert set(done[-1].versions) == {1}
