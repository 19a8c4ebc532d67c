"""User programs that play an episode: a command or a Python function, without a sandbox (see `boxed` for one)."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from agentrl.chat.messages import write_message
from agentrl.types import Message, Task

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from agentrl.sandbox import Box

TAIL_BYTES = 64 << 10
"""Maximum bytes kept from the end of each output of a command."""
GRACE_S = 2.0
"""Grace period between terminating a command and killing it."""


class AgentCrashedError(Exception):
    """The program failed."""


class Clients:
    """One HTTP client for all functions of a process: creating one per episode costs more than a request."""

    def __init__(self) -> None:
        self._shared: AsyncOpenAI | None = None

    def client(self, base_url: str, api_key: str) -> AsyncOpenAI:
        """The official client of one episode; callers must not close it."""
        import httpx
        from openai import AsyncOpenAI

        from agentrl.engine.servers.http import SDK_LIMITS, Transport

        if self._shared is None:
            # Requests stay on this machine, without TLS: loading certificates would take most of the time.
            transport = Transport(limits=SDK_LIMITS, verify=False)
            http = httpx.AsyncClient(transport=transport, trust_env=False, follow_redirects=True)
            self._shared = AsyncOpenAI(
                base_url=base_url,
                api_key=api_key,
                http_client=http,  # type: ignore[arg-type] # the SDK names httpx2 and takes both
            )
        return self._shared.copy(base_url=base_url, api_key=api_key)

    async def close(self) -> None:
        """Close the connections; idempotent."""
        if self._shared is not None:
            await self._shared.close()
            self._shared = None


@dataclass(frozen=True, slots=True)
class Access:
    """How a program reaches the policy: `base_url` and `api_key` belong to its episode, `model` can be any
    name. Clients of Anthropic's API use `anthropic_base_url`."""

    base_url: str
    api_key: str
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
    """A Python function `f(task, access)`: async ones run in the event loop, others in a thread.

    `task` is the data of an `AgentTask`, `access` an `Access`; the return value is the outcome.
    """

    function: Callable[..., Any]

    async def run(self, task: AgentTask, access: Access) -> str:
        """Call the function. Raises AgentCrashedError if it raises."""
        try:
            if inspect.iscoroutinefunction(self.function):
                said = await self.function(task.data(), access)
            else:
                said = await asyncio.to_thread(self.function, task.data(), access)
        except Exception as e:
            raise AgentCrashedError(f"{type(e).__name__}: {e}") from e
        return said if isinstance(said, str) else "" if said is None else json.dumps(said, default=str)


@dataclass(frozen=True, slots=True)
class CommandAgent:
    """A command, started for each episode in a separate process group.

    Its standard input is the task as JSON; OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL and their ANTHROPIC_
    counterparts point to the policy; `{prompt}`, `{id}` and `{base_url}` (with the key) in its arguments are
    replaced. Its standard output is its outcome.
    """

    command: Sequence[str]
    cwd: str | None = None

    async def run(self, task: AgentTask, access: Access) -> str:
        """Run the command to completion. Raises AgentCrashedError if it cannot start or exits with a nonzero
        code."""
        words = [w.replace("{prompt}", task.prompt).replace("{id}", task.task.id) for w in self.command]
        words = [word.replace("{base_url}", access.keyed_url) for word in words]
        if words[0] == "python":
            words[0] = sys.executable
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=self.cwd,
                env={**os.environ, **access.environment},
                start_new_session=True,
            )
        except OSError as e:
            raise AgentCrashedError(f"cannot start {words[0]}: {e.strerror}") from e
        stdin, stdout, stderr = process.stdin, process.stdout, process.stderr
        assert stdin is not None
        assert stdout is not None
        assert stderr is not None
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_feed(stdin, json.dumps(task.data(), default=str).encode()))
                out = group.create_task(_tail(stdout))
                err = group.create_task(_tail(stderr))
                code = await process.wait()
                _signal(process.pid, signal.SIGKILL)  # leftover processes may keep its outputs open
        finally:
            await end_group(process)
        if code != 0:
            said = (err.result() or out.result()).strip().splitlines()
            raise AgentCrashedError(f"exit code {code}" + (f": {said[-1][:300]}" if said else ""))
        return out.result()


async def _feed(stdin: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(OSError):  # the program does not have to read it
        stdin.write(data)
        await stdin.drain()
    with contextlib.suppress(OSError):
        stdin.close()
        await stdin.wait_closed()


async def _tail(stream: asyncio.StreamReader) -> str:
    kept = b""
    while chunk := await stream.read(1 << 16):
        kept = (kept + chunk)[-TAIL_BYTES:]
    return kept.decode("utf-8", "replace")


async def end_group(process: asyncio.subprocess.Process) -> None:
    """End the whole process group, also while being cancelled."""
    if process.returncode is None:
        _signal(process.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError, asyncio.CancelledError):
            await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(process.wait())), GRACE_S)
    _signal(process.pid, signal.SIGKILL)
    if process.returncode is None:
        await asyncio.shield(process.wait())


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
