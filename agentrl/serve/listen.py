"""Serve the application on a port: for the CLI, for tests, and for a recorder that runs next to a trainer."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import ipaddress
import json
import logging
import select
import socket
from collections.abc import AsyncIterator, Generator
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from agentrl.errors import ConfigError
from agentrl.serve.api_errors import ApiError

SHUTDOWN_S = 5
"""Seconds that answers may take to finish when the server stops."""
LOOK_S = 0.05
"""How often to check whether a client that sends no more is still there."""
MOST_LOOKS = 128
"""Most checks between two interim responses to it: the first are close together."""
MOST_AHEAD = 1 << 16
"""Bytes of later requests that are received while one is answered."""


_CLIENTS = logging.getLogger("agentrl.serve.clients")
_CLIENTS.setLevel(logging.ERROR)  # errors of clients go to the clients, not to the server's terminal


class _Server(uvicorn.Server):
    """A server that leaves the process's signals alone: its caller decides when it stops."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _Protocol(H11Protocol):
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

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._max_connections is not None and len(self.connections) > self._max_connections:
            transport.abort()
            return
        self._slow = self.loop.call_later(self._head_timeout_s, self._too_slow)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) < MOST_AHEAD:
            self.flow.resume_reading()  # the next request paused it, and then nobody notices that a client leaves
        self._watch()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Answer a client that has closed only its sending side, as `nc -N` and some proxies do.

        A client that has closed its socket looks the same, and only what is sent to it shows the difference: hence
        an interim response, which clients skip.
        """
        if self.cycle is None or self.cycle.response_complete or self.cycle.more_body:
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
        if due and not self.cycle.response_started and self.cycle.scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.loop.call_later(LOOK_S, self._look, number + 1)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._half_closed and (self.cycle is None or self.cycle.response_complete):
            self.transport.close()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_watching()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, msg, code="invalid_http"))

    def _watch(self) -> None:
        ours, theirs = self.conn.our_state, self.conn.their_state
        half = theirs is h11.IDLE and bool(self.conn.trailing_data[0])
        if not (half or (ours is h11.DONE and theirs is h11.SEND_BODY)):
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
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            text = f"The head of the request took longer than {self._head_timeout_s:g} s."
            self._refuse(ApiError(408, text, code="request_timeout"))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer a request that never reached the application, and close the connection."""
        body = json.dumps(error.body()).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        for event in (h11.Response(status_code=error.status, headers=headers), h11.Data(body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


@contextlib.asynccontextmanager
async def running(
    app: ASGIApp, *, host: str = "127.0.0.1", port: int = 0, head_timeout_s: float = 30.0, websockets: bool = False
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
        await asyncio.wait({task}, timeout=SHUTDOWN_S)
        if task.done():
            task.result()
        else:  # cut off answers that are still in progress; they report it to their clients
            rest = {task, *server.server_state.tasks}
            for one in rest:
                one.cancel()
            await asyncio.wait(rest, timeout=1)
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
        other = "--port" if e.errno == errno.EADDRINUSE else "--host or --port"
        raise ConfigError(f"cannot listen on {host}:{port}: {e.strerror or e}; give another {other}") from e
    return listener


def is_loopback(host: str) -> bool:
    """Whether what listens on the address can be reached only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
