"""Back-ends on this machine: the host side of the keeper, which forks the sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any, ClassVar

from agentrl.errors import ConfigError
from agentrl.sandbox import bundle
from agentrl.sandbox.contract import PROMISES, USER_RLIMITS, Sandbox
from agentrl.sandbox.errors import SandboxUnavailable
from agentrl.sandbox.link import StreamLink

OPEN_TIMEOUT_S, KILL_TIMEOUT_S = 30.0, 20.0
END_TIMEOUT_S = 20.0
"""Seconds a sandbox may take to end after its link breaks."""


class LocalProcess:
    """One sandbox managed by the keeper."""

    def __init__(self, backend: LocalBackend, name: str) -> None:
        self._backend, self.name = backend, name
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.pid = 0
        """Process id of the supervisor on this machine."""
        self._killed = False
        self.end: Mapping[str, Any] | None = None
        """The keeper's record of its end: wait status, and the counters of its control group."""

    async def cause(self) -> str | None:
        """See contract.Process: killed by us, the keeper ended, or a signal that nothing inside can send."""
        if self._killed:
            return "it was killed by the program that leased it"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_TIMEOUT_S):
                while not self.ended.done():
                    if stopped := self._stopped_from_outside():
                        return stopped
                    await asyncio.wait({self.ended}, timeout=0.5)
        if not self.ended.done():
            return None
        if self.end is None:
            return "the keeper of the sandboxes is gone"
        if not self._backend.shields_supervisor or not os.WIFSIGNALED(self.end["exit"]):
            return None
        # Only a process outside the namespace, or the kernel's OOM killer, can kill its first process.
        if os.WTERMSIG(self.end["exit"]) != signal.SIGKILL:
            return None
        if self.end["oom_kills"] == 0:
            return "its supervisor was killed from outside the sandbox"
        return None if self.end["at_limit"] else "the host ran out of memory below the sandbox's own limit"

    def _stopped_from_outside(self) -> str | None:
        """Whether the supervisor is stopped although nothing inside can stop it."""
        if not self._backend.shields_supervisor:
            return None
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as f:
                state = f.read().rpartition(b")")[2].split()[0]
        except OSError:
            return None
        return "its supervisor was stopped from outside the sandbox" if state in (b"T", b"t") else None

    async def kill(self) -> None:
        """Send SIGKILL to its PID 1, which ends everything in it; return when the keeper has cleaned up."""
        self._killed = True
        if not self.ended.done():
            self._backend.tell({"op": "kill", "box": self.name})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KILL_TIMEOUT_S):
                    await asyncio.shield(self.ended)


class LocalBackend:
    """Sandboxes forked by a keeper process. Subclasses define the mode and what it guarantees."""

    name: ClassVar[str]
    always: ClassVar[frozenset[str]]
    """Promises that the mode keeps on every machine where it starts."""
    shields_supervisor: ClassVar[bool] = True
    """Whether the kernel blocks every signal from inside to the supervisor (PID 1 of a namespace)."""
    binds_before_it_drops: ClassVar[bool] = True
    """Whether files reach the sandbox regardless of the permissions of their parent directories."""

    def __init__(self, spec: Sandbox) -> None:
        self.spec = spec
        self._keeper: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._ready: asyncio.Future[dict[str, Any]] | None = None
        self._is_open = False
        self._replacing = asyncio.Lock()
        self._pending: dict[str, asyncio.Future[int]] = {}
        self._boxes: dict[str, LocalProcess] = {}
        self.controllers: frozenset[str] = frozenset()
        self.why_no_cgroup = ""
        """What keeps sandboxes here from having control groups."""

    async def open(self) -> None:
        """Start the keeper.

        Raises:
            ConfigError: this is not Linux.
            SandboxUnavailable: it did not start.
        """
        require_linux(self.name)
        self._check_spec()
        loop = asyncio.get_running_loop()
        python = self.spec.python or self._interpreter()
        program = bundle.program("keeper", compiled=python == _own_interpreter())
        ours, theirs = _socket_pair(socket.SOCK_SEQPACKET)
        text = f"{program}{theirs.fileno()}, {os.getpid()})\n"
        try:
            self._keeper = self._launch(python, theirs.fileno())
            await asyncio.to_thread(self._hand_over, text.encode())
        except BaseException as error:
            ours.close()  # what waits for the end of a keeper that has started would wait for this
            if isinstance(error, OSError):
                raise SandboxUnavailable(f"the keeper {python} could not be started: {error}") from error
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        self._control, self._ready = ours, loop.create_future()
        loop.add_reader(ours.fileno(), self._receive)
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                said = await self._ready
        except TimeoutError:
            await self._stop()
            raise SandboxUnavailable(f"the keeper did not answer within {OPEN_TIMEOUT_S:g} s") from None
        self.controllers, self.why_no_cgroup = frozenset(said["controllers"]), said["why_no_cgroup"]
        self._is_open = True

    def _check_spec(self) -> None:
        user = self.spec.run_as
        if user is not None and os.getuid() not in (0, user):
            raise SandboxUnavailable(f"sandbox run_as={user}: only root can choose another user id than its own")
        for path in self.spec.readonly:
            try:
                os.lstat(path)
            except OSError as error:
                raise SandboxUnavailable(f"sandbox readonly: {path}: {error.strerror}") from None

    def _interpreter(self) -> str:
        """Return this program's interpreter, or the system's if the sandbox's user cannot read it."""
        own = _own_interpreter()
        other = shutil.which("python3", path="/usr/bin:/usr/local/bin")
        if self.binds_before_it_drops or os.getuid() != 0 or other is None or _is_public(own):
            return own
        return other

    def _launch(self, python: str, control: int) -> subprocess.Popen[bytes]:
        user = self.spec.run_as if self.spec.run_as not in (None, os.getuid()) else None
        return subprocess.Popen(
            # Reading it takes 0.1 ms; a program on the standard input, `-`, takes 60 ms to parse.
            [python, "-S", "-s", "-B", "-X", "utf8", "-c", "import sys; exec(sys.stdin.read())"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[control],
            env={"PYTHONHASHSEED": "0", "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
            cwd="/",
            user=user,
            group=user,
            extra_groups=None if user is None else [],
        )

    def _hand_over(self, text: bytes) -> None:
        assert self._keeper is not None
        assert self._keeper.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._keeper.stdin as pipe:
            pipe.write(text)

    def tell(self, message: dict[str, Any]) -> None:
        """Send one order to the keeper, without waiting for an answer."""
        if self._control is not None:
            with contextlib.suppress(OSError):
                self._control.send(json.dumps(message).encode())

    async def start(self, name: str) -> tuple[LocalProcess, StreamLink, str]:
        """Fork a sandbox; see contract.Backend."""
        await self._replace_keeper()
        assert self._control is not None
        spec = self.spec
        order = {
            "op": "spawn", "box": name, "mode": self.name, "network": spec.network, "memory_mb": spec.memory_mb,
            "reserve_mb": spec.supervisor_mb,
            "pids": spec.pids, "cpus": spec.cpus, "workspace_mb": spec.workspace_mb, "inodes": spec.inodes,
            "readonly": spec.readonly, "writable": spec.writable, "python_path": spec.python_path,
            "env": dict(spec.env),
            "rlimits": {"NPROC": spec.pids + 2, **USER_RLIMITS}, "ttl_s": spec.ttl_s,
            "folders": tempfile.gettempdir(),
        }  # fmt: skip
        ours, theirs = _socket_pair(socket.SOCK_STREAM)
        with theirs:
            link = await StreamLink.over(ours, name)
            self._pending[name] = asyncio.get_running_loop().create_future()
            process = self._boxes[name] = LocalProcess(self, name)
            try:
                socket.send_fds(self._control, [json.dumps(order).encode()], [theirs.fileno()])
                theirs.close()  # notice a supervisor that dies before its first message
                process.pid = await self._pending[name]
                home = str((await link.hello())["home"])
            except BaseException as error:
                link.close()
                self.tell({"op": "kill", "box": name})
                if isinstance(error, OSError):
                    raise SandboxUnavailable(f"sandbox {name}: the keeper is not reachable: {error}") from error
                raise
            finally:
                self._pending.pop(name, None)
        return process, link, home

    def _receive(self) -> None:
        assert self._control is not None
        while True:
            try:
                data = self._control.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._keeper_is_gone()
                return
            message = json.loads(data)
            if "ready" in message:
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(message)
                continue
            name = message["box"]
            pending = self._pending.get(name)
            if "pid" in message and pending is not None and not pending.done():
                pending.set_result(message["pid"])
            elif "error" in message:
                if pending is not None and not pending.done():
                    pending.set_exception(SandboxUnavailable(f"sandbox {name}: {message['error']}"))
                self._end(name)
            elif "exit" in message:
                self._end(name, message)

    def _end(self, name: str, end: Mapping[str, Any] | None = None) -> None:
        process = self._boxes.pop(name, None)
        if process is not None and not process.ended.done():
            process.end = end
            process.ended.set_result(None)

    def _keeper_is_gone(self) -> None:
        """Mark every sandbox of the keeper as dead, because they die with it."""
        self._drop_control()
        words = "the keeper of the sandboxes is gone" + self._last_words()
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(SandboxUnavailable(words))
        for pending in self._pending.values():
            if not pending.done():
                pending.set_exception(SandboxUnavailable(words))
        for name in list(self._boxes):
            self._end(name)

    async def _replace_keeper(self) -> None:
        """Start another keeper if the last one has ended, for example killed for the host's memory."""
        async with self._replacing:
            if self._control is not None:
                return
            if not self._is_open:
                raise SandboxUnavailable("the keeper is not running")
            await self._stop()
            await self.open()

    def _last_words(self) -> str:
        if self._keeper is None or self._keeper.stderr is None:
            return ""
        os.set_blocking(self._keeper.stderr.fileno(), False)
        text = self._keeper.stderr.read() or b""
        return f": {text[-2000:].decode('utf-8', 'replace').strip()}" if text else ""

    def _drop_control(self) -> None:
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            self._control.close()
            self._control = None

    async def close(self) -> None:
        """Stop the keeper and every sandbox with it; idempotent."""
        async with self._replacing:
            self._is_open = False
            await self._stop()

    async def _stop(self) -> None:
        self._drop_control()
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            await asyncio.shield(asyncio.to_thread(_reap, keeper))
        for name in list(self._boxes):
            self._end(name)

    def promises(self) -> tuple[frozenset[str], frozenset[str]]:
        """See contract.Backend."""
        more = {name for name, controller in (("memory", "memory"), ("pids", "pids"), ("cpu_share", "cpu"))
                if controller in self.controllers}  # fmt: skip
        always = self.always if "memory" in self.controllers else self.always - {"memory"}
        if self.spec.run_as or os.getuid() != 0:  # only root can give each sandbox a separate user
            always -= {"own_quotas"}
        return always, (always | more) & frozenset(PROMISES)


def require_linux(backend: str) -> None:
    """Raise ConfigError where no back-end of this module can ever work."""
    if not sys.platform.startswith("linux"):
        here = "macOS" if sys.platform == "darwin" else sys.platform
        raise ConfigError(
            f"sandbox backend {backend!r} needs Linux, and this is {here}: use backend='docker', or 'remote' with "
            "`agentrl sandbox serve` on a Linux machine"
        )


def _socket_pair(kind: socket.SocketKind) -> tuple[socket.socket, socket.socket]:
    """Return connected sockets. Raises SandboxUnavailable if this process has too many open files."""
    try:
        return socket.socketpair(socket.AF_UNIX, kind)
    except OSError as error:
        raise SandboxUnavailable(f"no socket to a sandbox can be created: {error}") from error


def _own_interpreter() -> str:
    return str(getattr(sys, "_base_executable", sys.executable))


def _is_public(path: str) -> bool:
    """Return whether every user can reach a file, that is, whether all its parent directories are searchable."""
    real = os.path.realpath(path)
    while real != "/":
        real = os.path.dirname(real)
        if not os.stat(real).st_mode & 0o001:
            return False
    return True


def _reap(keeper: subprocess.Popen[bytes]) -> None:
    try:
        keeper.wait(KILL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        keeper.kill()
        keeper.wait()
    if keeper.stderr is not None:
        keeper.stderr.close()
