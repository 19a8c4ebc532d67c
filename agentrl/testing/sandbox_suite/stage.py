"""The setting of the checks: a pool, and host resources that a sandbox must not reach."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import secrets
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from agentrl.sandbox import Box, Sandbox
from agentrl.sandbox.pool import SandboxPool
from agentrl.scratch import ScratchFolder

Kind = Literal["conformance", "hostile", "sabotage", "fidelity", "chaos"]
LATE_S = 4.0
"""How late a call may return: a busy machine can cost it seconds, and what would hold it lasts longer."""


class Unseen(Exception):
    """What a check looks for cannot be seen from outside: the sandbox has a separate kernel."""


class Stage:
    """One pool of the back-end under test, and the bait: a file, a process, sockets, shared memory."""

    def __init__(self, pool: SandboxPool) -> None:
        self.pool = pool
        self.secret = "secret-" + secrets.token_hex(8)
        self._scratch = ScratchFolder("stage")
        self.folder = str(self._scratch.path)
        os.chmod(self.folder, 0o1777)
        self.marker = os.path.join(self.folder, "answer.txt")
        with open(self.marker, "w") as f:
            f.write(self.secret)
        os.chmod(self.marker, 0o644)
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.unix_path = os.path.join(self.folder, "listener.sock")
        self.unix = socket.socket(socket.AF_UNIX)
        self.unix.bind(self.unix_path)
        os.chmod(self.unix_path, 0o777)
        self.unix.listen()
        self.abstract_name = f"agentrl-{secrets.token_hex(6)}"
        self.abstract = socket.socket(socket.AF_UNIX)
        self.abstract.bind("\0" + self.abstract_name)
        self.abstract.listen()
        self.victim = subprocess.Popen(
            ["sleep", "1000"], env={"VICTIM": self.secret, "PATH": "/usr/bin:/bin"}, stdin=subprocess.DEVNULL
        )
        self.shm_key = secrets.randbelow(1 << 30) + 1
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._shm = self._libc.shmget(self.shm_key, 4096, 0o1666)
        os.environ["AGENTRL_STAGE_SECRET"] = self.secret
        self._neighbor: Box | None = None
        self._moving_in = asyncio.Lock()

    @property
    def spec(self) -> Sandbox:
        """The spec of the pool."""
        return self.pool.spec

    @contextlib.asynccontextmanager
    async def box(self) -> AsyncIterator[Box]:
        """A fresh sandbox for one check."""
        async with self.pool.lease() as box:
            yield box

    async def neighbor(self) -> Box:
        """A sandbox that outlives the checks, with the secret in peer.txt; replaced where a check has ended it."""
        async with self._moving_in:
            if self._neighbor is not None and not await self._neighbor.alive():
                await self.pool.release(self._neighbor)
                self._neighbor = None
            if self._neighbor is None:
                self._neighbor = await self.pool.acquire()
                await self._neighbor.write_file("peer.txt", self.secret)
            return self._neighbor

    def order(self, **more: object) -> bytes:
        """The input of a hostile program: the location of the bait."""
        spec = self.spec
        known = {
            "secret": self.secret, "marker": self.marker, "folder": self.folder, "victim": self.victim.pid,
            "harness": os.getpid(), "port": self.tcp.getsockname()[1], "unix": self.unix_path,
            "abstract": self.abstract_name, "shm_key": self.shm_key, "memory_mb": spec.memory_mb,
            "pids": spec.pids, "workspace_mb": spec.workspace_mb, "inodes": spec.inodes, "file_mb": spec.file_mb,
            **more,
        }  # fmt: skip
        return json.dumps(known).encode()

    def processes_with(self, token: str) -> list[int]:
        """Processes of this machine, alive, whose command line holds the token."""
        found = []
        for name in os.listdir("/proc"):
            if not name.isdigit() or int(name) == os.getpid():
                continue
            try:
                with open(f"/proc/{name}/cmdline", "rb") as f:
                    command = f.read()
                with open(f"/proc/{name}/stat", "rb") as f:
                    state = f.read().rpartition(b")")[2].split()[0]
            except OSError:
                continue
            if token.encode() in command and state not in (b"Z", b"X"):
                found.append(int(name))
        return found

    async def runs(self, token: str, within_s: float = 5.0) -> None:
        """Wait until a process with the token is there; AssertionError when none comes."""
        for _ in range(int(within_s / 0.05)):
            if self.processes_with(token):
                return
            await asyncio.sleep(0.05)
        if self.spec.runtime is not None and not await self._shares_our_kernel():
            raise Unseen
        raise AssertionError("what was started never ran")

    async def _shares_our_kernel(self) -> bool:
        async with self.box() as box:
            result = await box.python("import os; print(os.uname().release)")
        return result.text().strip() == os.uname().release

    async def nothing_left(self, token: str, within_s: float = 2.0) -> None:
        """Wait until no process with the token is alive; AssertionError when some stay."""
        for _ in range(int(within_s / 0.05)):
            if not self.processes_with(token):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"still alive: {self.processes_with(token)}")

    def close(self) -> None:
        """Remove the bait."""
        self.victim.kill()
        self.victim.wait()
        for s in (self.tcp, self.unix, self.abstract):
            s.close()
        if self._shm >= 0:
            self._libc.shmctl(self._shm, 0, None)
        self._scratch.close()
        os.environ.pop("AGENTRL_STAGE_SECRET", None)


@dataclass(frozen=True)
class Check:
    """One thing that must hold; `promise` names the promise that it tests, None for what every back-end keeps."""

    name: str
    kind: Kind
    run: Callable[[Stage], Awaitable[None]]
    promise: str | None = None
    group: str = ""
    """What kind of attack it is."""
    isolating: bool = False
    """Makes sense only where programs are confined (not for the trusted `process` back-end)."""
    alone: bool = False
    """Measures time or tampers with the pool, so no other check may run at the same time."""


def expect(condition: bool, what: object) -> None:
    """AssertionError with `what` unless the condition holds (also under `python -O`)."""
    if not condition:
        raise AssertionError(str(what))
