"""JSON over HTTP to one inference server, with every failure told apart: it is gone, or it said no."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import httpx

from agentrl.engine.servers.transport import Transport
from agentrl.errors import EngineError


class ServerLost(EngineError):
    """The server could not be reached, broke off, or broke down: what it was doing can be done elsewhere."""


class ServerRefused(EngineError):
    """The server understood and said no: asking again, or elsewhere, changes nothing.

    `status` is the HTTP status: 4xx, or 200 for a "no" inside of the answer.
    """

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status

    def __reduce__(self) -> tuple[type[ServerRefused], tuple[str, int]]:
        return type(self), (str(self), self.status)


class HttpServer:
    """One server at `url`. Safe to call from many tasks of one event loop."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        """Connect lazily.

        Args:
            url: `http://host:port`.
            timeout_s: how long an answer may take where a call says nothing else.
        """
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._client = httpx.AsyncClient(
            base_url=self.url,
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            # Servers close idle connections after 5 s; one that is just being closed loses a request.
            transport=Transport(
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0)
            ),
            trust_env=False,  # a proxy of the machine is not for servers of the run
        )

    async def post(
        self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> Any:
        """What the server answers: its JSON, or None for an answer without any.

        Raises:
            ServerLost: no answer, or 5xx.
            ServerRefused: 4xx, with the server's words.
            EngineError: an answer that is no JSON.
        """
        return await self._ask("POST", path, body, timeout_s)

    async def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        """As `post`."""
        return await self._ask("GET", path, None, timeout_s)

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """The JSON of each server-sent event that answers, up to `[DONE]`; close it to break off.

        Raises:
            ServerLost: no answer, one that ends without `[DONE]`, or 5xx.
            ServerRefused: 4xx, with the server's words.
            EngineError: an event that is no JSON.
        """
        self._check_open(path)
        try:
            async with self._client.stream("POST", path, json=dict(body)) as answer:
                if answer.status_code >= 400:
                    await answer.aread()
                    raise self._refused(path, answer)
                async for line in answer.aiter_lines():
                    if not line.startswith("data:"):
                        continue
                    data = line.removeprefix("data:").strip()
                    if data == "[DONE]":
                        return
                    try:
                        event = json.loads(data)
                    except ValueError:
                        raise EngineError(f"{self.url}{path}: an event that is no JSON: {data[:200]}") from None
                    yield event
        except httpx.TimeoutException as e:
            raise ServerLost(f"{self.url}{path}: no event within {self._timeout_s:g} s") from e
        except httpx.TransportError as e:
            raise ServerLost(f"{self.url}{path}: {type(e).__name__}: {e}") from e
        raise ServerLost(f"{self.url}{path}: the stream broke off")

    async def close(self) -> None:
        """Drop the connections; what is being asked is lost. Idempotent."""
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
        except httpx.TransportError as e:
            raise ServerLost(f"{self.url}{path}: {type(e).__name__}: {e}") from e
        if answer.status_code >= 400:
            raise self._refused(path, answer)
        if not answer.content:
            return None
        try:
            return json.loads(answer.content)
        except ValueError:
            if "json" not in answer.headers.get("content-type", ""):
                return answer.text
            raise EngineError(f"{self.url}{path}: an answer that is no JSON: {answer.text[:200]!r}") from None

    def _check_open(self, path: str) -> None:
        if self._client.is_closed:
            raise ServerLost(f"{self.url}{path}: the client has been closed")

    def _refused(self, path: str, answer: httpx.Response) -> EngineError:
        text = f"{self.url}{path}: HTTP {answer.status_code}: {answer.text[:300]}"
        return ServerLost(text) if answer.status_code >= 500 else ServerRefused(text, answer.status_code)
