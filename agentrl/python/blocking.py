"""Blocking forms of coroutines that also work where an event loop is already running, as in Jupyter."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, suppress
from queue import Queue
from typing import Generic, TypeVar

T = TypeVar("T")


def in_event_loop() -> bool:
    """Whether this thread runs an event loop."""
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        return True
    return False


def expect_asyncio(call: str, instead: str) -> None:
    """Raises RuntimeError if another event loop runs, such as trio's."""
    if not in_event_loop():
        raise RuntimeError(
            f"{call} needs the event loop of asyncio; under another one, {instead} in a thread "
            "(trio.to_thread.run_sync)"
        )


class Worker(Generic[T]):
    """A call on a separate thread, whose result or exception is returned to the caller.

    Args:
        abort: ends the call; called when the waiting thread is interrupted.
    """

    def __init__(self, call: Callable[[], T], abort: Callable[[], None], name: str) -> None:
        self._call, self._abort = call, abort
        self._result: list[T] = []
        self._error: BaseException | None = None
        # Not Thread.join: if that is interrupted, the thread counts as ended from then on (CPython bpo-45274).
        self._ended = threading.Event()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def result(self) -> T:
        """Wait for the call. A KeyboardInterrupt ends it, and is raised then; another one is raised at once."""
        try:
            self._wait()
        except KeyboardInterrupt:
            self._abort()
            self._wait()
            raise
        if self._error is not None:
            raise self._error
        return self._result[0]

    def _wait(self) -> None:
        while not self._ended.wait(0.2):  # an endless wait cannot be interrupted on every platform
            pass

    def _work(self) -> None:
        try:
            self._result.append(self._call())
        except BaseException as e:  # handed over
            self._error = e
        finally:
            self._ended.set()


class _End:
    """The last item; holds the exception that ended the iteration, if one did."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def iterate(make: Callable[[], AsyncIterator[T]]) -> Iterator[T]:
    """The items of an async generator, from any thread; it runs on a separate event loop.

    Args:
        make: called on the other thread. The generator is closed when the iteration ends early.
    """
    items: Queue[T | _End] = Queue(maxsize=1)
    loop = asyncio.new_event_loop()

    async def produce() -> None:
        generator = make()
        async with aclosing(generator) as found:  # type: ignore[type-var]
            async for item in found:
                await asyncio.to_thread(items.put, item)

    producing = loop.create_task(produce())

    def work() -> None:
        error = None
        try:
            loop.run_until_complete(producing)
        except BaseException as e:  # handed over
            error = e
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()
        items.put(_End(error))

    thread = threading.Thread(target=work, name="agentrl-rollouts", daemon=True)
    thread.start()
    try:
        while not isinstance(item := items.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(producing.cancel)  # it may be waiting for its next item
        while thread.is_alive():
            with suppress(Exception):
                items.get(timeout=0.1)
        thread.join()
