"""How many threads torch computes with, in one thread of a program and not in the others.

`torch.set_num_threads` counts for the calling thread, and for every thread that has not asked for its number yet.
"""

from __future__ import annotations

import os
import threading

import torch

_LOCK = threading.Lock()
_computing: int | None = None
"""The process that computed first, among this one and those that it was forked from."""


def one_after_fork() -> bool:
    """Have a forked process compute with one torch thread where more would crash or hang it; whether it has to.

    Each thread of a program has its own OpenMP threads, which a fork does not copy; those that start after it get
    new ones. Call this in every process before it computes, so that a fork knows of it.
    """
    global _computing
    if _computing is None:
        _computing = os.getpid()
    forked = _computing != os.getpid() and threading.current_thread() is threading.main_thread()
    if not forked or torch.get_num_threads() == 1:
        return False
    torch.set_num_threads(1)
    return True


def compute_with(threads: int) -> None:
    """Have torch compute with so many threads in the calling thread, which must be new, and not in others."""
    with _LOCK:
        default = torch.get_num_threads()  # of a new thread: the number that was set last, anywhere
        torch.set_num_threads(threads)
        torch.get_num_threads()  # from now on, what others set does not count here
        other = threading.Thread(target=torch.set_num_threads, args=(default,))
        other.start()
        other.join()
