"""Work that a cancellation must not leave half done."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine


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
