"""An event loop in a separate thread: lets plain code (Gymnasium's calls, class set-up) wait for async work."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundLoop:
    """Started on first use, one per process; a daemon thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run `coroutine` on that loop and wait for it; works inside and outside of other loops.

        Raises:
            TimeoutError: it took longer than `timeout_s`; it has been cancelled.
        """
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="agentrl-background", daemon=True).start()
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise


background = BackgroundLoop()
os.register_at_fork(after_in_child=background.__init__)  # type: ignore[misc]  # its thread stayed with the parent
