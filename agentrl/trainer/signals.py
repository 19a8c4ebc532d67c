"""Graceful shutdown: the first Ctrl-C, SIGTERM or SIGHUP asks the loop to save and exit, the second aborts."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import TypeVar

from agentrl.sigterm import of_this_process

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_S = 0.2
"""How often a wait checks whether the run was asked to stop."""


class StopRequest:
    """False until someone asks the run to stop; read it between steps."""

    def __init__(self) -> None:
        self.by: str | None = None
        """The received signal; None before."""
        self.tell: Callable[[str], None] = lambda text: None
        """Shows a sentence to the user."""
        self.abort: Callable[[], None] = lambda: None
        """Ends the run at once, from another thread than its own; set once it has an event loop."""

    def __bool__(self) -> bool:
        return self.by is not None

    def ask(self, by: str, then: str = "") -> None:
        """Ask the run to save and end, and say so: `by` is who asks, `then` what the user can do next."""
        self.by = by
        self.tell(f"{by}: saving after this step, then leaving{then}")


class StoppedEarly(Exception):
    """The run was asked to stop before its first step."""

    @staticmethod
    def ends(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        """As the exit of a context: such a run ends without an error."""
        return isinstance(error, StoppedEarly)


async def unless_stopped(stopping: Callable[[], bool], work: Awaitable[T]) -> T:
    """Wait for `work`; cancel it if the run is asked to stop in the meantime.

    Raises:
        StoppedEarly: it was asked to.
    """
    task = asyncio.ensure_future(work)
    try:
        while not task.done() and not stopping():
            await asyncio.wait({task}, timeout=POLL_S)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    if task.cancelled():
        raise StoppedEarly
    return task.result()


async def until(stopping: Callable[[], bool], items: AsyncIterator[T]) -> AsyncIterator[T]:
    """Yield the items; end early if the run is to stop while it waits for one."""
    while True:
        try:
            item = await unless_stopped(stopping, anext(items))
        except (StopAsyncIteration, StoppedEarly):
            return
        yield item


@contextmanager
def stop_requested(
    tell: Callable[[str], None] = lambda text: None, request: StopRequest | None = None
) -> Iterator[StopRequest]:
    """Catch SIGINT, SIGTERM and SIGHUP while the block runs; the earlier handlers come back after it.

    The first signal makes the yielded request true and calls `tell` with a sentence for the user. The second one
    raises KeyboardInterrupt in the main thread. A SIGHUP is never the second one, and what comes after it is the
    first: a terminal that is closed may send several, and service managers send SIGTERM with it. Where SIGHUP is
    ignored, as under nohup, it stays so. Outside of the main thread, signal handlers are not changed; whoever made
    the request asks there.

    Args:
        tell: shows the sentence. A signal can arrive while the main thread is writing to the same stream, so this
            is called in another thread, which the end of the block waits for.
        request: becomes true; by default a new one.
    """
    request = StopRequest() if request is None else request
    request.tell = tell
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    telling: list[threading.Thread] = []

    def handle(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        earlier = request.by
        if earlier is not None and number == signal.SIGHUP:
            return
        if earlier not in (None, "SIGHUP"):
            raise KeyboardInterrupt(f"second {name}")
        request.by = name
        if earlier is not None:
            return
        hint = "" if number == signal.SIGHUP else "; once more to abort now"
        thread = threading.Thread(target=request.ask, args=(name, hint))
        with suppress(RuntimeError):  # the system allows no more threads: the run ends without saying so
            thread.start()
            telling.append(thread)

    caught = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, of_this_process(handle)) for number in caught}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for thread in telling:
            thread.join()
