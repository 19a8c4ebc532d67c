"""Requests of one judge from several event loops: clients, and a limit that all of them share.

A plain reward that calls `asyncio.run(judge.score(...))` runs in a separate event loop, while rewards of other
episodes run in theirs. Connections and asyncio's locks belong to one loop each.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

_LOCK = threading.Lock()
"""For all slots, so that a judge can be copied."""


@dataclass
class Slots:
    """A limit of concurrent requests over all event loops; those that wait are served in order."""

    free: int
    _waiting: deque[Future[None]] = field(default_factory=deque)

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Wait for a slot and hold it inside the block."""
        mine: Future[None] = Future()
        with _LOCK:
            if self.free:
                self.free -= 1
                mine.set_result(None)
            else:
                self._waiting.append(mine)
        try:
            await asyncio.wrap_future(mine)
        except asyncio.CancelledError:
            if not mine.cancel():  # it got the slot in the meantime
                self._give_back()
            raise
        try:
            yield
        finally:
            self._give_back()

    def _give_back(self) -> None:
        with _LOCK:
            while self._waiting:
                next_one = self._waiting.popleft()
                if next_one.set_running_or_notify_cancel():
                    break
            else:
                self.free += 1
                return
        next_one.set_result(None)


@dataclass
class ClientByLoop:
    """One client for each event loop, closed when `asyncio.run` ends the loop."""

    _clients: dict[asyncio.AbstractEventLoop, tuple[Any, AsyncGenerator[None, None]]] = field(default_factory=dict)

    async def get(self, make: Callable[[], Any]) -> Any:
        """The running loop's client; the first call makes it."""
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            for ended in [known for known in list(self._clients) if known.is_closed()]:
                self._clients.pop(ended, None)
            closing = _at_the_end_of_the_loop(client := make())
            self._clients[loop] = client, closing
            await anext(closing)  # run up to the `yield`: the loop registers the generator
        return self._clients[loop][0]


async def _at_the_end_of_the_loop(client: Any) -> AsyncGenerator[None, None]:
    """Wait at the `yield` until `loop.shutdown_asyncgens`, which `asyncio.run` calls before closing the loop."""
    try:
        yield
    finally:
        await client.close()
