"""Streamed answers, and handling of clients that disconnect.

Source of the wire format: server-sent events, HTML Living Standard, section 9.2.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

log = logging.getLogger(__name__)

T = TypeVar("T")

_HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))
FAREWELL_S = 1.0
"""Time limit for telling a client that the server is shutting down."""


class GoneError(Exception):
    """The client disconnected before its answer was ready."""


def event(data: Any, name: str | None = None) -> bytes:
    """Format one server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {text}\n\n".encode("utf-8", "replace")


async def gone(receive: Receive) -> None:
    """Return when the client has disconnected. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_there(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is cancelled if the client disconnects.

    Raises:
        GoneError: the client disconnected.
    """
    leaving = asyncio.ensure_future(gone(request.receive))
    loop, working = asyncio.get_running_loop(), True

    def left(_: asyncio.Future[None]) -> None:
        if working:  # this may be scheduled already when the work ends
            limit.reschedule(loop.time())

    try:
        async with asyncio.timeout(None) as limit:
            leaving.add_done_callback(left)
            try:
                return await work
            finally:
                working = False
    except Exception:
        if limit.expired():
            raise GoneError from None
        raise
    finally:
        await _end(leaving)


async def _end(task: asyncio.Future[Any]) -> None:
    if not task.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


class EventStream:
    """An ASGI answer made of server-sent events.

    Args:
        events: what to send; closed if the client disconnects, so that the work behind it ends.
        on_end: always called when the answer is over.
        write_timeout_s: how long a client may read nothing before it counts as disconnected.
        farewell: the last event if the server shuts down first.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        *,
        on_end: Callable[[], None],
        write_timeout_s: float,
        farewell: bytes,
    ) -> None:
        self._events, self._on_end, self._write_timeout_s = events, [on_end], write_timeout_s
        self._farewell, self._begun = farewell, False

    def at_end(self, call: Callable[[], None]) -> None:
        """Register another callback that is always called when the answer is over."""
        self._on_end.append(call)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, or stop if the client disconnects."""
        sending, leaving = asyncio.ensure_future(self._send(send)), asyncio.ensure_future(gone(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if sending.done() and (trouble := sending.exception()) is not None:
                if not isinstance(trouble, TimeoutError | OSError):
                    raise trouble
                log.info("a client stopped reading or disconnected: %r", trouble)
        except asyncio.CancelledError:  # only a server shutdown cancels an answer
            await _end(sending)
            if not self._begun:
                raise
            with contextlib.suppress(TimeoutError, OSError):
                async with asyncio.timeout(FAREWELL_S):
                    await send({"type": "http.response.body", "body": self._farewell, "more_body": False})
        finally:
            await _end(leaving)
            await _end(sending)
            for call in self._on_end:
                call()

    async def _send(self, send: Send) -> None:
        try:
            await self._put(send, {"type": "http.response.start", "status": 200, "headers": [*_HEADERS]})
            self._begun = True
            async for data in self._events:
                await self._put(send, {"type": "http.response.body", "body": data, "more_body": True})
            await self._put(send, {"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            close: Callable[[], Awaitable[None]] | None = getattr(self._events, "aclose", None)
            if close is not None:
                await close()

    async def _put(self, send: Send, message: dict[str, Any]) -> None:
        async with asyncio.timeout(self._write_timeout_s):
            await send(message)
