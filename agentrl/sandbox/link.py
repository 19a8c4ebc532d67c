"""The host end of a supervisor's stream: numbered orders go out, and each answer resolves its future."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from typing import Any, cast

from agentrl.errors import SandboxError
from agentrl.sandbox.errors import SandboxDied, SandboxUnavailable
from agentrl.sandbox.inside import frames

Answer = tuple[dict[str, Any], bytes]


class _Parts:
    """The part of a streamed answer received so far, and how much more may arrive."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.parts: list[bytes] = []


class StreamLink(asyncio.Protocol):
    """Exchange frames over one asyncio transport."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._frames = frames.FrameReader()
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._parts: dict[int, _Parts] = {}
        self._count = 0
        self._lost: SandboxError | None = None
        self.failed_here = False
        """Whether this side broke it, because of what the other side sent or did not send."""
        self._tap: tuple[Callable[[bytes], None], Callable[[], None]] | None = None
        self._hello: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()

    @classmethod
    async def over(cls, sock: socket.socket, name: str) -> StreamLink:
        """Create a link over a connected socket and take ownership of it."""
        sock.setblocking(False)
        _, link = await asyncio.get_running_loop().create_connection(lambda: cls(name), sock=sock)
        return link

    @property
    def is_up(self) -> bool:
        """Whether the other side can still be there."""
        return self._lost is None

    async def hello(self) -> Mapping[str, Any]:
        """Wait for the supervisor's first message."""
        said = await asyncio.shield(self._hello)
        if not said.get("hello"):
            raise SandboxUnavailable(f"sandbox {self.name} could not be built: {said.get('error')}")
        if said["hello"] != frames.VERSION:
            raise SandboxUnavailable(
                f"sandbox {self.name} speaks version {said['hello']} of the protocol, this program "
                f"{frames.VERSION}: install the same release of agentrl on both sides"
            )
        return said

    def send(self, header: dict[str, Any], payload: bytes = b"") -> asyncio.Future[Answer]:
        """Send an order and return a future for its answer."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        if self._lost is not None or self._transport is None:
            future.set_exception(self._lost or SandboxDied(f"sandbox {self.name} is not connected"))
            return future
        self._count += 1
        header["id"] = self._count
        self._waiting[self._count] = future
        if header.get("stream"):
            self._parts[self._count] = _Parts(header["stream"])
        self._transport.write(frames.pack(header, payload))
        return future

    def hand_over(self, sink: Callable[[bytes], None], lost: Callable[[], None]) -> Callable[[bytes], None]:
        """Forward all further bytes to `sink` and the end to `lost`; return a function that writes to the
        supervisor."""
        if self._lost is not None or self._transport is None:
            raise self._lost or SandboxDied(f"sandbox {self.name} is not connected")
        self._tap = sink, lost
        return self._transport.write

    def fail(self, error: SandboxError) -> None:
        """Break the link, failing all waiters with this error; the supervisor then ends everything."""
        self.failed_here = self.failed_here or self.is_up
        self._fail(error)
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Break the link."""
        self.fail(SandboxDied(f"sandbox {self.name} has been closed"))

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio when the connection is made."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Split into frames and dispatch them to the waiters."""
        if self._tap is not None:
            self._tap[0](data)
            return
        try:
            for header, payload in self._frames.feed(data):
                self._take(header, payload)
        except (ValueError, TypeError, RecursionError) as error:
            self.fail(SandboxDied(f"sandbox {self.name} sent an invalid frame: {error}"))

    def _take(self, header: dict[str, Any], payload: bytes) -> None:
        """Dispatch a frame to its waiter.

        Raises:
            ValueError: nothing is waiting for it, or it is larger than requested.
        """
        if "hello" in header:
            if not self._hello.done():
                self._hello.set_result(header)
            return
        number = header.get("id", 0)
        if "part" in header:
            came = self._parts.get(number)
            if came is None:
                raise ValueError(f"a part of answer {number}, of which none is awaited")
            came.left -= len(payload)
            if came.left < 0:
                raise ValueError(f"more parts of answer {number} than were requested")
            came.parts.append(payload)
            return
        came = self._parts.pop(number, None)
        header["streamed"] = b"".join(came.parts) if came is not None else b""
        future = self._waiting.pop(number, None)
        if future is not None and not future.done():
            future.set_result((header, payload))

    def eof_received(self) -> bool:
        """Called by asyncio when the supervisor is gone."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every waiter that the sandbox has died."""
        self._fail(SandboxDied(f"sandbox {self.name} died: " + (str(exc) if exc else "its supervisor exited")))

    def _fail(self, error: SandboxError) -> None:
        if self._lost is None:
            self._lost = error
            if self._tap is not None:
                self._tap[1]()
        if not self._hello.done():
            self._hello.set_result({"hello": 0, "error": "its supervisor ended before its first word"})
        for future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(self._lost)
