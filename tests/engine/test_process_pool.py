"""Several processes as one engine: the same completions, sessions that stay, prompts that stay together."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from agentrl.engine.local.local_engine import LocalEngine
from agentrl.engine.local.process import ProcessEngine
from agentrl.engine.local.process_pool import UNEVEN, ProcessPool, start_processes
from agentrl.errors import ConfigError, EngineError
from agentrl.types import Sampling

PROMPT = [7, 3, 250, 9, 9, 41, 100, 2]
GREEDY = Sampling(temperature=0.0, max_tokens=8)


@pytest.fixture(autouse=True)
def two_torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest_asyncio.fixture
async def pool(models: dict[str, Path]) -> AsyncIterator[ProcessPool]:
    engine = await start_processes(models["qwen3"], 4, max_context=200)
    assert isinstance(engine, ProcessPool)
    assert engine.sizes == [0, 0]
    yield engine
    await engine.close()


async def test_completions_are_those_of_one_engine(pool: ProcessPool, models: dict[str, Path]):
    here = LocalEngine.from_directory(models["qwen3"])
    for turn in range(3):
        asked = [
            ([*PROMPT, *range(turn * 5), n // 4], Sampling(temperature=float(n % 2), max_tokens=9, seed=n))
            for n in range(12)
        ]
        one, other = [
            await asyncio.gather(
                *(e.generate(ids, sampling, session=f"s{n}") for n, (ids, sampling) in enumerate(asked))
            )
            for e in (pool, here)
        ]
        assert [c.ids for c in one] == [c.ids for c in other]
        for a, b in zip(one, other, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
            assert (a.versions, a.finish) == (b.versions, b.finish)
        if turn:
            assert all(c.cached_tokens >= len(PROMPT) for c in one), "a session's state is where it asks"
    await here.close()


async def test_groups_stay_together_and_are_spread_evenly(pool: ProcessPool):
    calls = [
        pool.generate([*PROMPT * 5, group], Sampling(max_tokens=2), session=f"{group}/{n}")
        for group in range(4)
        for n in range(8)
    ]
    found = await asyncio.gather(*calls)
    assert pool.sizes == [16, 16]
    reused = sum(completion.cached_tokens > 0 for completion in found)
    assert reused >= 4 * 7, "the prompt of a group is computed once"
    for group in range(4):
        for n in range(8):
            await pool.release(f"{group}/{n}")
    await pool.release("never began")
    assert pool.sizes == [0, 0]


async def test_one_prompt_alone_still_uses_every_process(pool: ProcessPool):
    await asyncio.gather(*(pool.generate(PROMPT, Sampling(max_tokens=2), session=f"s{n}") for n in range(64)))
    assert max(pool.sizes) - min(pool.sizes) <= UNEVEN
    await pool.generate(PROMPT, GREEDY)  # without a session
    assert sum(pool.sizes) == 64


async def test_new_weights_reach_every_process(pool: ProcessPool, models: dict[str, Path]):
    torch.manual_seed(5)
    other = AutoModelForCausalLM.from_pretrained(models["qwen3"])
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    with pytest.raises(ValueError, match="an update must give every parameter"):
        await pool.update_weights({"model.norm.weight": other.model.norm.weight}, 3)
    assert pool.policy_version == 0
    await pool.update_weights(other.state_dict(), 3)
    assert pool.policy_version == 3
    prompts = [[*PROMPT, n] for n in range(4)]
    found = await asyncio.gather(*(pool.generate(ids, GREEDY, session=str(ids)) for ids in prompts))
    assert pool.sizes == [2, 2]
    for ids, completion in zip(prompts, found, strict=True):
        wanted = other.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=8, eos_token_id=None)
        assert list(completion.ids) == wanted[0, len(ids) :].tolist()
        assert set(completion.versions) == {3}


async def test_a_killed_process_fails_its_requests(pool: ProcessPool):
    calls = [
        asyncio.ensure_future(pool.generate([n, *PROMPT], Sampling(max_tokens=180, seed=n), session=str(n)))
        for n in range(4)
    ]
    await pool.generate(PROMPT, GREEDY, session="a")
    victim = pool.processes[0]
    os.kill(victim, signal.SIGKILL)
    found = await asyncio.gather(*calls, return_exceptions=True)
    lost = [error for error in found if isinstance(error, EngineError)]
    assert lost
    assert all("killed by SIGKILL" in str(error) for error in lost)
    with pytest.raises(EngineError, match="killed by SIGKILL"):
        await pool.update_weights({}, 1)


async def test_one_process_where_more_would_not_help(models: dict[str, Path]):
    torch.set_num_threads(1)
    engine = await start_processes(models["qwen3"], 4)
    assert isinstance(engine, ProcessEngine)
    await engine.close()
    torch.set_num_threads(2)
    engine = await start_processes(models["qwen3"], 1)
    assert isinstance(engine, ProcessEngine)
    await engine.close()


async def test_a_directory_that_is_none_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="does not exist"):
        await start_processes(tmp_path / "nowhere", 2)
