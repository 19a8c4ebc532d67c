"""The page's server: static files and a JSON API on loopback, for clients with the token.

Every request needs the token (in the first URL, then as a cookie, or as `Authorization: Bearer`), a Host header
that names this server, and for POST an Origin that is this server's. Nothing on the page comes from elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import math
import time
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from html import escape
from typing import Any
from urllib.parse import parse_qs, urlsplit

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentrl.errors import ConfigError
from agentrl.run_folder.run_reader import Json
from agentrl.serve.body import body_within
from agentrl.view import env_view, run_page
from agentrl.view.as_json import json_text
from agentrl.view.bundle import served
from agentrl.view.episode_page import Span
from agentrl.view.library import RECENT, Library, NotFoundError, query_of
from agentrl.view.preferences import Preferences

log = logging.getLogger(__name__)

COOKIE = "agentrl_view"
"""Beginning of the name; the port follows, because all ports of a host share their cookies."""
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-src 'self'; object-src 'none'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
MAX_POST = 64 << 10
POLL_S = 25.0
"""How long a request for events waits."""
LOOK_EVERY_S = 0.9
"""Seconds between looks at the run folders, however many pages ask for events."""
MAX_EVENTS = 1_000


@dataclass
class Events:
    """Events that pages wait for: runs that changed, and views that a program wants to show."""

    library: Library
    happened: list[Json] = field(default_factory=list)
    dropped: int = 0
    closed: bool = False
    _states: dict[str, object] | None = None
    _looked: float = -math.inf
    _looking: asyncio.Lock = field(default_factory=asyncio.Lock)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def next(self) -> int:
        """The number of the event after the newest."""
        return self.dropped + len(self.happened)

    def add(self, event: Json) -> None:
        """Add an event and wake all waiting requests."""
        self.happened.append(event)
        if len(self.happened) > MAX_EVENTS:
            self.dropped += len(self.happened) - MAX_EVENTS
            del self.happened[:-MAX_EVENTS]
        self._wake()

    def close(self) -> None:
        """Answer all waiting requests; later ones do not wait."""
        self.closed = True
        self._wake()

    async def after(self, number: int, wait_s: float = POLL_S) -> list[Json]:
        """The events from `number` on; waits a while for the first."""
        await self.look()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self.next <= number and not self.closed:
                    arrived = self._arrived
                    await self.look()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_EVERY_S):
                            await arrived.wait()
        return self.happened[max(0, number - self.dropped) :]

    def _wake(self) -> None:
        self._arrived.set()
        self._arrived = asyncio.Event()

    async def look(self) -> None:
        """Note which runs have changed, appeared or gone since the last look, unless that was a moment ago."""
        async with self._looking:
            if time.monotonic() - self._looked < LOOK_EVERY_S:
                return
            states = await run_in_threadpool(self._found)
            before, self._states, self._looked = self._states, states, time.monotonic()
        if before is None:
            return
        if changed := [id for id in {**before, **states} if before.get(id) != states.get(id)]:
            self.add({"changed": changed})

    def _found(self) -> dict[str, object]:
        # The status too: a process that is killed leaves its folder as it was.
        return {id: (run.state, run.status) for id, run in self.library.runs.items()}


class Page:
    """Answers the requests of the page."""

    def __init__(self, library: Library, preferences: Preferences, events: Events) -> None:
        self.library, self.preferences, self.events = library, preferences, events

    def routes(self) -> list[Route]:
        """All routes."""
        return [
            self._get("/api/runs", lambda r: self.library.all_runs()),
            self._get("/api/runs/{run}", lambda r: self.library.about(_run(r))),
            self._get("/api/runs/{run}/series", self._series),
            self._get("/api/runs/{run}/steps", lambda r: run_page.steps(self.library.run(_run(r)))),
            self._get(
                "/api/runs/{run}/steps/{step}",
                lambda r: self.library.step(_run(r), _whole("step", r.path_params["step"])),
            ),
            self._get("/api/runs/{run}/tools", lambda r: self.library.tools(_run(r), _number(r, "steps", RECENT))),
            self._get("/api/runs/{run}/episodes/{id:path}", lambda r: self.library.episode(_run(r), *_named(r))),
            self._get(
                "/api/runs/{run}/tokens/{id:path}", lambda r: self.library.tokens(_run(r), *_named(r), _span(r))
            ),
            self._get("/api/search", lambda r: self.library.search(query_of(r.query_params, self.library))),
            self._get("/api/compare", self._compare),
            self._get("/api/image/{run}/{id:path}", self._image),
            self._get("/api/renderer/{run}/{env}", self._renderer),
            Route("/api/events", self._events, methods=["GET"]),
            Route("/api/view", self._view, methods=["POST"]),
            self._get("/api/preferences", lambda r: self.preferences.all()),
            Route("/api/preferences", self._prefer, methods=["POST"]),
            Route("/{path:path}", self._static, methods=["GET"]),
        ]

    def _get(self, path: str, find: Callable[[Request], Json | Response]) -> Route:
        async def answer(request: Request) -> Response:
            try:
                found = await run_in_threadpool(find, request)
                return found if isinstance(found, Response) else _json(found)
            except NotFoundError as e:
                return _error(404, str(e), "Go back to the list of runs.")
            except ConfigError as e:
                return _error(400, str(e), "Change the address.")
            except Exception as e:
                log.exception("a request failed: %s", request.url.path)
                return _error(500, f"Internal error: {type(e).__name__}", "See what `agentrl view` printed.")

        return Route(path, answer, methods=["GET"])

    def _series(self, request: Request) -> Json:
        given = [names for names in request.query_params.getlist("names") if names]
        reader, after = self.library.run(_run(request)), _number(request, "after", -1)
        known = reader.metrics.values  # the name of a metric may have a comma
        names = [name for each in given for name in ([each] if each in known else each.split(","))]
        return run_page.series(reader, names if given else None, after)

    def _compare(self, request: Request) -> Json:
        ids = [id for id in request.query_params.get("runs", "").split(",") if id]
        if not 0 < len(ids) <= 50:
            raise ConfigError("runs: name between 1 and 50 runs, separated by commas")
        return self.library.compare(ids)

    def _image(self, request: Request) -> Response:
        place = _number(request, "message", -1), _number(request, "part", -1)
        data, kind = self.library.image(_run(request), *_named(request), *place)
        return Response(data, media_type=kind, headers={"Content-Disposition": "inline"})

    def _renderer(self, request: Request) -> Response:
        page = self.library.renderer(_run(request), str(request.path_params["env"]))
        return Response(page, media_type=KINDS["html"], headers=dict(env_view.HEADERS))

    async def _events(self, request: Request) -> Response:
        if "after" not in request.query_params:
            await self.events.look()
            return _json({"next": self.events.next, "events": []})
        try:
            wait_s = min(POLL_S, _number(request, "wait", int(POLL_S)))
            found = await self.events.after(_number(request, "after", 0), wait_s)
        except ConfigError as e:
            return _error(400, str(e), "Ask without `after` first.")
        return _json({"next": self.events.next, "events": found})

    async def _prefer(self, request: Request) -> Response:
        try:
            found = json.loads(await _body(request))
            if not isinstance(found, dict):
                raise ConfigError("preferences: must be a JSON object")
            return _json(await run_in_threadpool(self.preferences.update, found))
        except (ConfigError, ValueError, RecursionError) as e:
            return _error(400, str(e)[:300], 'Send {"theme": "dark"}.')

    async def _view(self, request: Request) -> Response:
        try:
            place = json.loads(await _body(request))["hash"]
        except ConfigError as e:
            return _error(413, str(e), 'Send {"hash": "#/run/ID"}.')
        except (ValueError, KeyError, TypeError, RecursionError):
            place = None
        if not isinstance(place, str) or not place.startswith("#/"):
            return _error(400, "hash: must be text that begins with #/", 'Send {"hash": "#/run/ID"}.')
        self.events.add({"hash": place})
        return _json({"shown": place})

    async def _static(self, request: Request) -> Response:
        path = f"/{request.path_params['path']}"
        found = served().get(path)
        if found is None:
            return _refusal(
                request, 404, f"There is nothing at {path[:200]}.", "Open the address that `agentrl view` printed."
            )
        if path == "/page.js":
            found = await run_in_threadpool(self.preferences.script) + found
        return Response(found, media_type=KINDS[path.rpartition(".")[2] if "." in path else "html"])


KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
}


class Guard:
    """Accepts only requests with the token and an allowed Host and Origin.

    Args:
        hosts: the values of a Host header that name this server, as `127.0.0.1:8000`; may be filled in later.
    """

    def __init__(self, app: ASGIApp, token: str, hosts: Set[str]) -> None:
        self._app, self._token, self._hosts = app, token, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} requests are not answered")
        request = Request(scope)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                there = {name for name, _ in message.get("headers", [])}
                framed = request.url.path.startswith("/api/renderer/") and b"content-security-policy" in there
                extra = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                extra = [] if framed else extra
                message = {**message, "headers": [*message.get("headers", []), *extra]}
            await send(message)

        answer = self._refused(request)
        await (answer or self._app)(scope, receive, guarded)

    def _refused(self, request: Request) -> Response | None:
        if request.headers.get("host", "") not in self._hosts:
            return _refusal(
                request, 403, "This server does not answer to that name.", "Open the address that was printed."
            )
        if request.method not in ("GET", "HEAD") and not self._ours(request.headers.get("origin")):
            return _refusal(
                request, 403, "A request from another page is not answered.", "Send no Origin, or this server's."
            )
        cookie = f"{COOKIE}_{request.url.port or 80}"
        given = parse_qs(urlsplit(str(request.url)).query).get("token", [""])[0]
        if request.method == "GET" and request.url.path == "/" and self._is_token(given):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(cookie, self._token, httponly=True, samesite="strict", path="/")
            return answer
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        key = key if kind.lower() == "bearer" else request.cookies.get(cookie, "")
        if not self._is_token(key):
            return _refusal(
                request, 401, "The token is missing or wrong.", "Open the address that `agentrl view` printed."
            )
        return None

    def _ours(self, origin: str | None) -> bool:
        return origin is None or origin in {f"http://{host}" for host in self._hosts}

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self._token.encode())


def create_view(
    library: Library,
    token: str,
    hosts: Set[str],
    preferences: Preferences | None = None,
    events: Events | None = None,
) -> ASGIApp:
    """The application; without `preferences`, what a user chooses is kept until it ends.

    Args:
        events: close them before the server stops, to answer the requests that wait for events.
    """
    page = Page(library, preferences or Preferences(), events or Events(library))
    return Guard(Starlette(routes=page.routes()), token, hosts)


async def _body(request: Request) -> bytes:
    """The body of a POST. Raises ConfigError if it is too large."""
    if (found := await body_within(request, MAX_POST)) is None:
        raise ConfigError("The body is too large.")
    return found


def _run(request: Request) -> str:
    return str(request.path_params["run"])


def _named(request: Request) -> tuple[int | None, str]:
    step = _number(request, "step", -1)
    return (step if step >= 0 else None), str(request.path_params["id"])


def _span(request: Request) -> Span:
    count = _number(request, "count", -1)
    return Span(max(0, _number(request, "from", 0)), count if count >= 0 else None)


def _number(request: Request, name: str, otherwise: int) -> int:
    text = request.query_params.get(name, "")
    return _whole(name, text) if text else otherwise


def _whole(name: str, text: str) -> int:
    try:
        return max(-1, min(int(text), 1 << 53))
    except ValueError:
        raise ConfigError(f"{name}: {text[:40]!r} is not a whole number") from None


def _error(status: int, message: str, what_to_do: str) -> Response:
    return _json({"error": {"message": message, "what_to_do": what_to_do}}, status)


def _refusal(request: Request, status: int, message: str, what_to_do: str) -> Response:
    """An error; a page where a person opened the address."""
    if "text/html" not in request.headers.get("accept", ""):
        return _error(status, message, what_to_do)
    text = f"<p>{escape(message)}</p><p>{escape(what_to_do)}</p>"
    head = '<meta charset="utf-8"><meta name="color-scheme" content="light dark"><title>agentrl</title>'
    return Response(f'<!doctype html><html lang="en">{head}{text}', status, media_type=KINDS["html"])


def _json(body: Any, status: int = 200) -> Response:
    return Response(json_text(body), status, media_type="application/json")
