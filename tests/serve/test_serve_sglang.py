"""Grammars of a real SGLang server, which `agentrl serve` starts with its tokenizer; see scripts/ci-sglang."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import httpx
import pytest

from agentrl.cli.serve import _find
from agentrl.engine.open import open_engine
from tests.serve.real_grammars import (
    an_impossible_format_is_refused,
    answers_follow_a_format,
    calls_are_forced,
    it_scores_as_a_teacher,
    make_policy,
)
from tests.serve.serve_kit import serving

PYTHON = os.environ.get("AGENTRL_SGLANG_PYTHON", "")
pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default::UserWarning", "default::FutureWarning"),
    pytest.mark.skipif(not PYTHON, reason="AGENTRL_SGLANG_PYTHON is not set: see scripts/ci-sglang"),
]


async def test_forced_calls_and_json_answers_are_held_by_the_server(tmp_path: Path):
    folder = make_policy(tmp_path / "small", hidden=32)
    overrides = ["engine.kind=sglang", "engine.device=cpu", f"engine.server.python={PYTHON}", "engine.max_slots=8"]
    policy = _find(folder, overrides)
    engine = await open_engine(policy.engine, policy.directory)
    try:
        async with (
            serving(engine, policy.renderer, names=("small",)) as served,
            httpx.AsyncClient(timeout=300, base_url=served.base_url) as client,
        ):
            await calls_are_forced(client, folder)
            await answers_follow_a_format(client)
            await an_impossible_format_is_refused(client)
        (replica,) = engine._pool.replicas  # type: ignore[attr-defined]
        async with httpx.AsyncClient(base_url=replica.server.url) as server:
            model = (await server.get("/v1/models")).json()["data"][0]["id"]
        await asyncio.to_thread(it_scores_as_a_teacher, replica.server.url, model, folder)
    finally:
        await engine.close()
