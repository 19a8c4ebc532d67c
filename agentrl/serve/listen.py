"""Serve the application on a port: for the CLI, for tests, and for a recorder that runs next to a trainer."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import json
import logging
import select
import socket
from collections.abc import AsyncIterator, Generator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from agentrl.errors import ConfigError
from agentrl.serve.api_errors import ApiError

SHUTDOWN_S = 5
"""Seconds that answers may take to finish when the server stops."""
MAX_HEAD_BYTES = 65_536
"""Limit of a request's head, and of anything else in a request that is not its body."""
LOOK_S = 0.05
"""How often to check whether a client that sends no more is still there."""
MOST_LOOKS = 128
"""Most checks between two interim responses to it: the first are close together."""


_CLIENTS = logging.getLogger("agentrl.serve.clients")
_CLIENTS.setLevel(logging.ERROR)  # errors of clients go to the clients, not to the server's terminal


class _Server(uvicorn.Server):
    """A server that leaves the process's signals alone: its caller decides when it stops."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _Protocol(HttpToolsProtocol):
    """One connection: request heads must arrive in time, and invalid requests are answered in our error format.

    Connections that idle between requests are handled by uvicorn (`timeout_keep_alive`), bodies by the
    application; the rest of a body that has already been answered has the same time limit as a head.
    """

    def __init__(
        self, *args: Any, head_timeout_s: float, max_connections: int | None = None, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._head_timeout_s, self._max_connections = head_timeout_s, max_connections
        self.logger = _CLIENTS
        self._slow: asyncio.TimerHandle | None = None
        self._half_closed = False
        self._answered: RequestResponseCycle | None = None
        """The request that is being answered, or was last; `cycle` is the one that arrived last."""
        self._in_head = False
        self._unused = 0
        """Bytes received since the last part of a request that was complete."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._max_connections is not None and len(self.connections) > self._max_connections:
            transport.abort()
            return
        self._slow = self.loop.call_later(self._head_timeout_s, self._too_slow)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._unused += len(data)
        super().data_received(data)
        if self._unused > MAX_HEAD_BYTES:
            text = f"The head of the request is larger than {MAX_HEAD_BYTES} bytes."
            self._refuse(ApiError(431, text, code="head_too_large"))
        self._watch()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)
        else:  # a trailer, which nobody reads
            self._unused = 0

    def on_headers_complete(self) -> None:
        if self.parser.get_http_version() != "1.0" and sum(name == b"host" for name, _ in self.headers) != 1:
            raise ValueError("a request needs one Host header")  # answered as any other invalid request
        super().on_headers_complete()
        self._in_head, self._unused = False, 0

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._unused = 0

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._unused = 0

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Answer a client that has closed only its sending side, as `nc -N` and some proxies do.

        A client that has closed its socket looks the same, and only what is sent to it shows the difference: hence
        an interim response, which clients skip.
        """
        if not self._answering or self.cycle.more_body:
            return None
        self._half_closed = True
        self._look(1)
        return True

    def _look(self, number: int) -> None:
        """Close the connection if the other side is gone; repeated until the answer is complete."""
        if self.transport.is_closing():
            return
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), 0)
        if poll.poll(0):  # hung up, or reset
            self.transport.abort()
            return
        due = number & (number - 1) == 0 or number % MOST_LOOKS == 0  # after 1, 2, 4, ... checks
        now = self._answered
        if due and now is not None and not now.response_started and now.scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.loop.call_later(LOOK_S, self._look, number + 1)

    @property
    def _answering(self) -> bool:
        return self._answered is not None and not self._answered.response_complete

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._half_closed and not self._answering:
            self.transport.close()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._answered is not None and self._answering:  # uvicorn tells only the request that arrived last
            self._answered.disconnected = True
            self._answered.message_event.set()
        self._stop_watching()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, msg, code="invalid_http"))

    def _watch(self) -> None:
        rest_of_body = self.cycle is not None and self.cycle.more_body
        if self._answering or not (self._in_head or self._unused or rest_of_body):
            self._stop_watching()
        elif self._slow is None:
            self._slow = self.loop.call_later(self._head_timeout_s, self._too_slow)

    def _stop_watching(self) -> None:
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None

    def _too_slow(self) -> None:
        if self.transport.is_closing():
            return
        if self._in_head:
            text = f"The head of the request took longer than {self._head_timeout_s:g} s."
            self._refuse(ApiError(408, text, code="request_timeout"))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer a request with an error without the application, and close the connection.

        While an earlier request is being answered, the connection is closed after its answer instead.
        """
        now = self._answered
        if now is not None and self._answering and not now.more_body:
            now.keep_alive = False
            self.pipeline.clear()
            self.flow.pause_reading()
            return
        if now is not None and self._answering and now.response_started:
            self.transport.close()
            return
        body = json.dumps(error.body()).encode()
        headers = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[error.status] + headers.encode() + body)
        self.transport.close()


@contextlib.asynccontextmanager
async def running(
    app: ASGIApp,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    head_timeout_s: float = 30.0,
    websockets: bool = False,
) -> AsyncIterator[str]:
    """Serve `app` during the block; yields the address, http://HOST:PORT. Port 0 selects a free port.

    Args:
        head_timeout_s: time limit from connecting to the end of a request's head.
        websockets: whether connections may be upgraded to WebSockets.

    Raises:
        ConfigError: the port is not available.
    """
    listener = _listen(host, port)
    async with serving(app, listener, head_timeout_s=head_timeout_s, websockets=websockets):
        bound = listener.getsockname()
        shown = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
        yield f"http://{shown}:{bound[1]}"


@contextlib.asynccontextmanager
async def serving(
    app: ASGIApp,
    listener: socket.socket,
    *,
    head_timeout_s: float = 30.0,
    websockets: bool = False,
    max_connections: int | None = None,
) -> AsyncIterator[None]:
    """Serve `app` on a listening socket during the block, and close the socket.

    Args:
        head_timeout_s: time limit from connecting to the end of a request's head.
        websockets: whether connections may be upgraded to WebSockets.
        max_connections: connections beyond this number are closed at once; None: no limit.
    """
    protocol = functools.partial(_Protocol, head_timeout_s=head_timeout_s, max_connections=max_connections)
    config = uvicorn.Config(
        app,
        http=protocol,  # type: ignore[arg-type]
        proxy_headers=False,
        lifespan="off",
        ws="websockets-sansio" if websockets else "none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    server = _Server(config)
    task = asyncio.ensure_future(server.serve([listener]))
    try:
        while not server.started and not task.done():  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.005)
        if task.done():
            task.result()
        yield
    finally:
        server.should_exit = True
        await task
        listener.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1024)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
    except OSError as e:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {e.strerror or e}; give another --host or --port"
        ) from e
    return listener


def is_loopback(host: str) -> bool:
    """Whether the address can be reached only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
