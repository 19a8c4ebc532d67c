"""JSON over HTTP to one inference server: every failure is either a lost server or a refused request.

httpx shields its cleanup from cancellation by anyio, but not from `Task.cancel()`: a request cancelled while it
closes idle connections leaves the rest of them open forever, and a client closed while a request connects never
learns about that connection. In `Transport` each request and each cleanup runs in a separate task, which anyio
cancels.
"""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from typing import Any

import anyio
import httpx

from agentrl.async_tasks import spawn
from agentrl.config.address import without_credentials
from agentrl.errors import EngineError

SDK_LIMITS = httpx.Limits(max_connections=1000, max_keepalive_connections=100, keepalive_expiry=5.0)
"""The limits of the official `openai` client."""


class ServerLost(EngineError):
    """The server was unreachable, disconnected or failed: its requests can be sent to another server.

    `status` is the HTTP status, 5xx or 429 (too many requests), if it did answer.
    """

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status

    def __reduce__(self) -> tuple[type[ServerLost], tuple[str, int | None]]:
        return type(self), (str(self), self.status)


class ServerRestarted(ServerLost):
    """The server answers, but not with the weights that it was sent: it has been started again in the meantime."""


class ServerTaken(EngineError):
    """Another run has sent its weights to the server."""


UNNAMED = "default"
"""The label that servers use for weights that arrived without one."""
_OF_A_RUN = re.compile(r"(\d+)@([0-9a-f]{12})")
"""The labels that `WeightLabels.name` gives. A server may have any text (`--weight-version model@main`)."""


class WeightLabels:
    """Labels that tell the weights this connection sent to a server from another run's.

    A version number alone is not enough, because every run starts at 0.
    """

    def __init__(self, url: str) -> None:
        """Make the labels of one connection to the server at `url`."""
        self._url, self._own = url, uuid.uuid4().hex[:12]

    def name(self, version: int) -> str:
        """The label of our weights of this version."""
        return f"{version}@{self._own}"

    def refuse_others(self, label: object) -> None:
        """Raise ServerTaken if another run set the label."""
        other = _OF_A_RUN.fullmatch(str(label))
        if other and other[2] != self._own:
            raise ServerTaken(
                f"{self._url}: another run has sent its weights to this server (version {other[1]} there): give "
                "each run, `agentrl eval` and `agentrl serve` separate servers in engine.server.urls (with "
                "engine.sync lora, also restart this one, which no longer has the weights below the adapters)"
            )

    def version(self, label: object, *, sent: bool) -> int:
        """The version in a label, whether we set it or the server did.

        Args:
            sent: we have sent weights, so a label that the server set means that it has restarted since.

        Raises:
            ServerTaken: another run set the label.
            ServerRestarted: the server has restarted.
            ValueError: the label contains no version.
        """
        self.refuse_others(label)
        if ours := _OF_A_RUN.fullmatch(str(label)):
            return int(ours[1])
        if sent or label == UNNAMED:
            raise ServerRestarted(
                f"{self._url}: answers with weights that have no version of this run ({label!s:.40})"
            )
        return int(str(label))


class ServerRefused(EngineError):
    """The server rejected the request: retrying, here or on another server, would not help.

    `status` is the HTTP status: 3xx, 4xx, or 200 if the rejection is in the body.
    """

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status

    def __reduce__(self) -> tuple[type[ServerRefused], tuple[str, int]]:
        return type(self), (str(self), self.status)


class HttpServer:
    """One server; `url` is its address without credentials. Safe to call from many tasks of one event loop."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        """Connect lazily.

        Args:
            url: `http://host:port`.
            timeout_s: default time limit of an answer.
        """
        url = url.rstrip("/")
        self.url = without_credentials(url)
        self._timeout_s = timeout_s
        self._client = httpx.AsyncClient(
            base_url=url,
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            # Servers close idle connections after 5 s; a request sent while one is closing is lost.
            transport=Transport(
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0)
            ),
            trust_env=False,  # the machine's proxy settings do not apply to servers of the run
        )

    async def post(
        self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> Any:
        """Return the server's JSON answer, or None if it has none.

        Raises:
            ServerLost: no answer, 5xx, or 429.
            ServerRefused: another 4xx, with the server's message, or a redirect.
            EngineError: the answer is not JSON.
        """
        return await self._ask("POST", path, body, timeout_s)

    async def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        """Send a GET request; otherwise like `post`."""
        return await self._ask("GET", path, None, timeout_s)

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """Yield the JSON of each server-sent event in the answer, up to `[DONE]`; close it to abort.

        Raises:
            ServerLost: no answer, one that ends without `[DONE]`, 5xx, or 429.
            ServerRefused: another 4xx, with the server's message, or a redirect.
            EngineError: an event is not JSON.
        """
        self._check_open(path)
        try:
            async with self._client.stream("POST", path, json=dict(body)) as answer:
                if not answer.is_success:
                    await answer.aread()
                    raise self._refused(path, answer)
                async for line in _lines(answer):
                    if not line.startswith("data:"):
                        continue
                    data = line.removeprefix("data:").strip()
                    if data == "[DONE]":
                        return
                    try:
                        event = json.loads(data)
                    except (ValueError, RecursionError):
                        raise EngineError(f"{self.url}{path}: the event is not JSON: {data[:200]}") from None
                    yield event
        except httpx.TimeoutException as e:
            raise ServerLost(f"{self.url}{path}: no event within {self._timeout_s:g} s") from e
        except httpx.RequestError as e:
            raise ServerLost(f"{self.url}{path}: {type(e).__name__}: {e}") from e
        raise ServerLost(f"{self.url}{path}: the stream broke off")

    async def close(self) -> None:
        """Close the connections; requests in flight are lost. Idempotent."""
        await self._client.aclose()

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float | None) -> Any:
        content = json.dumps(body, separators=(",", ":")).encode() if body is not None else None
        limit_s = timeout_s or self._timeout_s
        self._check_open(path)
        try:
            answer = await self._client.request(
                method,
                path,
                content=content,
                headers={"content-type": "application/json"} if content else None,
                timeout=httpx.Timeout(limit_s, connect=10.0),
            )
        except httpx.TimeoutException as e:
            raise ServerLost(f"{self.url}{path}: no answer within {limit_s:g} s ({type(e).__name__})") from e
        except httpx.RequestError as e:
            raise ServerLost(f"{self.url}{path}: {type(e).__name__}: {e}") from e
        if not answer.is_success:
            raise self._refused(path, answer)
        if not answer.content:
            return None
        try:
            return json.loads(answer.content)
        except (ValueError, RecursionError):
            if "json" not in answer.headers.get("content-type", ""):
                return answer.text
            raise EngineError(f"{self.url}{path}: the answer is not JSON: {answer.text[:200]!r}") from None

    def _check_open(self, path: str) -> None:
        if self._client.is_closed:
            raise ServerLost(f"{self.url}{path}: the client has been closed")

    def _refused(self, path: str, answer: httpx.Response) -> EngineError:
        status = answer.status_code
        said = " ".join(answer.text.split())[:300]  # the page of a proxy has lines
        if answer.is_redirect:
            said = f"redirects to {answer.headers.get('location', '')[:200]!r}; give the address behind it"
        kind = ServerLost if status >= 500 or status == 429 else ServerRefused
        return kind(f"{self.url}{path}: HTTP {status}: {said}", status)


async def _lines(answer: httpx.Response) -> AsyncIterator[str]:
    """The lines of an event stream. `aiter_lines` also ends a line at U+2028, which JSON text may contain."""
    begun: list[str] = []
    async for text in answer.aiter_text():
        end, *lines = text.split("\n")
        begun.append(end)
        for line in lines:
            yield "".join(begun)
            begun = [line]
    yield "".join(begun)


class Transport(httpx.AsyncBaseTransport):
    """A transport for an `httpx.AsyncClient` whose callers may be cancelled at any time. For one event loop."""

    def __init__(self, *, limits: httpx.Limits, verify: bool = True) -> None:
        """Connect lazily.

        Args:
            limits: maximum number of connections, and how long they are kept.
            verify: whether to load certificates; False saves time without TLS.
        """
        self._inner = httpx.AsyncHTTPTransport(verify=verify, limits=limits)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._asking: set[anyio.CancelScope] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request.

        Raises:
            httpx.ReadError: the client was closed in the meantime.
            httpx.TransportError: as raised by httpx.
        """
        scope = anyio.CancelScope()

        async def ask() -> httpx.Response | None:
            with scope:
                return await self._inner.handle_async_request(request)
            return None

        self._asking.add(scope)
        task = spawn(self._tasks, ask())
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
            answer.status_code, headers=answer.headers, stream=_Stream(stream, self), extensions=answer.extensions
        )

    async def aclose(self) -> None:
        """Cancel all requests, then close all connections."""
        for scope in list(self._asking):
            scope.cancel()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._inner.aclose()

    async def clean_up(self, work: Coroutine[Any, Any, None]) -> None:
        """Await a task that continues even if its caller is cancelled."""
        await asyncio.shield(spawn(self._tasks, work))

    def _drop(self, task: asyncio.Task[httpx.Response | None]) -> None:
        """Discard an answer or error that nobody waits for."""
        if not task.cancelled() and task.exception() is None and (answer := task.result()) is not None:
            spawn(self._tasks, answer.aclose())


class _Stream(httpx.AsyncByteStream):
    """A response body whose end triggers cleanup."""

    def __init__(self, inner: httpx.AsyncByteStream, transport: Transport) -> None:
        self._inner, self._transport = inner, transport

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._inner:
            yield part

    async def aclose(self) -> None:
        await self._transport.clean_up(self._inner.aclose())
