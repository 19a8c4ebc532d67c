"""How often Python looks for garbage: rarely in processes that import PyTorch."""

from __future__ import annotations

import atexit
import gc
import signal

RARELY = (20_000, 20, 10)
"""Of the three generations of the garbage collector: new containers before a pass over them, and passes over each
generation before one over the next."""


def collect_rarely() -> None:
    """Look for garbage rarely in this process, and one last time at exit.

    PyTorch and transformers create half a million objects that stay. With Python's thresholds, going through them
    again and again takes one of the four seconds of their import; freeing them one by one at exit takes another.
    For processes that run nothing but agentrl.
    """
    if gc.get_threshold() != RARELY:
        gc.set_threshold(*RARELY)
        atexit.register(_leave)


def _leave() -> None:
    """Finalize what is unreachable, such as a file that is not flushed yet; the rest is not freed one by one.

    Ctrl-C ends the process from here on: there is nothing left that could catch a KeyboardInterrupt.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.collect()
    gc.freeze()
