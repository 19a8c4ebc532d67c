"""Tool threads let go of what they ran, and end before Python does."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

from agentrl.env.toolenv.threads import EpisodeThread

UNCLOSED = """
import asyncio, atexit, threading

def see():  # registered first, so it runs after the hooks of the imports below
    names = sorted(t.name for t in threading.enumerate() if t.name.startswith("agentrl"))
    print("left:", names)
atexit.register(see)

from agentrl.engine.local.engine import LocalEngine
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
    ident[0].join(20)
    assert not ident[0].is_alive()


async def test_a_closed_thread_starts_again_when_it_is_used_again():
    thread = EpisodeThread()
    assert await thread.run(lambda: 1, None) == 1
    await thread.close()
    assert await thread.run(lambda: 2, 5.0) == 2
    await thread.close()


async def test_the_thread_of_an_env_that_nobody_closed_ends_with_it():
    thread = EpisodeThread()
    found = await thread.run(threading.current_thread, None)
    del thread
    gc.collect()
    found.join(20)
    assert not found.is_alive()


def test_no_thread_of_ours_is_left_when_python_ends():
    done = subprocess.run([sys.executable, "-c", UNCLOSED], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["before: ['agentrl-local-engine', 'agentrl-tool-']", "left: []"]
