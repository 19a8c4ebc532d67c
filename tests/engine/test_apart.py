"""The engine in a process of its own: the same completions, and an end that is always told."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from agentrl.engine.local.local_engine import LocalEngine
from agentrl.engine.local.process import ProcessEngine
from agentrl.errors import ConfigError, EngineError
from agentrl.types import Sampling

PROMPT = [7, 3, 250, 9, 9, 41, 100, 2]
GREEDY = Sampling(temperature=0.0, max_tokens=8)


@pytest_asyncio.fixture
async def engine(models: dict[str, Path]) -> AsyncIterator[ProcessEngine]:
    engine = await ProcessEngine.start(models["qwen3"], max_context=200, max_slots=4)
    yield engine
    await engine.close()


async def test_completions_are_those_of_the_engine_in_this_process(engine: ProcessEngine, models: dict[str, Path]):
    here = LocalEngine.from_directory(models["qwen3"])
    for turn in range(3):
        asked = [
            ([*PROMPT, *range(turn * 5), n], Sampling(temperature=float(n % 2), max_tokens=9, seed=n))
            for n in range(8)
        ]
        one, other = [
            await asyncio.gather(
                *(e.generate(ids, sampling, session=f"s{n}") for n, (ids, sampling) in enumerate(asked))
            )
            for e in (engine, here)
        ]
        assert [c.ids for c in one] == [c.ids for c in other]
        for a, b in zip(one, other, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
            assert (a.versions, a.finish) == (b.versions, b.finish)
    await engine.release("s0")
    await here.close()


async def test_new_weights_are_used_from_the_next_token_on(engine: ProcessEngine, models: dict[str, Path]):
    before = await engine.generate(PROMPT, GREEDY)
    torch.manual_seed(5)
    other = AutoModelForCausalLM.from_pretrained(models["qwen3"])
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    with pytest.raises(ValueError, match="an update must give every parameter"):
        await engine.update_weights({"model.norm.weight": other.model.norm.weight}, 3)
    assert (await engine.generate(PROMPT, GREEDY)).ids == before.ids
    assert engine.policy_version == 0
    await engine.update_weights(other.state_dict(), 3)
    assert engine.policy_version == 3
    after = await engine.generate(PROMPT, GREEDY)
    assert set(after.versions) == {3}
    expected = other.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=8, eos_token_id=None)
    assert list(after.ids) == expected[0, len(PROMPT) :].tolist()


async def test_a_cancelled_call_frees_its_slot(engine: ProcessEngine):
    endless = [
        asyncio.ensure_future(engine.generate([*PROMPT, n], Sampling(max_tokens=190, seed=n))) for n in range(4)
    ]
    await asyncio.sleep(0)
    for call in endless:
        call.cancel()
    assert all(
        isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*endless, return_exceptions=True)
    )
    assert len((await engine.generate(PROMPT, GREEDY)).ids) == 8
    assert not engine._waiting


async def test_signals_that_stop_a_run_leave_its_engine_alone(engine: ProcessEngine):
    assert engine._process.pid is not None
    for wish in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(engine._process.pid, wish)
    assert len((await engine.generate(PROMPT, GREEDY)).ids) == 8


async def test_bad_requests_are_refused_here(engine: ProcessEngine):
    with pytest.raises(ValueError, match="ids is empty"):
        await engine.generate([], GREEDY)
    with pytest.raises(ValueError, match="the prompt has 200 tokens and max_context is 200"):
        await engine.generate([1] * 200, GREEDY)


async def test_a_directory_that_is_none_is_said_as_ever(tmp_path: Path):
    with pytest.raises(ConfigError, match="does not exist; give the path of a Hugging Face model directory"):
        await ProcessEngine.start(tmp_path / "nowhere")


async def test_closing_ends_what_runs_with_what_it_has(models: dict[str, Path]):
    engine = await ProcessEngine.start(models["qwen3"])
    call = asyncio.ensure_future(engine.generate(PROMPT, Sampling(max_tokens=20_000, seed=1)))
    await engine.generate(PROMPT, GREEDY)
    await engine.close()
    completion = await call
    assert completion.finish == "abort"
    assert len(completion.ids) > 0
    with pytest.raises(EngineError, match="the local engine is closed"):
        await engine.generate(PROMPT, GREEDY)
    await engine.close()


async def test_a_killed_process_is_told_to_everybody_who_waits(models: dict[str, Path]):
    engine = await ProcessEngine.start(models["qwen3"])
    call = asyncio.ensure_future(engine.generate(PROMPT, Sampling(max_tokens=20_000, seed=1)))
    await engine.generate(PROMPT, GREEDY)
    assert engine._process.pid is not None
    os.kill(engine._process.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="process was killed by SIGKILL; out of memory"):
        await call
    with pytest.raises(EngineError, match="killed by SIGKILL"):
        await engine.generate(PROMPT, GREEDY)
    await engine.close()


def running(pid: int) -> bool:
    """Whether there is such a process that has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("ending", ["pass", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_script_needs_no_guard_and_leaves_nothing_behind(ending: str, models: dict[str, Path], tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import asyncio, os, signal
        from agentrl.engine.local.process import ProcessEngine
        from agentrl.types import Sampling

        async def main():
            engine = await ProcessEngine.start({str(models["qwen3"])!r})
            completion = await engine.generate([1, 2, 3], Sampling(max_tokens=4))
            print(len(completion.ids), engine._process.pid, flush=True)
            asyncio.ensure_future(engine.generate([1, 2, 3], Sampling(max_tokens=20_000)))
            await asyncio.sleep(0)

        print("started")
        asyncio.run(main())
        {ending}
        """)
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.startswith("started\n4 "), done.stderr
    assert done.stdout.count("started") == 1
    pid = int(done.stdout.split()[-1])
    for _ in range(300):
        if not running(pid):
            return
        time.sleep(0.1)
    pytest.fail("the engine's process outlived the script by 30 s")
