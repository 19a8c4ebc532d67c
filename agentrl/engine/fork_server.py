"""The server that forks the processes of the local engine.

It imports PyTorch and transformers once, has no threads, and forks each engine at once. A run starts it before it
imports them itself: each import takes seconds, and the two run at the same time.
"""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing import resource_tracker
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import _forkserver, ensure_running

PRELOAD = ["agentrl.engine.local.preload"]


def fork_server() -> ForkServerContext:
    """Start the server unless it is running, without waiting for its imports; returns the context that uses it.

    The server inherits that SIGINT, SIGTERM and SIGHUP are blocked: they are meant for the run.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    resource_tracker.ensure_running()  # the server needs it, and its start ends with the signals unblocked
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        try:
            ensure_running()
        except ChildProcessError:  # the server is of the process that this one was forked from
            _forkserver.__init__()  # type: ignore[misc]
            context.set_forkserver_preload(PRELOAD)
            ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context
