"""The application: OpenEnv's routes, and MCP at /mcp."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from agentrl.env_server import openenv_wire as wire
from agentrl.env_server.jsonrpc import Rpc
from agentrl.env_server.open_sessions import Sessions, SessionsFull
from agentrl.env_server.served import EnvSource, Json, JsonObject, RequestError
from agentrl.env_server.session import EnvSession
from agentrl.errors import AgentRLError
from agentrl.serve.body import body_within
from agentrl.serve.browsers import is_rebound

MAX_BODY = 16 << 20
"""Largest request, in bytes."""
MAX_LISTED = 10_000
"""Most tasks in one answer."""
MOST_AHEAD = 16
"""Maximum number of messages of a WebSocket that are queued while one is answered."""
_SESSION = "mcp-session-id"
_Page = Callable[[Request], Awaitable[Response]]
_Receive = Callable[[], Awaitable[object]]
"""Waits for the next message."""


def create_env_app(sessions: Sessions, token: str | None = None) -> ASGIApp:
    """The application over these sessions; with a token, every request except /health must send it."""
    pages = _Pages(sessions, Rpc(sessions))
    tasks = _TaskPages(sessions.source)
    routes = [
        Route("/health", pages.health),
        Route("/metadata", pages.metadata),
        Route("/schema", pages.schema),
        Route("/mcp", pages.mcp, methods=["POST", "DELETE"]),
        WebSocketRoute("/ws", pages.socket),
        WebSocketRoute("/mcp", pages.mcp_socket),
        Route("/list_environments", tasks.environments),
        Route("/{env}/splits", tasks.of_env(tasks.splits)),
        Route("/{env}/num_tasks", tasks.of_env(tasks.count), methods=["POST"]),
        Route("/{env}/tasks", tasks.of_env(tasks.span), methods=["POST"]),
        Route("/{env}/task_range", tasks.of_env(tasks.span), methods=["POST"]),
        Route("/{env}/task", tasks.of_env(tasks.one), methods=["POST"]),
    ]
    return _Guard(Starlette(routes=routes, exception_handlers={RequestError: _explained}), token)


@dataclass(frozen=True, slots=True)
class _Guard:
    """Refuses requests without the token, and those of web pages of other sites, also after DNS rebinding."""

    app: ASGIApp
    token: str | None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and (problem := self._problem(scope)):
            if scope["type"] == "websocket":
                await receive()
                await send({"type": "websocket.close", "code": 1008, "reason": problem})
            else:
                await _Json({"detail": problem}, 401)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _problem(self, scope: Scope) -> str:
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != headers.get("host"):
            return f"origin {origin[:200]}: requests from other sites are refused"
        if scope["path"] == "/health":
            return ""
        if self.token is None:
            host = headers.get("host", "")
            return f"host {host[:200]}: is not this machine" if is_rebound(scope) else ""
        kind, _, given = headers.get("authorization", "").partition(" ")
        known = kind.lower() == "bearer" and hmac.compare_digest(given.encode(), self.token.encode())
        return "" if known else "the token is missing or wrong; send it as `Authorization: Bearer TOKEN`"


@dataclass(frozen=True, slots=True)
class _Pages:
    """Sessions, over WebSocket and JSON-RPC."""

    sessions: Sessions
    rpc: Rpc

    async def health(self, request: Request) -> Response:
        """Whether the server is up."""
        return _Json({"status": "healthy"})

    async def metadata(self, request: Request) -> Response:
        """The name of the env."""
        name = self.sessions.source.name
        return _Json({"name": name, "description": f"{name}, served by agentrl"})

    async def schema(self, request: Request) -> Response:
        """The shape of actions and observations."""
        state = {"type": "object", "properties": {"episode_id": {}, "step_count": {"type": "integer"}}}
        return _Json({"action": wire.ACTION_SCHEMA, "observation": wire.OBSERVATION_SCHEMA, "state": state})

    async def mcp(self, request: Request) -> Response:
        """MCP's Streamable HTTP with JSON answers, and OpenEnv's sessions in `params.session_id`."""
        session_id = request.headers.get(_SESSION)
        session = self.sessions.get(session_id)
        if session_id is not None and session is None:
            return _rpc_problem(404, f"unknown session {session_id}: it was closed, or idle for too long")
        if request.method == "DELETE":
            closed = session is not None and await self.sessions.close(session.id)
            return Response(status_code=204 if closed else 400)
        try:
            body = json.loads(await _body(request))
        except RequestError as e:
            return _rpc_problem(413, str(e))
        except (ValueError, RecursionError):
            return _rpc_problem(400, "the body is not JSON")
        answer = await self.rpc.answer(body, session=session, query=request.query_params)
        if answer.body is None:
            return Response(status_code=202)
        return _Json(answer.body, headers={_SESSION: answer.session_id} if answer.session_id else None)

    async def mcp_socket(self, socket: WebSocket) -> None:
        """JSON-RPC over a WebSocket, with a separate session."""
        await socket.accept()
        try:
            session = self.sessions.create(attached=True)
        except SessionsFull as e:
            await socket.close(1013, str(e))
            return
        try:
            async with _listening(socket, partial(self.sessions.close, session.id)) as receive:
                while True:
                    answer = await self.rpc.answer(await receive(), session=session)
                    if answer.body is not None:
                        await _send(socket, answer.body)
        except WebSocketDisconnect:
            pass
        finally:
            await self.sessions.close(session.id)

    async def socket(self, socket: WebSocket) -> None:
        """A session of OpenEnv: its own, or the one that `session_id` names."""
        await socket.accept()
        named = socket.query_params.get("session_id")
        try:
            session = self.sessions.attach(named) if named else self.sessions.create(attached=True)
        except SessionsFull as e:
            counts = {"active_sessions": len(self.sessions), "max_sessions": self.sessions.max_sessions}
            await _refuse(socket, "CAPACITY_REACHED", str(e), **counts)
            return
        if session is None:
            await _refuse(socket, "SESSION_ERROR", f"session {named}: unknown, or held by another connection")
            return
        try:
            if named:
                await self._converse(socket, session, partial(_receive, socket))
            else:
                async with _listening(socket, partial(self.sessions.close, session.id)) as receive:
                    await self._converse(socket, session, receive)
        except WebSocketDisconnect:
            pass
        finally:
            if named:
                self.sessions.detach(named)
            else:
                await self.sessions.close(session.id)

    async def _converse(self, socket: WebSocket, session: EnvSession, receive: _Receive) -> None:
        while True:
            sent = await receive()
            if isinstance(sent, dict) and sent.get("type") == "close":
                await socket.close()
                return
            try:
                kind, data = await self._answer(session, sent)
            except _Refused as e:
                kind, data = "error", {"message": e.message, "code": e.code}
            await _send(socket, {"type": kind, "data": data})

    async def _answer(self, session: EnvSession, sent: object) -> tuple[str, JsonObject]:
        if not isinstance(sent, dict):
            raise _Refused("INVALID_JSON", "a message must be a JSON object")
        kind, data = sent.get("type"), sent.get("data") or {}
        if not isinstance(data, dict):
            raise _Refused("VALIDATION_ERROR", f"data {data!r:.80}: must be an object")
        try:
            if kind == "reset":
                return "observation", wire.messages_payload(await session.reset(data))
            if kind == "step":
                return "observation", await wire.step(session, cast(JsonObject, data))
            if kind == "state":
                return "state", {
                    "episode_id": session.task.id if session.task else None,
                    "step_count": session.turns,
                }
            if kind == "mcp":
                return "mcp", (await self.rpc.answer(data, session=session)).body or {}
        except RequestError as e:
            raise _Refused("VALIDATION_ERROR", str(e)) from None
        except AgentRLError as e:
            raise _Refused("SESSION_ERROR", f"{type(e).__name__}: {e}".partition("\n")[0]) from None
        raise _Refused("UNKNOWN_TYPE", f"Unknown message type: {kind!r:.80}")


@dataclass(frozen=True, slots=True)
class _TaskPages:
    """OpenEnv's Task API. The rows stay here: an episode names its task by split and index."""

    source: EnvSource

    async def environments(self, request: Request) -> Response:
        """The name of the env."""
        return _Json([self.source.name])

    async def splits(self, request: Request) -> Response:
        """The splits that have tasks."""
        return _Json([{"name": s, "type": s} for s in self.source.splits])

    async def count(self, request: Request) -> Response:
        """How many tasks a split has."""
        return _Json({"num_tasks": len(self.source.tasks((await _object(request)).get("split")))})

    async def one(self, request: Request) -> Response:
        """One task."""
        asked = await _object(request)
        task = self.source.task({"split": asked.get("split"), "index": asked.get("index")})
        return _Json({"task": {"id": task.id, "split": asked.get("split"), "index": asked.get("index")}})

    async def span(self, request: Request) -> Response:
        """The tasks from `start` to `stop`."""
        asked = await _object(request)
        tasks = self.source.tasks(split := asked.get("split"))
        places = range(len(tasks))[_bound(asked, "start") : _bound(asked, "stop")]
        if len(places) > MAX_LISTED:
            raise RequestError(f"{len(places):,} tasks: ask for at most {MAX_LISTED:,} with start and stop")
        listed = [{"id": tasks[i].id, "split": split, "index": i} for i in places]
        return _Json({"tasks": listed, "env_name": self.source.name})

    def of_env(self, answer: _Page) -> _Page:
        """The page of a route that names the env; another name is an error."""

        async def checked(request: Request) -> Response:
            name = request.path_params["env"]
            if name.lower() != self.source.name.lower():
                return _Json({"detail": f"unknown environment {name!r}; this is {self.source.name!r}"}, 404)
            return await answer(request)

        return checked


@dataclass(frozen=True, slots=True)
class _Refused(Exception):
    """An error message of OpenEnv."""

    code: str
    message: str


async def _explained(request: Request, error: Exception) -> Response:
    return _Json({"detail": str(error)}, 400)


async def _refuse(socket: WebSocket, code: str, message: str, **more: int) -> None:
    await _send(socket, {"type": "error", "data": {"message": message, "code": code, **more}})
    await socket.close()


def _rpc_problem(status: int, message: str) -> Response:
    return _Json({"jsonrpc": "2.0", "id": None, "error": {"code": -32600, "message": message}}, status)


class _Json(JSONResponse):
    """JSON in ASCII: half of a surrogate pair, which a client may send and a message may quote, is no UTF-8."""

    def render(self, content: object) -> bytes:
        """The body."""
        return json.dumps(content, allow_nan=False).encode()


async def _receive(socket: WebSocket) -> object:
    """The JSON of the next message, text or binary; None if it is not JSON. Raises WebSocketDisconnect."""
    message = await socket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1005))
    text = message.get("text")
    return _loads((message.get("bytes") or b"").decode(errors="replace") if text is None else text)


@contextlib.asynccontextmanager
async def _listening(socket: WebSocket, leave: Callable[[], Awaitable[object]]) -> AsyncIterator[_Receive]:
    """Yield a function that receives the next message; call `leave` once the client disconnects."""
    coming: asyncio.Queue[object] = asyncio.Queue(MOST_AHEAD)

    async def read() -> None:
        try:
            while True:
                await coming.put(await _receive(socket))
        except WebSocketDisconnect as e:
            await leave()
            await coming.put(e)

    async def receive() -> object:
        message = await coming.get()
        if isinstance(message, WebSocketDisconnect):
            raise message
        return message

    reading = asyncio.create_task(read())
    try:
        yield receive
    finally:
        reading.cancel()


async def _send(socket: WebSocket, content: object) -> None:
    await socket.send_text(json.dumps(content, separators=(",", ":")))


def _loads(text: str) -> object:
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found


async def _body(request: Request) -> bytes:
    """The body. Raises RequestError if it is too large."""
    if (found := await body_within(request, MAX_BODY)) is None:
        raise RequestError(f"the body has more than {MAX_BODY:,} bytes")
    return found


async def _object(request: Request) -> Mapping[str, Json]:
    found = _loads((await _body(request)).decode(errors="replace"))
    if not isinstance(found, dict):
        raise RequestError("the body must be a JSON object")
    return found


def _bound(asked: Mapping[str, Json], key: str) -> int | None:
    value = asked.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise RequestError(f"{key} {value!r}: must be a whole number")
    return value
