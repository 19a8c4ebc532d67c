"""HTTP connections that outlive the cancelling of whoever asked, and none of which is forgotten.

httpx shields its clean-up from cancellation by anyio, not from `Task.cancel()`: a request that is cancelled while
it closes connections that have been idle too long leaves the rest of them open for ever; a client that is closed
while a request connects knows nothing of that connection. Here each request and each clean-up has a task of its
own, cancelled in anyio's way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import anyio
import httpx

SDK_LIMITS = httpx.Limits(max_connections=1000, max_keepalive_connections=100, keepalive_expiry=5.0)
"""Those of the official `openai` client."""


class Transport(httpx.AsyncBaseTransport):
    """For an `httpx.AsyncClient` whose callers may be cancelled at any time. Of one event loop."""

    def __init__(self, *, limits: httpx.Limits, verify: bool = True) -> None:
        """Connect lazily.

        Args:
            limits: how many connections, and for how long they are kept.
            verify: whether certificates are read; False saves the time where there is no TLS.
        """
        self._inner = httpx.AsyncHTTPTransport(verify=verify, limits=limits)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._asking: set[anyio.CancelScope] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Ask.

        Raises:
            httpx.ReadError: the client has been closed meanwhile.
            httpx.TransportError: as of httpx.
        """
        scope = anyio.CancelScope()

        async def ask() -> httpx.Response | None:
            with scope:
                return await self._inner.handle_async_request(request)
            return None

        self._asking.add(scope)
        task = self._apart(ask())
        try:
            answer = await asyncio.shield(task)
        except asyncio.CancelledError:
            scope.cancel()
            task.add_done_callback(self._drop)
            raise
        finally:
            self._asking.discard(scope)
        if answer is None:
            raise httpx.ReadError("the client has been closed", request=request)
        stream = answer.stream
        assert isinstance(stream, httpx.AsyncByteStream)
        return httpx.Response(
            answer.status_code,
            headers=answer.headers,
            stream=_Stream(stream, self),
            extensions=answer.extensions,
        )

    async def aclose(self) -> None:
        """End what is asked, then drop all connections."""
        for scope in list(self._asking):
            scope.cancel()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._inner.aclose()

    async def clean_up(self, work: Coroutine[Any, Any, None]) -> None:
        """Await what goes on even where nobody awaits it any more."""
        await asyncio.shield(self._apart(work))

    def _apart(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _drop(self, task: asyncio.Task[httpx.Response | None]) -> None:
        """An answer, or an error, that nobody waits for."""
        if not task.cancelled() and task.exception() is None and (answer := task.result()) is not None:
            self._apart(answer.aclose())


class _Stream(httpx.AsyncByteStream):
    """The body of an answer, whose end is a clean-up."""

    def __init__(self, inner: httpx.AsyncByteStream, transport: Transport) -> None:
        self._inner, self._transport = inner, transport

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._inner:
            yield part

    async def aclose(self) -> None:
        await self._transport.clean_up(self._inner.aclose())
