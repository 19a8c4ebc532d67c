"""Programs that play an episode in a sandbox whose only way out is the recorder's address of that episode.

The recorder listens on a Unix socket in a directory of the episode, which is mounted into the sandbox. Inside, a
forwarder (`agentrl.agents.forwarder`) connects it to a port of the sandbox's own loopback, so unmodified clients
reach the policy at `http://127.0.0.1:PORT/KEY/v1`. The program works on a copy of the env's files. The changed
files are copied back for the reward, so no process of the program ever runs in the env's sandbox.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from agentrl.agents.forwarder import PROGRAM
from agentrl.agents.program import MAX_CRASH, TAIL_BYTES, Access, AgentCrashedError, AgentTask
from agentrl.errors import ConfigError, SandboxError
from agentrl.sandbox import Box, BoxSnapshot, Sandbox, SandboxBroken, SandboxPool
from agentrl.sandbox.local import require_linux
from agentrl.scratch import ScratchFolder
from agentrl.serve.listen import serving
from agentrl.suggest import did_you_mean

BACKENDS = ("namespace", "docker")
NEEDS = ("files", "environment", "network", "processes", "privileges")
"""Promises without which a program could reach more than its episode."""
MAX_CONNECTIONS = 64
"""Connections of one sandbox to the recorder; further ones are closed."""
SHARE = 0.9
"""Default time limit of the program as a share of `rollout.timeout_s`; the rest is for reading its files."""


def box_spec(options: Mapping[str, object], timeout_s: float) -> Sandbox:
    """Return the sandbox of `agent.sandbox`.

    Raises:
        ConfigError: a key is unknown, or the sandbox could not keep the program to its episode.
    """
    known = [f.name for f in fields(Sandbox)]
    if unknown := [key for key in options if key not in known]:
        hint = did_you_mean(unknown[0], known, otherwise=f"the keys are: {', '.join(known)}")
        raise ConfigError(f"agent.sandbox.{unknown[0]}: unknown key; {hint}")
    values: dict[str, object] = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    if isinstance(variables := values.get("env"), Mapping):
        values["env"] = tuple((str(k), str(v)) for k, v in variables.items())
    if (backend := values.get("backend", "namespace")) not in BACKENDS:
        raise ConfigError(
            f"agent.sandbox.backend {backend!r}: cannot keep a program from other addresses; "
            f"use {' or '.join(map(repr, BACKENDS))}"
        )
    if backend == "namespace":
        try:
            require_linux("namespace")
        except ConfigError as e:
            raise ConfigError(f"agent.sandbox: {e}") from e
    if values.get("network"):
        raise ConfigError(
            "agent.sandbox.network: the only address that the program reaches is the recorder's; remove the key, "
            "or remove agent.sandbox to run the program with the network of this machine"
        )
    for name in ("on_death", "death_reward"):
        if name in values:
            raise ConfigError(
                f"agent.sandbox.{name}: has no effect here; `agent.crash` decides what failures mean"
            )
    values.setdefault("wall_s", SHARE * timeout_s)
    values.setdefault("ttl_s", max(Sandbox.ttl_s, timeout_s))
    values.setdefault("stdout_bytes", TAIL_BYTES)
    values.setdefault("stderr_bytes", TAIL_BYTES)
    try:
        spec = Sandbox(**values)  # type: ignore[arg-type] # Sandbox checks the types itself
    except ConfigError as e:
        raise ConfigError(f"agent.sandbox: {e}") from e
    for path in (*spec.readonly, *spec.python_path):
        if spec.backend == "namespace" and not Path(path).exists():
            raise ConfigError(f"agent.sandbox: {path}: no such file or folder")
    mounts = tuple(path for path in spec.python_path if path not in spec.readonly)
    needs = tuple(dict.fromkeys((*NEEDS, *(spec.require or ()))))
    return replace(spec, readonly=(*spec.readonly, *mounts), require=needs)


@dataclass(frozen=True, slots=True)
class EpisodeGate:
    """The only address a sandboxed program reaches: `/KEY/v1/...`, or `/v1/...` with the key in a header.

    Attributes:
        app: the recorder.
        path: base path of the episode's URL there.
        key: the episode's key.
    """

    app: ASGIApp
    path: str
    key: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the episode; any other path gets status 404."""
        if scope["type"] != "http":
            return
        headers = [(k, v) for k, v in scope["headers"] if k != b"host"] + [(b"host", b"127.0.0.1")]
        path: str = scope["path"]
        if path.startswith(f"/{self.key}/v1/"):
            path = path.removeprefix(f"/{self.key}")
            headers = [(k, v) for k, v in headers if k not in (b"authorization", b"x-api-key")]
            headers.append((b"authorization", f"Bearer {self.key}".encode()))
        if not path.startswith("/v1/"):
            error = {"message": "This address serves one episode, below its base URL.", "type": "not_found"}
            await JSONResponse({"error": error}, 404)(scope, receive, send)
            return
        path = self.path + path.removeprefix("/v1")
        inner = {**scope, "path": path, "raw_path": path.encode(), "headers": headers, "client": ("127.0.0.1", 0)}
        await self.app(inner, receive, send)


@dataclass(frozen=True, slots=True)
class BoxedAgent:
    """A command, started for each episode in a new sandbox.

    It gets what a `CommandAgent` gets: the task on stdin, the policy's address and key in its environment,
    `{prompt}`, `{id}` and also `{base_url}` replaced in its arguments.
    """

    command: Sequence[str]
    spec: Sandbox
    app: ASGIApp

    async def run(self, task: AgentTask, access: Access) -> str:
        """Run the command to completion and copy its files to the env's sandbox.

        Raises:
            AgentCrashedError: it cannot start, fails, or exceeds a limit.
            SandboxError: the sandbox is gone.
        """
        gate = EpisodeGate(self.app, urlsplit(access.base_url).path, access.api_key)
        async with episode_socket(gate) as folder, _new_box(self.spec, folder) as box:
            given = await _lend(task.box, box) if task.box is not None else None
            order = json.dumps(self._order(task, access, f"{folder}/s"), default=str).encode()
            try:
                result = await box.python(PROGRAM, stdin=order)
                files = await _files(box) if task.box is not None else None
            except SandboxBroken as e:  # `agent.crash` decides, as for all that the program does to it
                raise AgentCrashedError(f"its sandbox has ended: {e}"[:MAX_CRASH]) from e
            if task.box is not None:
                await _return(files, task.box, given)
        if not result.ok:
            said = (result.error_text() or result.text()).strip().splitlines()
            what = f"exit code {result.exit_code}" if result.outcome == "exit" else result.outcome
            raise AgentCrashedError(what + (f": {said[-1][:300]}" if said else ""))
        return result.text()

    def _order(self, task: AgentTask, access: Access, address: str) -> dict[str, object]:
        inside = replace(access, base_url=f"{{root}}/{access.api_key}/v1")
        paths = {"PYTHONPATH": os.pathsep.join(self.spec.python_path)} if self.spec.python_path else {}
        words = task.fill(self.command, base_url=inside.base_url)  # the port is known inside only
        return {"socket": address, "env": paths | inside.environment, "command": words, "task": task.data()}


async def _lend(env: Box, box: Box) -> BoxSnapshot:
    """Copy the env's files into the program's sandbox, before the program runs; returns them."""
    try:
        given = await env.snapshot()
        await box.load(given)
    except OSError as e:
        raise SandboxError(f"agent.sandbox: the files of the env cannot be copied into it: {e}") from e
    return given


async def _files(box: Box) -> BoxSnapshot:
    """The program's files. Raises AgentCrashedError if they cannot be read."""
    try:
        return await box.snapshot()
    except OSError as e:
        raise AgentCrashedError(f"its files cannot be read: {e}") from e


async def _return(files: BoxSnapshot | None, env: Box, given: BoxSnapshot | None) -> None:
    """Copy the program's files into the env's sandbox; if that fails, the env gets its own files back.

    Raises:
        AgentCrashedError: they do not fit: several names of one file become several files, for example.
    """
    try:
        await env.reset(to=files)
    except OSError as e:
        await env.reset(to=given)
        raise AgentCrashedError(f"its files do not fit into the sandbox of the env: {e}") from e


@contextlib.asynccontextmanager
async def episode_socket(gate: EpisodeGate) -> AsyncIterator[str]:
    """Serve an episode on a Unix socket; yields the folder that holds it."""
    with ScratchFolder("agent") as scratch:
        folder = f"{scratch.path}/d"
        os.mkdir(folder)
        for place in (scratch.path, folder):
            os.chmod(place, 0o755)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/s")
            os.chmod(f"{folder}/s", 0o666)
            listener.listen(MAX_CONNECTIONS)
            listener.setblocking(False)
            async with serving(gate, listener, max_connections=MAX_CONNECTIONS):
                yield folder


@contextlib.asynccontextmanager
async def _new_box(spec: Sandbox, folder: str) -> AsyncIterator[Box]:
    mounted = replace(spec, readonly=(*spec.readonly, folder))
    async with SandboxPool(mounted, min_idle=0, max_total=1) as pool, pool.lease() as box:
        yield box
