"""The watch of the event loop on a busy machine."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time

import pytest

from agentrl.exam.speed import _queued_s, watching_loop


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads are pinned to processors on Linux only")
def test_time_without_a_processor_is_told_apart():
    native, allowed = threading.get_native_id(), os.sched_getaffinity(0)
    if not os.path.exists(f"/proc/self/task/{native}/schedstat"):
        pytest.skip("this kernel does not tell how long a thread waits for a processor")
    before = _queued_s(native)
    os.sched_setaffinity(0, {min(allowed)})
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]  # on the same one
    try:
        ends = time.monotonic() + 2.0
        while time.monotonic() < ends:
            pass
        assert _queued_s(native) - before > 0.5
    finally:
        for other in others:
            other.kill()
            other.wait()
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize("collecting", [True, False])
async def test_the_garbage_collector_is_no_code_of_the_env(collecting: bool):
    def slow(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            time.sleep(1.2)

    async with watching_loop() as watch:
        gc.callbacks.append(slow)
        try:
            for _ in range(2):
                await asyncio.sleep(0.1)
                if collecting:
                    gc.collect()
                else:
                    slow("start", {})
        finally:
            gc.callbacks.remove(slow)
    assert watch.repeatedly is not collecting
