"""An engine that is watched: tokens as they are drawn, alternatives, a grammar, logprobs of given tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from agentrl.engine.base import GenerateOptions, TokenLogprob
from agentrl.engine.local.local_engine import LocalEngine
from agentrl.types import Sampling
from tests.engine.engine_models import VOCABULARY, logprobs_of, reference

PROMPT = [7, 3, 250, 9, 9, 41, 100, 2]


class Digits:
    """Allows the ids of one set at even places and of another at odd ones."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def allowed(self) -> np.ndarray:
        mask = np.zeros(VOCABULARY, dtype=np.bool_)
        mask[[10, 11, 12] if len(self.taken) % 2 == 0 else [20, 21]] = True
        return mask

    def take(self, id: int) -> None:
        self.taken.append(id)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
async def test_tokens_are_told_in_order_before_the_completion_with_its_logprobs(
    models: dict[str, Path], temperature: float
):
    engine = LocalEngine.from_directory(models["qwen3"])
    sampling = Sampling(temperature=temperature, max_tokens=6, seed=3)
    told: list[TokenLogprob] = []
    seen_early: list[int] = []

    async def other() -> None:
        await engine.generate(PROMPT[:4], sampling)
        seen_early.append(len(told))

    try:
        plain = await engine.generate(PROMPT, sampling)
        watched, _ = await asyncio.gather(
            engine.generate_streaming(PROMPT, sampling, GenerateOptions(told.append, top=3)), other()
        )
    finally:
        await engine.close()
    assert watched == plain or watched.ids == plain.ids
    assert tuple(drawn.id for drawn in told) == watched.ids
    assert tuple(drawn.logprob for drawn in told) == watched.logprobs
    for drawn in told:
        assert [logprob for _, logprob in drawn.top] == sorted((p for _, p in drawn.top), reverse=True)
        assert len(drawn.top) == 3
        if temperature == 0.0:
            assert drawn.top[0][0] == drawn.id


async def test_a_mask_holds_the_completion_and_leaves_the_logprobs_alone(models: dict[str, Path]):
    engine = LocalEngine.from_directory(models["qwen3"])
    mask = Digits()
    try:
        completion = await engine.generate_streaming(
            PROMPT, Sampling(temperature=1.0, max_tokens=8, seed=5), GenerateOptions(mask=mask)
        )
    finally:
        await engine.close()
    assert mask.taken == list(completion.ids)
    assert all(id in ((10, 11, 12) if n % 2 == 0 else (20, 21)) for n, id in enumerate(completion.ids))
    expected = logprobs_of(reference(models["qwen3"]), PROMPT, completion.ids)
    np.testing.assert_allclose(completion.logprobs, expected, atol=2e-3)


async def test_given_tokens_are_scored_as_the_model_scores_them(models: dict[str, Path]):
    engine = LocalEngine.from_directory(models["qwen3"])
    try:
        scored = await engine.prompt_logprobs(PROMPT, top=2)
    finally:
        await engine.close()
    assert [drawn.id for drawn in scored] == PROMPT[1:]
    expected = logprobs_of(reference(models["qwen3"]), PROMPT[:1], tuple(PROMPT[1:]))
    np.testing.assert_allclose([drawn.logprob for drawn in scored], expected, atol=2e-3)
    assert all(drawn.top[0][1] >= drawn.logprob - 1e-6 for drawn in scored)
