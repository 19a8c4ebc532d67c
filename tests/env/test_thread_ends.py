"""Tool threads let go of what they ran, and end before Python does."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import warnings
import weakref
from typing import Any

import pytest

from agentrl.env.toolenv.dispatch import call_function, within
from agentrl.env.toolenv.threads import EpisodeThread, current

REUSED = sys.version_info < (3, 13)
"""Whether another episode gets the thread: later Pythons cannot drop the variables of one that lives."""
UNCLOSED = """
import asyncio, atexit, threading

def see():  # registered first, so it runs after the hooks of the imports below
    names = sorted(t.name for t in threading.enumerate() if t.name.startswith("agentrl"))
    print("left:", names)
atexit.register(see)

from agentrl.engine.local.local_engine import LocalEngine
from agentrl.env.toolenv.threads import EpisodeThread
from agentrl.types import Sampling
from transformers import Qwen3Config, Qwen3ForCausalLM

SMALL = Qwen3Config(vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                    num_key_value_heads=1, head_dim=16, intermediate_size=64, max_position_embeddings=64)

async def main():
    engine = LocalEngine(Qwen3ForCausalLM(SMALL).eval())
    thread = EpisodeThread()
    assert await thread.run(lambda: 6 * 7, None) == 42
    assert len((await engine.generate([1, 2, 3], Sampling(max_tokens=2))).ids) > 0
    print("before:", sorted({t.name.rstrip("0123456789") for t in threading.enumerate() if "agentrl" in t.name}))
    return engine, thread

engine = asyncio.run(main())
"""


class Env:
    def tool(self) -> str:
        return "done"


async def test_an_idle_thread_keeps_no_env_alive():
    thread = EpisodeThread()
    env = Env()
    gone = weakref.ref(env)
    ident: list[threading.Thread] = []

    def call(tool=env.tool) -> str:
        ident.append(threading.current_thread())
        return tool()

    assert await thread.run(call, None) == "done"
    del env, call
    await thread.run(lambda: None, None)  # the thread is past the first call's end
    assert gone() is None
    assert ident[0].is_alive()
    await thread.close()
    another = EpisodeThread()
    same = await another.run(threading.current_thread, None) is ident[0]
    assert same == REUSED, "it waits for another episode"
    await another.close()


async def test_a_closed_thread_starts_again_when_it_is_used_again():
    thread = EpisodeThread()
    assert await thread.run(lambda: 1, None) == 1
    await thread.close()
    assert await thread.run(lambda: 2, 5.0) == 2
    await thread.close()


async def test_the_thread_of_an_env_that_nobody_closed_is_given_back():
    thread = EpisodeThread()
    found = await thread.run(threading.current_thread, None)
    del thread
    gc.collect()
    another = EpisodeThread()
    assert (await another.run(threading.current_thread, None) is found) == REUSED
    await another.close()


async def test_two_episodes_at_a_time_never_share_a_thread():
    one, other = EpisodeThread(), EpisodeThread()
    threads = [await thread.run(threading.current_thread, None) for thread in (one, other, one)]
    assert threads[0] is threads[2] is not threads[1]
    await one.close()
    await other.close()


async def test_what_an_episode_left_in_its_thread_is_gone_for_the_next_and_freed_soon(monkeypatch):
    monkeypatch.setattr("agentrl.env.toolenv.threads.CLEAN_AFTER_S", 0.01)
    local, thread = threading.local(), EpisodeThread()

    def leave() -> threading.Thread:
        local.env = Env()
        gone.append(weakref.ref(local.env))
        return threading.current_thread()

    gone: list[weakref.ref[Env]] = []
    home = await thread.run(leave, None)
    await thread.close()
    other = EpisodeThread()
    there, left = await other.run(lambda: (threading.current_thread(), hasattr(local, "env")), None)
    assert not left
    assert (there is home) == REUSED
    await other.run(leave, None)
    await other.close()
    for _ in range(500):
        if gone[1]() is None:
            break
        await asyncio.sleep(0.02)
    assert [ref() for ref in gone] == [None, None]


async def test_threads_beyond_those_that_may_wait_end(monkeypatch):
    monkeypatch.setattr("agentrl.env.toolenv.threads.MAX_IDLE", 0)
    thread = EpisodeThread()
    found = await thread.run(threading.current_thread, None)
    await thread.close()
    found.join(20)
    assert not found.is_alive()


def test_no_thread_of_ours_is_left_when_python_ends():
    done = subprocess.run([sys.executable, "-c", UNCLOSED], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["before: ['agentrl-local-engine', 'agentrl-tool-']", "left: []"]


@pytest.mark.parametrize("plain", [True, False])
async def test_an_answer_that_nobody_waits_for_is_closed(plain: bool):
    """A coroutine that is dropped before it began would warn."""

    async def reply() -> str:
        return "late"

    def respond() -> Any:
        began.set()
        gone.wait()
        return reply()

    began, gone, thread = threading.Event(), threading.Event(), EpisodeThread()
    token = current.set(thread)
    try:
        asked = asyncio.create_task(call_function(respond, {}, 5) if plain else within(reply(), 5))
        await asyncio.sleep(0)
        while plain and not began.is_set():  # noqa: ASYNC110  # another thread sets it
            await asyncio.sleep(0.01)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        gone.set()
        await asyncio.wait([asked])
        assert asked.cancelled()
        await thread.close()
    finally:
        current.reset(token)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        del asked, task  # their tracebacks hold the call
        gc.collect()
    assert said == []
