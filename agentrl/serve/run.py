"""The application on a port: for the command, for tests, and for a recorder that stands beside a trainer."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import AsyncIterator, Generator

import uvicorn
from starlette.types import ASGIApp

from agentrl.errors import ConfigError

SHUTDOWN_S = 5
"""How long answers may take to end when the server stops."""


class _Server(uvicorn.Server):
    """Leaves the process's signals alone: who runs it decides when it ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@contextlib.asynccontextmanager
async def running(app: ASGIApp, *, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve `app` while the block runs; gives the address, http://HOST:PORT. Port 0 takes a free one.

    Raises:
        ConfigError: the port cannot be had.
    """
    listener = _listen(host, port)
    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    server = _Server(config)
    serving = asyncio.ensure_future(server.serve([listener]))
    try:
        while not server.started and not serving.done():  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.005)
        if serving.done():
            serving.result()
        bound = listener.getsockname()
        shown = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
        yield f"http://{shown}:{bound[1]}"
    finally:
        server.should_exit = True
        await serving
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
    """Whether only this machine can reach what listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
