"""What web pages may do: nothing without a key, unless they are listed.

A page in a browser can send requests to a server on the same machine, and by DNS rebinding even read the answers.
Without a key, the `Host` of a request must therefore be a loopback name, and its `Origin`, which only browsers
send, must be listed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from agentrl.serve.api_errors import ApiError
from agentrl.serve.dialects.anthropic import error_body, in_anthropic
from agentrl.serve.listen import is_loopback


class BrowserGuard:
    """Rejects requests of web pages that are not listed.

    Args:
        app: the application.
        origins: the origins (`https://app.example.com`) whose pages may use the endpoint, or `*` for all.
        keyless: whether requests need no key.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str], *, keyless: bool) -> None:
        self._origins, self._keyless = frozenset(origins), keyless
        self._app = app
        if origins:
            self._app = CORSMiddleware(
                app,
                allow_origins=list(origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "request-id"],
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, or reject it."""
        if scope["type"] == "http" and self._keyless and (why := self._problem(scope)):
            error = ApiError(403, why, code="forbidden")
            body = error_body(error) if in_anthropic(scope["path"]) else error.body()
            await JSONResponse(body, error.status)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _problem(self, scope: Scope) -> str:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if is_rebound(scope):
            return f"The host {host[:200]!r} is not this machine; a server with a key (--api-key-env) accepts it."
        if origin is None or "*" in self._origins or origin in self._origins:
            return ""
        if origin.partition("://")[2] == host:
            return ""
        return f"Pages of {origin[:200]!r} are not allowed; start the server with --cors {origin[:200]}."


def is_rebound(scope: Scope) -> bool:
    """Whether a request to a loopback address names another host, as after DNS rebinding."""
    server, host = scope.get("server"), Headers(scope=scope).get("host", "")
    return server is not None and is_loopback(server[0]) and bool(host) and not means_this_machine(_name(host))


@lru_cache
def means_this_machine(name: str) -> bool:
    """Whether a host name or address in a request means this machine."""
    return name.endswith(".localhost") or is_loopback(name)


def _name(host: str) -> str:
    """The name or address in a `Host` header."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
