"""The server that forks the processes of a run: the local engine's, and those that work beside it.

It imports PyTorch and transformers once, has no threads, and forks each engine at once. A run starts it before it
imports them itself: each import takes seconds, and the two run at the same time.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess

_started = threading.Event()
_starting = threading.Lock()


def fork_server() -> ForkServerContext:
    """Start the server unless it is running, without waiting for its imports; returns the context that uses it.

    The server inherits that SIGINT and SIGTERM are blocked: they are meant for the run.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["agentrl.engine.local.preload"])
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    _started.set()
    return context


def light_context() -> ForkServerContext | SpawnContext:
    """The context in which a process without PyTorch starts soonest: the server's, if a run has started it."""
    return fork_server() if _started.is_set() else multiprocessing.get_context("spawn")


def start_without_main(process: BaseProcess) -> None:
    """Start a process that does not import the user's script: it needs nothing from it."""
    with _starting, _no_main():
        process.start()


@contextlib.contextmanager
def _no_main() -> Iterator[None]:
    main = sys.modules["__main__"]
    hidden = {name: main.__dict__.pop(name) for name in ("__file__", "__spec__") if name in main.__dict__}
    main.__dict__["__spec__"] = None
    try:
        yield
    finally:
        main.__dict__.update({"__spec__": None} | hidden)
