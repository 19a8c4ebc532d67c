"""Tasks that may outlive the call that started them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
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
