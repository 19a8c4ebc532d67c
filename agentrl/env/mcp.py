"""Tools of MCP servers (stdio or streamable HTTP) through the official `mcp` SDK, one connection per episode.

A server's answers, including errors, are observations. A server that is unreachable at the start of an episode is
an infrastructure failure. A later crash may be caused by the policy's calls: if a new session can be opened, the
lost session and every later call are observations; otherwise the server is down, which is an infrastructure
failure. So is a server at a `url` that answers neither a call in time nor anything else.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

from agentrl.config.address import address_problem, hide_credentials, without_credentials
from agentrl.config.typed import check_types
from agentrl.env.toolenv.background import background
from agentrl.env.toolenv.dispatch import within
from agentrl.env.toolenv.jsonschema import check_arguments
from agentrl.env.toolenv.observe import ToolError, error_text
from agentrl.env.toolenv.threads import CallTimeout
from agentrl.errors import ConfigError, InfraError, first_error
from agentrl.types import Image, Part

if TYPE_CHECKING:
    from mcp import Client


@dataclass(frozen=True, slots=True)
class McpServer:
    """How to reach a server, and which of its tools to use.

    Exactly one of `command` (started for each episode) and `url` (streamable HTTP) is given.
    """

    command: tuple[str, ...] = ()
    """Program and arguments of a stdio server."""
    url: str = ""
    """Address of a streamable HTTP server."""
    env: tuple[tuple[str, str], ...] = ()
    """Environment variables of the program, added to the few that the SDK passes through."""
    cwd: str = ""
    """Working directory of the program."""
    include: tuple[str, ...] = ()
    """Names of the tools to use; all if empty."""
    prefix: str = ""
    """Prefix of each tool's name."""
    connect_timeout_s: float = 30.0
    """Timeout for starting and initializing the server, once it has its turn to start."""
    call_timeout_s: float | None = None
    """Timeout of one call; overrides the env's."""

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ConfigError("mcp: give exactly one of `command` (a list) and `url`")
        if self.url and (problem := address_problem(self.url)):
            raise ConfigError(f"mcp: url {self.where}: {problem}")

    @classmethod
    def from_mapping(cls, entry: Mapping[str, Any]) -> McpServer:
        """Read an entry of `tools:`. Raises ConfigError on an unknown key."""
        known = set(cls.__dataclass_fields__)
        if unknown := [key for key in entry if key not in known]:
            raise ConfigError(f"mcp: unknown key {unknown[0]!r}; the keys are: {', '.join(sorted(known))}")
        values = dict(entry)
        if isinstance(values.get("command"), str):
            raise ConfigError("mcp.command: write a list, e.g. [python, server.py]")
        for key in ("command", "include"):
            if isinstance(values.get(key), list | tuple):
                values[key] = tuple(map(str, values[key]))
        if isinstance(values.get("env"), Mapping):
            values["env"] = tuple((str(k), str(v)) for k, v in values["env"].items())
        check_types(cls, values, "mcp")
        return cls(**values)

    @property
    def where(self) -> str:
        """The name used in messages."""
        return without_credentials(self.url) or " ".join(self.command)


@dataclass(frozen=True, slots=True)
class _Listed:
    name: str
    description: str
    parameters: Mapping[str, object]


_READERS = ("mcp.client.stdio", "mcp.client.streamable_http")
"""The SDK's loggers of lines and answers that are no messages."""


def _without_traceback(record: logging.LogRecord) -> bool:
    """Log output that the SDK cannot read as one line: a traceback would look like an error in agentrl."""
    if record.exc_info and record.exc_info[1] is not None:
        said = " ".join(error_text(record.exc_info[1]).split())
        record.msg, record.args = "mcp: %s: %s", (record.getMessage(), said[:300])
        record.exc_info = None
    return True


_listings: dict[McpServer, tuple[_Listed, ...]] = {}
"""All tools of each server, whichever of them are used and however they are called."""


def list_tools(server: McpServer) -> tuple[_Listed, ...]:
    """The tools of the server that are used; each server is asked once per process.

    Raises:
        ConfigError: the server does not answer, or lacks tools that `include` names.
    """
    asked = replace(server, include=(), prefix="", connect_timeout_s=0.0, call_timeout_s=None)
    if asked not in _listings:
        try:
            _listings[asked] = background.run(_ask_tools(server), server.connect_timeout_s + 5)
        except InfraError as e:
            raise ConfigError(str(e)) from e
        except TimeoutError as e:
            raise ConfigError(f"mcp: {server.where}: no answer after {server.connect_timeout_s:g} s") from e
        except Exception as e:
            said = " ".join(error_text(_first(e)).split())[:300]
            raise ConfigError(f"mcp: {server.where}: its tools cannot be listed: {said}") from e
        if not all(tool.name for tool in _listings[asked]) or not _listings[asked]:
            said = "lists a tool without a name" if _listings.pop(asked) else "offers no tools"
            raise ConfigError(f"mcp: {server.where}: {said}")
    names = [tool.name for tool in _listings[asked]]
    if missing := [name for name in server.include if name not in names]:
        raise ConfigError(f"mcp: {server.where} has no tool {missing[0]!r}; it has: {', '.join(names)}")
    return tuple(tool for tool in _listings[asked] if not server.include or tool.name in server.include)


async def _ask_tools(server: McpServer) -> tuple[_Listed, ...]:
    connection = McpConnection(server)
    await connection.open()
    try:
        found: list[Any] = []
        cursor: str | None = None
        while True:
            page = await connection.client.list_tools(cursor=cursor)
            found += page.tools
            cursor = page.next_cursor
            if not cursor:
                break
    finally:
        await connection.close()
    return tuple(_Listed(tool.name, tool.description or "", tool.input_schema) for tool in found)


_places: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


def _starting() -> asyncio.Semaphore:
    """The places of programs that start at once: hundreds would all take longer than `connect_timeout_s`."""
    loop = asyncio.get_running_loop()
    if loop not in _places:
        _places[loop] = asyncio.Semaphore(max(4, os.cpu_count() or 1))
    return _places[loop]


@dataclass(slots=True)
class McpConnection:
    """A session with a server, kept open by a separate task (the SDK ties a session to its task)."""

    server: McpServer
    _client: Client | None = None
    _gone: str = ""
    """Why calls no longer get answers."""
    _holder: asyncio.Task[None] | None = None
    _done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def client(self) -> Client:
        """The SDK's client. Raises InfraError when the session is not open."""
        if self._client is None or self._holder is None or self._holder.done():
            raise InfraError(f"mcp: {self.server.where}: the server has exited")
        return self._client

    async def open(self) -> None:
        """Start or connect to the server and initialize the session.

        Raises:
            InfraError: it does not answer in time.
            ConfigError: the SDK is not installed.
        """
        try:
            import mcp
        except ImportError as e:
            raise ConfigError("MCP tools need the SDK: pip install 'agentrl-train[mcp]'") from e
        target: Any = self.server.url or mcp.StdioServerParameters(
            command=self.server.command[0],
            args=list(self.server.command[1:]),
            env=dict(self.server.env) or None,
            cwd=self.server.cwd or None,
            encoding_error_handler="replace",  # the SDK stops reading at what is not UTF-8 and reports nothing
        )
        for name in _READERS:
            logging.getLogger(name).addFilter(_without_traceback)
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._done = asyncio.Event()
        async with _starting() if self.server.command else contextlib.nullcontext():
            self._holder = asyncio.create_task(self._hold(mcp.Client(target), ready))
            await asyncio.wait(
                {ready, self._holder}, timeout=self.server.connect_timeout_s, return_when="FIRST_COMPLETED"
            )
        if not ready.done():
            self._holder.cancel()  # nothing is open that could end in an orderly way
            await self.close()
            raise InfraError(f"mcp: {self.server.where}: no answer after {self.server.connect_timeout_s:g} s")
        try:
            ready.result()
        except Exception as e:
            await self.close()
            raise InfraError(f"mcp: {self.server.where}: {hide_credentials(error_text(e))}") from e

    async def _hold(self, client: Client, ready: asyncio.Future[None]) -> None:
        try:
            async with client:
                self._client = client
                ready.set_result(None)
                await self._done.wait()
        except Exception as e:
            if not ready.done():
                ready.set_exception(_first(e))
        finally:
            self._client = None

    async def call(self, name: str, arguments: dict[str, object], timeout_s: float | None) -> object:
        """Call a tool; text and images come back as content.

        Raises:
            ToolError: the tool reported an error.
            CallTimeout: no answer in time, from a server that is up.
            InfraError: the server is down: not even a new session can be opened.
        """
        if self._gone:
            raise ToolError(self._gone)
        if self._client is None or self._holder is None or self._holder.done():
            await self._lost("died before", name)
        client, holder = self.client, self._holder
        assert holder is not None
        asked = asyncio.ensure_future(within(client.call_tool(name, arguments), timeout_s))
        try:
            await asyncio.wait({asked, holder}, return_when="FIRST_COMPLETED")
            if not asked.done():
                await self._lost("died during", name)
            result = asked.result()
        except CallTimeout:
            if self.server.url and not await self._alive():
                await self._check_up("hung during", name)
            raise
        except (InfraError, ToolError, asyncio.CancelledError):
            raise
        except Exception as e:
            if await self._alive():
                raise ToolError(hide_credentials(error_text(_first(e)))) from e
            self._client = None
            await self._lost("died during", name)
        finally:
            if not asked.done():
                asked.cancel()
                await asyncio.wait({asked}, timeout=1.0)
        content = _content(result.content)
        if content == "" and (given := getattr(result, "structured_content", None)) is not None:
            content = json.dumps(given, ensure_ascii=False)
        if result.is_error:
            raise ToolError(
                content if isinstance(content, str) else "".join(p for p in content if isinstance(p, str))
            )
        return content

    async def _lost(self, how: str, name: str) -> NoReturn:
        """Handle a lost session. Raises ToolError if the server accepts a new one, InfraError otherwise."""
        await self._check_up(how, name)
        when = how.removeprefix("died ")
        self._gone = f"the tool server's session ended {when} the call of {name} and answers no more calls"
        raise ToolError(self._gone)

    async def _check_up(self, how: str, name: str) -> None:
        """Raises InfraError if the server accepts no new session."""
        fresh = McpConnection(self.server)
        try:
            await fresh.open()
        except InfraError as e:
            said = str(e).removeprefix(f"mcp: {self.server.where}: ")
            raise InfraError(f"mcp: {self.server.where}: the server {how} {name}, and is down: {said}") from e
        finally:
            await fresh.close()

    async def _alive(self) -> bool:
        """Whether the server still answers: a failed request does not mean that the session is lost."""
        try:
            await within(self.client.list_tools(), min(5.0, self.server.connect_timeout_s))
        except Exception:
            return False
        return True

    async def close(self) -> None:
        """End the session and the server's process; idempotent."""
        holder, self._holder = self._holder, None
        self._done.set()
        if holder is None:
            return
        done, _ = await asyncio.wait({holder}, timeout=10.0)
        if not done:
            holder.cancel()
            await asyncio.wait({holder}, timeout=5.0)


@dataclass(slots=True)
class McpTool:
    """A `BoundTool` that calls a tool over a connection."""

    name: str
    schema: Mapping[str, Any]
    connection: McpConnection
    remote_name: str
    timeout_s: float | None
    parallel: bool = False
    outside: bool = True

    def validate(self, arguments: Mapping[str, object]) -> dict[str, object]:
        """Raises InvalidArguments."""
        return check_arguments(self.schema["function"]["parameters"], arguments)

    async def call(self, arguments: dict[str, object], timeout_s: float | None) -> object:
        """Call the tool on the server."""
        return await self.connection.call(self.remote_name, arguments, timeout_s)


def mcp_tools(server: McpServer, connection: McpConnection) -> Sequence[McpTool]:
    """The server's tools on one connection, with schemas passed through unchanged."""
    tools = []
    for listed in list_tools(server):
        function: dict[str, Any] = {"name": server.prefix + listed.name}
        if listed.description:
            function["description"] = listed.description
        function["parameters"] = listed.parameters
        schema = {"type": "function", "function": function}
        tools.append(McpTool(function["name"], schema, connection, listed.name, server.call_timeout_s))
    return tools


def _content(items: Sequence[Any]) -> str | tuple[Part, ...]:
    parts: list[Part] = []
    for item in items:
        if item.type == "text":
            parts.append(item.text)
        elif item.type == "image":
            try:
                parts.append(Image(base64.b64decode(item.data, validate=True), item.mime_type))
            except ValueError as e:
                raise ToolError(f"the tool returned an image that cannot be read: {e}") from None
        elif isinstance(text := getattr(getattr(item, "resource", None), "text", None), str):
            parts.append(text)
        elif uri := getattr(getattr(item, "resource", item), "uri", None):
            parts.append(f"[{item.type}: {uri}]")
        else:
            parts.append(f"[{item.type}]")
    if all(isinstance(p, str) for p in parts):
        return "\n".join(str(p) for p in parts)
    return tuple(parts)


def _first(error: BaseException) -> Exception:
    """The first plain error inside the exception groups that task groups make."""
    first = first_error(error)
    return first if isinstance(first, Exception) else InfraError(error_text(first))
