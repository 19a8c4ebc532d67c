"""Handlers of SIGTERM for a command, but not for the processes that its envs fork."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any
from weakref import WeakSet

Handler = Callable[[int, FrameType | None], object]

_handlers: WeakSet[Any] = WeakSet()


def of_this_process(handler: Handler) -> Handler:
    """The same handler, for SIGTERM in this process alone.

    What an env forks ends on SIGTERM, as `terminate` of a `multiprocessing` process or pool expects. One that
    catches it would let the pool wait forever.
    """
    _handlers.add(handler)
    return handler


def set_at_end(event: asyncio.Event) -> None:
    """Set an event of the running loop on SIGINT and SIGTERM. After that, SIGINT ends the process at once."""
    loop = asyncio.get_running_loop()

    def end() -> None:
        event.set()
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    _handlers.add(signal.getsignal(signal.SIGTERM))


def _forget_handler() -> None:
    if signal.getsignal(signal.SIGTERM) in _handlers:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)  # before Python 3.12, the parent's event loop would get the signal


os.register_at_fork(after_in_child=_forget_handler)
