"""User programs that play an episode: a command or a Python function, without a sandbox (see `boxed` for one)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from agentrl.chat.messages import write_message
from agentrl.env.toolenv.threads import ToolRaised, run_apart
from agentrl.types import Message, Task

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from agentrl.sandbox import Box

log = logging.getLogger(__name__)

TAIL_BYTES = 64 << 10
"""Maximum bytes kept from the end of each output of a command."""
OUTPUT_BYTES = 256 << 20
"""A command that writes more than this to one of its outputs is ended."""
GRACE_S = 2.0
"""Grace period between terminating a command and killing it, and for a canceled function to end."""
DRAIN_S = 1.0
"""How long the outputs of a command that has ended may stay open."""
LOOK_S = 0.05
"""How often to check whether a command has ended while others hold its outputs open."""
MAX_CRASH = 1000
"""Maximum characters of the error with which a program failed."""
_PLACEHOLDER = re.compile(r"\{(?:prompt|id|base_url)\}")


class AgentCrashedError(Exception):
    """The program failed."""


class Clients:
    """One HTTP client for all functions in an event loop: creating one per episode costs more than a request."""

    def __init__(self) -> None:
        self._loop = _running_loop()
        self._shared: AsyncOpenAI | None = None

    def client(self, base_url: str, api_key: str) -> AsyncOpenAI:
        """The official client of one episode; callers must not close it.

        Connections are tied to an event loop. A function that runs in a thread has a separate loop, so its client
        neither shares connections nor keeps them open.
        """
        if _running_loop() is not self._loop:
            return _new_client(base_url, api_key, keep=0)
        if self._shared is None:
            self._shared = _new_client(base_url, api_key)
        return self._shared.copy(base_url=base_url, api_key=api_key)

    async def close(self) -> None:
        """Close the connections; idempotent."""
        if self._shared is not None:
            await self._shared.close()
            self._shared = None


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _new_client(base_url: str, api_key: str, keep: int | None = None) -> AsyncOpenAI:
    """A client with at most `keep` idle connections."""
    import httpx
    from openai import AsyncOpenAI

    from agentrl.engine.servers.http import SDK_LIMITS, Transport

    # Requests stay on this machine, without TLS: loading certificates would take most of the time.
    limits = SDK_LIMITS if keep is None else httpx.Limits(max_keepalive_connections=keep)
    transport = Transport(limits=limits, verify=False)
    http = httpx.AsyncClient(transport=transport, trust_env=False, follow_redirects=True)
    return AsyncOpenAI(
        base_url=base_url,
        api_key=api_key,
        http_client=http,  # type: ignore[arg-type] # the SDK names httpx2 and takes both
    )


@dataclass(frozen=True, slots=True)
class Access:
    """How a program reaches the policy: `base_url` and `api_key` belong to its episode, `model` can be any
    name. Clients of Anthropic's API use `anthropic_base_url`."""

    base_url: str
    api_key: str = field(repr=False)
    model: str = "policy"
    clients: Clients = field(default_factory=Clients, repr=False)

    @property
    def keyed_url(self) -> str:
        """The address with the key, for programs that cannot send one."""
        return f"{self.base_url.removesuffix('/v1')}.{self.api_key}/v1"

    @property
    def anthropic_base_url(self) -> str:
        """The address without its last part `/v1`, which clients of Anthropic's API add themselves."""
        return self.base_url.removesuffix("/v1")

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that the official SDKs and most agents read."""
        openai = {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key, "OPENAI_MODEL": self.model}
        return openai | {
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_API_KEY": self.api_key,
            "ANTHROPIC_MODEL": self.model,
        }

    def client(self) -> AsyncOpenAI:
        """The official client, ready for this episode and cheap; do not close it."""
        return self.clients.client(self.base_url, self.api_key)


@dataclass(frozen=True, slots=True)
class AgentTask:
    """The input of a program: the task, and the opening messages and tools that the env would show a policy."""

    task: Task
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    box: Box | None = None
    """The env's sandbox, if it has one: a program in a sandbox works on a copy of its files."""

    @property
    def prompt(self) -> str:
        """The text of the last opening message."""
        content = self.messages[-1].content if self.messages else ""
        return content if isinstance(content, str) else "".join(p for p in content if isinstance(p, str))

    def fill(self, command: Sequence[str], *, base_url: str) -> list[str]:
        """The words of a command with `{prompt}`, `{id}` and `{base_url}` replaced, but not within a prompt."""
        values = {"{prompt}": self.prompt, "{id}": self.task.id, "{base_url}": base_url}
        return [_PLACEHOLDER.sub(lambda found: values[found.group()], word) for word in command]

    def data(self) -> dict[str, Any]:
        """The task as JSON data."""
        return {
            "id": self.task.id,
            "seed": self.task.seed,
            "row": dict(self.task.row),
            "prompt": self.prompt,
            "messages": [write_message(message) for message in self.messages],
            "tools": [dict(tool) for tool in self.tools],
        }


class Agent(Protocol):
    """Plays one episode."""

    async def run(self, task: AgentTask, access: Access) -> str:
        """Play the episode; returns the program's outcome. Cancellation stops the program.

        Raises:
            AgentCrashedError: the program failed.
        """
        ...


@dataclass(frozen=True, slots=True)
class FunctionAgent:
    """A Python function `f(task, access)`: async ones run in the event loop, others on a thread of their own.

    `task` is the data of an `AgentTask`, `access` an `Access`; the return value is the outcome. A function that
    does not end when it is canceled is left behind: the address of its episode answers no more.
    """

    function: Callable[..., Any]

    async def run(self, task: AgentTask, access: Access) -> str:
        """Call the function. Raises AgentCrashedError if it raises."""
        playing = asyncio.ensure_future(self._play(task.data(), access))
        playing.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may ask for it
        try:
            await asyncio.wait({playing})
        finally:
            if not playing.done():
                playing.cancel()
                await asyncio.wait({playing}, timeout=GRACE_S)
            if not playing.done():
                log.warning("the agent %s ignores that its episode is over", self.function)
        return playing.result()

    async def _play(self, task: dict[str, Any], access: Access) -> str:
        try:
            if inspect.iscoroutinefunction(self.function):
                said = await self.function(task, access)
            else:
                said = await run_apart(functools.partial(self.function, task, access), None)
                said = await said if inspect.isawaitable(said) else said
            return said if isinstance(said, str) else "" if said is None else json.dumps(said, default=str)
        except ToolRaised as e:
            return _exit(e.cause)
        except asyncio.CancelledError as e:
            here = asyncio.current_task()
            if here is not None and here.cancelling():
                raise
            return _exit(e)
        except (Exception, SystemExit) as e:
            return _exit(e)


def _exit(error: BaseException) -> str:
    """The outcome of a function that did not return: empty if it called `sys.exit()`. Raises AgentCrashedError."""
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return ""
    try:
        text = str(error)
    except Exception:  # of the user's own exception
        text = "(its text raises)"
    raise AgentCrashedError(f"{type(error).__name__}: {text}"[:MAX_CRASH]) from error


@dataclass(frozen=True, slots=True)
class CommandAgent:
    """A command, started for each episode in a separate process group.

    Its standard input is the task as JSON; OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL and their ANTHROPIC_
    counterparts point to the policy; `{prompt}`, `{id}` and `{base_url}` (with the key) in its arguments are
    replaced. Its standard output is its outcome. Processes that it leaves behind end with it, in whatever group.
    """

    command: Sequence[str]
    cwd: str | None = None

    async def run(self, task: AgentTask, access: Access) -> str:
        """Run the command to completion. Raises AgentCrashedError if it cannot start, is killed, writes without
        end, or exits with a nonzero code."""
        process = await self._start(task, access)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        out, err = (_Tail(stream, process.pid) for stream in (process.stdout, process.stderr))
        given = json.dumps(task.data(), default=str).encode()
        streams = [asyncio.ensure_future(work) for work in (_feed(process.stdin, given), out.read(), err.read())]
        try:
            code = await _ended(process)
        finally:
            await end_group(process)
            await asyncio.to_thread(end_leftovers, access.api_key)
            await asyncio.wait(streams, timeout=DRAIN_S)
            await _drop(streams)
            vars(process)["_transport"].close()  # what hid from that may still hold the outputs open
        if out.full or err.full:
            raise AgentCrashedError(f"it wrote more than {OUTPUT_BYTES >> 20} MiB to its output")
        if code != 0:
            said = (err.text() or out.text()).strip().splitlines()
            raise AgentCrashedError(how_ended(code) + (f": {said[-1][:300]}" if said else ""))
        return out.text()

    async def _start(self, task: AgentTask, access: Access) -> asyncio.subprocess.Process:
        words = task.fill(self.command, base_url=access.keyed_url)
        if words[0] == "python":
            words[0] = sys.executable
        try:
            return await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=self.cwd,
                env={**os.environ, **without_proxy(), **access.environment},
                start_new_session=True,
            )
        except (OSError, ValueError) as e:  # ValueError: a NUL in the prompt
            raise AgentCrashedError(f"cannot start {words[0]}: {getattr(e, 'strerror', None) or e}") from e


def without_proxy() -> dict[str, str]:
    """Environment variables that keep requests to this machine from a proxy, in addition to what they exclude."""
    hosts = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if hosts.strip() == "*":  # all hosts; in a list, not every client reads it so
        return {}
    return dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(filter(None, [hosts, "127.0.0.1"])))


async def _ended(process: asyncio.subprocess.Process) -> int:
    """Its exit code as soon as it has ended: `Process.wait` also waits for others that hold its outputs open."""
    waiting = asyncio.ensure_future(process.wait())
    try:
        while process.returncode is None:
            await asyncio.wait({waiting}, timeout=LOOK_S)
    finally:
        waiting.cancel()
    return process.returncode


def how_ended(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    named = -code in {number.value for number in signal.Signals}  # real-time signals have numbers only
    return f"killed by {signal.Signals(-code).name if named else f'signal {-code}'}"


async def _feed(stdin: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(OSError):  # the program does not have to read it
        stdin.write(data)
        await stdin.drain()
    with contextlib.suppress(OSError):
        stdin.close()
        await stdin.wait_closed()


class _Tail:
    """The end of an output; a process that writes without end is killed."""

    def __init__(self, stream: asyncio.StreamReader, group: int) -> None:
        self._stream, self._group = stream, group
        self._kept, self._count = b"", 0

    @property
    def full(self) -> bool:
        """Whether it wrote more than it may."""
        return self._count > OUTPUT_BYTES

    async def read(self) -> None:
        """Read until the output is closed."""
        while chunk := await self._stream.read(1 << 16):
            self._kept = (self._kept + chunk)[-TAIL_BYTES:]
            self._count += len(chunk)
            if self.full:
                _signal(self._group, signal.SIGKILL)

    def text(self) -> str:
        """What is kept."""
        return self._kept.decode("utf-8", "replace")


async def _drop(tasks: Sequence[asyncio.Future[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def end_leftovers(key: str) -> None:
    """Kill the processes that were started with the key of an episode, in whatever group they are (Linux).

    Returns once they have ended, or after GRACE_S.
    """
    deadline = time.monotonic() + GRACE_S
    while found := [f.name for f in Path("/proc").glob("[0-9]*") if _has(f / "environ", key.encode())]:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(pid), signal.SIGKILL)
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)  # they end, or start others, meanwhile


def _has(environ: Path, key: bytes) -> bool:
    try:
        return key in environ.read_bytes()
    except OSError:
        return False


async def end_group(process: asyncio.subprocess.Process) -> None:
    """End the whole process group, also while being cancelled."""
    if process.returncode is None:
        _signal(process.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError, asyncio.CancelledError):
            await asyncio.wait_for(_ended(process), GRACE_S)
    _signal(process.pid, signal.SIGKILL)
    if process.returncode is None:
        await asyncio.shield(_ended(process))


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
