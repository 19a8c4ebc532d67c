"""How many threads torch computes with, in one thread of a program and not in the others.

`torch.set_num_threads` counts for the calling thread, and for every thread that has not asked for its number yet.
"""

from __future__ import annotations

import threading

import torch

_LOCK = threading.Lock()


def compute_with(threads: int) -> None:
    """Have torch compute with so many threads in the calling thread, which must be new, and not in others."""
    with _LOCK:
        default = torch.get_num_threads()  # of a new thread: the number that was set last, anywhere
        torch.set_num_threads(threads)
        torch.get_num_threads()  # from now on, what others set does not count here
        other = threading.Thread(target=torch.set_num_threads, args=(default,))
        other.start()
        other.join()
