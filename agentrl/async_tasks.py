"""Tasks that may outlive the call that started them, and time limits of code that users write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


def spawn(tasks: set[asyncio.Task[T]], work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a task that is in `tasks` until it is done: the event loop alone would not keep it alive."""
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def shielded(work: Coroutine[object, object, None]) -> None:
    """Finish `work` however often the caller is cancelled, and only then raise the cancellation."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as e:
            cancelled = e
    if cancelled is not None and not task.cancelled() and task.exception() is None:
        raise cancelled
    task.result()


@asynccontextmanager
async def time_limit(timeout_s: float) -> AsyncIterator[asyncio.Timeout]:
    """`asyncio.timeout`, which also holds after a TaskGroup has failed in the block.

    Before Python 3.13, such a group leaves a request to cancel the task behind, and `asyncio.timeout` then takes
    its own cancellation for someone else's.

    Raises:
        TimeoutError: the time is up.
    """
    before = cancellations()
    try:
        async with asyncio.timeout(timeout_s) as clock:
            yield clock
    except asyncio.CancelledError:
        if not clock.expired():
            raise
        forget_cancellations(before)
        raise TimeoutError from None


def cancellations() -> int:
    """How many requests to cancel the current task are open."""
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0


def forget_cancellations(before: int) -> None:
    """Drop the requests to cancel the current task that exceed `before`; whoever ran in it has seen them."""
    task = asyncio.current_task()
    while task is not None and task.cancelling() > before:
        task.uncancel()
