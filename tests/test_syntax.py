"""Source is parsed by several threads at once, whatever a garbage collection does meanwhile."""

from __future__ import annotations

import gc
import threading
import time

from agentrl.envs.others.bfcl import read_calls
from agentrl.syntax import parse, source_of


class Cycle:
    """Garbage that lets another thread run when it is collected."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        time.sleep(0.0005)


TEXT = "def f(x):\n    return (x + (1 * (2 - (3 + (4 * x)))))\n" * 20
CALLS = f"[{', '.join(['f(a=[1, [2, [3]]])'] * 100)}]"


def test_threads_parse_at_once():
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(200):
                Cycle()
                assert len(parse(TEXT).body) == 20
                assert "Garbage" in source_of(Cycle)
                assert len(read_calls(CALLS)) == 100
        except BaseException as e:
            failed.append(e)

    often = gc.get_threshold()
    gc.set_threshold(50)
    try:
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*often)
    assert failed == []
