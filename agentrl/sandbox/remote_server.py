"""Share this machine's sandboxes over HTTP: one request leases a box, and the connection becomes its link.

    GET  /v1/health              what this server offers
    POST /v1/lease               body: the spec as JSON; answered with 101, then supervisor frames both ways
    GET  /v1/ended/LEASE         whether the sandbox of that lease has ended, and the outside cause if any

Every request carries `Authorization: Bearer TOKEN`. The lease ends with the connection, so a client that dies
leaves nothing behind. There is no encryption: bind to loopback or to a private network.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from agentrl.errors import AgentRLError, ConfigError
from agentrl.sandbox.box import Box
from agentrl.sandbox.contract import Sandbox, SandboxLimits
from agentrl.sandbox.inside import frames
from agentrl.sandbox.link import StreamLink
from agentrl.sandbox.pool import SandboxPool

log = logging.getLogger(__name__)

MAX_BODY = 1 << 16
REQUEST_TIMEOUT_S = 30.0
UNREADABLE = (
    ValueError, TimeoutError, RecursionError, ConnectionError,
    asyncio.IncompleteReadError, asyncio.LimitOverrunError,
)  # fmt: skip
MAX_SPECS = 32
MAX_ENDED = 10_000
"""Number of ended leases to remember."""
LOCAL_ONLY = (
    "backend", "url", "token_file", "run_as", "python", "readonly", "writable", "trusted", "image", "runtime",
    "on_death", "death_reward",
)  # fmt: skip
"""Settings a client cannot request: the server's spec decides them, or they concern only the client."""

BOUNDS = (*(f.name for f in fields(SandboxLimits)), "ttl_s")
"""Settings a client can request up to the value in the server's spec."""
UNBOUNDED = ("cpu_s", "cpus")
"""Limits that may be None. A client that sets none gets the server's value."""


def limits_from(given: Sequence[str]) -> dict[str, Any]:
    """Parse `--limit NAME=VALUE` options into fields of a spec.

    Raises:
        ConfigError: the limit does not exist, or its value is invalid.
    """
    found: dict[str, object] = {}
    for text in given:
        name, _, value = text.partition("=")
        if name not in (*BOUNDS, "network"):
            raise ConfigError(f"--limit {text!r}: known are {', '.join(BOUNDS)} and network")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
        if type(found[name]) not in ((bool,) if name == "network" else (int, float)):
            raise ConfigError(f"--limit {text!r}: must look like memory_mb=1024 or network=true")
    return found


def read_token(path: str) -> str:
    """Read the token from a file.

    Raises:
        ConfigError: the file has no token, or the token is too short.
    """
    try:
        token = Path(path).read_text().strip()
    except OSError as error:
        raise ConfigError(f"sandbox token file {path!r} cannot be read: {error.strerror}") from error
    if len(token) < 16:
        raise ConfigError(f"sandbox token file {path!r}: the token needs at least 16 characters, got {len(token)}")
    return token


def to_wire(spec: Sandbox) -> dict[str, Any]:
    """Return the lease request for a client's spec."""
    return {f.name: getattr(spec, f.name) for f in fields(Sandbox) if f.name not in LOCAL_ONLY}


def from_wire(asked: Mapping[str, object], own: Sandbox) -> Sandbox:
    """Merge a client's request into the server's spec.

    Raises:
        ConfigError: the request contains any other setting.
    """
    known = {f.name for f in fields(Sandbox)} - set(LOCAL_ONLY)
    if not isinstance(asked, Mapping):
        raise ConfigError("lease: the spec must be a JSON object")
    unknown = sorted(set(asked) - known)
    if unknown:
        raise ConfigError(f"lease: {unknown[0]!r} cannot be requested; known: {', '.join(sorted(known))}")
    plain = {name: _plain(value) for name, value in asked.items()}
    for name in BOUNDS:
        plain[name] = _within(name, plain.get(name, getattr(own, name)), getattr(own, name))
    if plain.get("network", False) is not False and own.network is not True:
        raise ConfigError("lease: network=True, and this server gives none: start it with --limit network=true")
    try:
        for path in plain.get("python_path", ()):
            if path not in own.python_path:
                raise ConfigError(f"lease: python_path has {path!r}, which this server does not offer")
        env = dict(plain.get("env", ()))
        if not all(type(text) is str for pair in env.items() for text in pair):
            raise TypeError("env is made of pairs of texts")
        mine = dict(own.env)
        changed = [name for name, value in env.items() if mine.get(name, value) != value]
        if changed:
            raise ConfigError(f"lease: the variable {changed[0]} is this server's, and cannot be another")
        plain["env"] = tuple((mine | env).items())
        plain["require"] = own.require  # The client checks its own promises, and may not lower the server's.
        return replace(own, **plain)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"lease: {error}") from error


def _within(name: str, asked: Any, most: float | None) -> object:
    """Return the limit that a client requests, or the server's own if it requests none.

    Raises:
        ConfigError: it is not a number, or exceeds the server's limit.
    """
    if asked is None and name in UNBOUNDED:
        return most
    if type(asked) not in (int, float) or not asked >= 0:
        raise ConfigError(f"lease: {name}={asked!r} is not a valid limit")
    if most is not None and asked > most:
        raise ConfigError(
            f"lease: {name}={asked!r} is more than this server's {most!r}: ask for at most that, or start the "
            f"server with --limit {name}={asked!r}"
        )
    return asked


def _plain(value: object) -> Any:
    """Convert JSON lists back to the tuples of a spec."""
    return tuple(_plain(item) for item in value) if isinstance(value, list) else value


class SandboxServer:
    """Serve leases from pools of one back-end, with one pool per requested spec."""

    def __init__(self, spec: Sandbox, token: str, *, min_idle: int = 2, max_total: int = 256) -> None:
        self.spec, self._token = spec, token
        self.min_idle, self.max_total = min_idle, max_total
        self._pools: dict[Sandbox, SandboxPool] = {}
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._ends: dict[str, tuple[bool, str | None]] = {}
        """For recent leases: whether the sandbox has ended, and the outside cause if any."""

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Test the back-end, start listening, and return the URL."""
        await self._pool(self.spec).open()
        self._server = await asyncio.start_server(self._connected, host, port)
        name, number = self._server.sockets[0].getsockname()[:2]
        return f"http://{name}:{number}"

    async def close(self) -> None:
        """End all leases and stop; idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))
        self._pools.clear()

    def _pool(self, spec: Sandbox) -> SandboxPool:
        pool = self._pools.get(spec)
        if pool is None:
            if len(self._pools) >= MAX_SPECS:
                raise ConfigError(f"lease: this server holds pools for {MAX_SPECS} different specs already")
            pool = SandboxPool(spec, min_idle=self.min_idle, max_total=self.max_total)
            self._pools[spec] = pool
        return pool

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                method, path, headers = await _read_head(reader)
                length = int(headers.get("content-length", "0"))
                body = await reader.readexactly(length) if 0 < length <= MAX_BODY else b""
            given = headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), self._token.encode()):
                await _answer(writer, 401, {"error": "the token is missing or wrong"})
            elif (method, path) == ("GET", "/v1/health"):
                await _answer(writer, 200, self.health())
            elif (method, path) == ("POST", "/v1/lease"):
                await self._lease(json.loads(body), reader, writer)
            elif method == "GET" and (end := self._ends.get(path.removeprefix("/v1/ended/"))) is not None:
                await _answer(writer, 200, {"ended": end[0], "cause": end[1]})
            else:
                await _answer(writer, 404, {"error": f"no such thing: {method} {path}"})
        except UNREADABLE as error:
            log.info("sandbox server: a request could not be read: %r", error)
        finally:
            self._connections.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def health(self) -> dict[str, object]:
        """Report the back-end, its capabilities and its load."""
        capabilities = self._pools[self.spec].capabilities
        kept = sorted(capabilities.kept) if capabilities is not None else []
        leased = sum(pool.metrics()["leased"] for pool in self._pools.values())
        return {"backend": self.spec.backend, "kept": kept, "leased": leased, "max_total": self.max_total}

    async def _lease(
        self, asked: Mapping[str, object], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            pool = self._pool(from_wire(asked, self.spec))
            box = await pool.acquire()
        except AgentRLError as error:
            status = 400 if isinstance(error, ConfigError) else 503
            await _answer(writer, status, {"error": f"{type(error).__name__}: {error}"})
            return
        lease = secrets.token_hex(16)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(box.spec.ttl_s):  # whatever the client sends to the supervisor
                    await self._relay(box, lease, reader, writer)
                    lease = ""
            if lease:  # its time was over, which nothing outside has caused
                self._ends[lease] = (True, None)
        finally:
            await pool.release(box)

    async def _relay(
        self, box: Box, lease: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Relay bytes in both directions until one side closes."""
        link = box._link
        if not isinstance(link, StreamLink):
            raise ConfigError(f"sandbox backend {self.spec.backend!r} cannot be served: it has no stream")
        task = asyncio.current_task()
        assert task is not None
        ended = asyncio.Event()
        self._ends[lease] = (False, None)
        while len(self._ends) > MAX_ENDED:
            del self._ends[next(iter(self._ends))]
        send = link.hand_over(writer.write, ended.set)
        head = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: agentrl-frames\r\n\r\n"
        writer.write(head.encode() + frames.pack({"hello": 1, "home": box.home, **box.facts, "lease": lease}))

        async def forward() -> None:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(1 << 16):
                    send(data)
            ended.set()

        forwarding = asyncio.create_task(forward())
        try:
            await ended.wait()
            if not link.is_up:  # otherwise the client has disconnected
                cause = await box._process.cause() if box._process is not None else None
                self._ends[lease] = (True, cause)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
        finally:
            forwarding.cancel()
            await asyncio.gather(forwarding, return_exceptions=True)


async def _read_head(reader: asyncio.StreamReader) -> tuple[str, str, dict[str, str]]:
    """Return (method, path, lower-case headers) of a request."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = lines[0].split(" ", 2)
    headers = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip().lower()] = value.strip()
    return method, path, headers


async def _answer(writer: asyncio.StreamWriter, status: int, body: Mapping[str, object]) -> None:
    text = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} -\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n"
    writer.write(f"{head}Connection: close\r\n\r\n".encode() + text)
    await writer.drain()


async def serve(
    spec: Sandbox,
    token_file: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8750,
    min_idle: int = 2,
    max_total: int = 256,
) -> None:
    """Serve until cancelled. Logs the address."""
    server = SandboxServer(spec, read_token(token_file), min_idle=min_idle, max_total=max_total)
    try:
        url = await server.start(host, port)
        log.warning("sandboxes of back-end %s at %s", spec.backend, url)
        await asyncio.Event().wait()
    finally:
        await server.close()
