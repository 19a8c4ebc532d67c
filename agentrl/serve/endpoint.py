"""The endpoint as an ASGI application: routes, keys, limits, and errors in one format.

    app = create_app(ChatService(engine, renderer, ...), Settings(names=("my-model",)))

`api_routes` provides the same routes for other sessions: a recorder mounts them under the URL of each episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from agentrl.engine.base import TokenLogprob
from agentrl.errors import EngineError
from agentrl.serve.api_errors import ApiError, context_exceeded, from_validation, unsupported
from agentrl.serve.body import read_body
from agentrl.serve.bounds import FEW_VALUES, SMALL_BODY, VALUES_PER_TOKEN, has_more_values, tokens_above
from agentrl.serve.browsers import BrowserGuard
from agentrl.serve.conversations import Conversations
from agentrl.serve.dialects import anthropic, chat, responses
from agentrl.serve.dialects.completions import TextJob, TextWriter
from agentrl.serve.dialects.wire import ChatRequest, CompletionRequest
from agentrl.serve.dialects.wire_anthropic import CountRequest, MessagesRequest
from agentrl.serve.dialects.wire_responses import ResponsesRequest
from agentrl.serve.event_stream import EventStream, GoneError, event, gone, while_there
from agentrl.serve.openapi import describe
from agentrl.serve.prometheus import Metrics
from agentrl.serve.reader import Delta
from agentrl.serve.service import ChatService, Client, now

log = logging.getLogger(__name__)

ANTHROPIC_VERSION = "anthropic-version"
"""The header by which clients of Anthropic's API are known."""

Body = TypeVar("Body", bound=BaseModel)
FindClient = Callable[[Request], Client]
"""Identify the client of a request. Raises ApiError if the client is unknown."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How the endpoint treats its clients.

    Attributes:
        names: names of the model; the first is its own, the others are aliases.
        accept_any_model: accept every name as an alias.
        api_key: the key clients must send; None requires no key.
        fingerprint: identifies the weights and the renderer; sent as `system_fingerprint`.
        max_body_bytes: larger requests are rejected.
        body_timeout_s: time limit for a client to send its request.
        write_timeout_s: how long a client may stop reading a streamed answer.
        cors: origins of web pages that may use the endpoint; `*` for all.
    """

    names: tuple[str, ...]
    accept_any_model: bool = False
    api_key: str | None = None
    fingerprint: str = ""
    max_body_bytes: int = 32 << 20
    body_timeout_s: float = 60.0
    write_timeout_s: float = 120.0
    cors: tuple[str, ...] = ()


class StreamJob(Protocol):
    """The sampling work of one request."""

    async def run(self, emit: Callable[[int, list[Delta], Sequence[TokenLogprob]], None] | None = None) -> Any:
        """Run the sampling."""
        ...


class Writer(Protocol):
    """Formats answers in one dialect."""

    def whole(self, done: Any) -> dict[str, Any]:
        """Return the answer as one object."""
        ...

    def opening(self) -> list[Any]:
        """Return the events before the first piece."""
        ...

    def chunks(self, index: int, deltas: Sequence[Delta], drawn: Sequence[TokenLogprob]) -> list[Any]:
        """Return the events for some pieces."""
        ...

    def closing(self, done: Any) -> list[Any]:
        """Return the final events."""
        ...


def create_app(
    service: ChatService, settings: Settings, *, session: Conversations, extra_routes: Sequence[Route] = ()
) -> ASGIApp:
    """Create the application; all clients share `session`, which remembers their conversations."""
    client = Client(session)
    endpoint = ApiEndpoint(service, settings)
    routes = [
        Route("/health", endpoint.health, methods=["GET"]),
        Route("/metrics", endpoint.metrics, methods=["GET"]),
        Route("/openapi.json", endpoint.openapi, methods=["GET"]),
        *endpoint.api_routes("/v1", lambda request: client),
        *extra_routes,
    ]
    return guarded(with_errors(routes), settings)


def guarded(app: ASGIApp, settings: Settings) -> ASGIApp:
    """The application behind its key, closed to web pages that are not listed."""
    return BrowserGuard(ApiKeyGuard(app, settings), settings.cors, keyless=settings.api_key is None)


def with_errors(routes: Sequence[Route]) -> Starlette:
    """Combine these routes with a fallback that answers other paths and methods with errors in the same format."""
    return Starlette(routes=routes, exception_handlers={HTTPException: _http_error})


class ApiKeyGuard:
    """Wraps the application: checks the key and adds a request id to every answer."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._key = app, settings.api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, or reject it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        id = f"req_{secrets.token_hex(12)}".encode()
        ids = [(b"x-request-id", id), (b"request-id", id)]  # OpenAI's name, and Anthropic's

        async def named(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), *ids]}
            await send(message)

        if self._key is not None and scope["path"] != "/health" and not self._knows(scope):
            error = ApiError(
                401,
                "The API key is missing or wrong; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error_response(error, scope["path"])(scope, receive, named)
            return
        await self._app(scope, receive, named)

    def _knows(self, scope: Scope) -> bool:
        key = (self._key or "").encode()
        return any(hmac.compare_digest(given.encode(), key) for given in keys_in(Headers(scope=scope)))


def keys_in(headers: Headers) -> list[str]:
    """The keys that a client sent, in OpenAI's way (`Authorization: Bearer KEY`) and Anthropic's (`x-api-key`).

    Some clients send both, such as an agent whose user is logged in elsewhere; either may be the right one.
    """
    kind, _, key = headers.get("authorization", "").partition(" ")
    sent = [key.strip() if kind.lower() == "bearer" else None, headers.get("x-api-key")]
    return [one for one in sent if one]


class ApiEndpoint:
    """Answers requests in every dialect."""

    def __init__(self, service: ChatService, settings: Settings) -> None:
        self.service, self.settings = service, settings
        self._created = now()

    def api_routes(self, prefix: str, find_client: FindClient) -> list[Route]:
        """Return the OpenAI and Anthropic routes under `prefix`, for the sessions that `find_client` selects.

        Args:
            prefix: may contain path parameters, which `find_client` reads from the request.
        """

        def route(path: str, handle: Callable[[Request, Client], Awaitable[Any]], method: str) -> Route:
            async def answer(request: Request) -> Any:
                return await self._answered(request, path, handle, find_client)

            return Route(f"{prefix}{path}", answer, methods=[method])

        return [
            route("/chat/completions", self._chat, "POST"),
            route("/completions", self._completions, "POST"),
            route("/responses", self._responses, "POST"),
            route("/responses/{id}", self._response, "GET"),
            route("/messages", self._messages, "POST"),
            route("/messages/count_tokens", self._count_tokens, "POST"),
            route("/models", self._models, "GET"),
            route("/models/{model:path}", self._model, "GET"),
        ]

    async def health(self, request: Request) -> Response:
        """Answer 200 if requests are answered, 503 while they would wait for the engine."""
        engine = self.service.engine
        ready = engine.ready
        body = {"status": "ok" if ready else "waiting", "policy_version": engine.policy_version}
        return JSONResponse(body, 200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        """Answer with counters in Prometheus format."""
        self.service.metrics.running.set(self.service.gate.running)
        return Response(self.service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, request: Request) -> Response:
        """Answer with the OpenAPI description."""
        return JSONResponse(describe())

    # -- one request -------------------------------------------------------------------------------------------

    async def _answered(
        self,
        request: Request,
        route: str,
        handle: Callable[[Request, Client], Awaitable[Any]],
        find_client: FindClient,
    ) -> Any:
        """Return the answer of `handle`, or its error as an answer; never raises."""
        started = time.monotonic()
        answer: Any
        spoken = "/messages" if ANTHROPIC_VERSION in request.headers else route
        try:
            client = find_client(request)
            try:
                answer = await handle(request, client)
            except ApiError as e:
                client.refused(e)
                raise
        except (GoneError, ClientDisconnect):
            answer = Response(status_code=499)  # nobody reads it
        except asyncio.CancelledError:  # only a server shutdown cancels a request
            answer = error_response(_ending(), spoken)
        except BaseExceptionGroup as group:
            if group.subgroup(asyncio.CancelledError) is not None:
                raise
            answer = error_response(_explained(group.exceptions[0]), spoken)
        except Exception as e:
            answer = error_response(_explained(e), spoken)
        status = getattr(answer, "status_code", 200)
        self.service.metrics.requests.labels(route, str(status)).inc()
        seconds = self.service.metrics.seconds.labels(route)
        if isinstance(answer, EventStream):
            answer.at_end(lambda: seconds.observe(time.monotonic() - started))
        else:
            seconds.observe(time.monotonic() - started)
        return answer

    async def _body(self, request: Request, kind: type[Body]) -> Body:
        data = await read_body(request, self.settings.max_body_bytes, self.settings.body_timeout_s)
        most = FEW_VALUES + VALUES_PER_TOKEN * self.service.engine.max_context
        if len(data) > SMALL_BODY and await asyncio.to_thread(has_more_values, data, most):
            text = f"The request has more than {most} JSON keys and values; no prompt for this model needs them."
            raise ApiError(413, text, code="request_too_large")
        try:
            return kind.model_validate_json(data)
        except ValidationError as e:
            raise from_validation(e) from None

    def _known_model(self, name: str, param: str | None = "model") -> None:
        if name not in self.settings.names and not self.settings.accept_any_model:
            known = ", ".join(self.settings.names)
            raise ApiError(
                404,
                f"The model {name[:200]!r} does not exist; here is {known}.",
                param=param,
                code="model_not_found",
            )

    async def _models(self, request: Request, client: Client) -> Response:
        if ANTHROPIC_VERSION in request.headers:
            return JSONResponse(anthropic.models_body(self.settings.names, self._since))
        return JSONResponse({"object": "list", "data": [self._described(name) for name in self.settings.names]})

    async def _model(self, request: Request, client: Client) -> Response:
        name = request.path_params["model"]
        self._known_model(name, None)
        if ANTHROPIC_VERSION in request.headers:
            return JSONResponse(anthropic.model_body(name, self._since))
        return JSONResponse(self._described(name))

    @property
    def _since(self) -> str:
        return datetime.fromtimestamp(self._created, UTC).isoformat()

    def _described(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "agentrl",
            "max_model_len": self.service.engine.max_context,
        }

    async def _chat(self, request: Request, client: Client) -> Any:
        body = await self._body(request, ChatRequest)
        self._known_model(body.model)
        job = await self.service.prepare(chat.request_of(body), client)
        writer = chat.ChatWriter(body, job, fingerprint=self.settings.fingerprint, renderer=self.service.renderer)
        return await self._play(request, job, writer, job.ask.n, bool(body.stream), CHUNKS)

    async def _completions(self, request: Request, client: Client) -> Any:
        body = await self._body(request, CompletionRequest)
        self._known_model(body.model)
        given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        limit = self.service.engine.max_context
        for text in given:
            if not isinstance(text, str):
                break
            if (tokens := await tokens_above(self.service.renderer.vocabulary, [text], limit)) is not None:
                raise context_exceeded("prompt", tokens, limit, at_least=True)
        job = await asyncio.to_thread(TextJob, self.service.engine, self.service.renderer, body)
        writer = TextWriter(job, self.service.renderer, self.settings.fingerprint)
        return await self._play(request, job, writer, job.count, bool(body.stream), CHUNKS)

    async def _responses(self, request: Request, client: Client) -> Any:
        body = await self._body(request, ResponsesRequest)
        self._known_model(body.model)
        job = await self.service.prepare(responses.request_of(body, client.session), client)
        writer = responses.ResponseWriter(body, job)
        return await self._play(request, job, writer, 1, bool(body.stream), EVENTS)

    async def _response(self, request: Request, client: Client) -> Response:
        id = request.path_params["id"]
        if request.query_params.get("stream", "false").lower() not in ("false", "0"):
            raise unsupported("stream", "a stored response is not streamed again; leave it out")
        found = client.session.answer(id)
        if found is None:
            raise responses.not_found(id)
        return JSONResponse(found)

    async def _messages(self, request: Request, client: Client) -> Any:
        body = await self._body(request, MessagesRequest)
        self._known_model(body.model)
        job = await self.service.prepare(anthropic.request_of(body), client)
        writer = anthropic.MessagesWriter(body, job)
        return await self._play(request, job, writer, 1, bool(body.stream), ANTHROPIC_EVENTS)

    async def _count_tokens(self, request: Request, client: Client) -> Response:
        body = await self._body(request, CountRequest)
        self._known_model(body.model)
        return JSONResponse({"input_tokens": await self.service.count(anthropic.counted_of(body), client)})

    async def _play(
        self, request: Request, job: StreamJob, writer: Writer, count: int, stream: bool, framing: Framing
    ) -> Any:
        """Sample the job and write its answer, whole or streamed."""
        gate = self.service.gate
        gate.enter(count)
        if not stream:
            try:
                return JSONResponse(writer.whole(await while_there(request, job.run())))
            finally:
                gate.leave(count)
        streaming = _Streaming(job, writer, framing, self.service.metrics)
        try:
            await streaming.first(request)
        except BaseException:
            await streaming.stop()
            gate.leave(count)
            raise
        return EventStream(
            streaming.events(),
            on_end=lambda: gate.leave(count),
            write_timeout_s=self.settings.write_timeout_s,
            farewell=framing.error(_ending()),
        )


@dataclass(frozen=True, slots=True)
class Framing:
    """How a dialect streams: the bytes of a chunk, of an error, and of the end if it has its own event."""

    chunk: Callable[[Any], bytes]
    error: Callable[[ApiError], bytes]
    last: bytes = b""


def _named(chunk: Any) -> bytes:
    return event(chunk, chunk["type"])


CHUNKS = Framing(event, lambda error: event(error.body()), event("[DONE]"))
EVENTS = Framing(_named, lambda error: event(error.body(), "error"))
ANTHROPIC_EVENTS = Framing(_named, lambda error: event(anthropic.error_body(error), "error"))


class _Streaming:
    """A job that is sampled while its answer is being sent."""

    def __init__(self, job: StreamJob, writer: Writer, framing: Framing, metrics: Metrics) -> None:
        self._writer, self._framing = writer, framing
        self._ready = asyncio.Event()
        self._chunks: list[Any] = list(writer.opening())
        self._began, self._metrics, self._told = time.monotonic(), metrics, False
        self._task = asyncio.ensure_future(job.run(self._take))
        self._task.add_done_callback(lambda task: self._ready.set())

    def _take(self, index: int, deltas: list[Delta], drawn: Sequence[TokenLogprob]) -> None:
        if not self._told:
            self._metrics.first_token_seconds.observe(time.monotonic() - self._began)
            self._told = True
        self._chunks += self._writer.chunks(index, deltas, drawn)
        self._ready.set()

    async def first(self, request: Request) -> None:
        """Wait for the first piece, so that immediate failures are answered with their HTTP status.

        Raises:
            GoneError: the client disconnected.
        """
        ready, leaving = asyncio.ensure_future(self._ready.wait()), asyncio.ensure_future(gone(request.receive))
        try:
            await asyncio.wait((ready, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                raise GoneError
            if self._task.done():
                self._task.result()
        finally:
            for waiting in (ready, leaving):
                waiting.cancel()
            await asyncio.gather(ready, leaving, return_exceptions=True)

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the answer event by event; a failure on the way becomes the last event."""
        try:
            while True:
                await self._ready.wait()
                self._ready.clear()
                chunks, self._chunks = self._chunks, []
                for chunk in chunks:
                    yield self._framing.chunk(chunk)
                if self._task.done() and not self._chunks:
                    break
            for chunk in self._writer.closing(self._task.result()):
                yield self._framing.chunk(chunk)
            if self._framing.last:
                yield self._framing.last
        except Exception as e:
            trouble = e.exceptions[0] if isinstance(e, ExceptionGroup) else e
            yield self._framing.error(_explained(trouble))
        finally:
            await self.stop()

    async def stop(self) -> None:
        """Stop the job in any state."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await self._task


def _ending() -> ApiError:
    return ApiError(503, "The server is ending; ask again.", code="server_ending", headers={"Retry-After": "5"})


def error_response(error: ApiError, path: str = "") -> Response:
    """An error in the envelope of the dialect that answers this path: Anthropic's, or OpenAI's."""
    body = anthropic.error_body(error) if anthropic.in_anthropic(path) else error.body()
    return JSONResponse(body, error.status, headers=error.headers)


def _explained(e: BaseException) -> ApiError:
    """Return the error sent to the client; internal errors are logged in full and sent in short form."""
    if isinstance(e, ApiError):
        return e
    if isinstance(e, EngineError):
        log.error("the engine failed: %s", e)
        return ApiError(503, f"The engine failed: {e}", code="engine_error", headers={"Retry-After": "5"})
    log.error("a request failed", exc_info=e)
    return ApiError(500, f"Internal error: {type(e).__name__}", code="internal_error")


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer unknown paths and methods with errors in the standard format."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    texts = {404: f"There is nothing at {what}.", 405: f"{what}: this method is not allowed here."}
    headers: Mapping[str, str] = error.headers or {}
    code = "method_not_supported" if error.status_code == 405 else "not_found"
    text = texts.get(error.status_code, error.detail)
    return error_response(ApiError(error.status_code, text, code=code, headers=headers), request.url.path)
