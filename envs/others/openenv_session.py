"""The wire protocol of OpenEnv: one WebSocket session per episode, and HTTP for schemas and tasks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn, TypeAlias, cast

import httpx

from agentrl.config.address import address_problem, hide_credentials, without_credentials
from agentrl.env.toolenv.observe import ToolError, error_text
from agentrl.env.toolenv.threads import CallTimeout
from agentrl.errors import ConfigError, InfraError
from agentrl.extras import require

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

JsonObject: TypeAlias = "dict[str, Json]"
Json: TypeAlias = "JsonObject | list[Json] | str | float | bool | None"

MAX_BYTES = 100 << 20
"""Largest message of a server."""
RESTART_S = (1.0, 2.0)
"""How long to wait for a server that may be starting again."""
PROBE_S = 30.0
"""Timeout of a connection that shows whether a server is up."""
_POLICY = ("VALIDATION_ERROR", "EXECUTION_ERROR")
"""Error codes that an action can cause; all others are the server's."""


@dataclass(frozen=True, slots=True)
class OpenEnvServer:
    """Address of an OpenEnv server, and how long to wait for it."""

    url: str
    connect_timeout_s: float = 60.0
    api_key_env: str = ""

    def __post_init__(self) -> None:
        require("openenv", "an OpenEnv server")
        if problem := address_problem(self.base):
            raise ConfigError(
                f"openenv: url {self.address!r}: {problem}; write e.g. openenv:http://127.0.0.1:8000"
            )
        if self.api_key_env and not os.environ.get(self.api_key_env):
            raise ConfigError(f"openenv: api_key_env {self.api_key_env}: this environment variable is not set")

    @property
    def address(self) -> str:
        """`url` without credentials, for messages and files."""
        return without_credentials(self.url)

    @property
    def base(self) -> str:
        """The HTTP address without a slash at the end."""
        url = self.url.rstrip("/")
        return "http" + url.removeprefix("ws") if url.startswith(("ws://", "wss://")) else url

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        key = os.environ.get(self.api_key_env, "") if self.api_key_env else ""
        return {"Authorization": f"Bearer {key}"} if key else {}

    @property
    def local(self) -> bool:
        """Whether the server runs on this machine, where no proxy applies."""
        return httpx.URL(self.base).host in ("localhost", "127.0.0.1", "::1")

    def http(self, path: str, body: JsonObject | None = None) -> Json:
        """GET a path, or POST `body` to it; None if the server does not offer it.

        Raises:
            ConfigError: no server answers there, or it answers with something other than JSON.
        """
        url = f"{self.base}{path}"
        try:
            with httpx.Client(headers=self.headers, trust_env=not self.local, timeout=30.0) as client:
                answer = client.get(url) if body is None else client.post(url, json=body)
            if answer.status_code in (404, 405, 501):
                return None
            return cast(Json, answer.raise_for_status().json())
        except (httpx.HTTPError, ValueError) as e:
            raise ConfigError(
                f"openenv: {hide_credentials(f'{url}: {error_text(e)}')}; is an OpenEnv server running there?"
            ) from e


@dataclass(slots=True)
class OpenEnvSession:
    """One episode's session: requests are answered in order."""

    server: OpenEnvServer
    _socket: ClientConnection | None = None
    _stale: int = 0
    """Answers that are still due to calls that timed out."""
    _gone: str = ""
    """Why actions no longer get answers."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _reset: JsonObject = field(default_factory=dict)

    async def open(self, reset: JsonObject) -> JsonObject:
        """Connect and reset; a server whose sessions are all taken is asked again until the timeout.

        Raises:
            InfraError: the server does not answer, has no free session, or cannot reset.
        """
        self._reset = reset
        loop = asyncio.get_running_loop()
        deadline, wait_s = loop.time() + self.server.connect_timeout_s, 0.05
        while True:
            try:
                await self._connect(max(0.1, deadline - loop.time()))
                return await self.ask("reset", reset, max(1.0, deadline - loop.time()))
            except _Full as e:
                await self.close()
                if loop.time() + wait_s > deadline:
                    raise InfraError(
                        f"openenv: {self.server.address}: no free session after "
                        f"{self.server.connect_timeout_s:g} s ({e}); raise the server's max_concurrent_envs or "
                        "lower the run's concurrency"
                    ) from None
            except (CallTimeout, ToolError) as e:
                await self.close()
                raise InfraError(f"openenv: {self.server.address}: reset: {e}") from None
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(2.0, 2 * wait_s)

    async def _connect(self, timeout_s: float) -> None:
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException

        url = "ws" + self.server.base.removeprefix("http") + "/ws"
        try:
            self._socket = await connect(
                url,
                open_timeout=timeout_s,
                max_size=MAX_BYTES,
                additional_headers=self.server.headers,
                proxy=None if self.server.local else True,
                ping_timeout=None,
            )
        except (OSError, WebSocketException) as e:
            raise InfraError(f"openenv: {without_credentials(url)}: {error_text(e)}") from e

    async def step(self, action: JsonObject, timeout_s: float | None) -> JsonObject:
        """Take one action; the result has `observation`, `reward` and `done`.

        Raises:
            ToolError: the server rejects the action, or has ended the session.
            CallTimeout: no answer in time, from a server that is up.
            InfraError: the server is down: not even a new session can be opened.
        """
        if self._gone:
            raise ToolError(self._gone)
        try:
            return await self.ask("step", action, timeout_s)
        except CallTimeout as e:
            await self._check_up(f"openenv: {self.server.address}: step: {e}")
            raise
        except _Lost as e:
            await self._lost(str(e))

    async def _check_up(self, problem: str) -> None:
        """Raises InfraError if the server accepts no connection; one whose sessions are all taken does."""
        fresh = OpenEnvSession(self.server)
        try:
            await fresh._connect(min(PROBE_S, self.server.connect_timeout_s))
        except InfraError as e:
            raise InfraError(f"{problem}, and the server is down: {e}") from e
        finally:
            await fresh.close()

    async def _lost(self, problem: str) -> NoReturn:
        """Handle a lost session, of which the action may be the cause. Raises ToolError if a new one opens."""
        await self.close()
        for wait_s in (*RESTART_S, None):
            fresh = OpenEnvSession(self.server)
            try:
                await fresh.open(self._reset)
                break
            except InfraError as e:
                if wait_s is None:
                    raise InfraError(f"{problem}, and the server is down: {e}") from e
                await asyncio.sleep(wait_s)
            finally:
                await fresh.close()
        self._gone = "the server ended the session during an action and takes no more actions"
        raise ToolError(self._gone)

    async def ask(self, kind: str, data: JsonObject, timeout_s: float | None) -> JsonObject:
        """Send a message and wait for its answer; see `step` for the errors."""
        async with self._lock:
            if self._socket is None:
                raise InfraError(f"openenv: {self.server.address}: the session is not open")
            return await self._exchange(self._socket, kind, data, timeout_s)

    async def _exchange(
        self, socket: ClientConnection, kind: str, data: JsonObject, timeout_s: float | None
    ) -> JsonObject:
        from websockets.exceptions import ConnectionClosed

        try:
            async with asyncio.timeout(timeout_s):
                with contextlib.suppress(ConnectionClosed):  # the reason may be waiting to be read
                    await socket.send(json.dumps({"type": kind, "data": data}))
                self._stale += 1
                while True:
                    answer = await socket.recv()
                    self._stale -= 1
                    if not self._stale:
                        return self._read(answer)
        except TimeoutError:
            raise CallTimeout(f"no result after {timeout_s:g} s") from None
        except (ConnectionClosed, OSError) as e:
            raise _Lost(f"openenv: {self.server.address}: the connection was lost in {kind}: {e}") from e

    def _read(self, answer: str | bytes) -> JsonObject:
        try:
            message = json.loads(answer)
            kind, data = message["type"], message["data"]
        except (ValueError, KeyError, TypeError) as e:
            raise InfraError(f"openenv: {self.server.address}: not an OpenEnv message: {answer[:200]!r}") from e
        if kind != "error":
            return dict(data)
        code = data.get("code", "")
        text = _error_text(data)
        if code == "CAPACITY_REACHED":
            raise _Full(text)
        if code in _POLICY:
            raise ToolError(text)
        raise InfraError(f"openenv: {self.server.address}: {code}: {text}")

    async def close(self) -> None:
        """End the session; idempotent, never raises."""
        from websockets.exceptions import ConnectionClosed

        socket, self._socket, self._stale = self._socket, None, 0
        if socket is None:
            return
        try:
            async with asyncio.timeout(5.0):
                await socket.send(json.dumps({"type": "close"}))
                await socket.close()
        except (TimeoutError, ConnectionClosed, OSError):
            socket.transport.abort()


class _Lost(InfraError):
    """The connection ended."""


class _Full(Exception):
    """The server has no free session."""


def _error_text(data: Mapping[str, object]) -> str:
    """The message of an error, with the place of each invalid field."""
    errors = data.get("errors")
    if not isinstance(errors, list):
        return str(data.get("message", "")) or "the action failed"
    lines = []
    for error in errors[:8]:
        place = ".".join(map(str, error.get("loc", ())))
        lines.append(f"{place}: {error.get('msg', '')}" if place else str(error.get("msg", "")))
    return "; ".join(lines)
