"""JSON-RPC 2.0: the Model Context Protocol, and OpenEnv's calls that open and close a session.

An MCP session is one episode: `initialize` resets the env, `instructions` hold its opening messages, and each
result of `tools/call` has the reward and the end of the episode in `_meta`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import cast

from agentrl.env_server.open_sessions import Sessions, SessionsFull
from agentrl.env_server.openenv_wire import about_end, answer_content, answer_text, called
from agentrl.env_server.served import Json, JsonObject, RequestError, listed_tools
from agentrl.env_server.session import EnvSession, TurnResult
from agentrl.errors import AgentRLError
from agentrl.extras import DISTRIBUTION
from agentrl.types import Message

INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS, SERVER_ERROR = -32600, -32601, -32602, -32000
PROTOCOLS = ("2025-11-25", "2025-06-18", "2025-03-26")
"""Versions of MCP that are answered, newest first."""
_DIGITS = 18
OVER = "Error: the episode has ended; this call had no effect."


@dataclass(frozen=True, slots=True)
class RpcError(Exception):
    """An error answer."""

    code: int
    message: str


@dataclass(frozen=True, slots=True)
class RpcAnswer:
    """The body of an answer, None for a notification; `session_id` if the request opened an MCP session."""

    body: JsonObject | None
    session_id: str = ""


@dataclass(frozen=True, slots=True)
class Rpc:
    """Answers requests of any transport."""

    sessions: Sessions

    async def answer(
        self, request: object, *, session: EnvSession | None = None, query: Mapping[str, str] | None = None
    ) -> RpcAnswer:
        """Answer one request.

        Args:
            request: the parsed JSON.
            session: the session of the connection or of the request's header.
            query: the query of the URL, which names the task of a new MCP session.
        """
        if not isinstance(request, dict) or not isinstance(method := request.get("method"), str):
            return RpcAnswer(_error(None, INVALID_REQUEST, "not a JSON-RPC 2.0 request"))
        if "id" not in request:
            return RpcAnswer(None)
        number, params = request["id"], request.get("params") or {}
        if type(number) not in (int, str, type(None)):
            return RpcAnswer(_error(None, INVALID_REQUEST, "id: must be text or a whole number"))
        try:
            if not isinstance(params, dict):
                raise RpcError(INVALID_PARAMS, "params: must be an object")
            if method == "initialize" and session is None:
                opened, result = await self._initialize(params, query or {})
                return RpcAnswer(_result(number, result), opened.id)
            return RpcAnswer(_result(number, await self._call(method, cast(JsonObject, params), session)))
        except RpcError as e:
            return RpcAnswer(_error(number, e.code, e.message))
        except (RequestError, SessionsFull) as e:
            code = SERVER_ERROR if isinstance(e, SessionsFull) else INVALID_PARAMS
            return RpcAnswer(_error(number, code, str(e)))
        except AgentRLError as e:
            return RpcAnswer(_error(number, SERVER_ERROR, f"{type(e).__name__}: {e}".partition("\n")[0]))

    async def _initialize(self, params: JsonObject, query: Mapping[str, str]) -> tuple[EnvSession, JsonObject]:
        wanted: dict[str, object] = dict(query)
        for key in ("index", "seed"):
            if key in query:
                if not query[key].isdecimal() or len(query[key]) > _DIGITS:
                    raise RequestError(f"{key} {query[key]!r}: must be a whole number of at least 0")
                wanted[key] = int(query[key])
        session = self.sessions.create()
        try:
            opening = await session.reset(wanted)
        except BaseException:
            await self.sessions.close(session.id)
            raise
        asked = params.get("protocolVersion")
        return session, {
            "protocolVersion": asked if asked in PROTOCOLS else PROTOCOLS[0],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": self.sessions.source.name, "version": version(DISTRIBUTION)},
            "instructions": answer_text(opening.messages),
        }

    async def _call(self, method: str, params: JsonObject, session: EnvSession | None) -> JsonObject:
        if method == "ping":
            return {}
        if method == "openenv/session/create":
            return {"session_id": (session or self.sessions.create()).id}
        if method == "openenv/session/close":
            return await self._close(params.get("session_id"), session)
        if method not in ("tools/list", "tools/call"):
            raise RpcError(METHOD_NOT_FOUND, f"Method not found: {method}")
        found = session or self._named(params.get("session_id"))
        if method == "tools/list":
            schemas = self.sessions.source.own_tools if found is None else found.tools
            return {"tools": cast("list[Json]", listed_tools(schemas, "inputSchema"))}
        if found is None:
            raise RpcError(INVALID_REQUEST, "no session: initialize first")
        if found.last is not None and found.last.done:
            over = TurnResult((Message("user", OVER),), 0.0, episode=found.last.episode)
            return call_result(over) | {"isError": True}
        return call_result(await found.act(called(found, params.get("name"), params.get("arguments"))))

    def _named(self, session_id: object) -> EnvSession | None:
        found = self.sessions.get(session_id)
        if session_id is not None and found is None:
            raise RpcError(INVALID_PARAMS, f"Unknown session_id: {session_id}")
        return found

    async def _close(self, session_id: object, session: EnvSession | None) -> JsonObject:
        if session is not None and session_id == session.id:
            raise RpcError(INVALID_REQUEST, "this connection holds the session; close the connection")
        if not isinstance(session_id, str) or not await self.sessions.close(session_id):
            raise RpcError(INVALID_PARAMS, f"Unknown session_id: {session_id}")
        return {"session_id": session_id, "closed": True}


def call_result(result: TurnResult) -> JsonObject:
    """The result of `tools/call`."""
    meta: JsonObject = {"reward": result.reward, "done": result.done, **about_end(result)}
    return {
        "content": answer_content(result.messages),
        "isError": any(call.outcome != "ok" for call in result.calls),
        "_meta": meta,
    }


def _result(number: object, result: JsonObject) -> JsonObject:
    return {"jsonrpc": "2.0", "id": cast(Json, number), "result": result}


def _error(number: object, code: int, message: str) -> JsonObject:
    return {"jsonrpc": "2.0", "id": cast(Json, number), "error": {"code": code, "message": message}}
