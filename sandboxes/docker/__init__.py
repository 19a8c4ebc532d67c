"""Containers of a Docker engine (or podman through DOCKER_HOST): hardened, one supervisor each, no `exec` ever.

The supervisor is the same program as on the bare machine. It is the container's entry point and is spoken to
over a socket of our own (see `door`) or, where that leads nowhere, over the one attached stream. So a call costs a
fork, not a trip through the daemon, and how it ended is the supervisor's word.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import datetime
import functools
import itertools
import json
import os
import re
import secrets
import socket
import struct
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.errors import ConfigError
from agentrl.sandbox import bundle
from agentrl.sandbox.contract import PROMISES, USER_RLIMITS, Sandbox
from agentrl.sandbox.errors import SandboxUnavailable
from agentrl.sandbox.inside.leftovers import is_stale, run_name, sweep_folders
from agentrl.sandbox.link import StreamLink
from agentrl.sandboxes.docker.door import PLACE, Door

if TYPE_CHECKING:
    import docker as sdk

USER = 10001
"""Group of every container, and the first of the USERS of which each living container of this process has its
own: what the kernel counts per user (inotify, pipes, queues, pending signals) is then no other container's."""
USERS = 50_000
HOME = "/workspace"
HOSTNAME = "sandbox"
PODMAN_HOME = "/tmp/workspace"
"""podman knows neither owner nor number of files of a tmpfs, but opens /tmp to all: `disk` is not promised."""
LABEL = "agentrl.run"
PROFILE = Path(__file__).with_name("seccomp.json")
"""System calls of a container, the supervisor's included; made by `agentrl.sandboxes.docker.seccomp`."""
API_TIMEOUT_S = 60
GVISOR_MB = 256
"""Memory of gVisor's own kernel: it counts in the container, and must not run out before the programs' does."""
GVISOR_LACKS = frozenset({"pids", "disk", "processes"})
"""It limits neither processes nor the number of files, and shows the supervisor's memory map to programs."""
GVISOR_STREAM = (
    "gVisor lets a program open the pipes of its supervisor and forge reports there, and no socket leads to it: "
    "say --host-uds=open among the runtimeArgs of runsc, and use an engine of this machine"
)

_open_backends: weakref.WeakSet[Backend] = weakref.WeakSet()
_numbers = itertools.count(1)
_users_lock = threading.Lock()
_users_in_use: set[int] = set()
"""By the living containers of all back-ends of this process. What other processes have is left to chance."""


class AttachedLink(StreamLink):
    """Frames inside the frames in which the engine wraps stdout and stderr of a container without a terminal."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._wrapped = bytearray()
        self.words = bytearray()
        """What came on stderr: the interpreter's, should the supervisor not even start."""

    def data_received(self, data: bytes) -> None:
        """Unwrap, then as usual."""
        buffer = self._wrapped
        buffer += data
        while len(buffer) >= 8:
            stream, size = struct.unpack_from(">BxxxI", buffer)
            if len(buffer) < 8 + size:
                break
            part = bytes(buffer[8 : 8 + size])
            del buffer[: 8 + size]
            if stream == 1:
                super().data_received(part)
            else:
                self.words += part[: max(0, 4000 - len(self.words))]


async def _through(door: Door | None, relayed: AttachedLink) -> StreamLink:
    """The link by which the supervisor speaks first: the door, or the attached stream where it found none.

    Raises:
        SandboxUnavailable: it did not even start; with what was on stderr.
    """
    word = asyncio.ensure_future(relayed.hello())
    opened = asyncio.ensure_future(door.opened()) if door is not None else None
    try:
        await asyncio.wait([word] if opened is None else [word, opened], return_when=asyncio.FIRST_COMPLETED)
        if opened is not None and opened.done():
            return await StreamLink.over(opened.result(), relayed.name)
        await word
        return relayed
    except SandboxUnavailable as error:
        raise SandboxUnavailable(f"{error}: {relayed.words.decode('utf-8', 'replace')[-800:]}") from None
    finally:
        for waiting in (word, opened):
            if waiting is not None and not waiting.cancel() and not waiting.cancelled():
                waiting.exception()  # looked at


class Container:
    """One container, as the pool sees it."""

    def __init__(self, backend: Backend, identity: str, attached: Any) -> None:
        self._backend, self.identity = backend, identity
        self._attached = attached
        self._gone: asyncio.Task[None] | None = None

    async def cause(self) -> str | None:
        """See contract.Process: what the engine says of the end, or that it says nothing any more."""
        import docker as sdk

        if self._gone is not None:
            return "it was removed by the program that leased it"
        try:
            return await asyncio.to_thread(self._backend.outside_cause, self.identity)
        except (sdk.errors.DockerException, OSError) as error:
            return f"the Docker engine does not answer: {error}"

    async def kill(self) -> None:
        """Remove it, with everything in it."""
        if self._gone is None:
            self._gone = asyncio.get_running_loop().create_task(self._remove())
        await asyncio.shield(self._gone)

    async def _remove(self) -> None:
        import docker as sdk

        try:
            await asyncio.to_thread(self._backend.remove, self.identity)
        except (sdk.errors.DockerException, OSError) as error:
            raise SandboxUnavailable(f"container {self.identity[:12]} could not be removed: {error}") from error
        finally:
            self.detach()

    def detach(self) -> None:
        """Close the attached stream; idempotent. The SDK keeps it in three places, and warns of each left open."""
        for name in ("_response", "_sock"):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                getattr(self._attached, name).close()
        with contextlib.suppress(OSError):
            self._attached.close()


class Backend:
    """See the module."""

    name = "docker"

    def __init__(self, spec: Sandbox) -> None:
        self.spec = spec
        self._client: sdk.APIClient | None = None
        self._containers: dict[str, int] = {}
        """The user of each by its identity."""
        self._run = f"{run_name()}-{next(_numbers)}"
        self._ulimits: list[Any] = []
        self._podman = self._gvisor = False
        self._opened = 0
        """When this back-end was opened, in seconds of the engine's clock."""
        self._doors = False
        """Whether containers can be shown a socket of this machine."""
        if spec.run_as is not None or spec.python is not None:
            raise ConfigError(
                "sandbox run_as and python have an effect on this machine's own back-ends, not on docker"
            )

    @property
    def client(self) -> sdk.APIClient:
        """The connection to the engine."""
        if self._client is None:
            raise SandboxUnavailable("the docker back-end is not open")
        return self._client

    async def open(self) -> None:
        """Connect, look for the image, remove what runs of before have left."""
        try:
            import docker as sdk
        except ImportError as error:
            raise ConfigError(
                "sandbox backend 'docker' needs the docker SDK: pip install 'docker>=7.1'"
            ) from error
        try:
            await asyncio.to_thread(self._connect, sdk)
        except (sdk.errors.DockerException, OSError) as error:
            where = os.environ.get("DOCKER_HOST", "the default socket")
            raise SandboxUnavailable(f"no Docker engine answers at {where}: {error}") from error
        _open_backends.add(self)

    def _connect(self, sdk: Any) -> None:
        host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
        if host.startswith("unix://"):
            with socket.socket(socket.AF_UNIX) as s:  # the SDK would leave its own open when this fails
                s.connect(host.removeprefix("unix://"))
        self._client = sdk.APIClient(version="auto", timeout=API_TIMEOUT_S, **sdk.utils.kwargs_from_env())
        engine = json.dumps(self.client.version())
        self._podman = "podman" in engine.lower()
        if self._podman:
            # Its defaults ask for more than a process without CAP_SYS_RESOURCE may give.
            self._ulimits = [sdk.types.Ulimit(name=name, soft=1024, hard=1024) for name in ("nofile", "nproc")]
        try:
            self.client.inspect_image(self.spec.image)
        except sdk.errors.ImageNotFound:
            raise ConfigError(
                f"sandbox image {self.spec.image!r} is not on this Docker engine: pull or build it "
                "(`python -m agentrl.sandboxes.docker.image` makes the default one without a registry)"
            ) from None
        engine_has = self.client.info()
        if runtime := self.spec.runtime or engine_has.get("DefaultRuntime"):
            known = (engine_has.get("Runtimes") or {}).get(runtime, {})
            self._gvisor = "runsc" in f"{runtime} {known.get('path', '')} {known.get('runtimeType', '')}"
        self._doors = host.startswith("unix://")
        self._opened = int(_engine_time(engine_has)) - 1
        self._sweep()

    def _sweep(self) -> None:
        sweep_folders(tempfile.gettempdir())
        boot = boot_id()
        for found in self.client.containers(all=True, filters={"label": LABEL}):
            labels = found["Labels"]
            owner = labels[LABEL].rpartition("-")[0]
            mine = labels.get("agentrl.boot") == boot
            expired = float(labels.get("agentrl.expires", "inf")) < time.time()
            if expired or (mine and is_stale(owner)):
                self.remove(found["Id"])

    def remove(self, identity: str) -> None:
        """Remove a container by force and see it gone; fine when it is gone already."""
        import docker as sdk

        user = self._containers.pop(identity, 0)
        self._remove(identity, sdk.errors)
        _users_in_use.discard(user)  # not where that failed: it may live on

    def _remove(self, identity: str, errors: Any) -> None:
        until = time.monotonic() + API_TIMEOUT_S
        while True:
            try:
                self.client.remove_container(identity, force=True, v=True)
            except errors.NotFound:
                return
            except errors.APIError as error:
                # Docker is removing it of its own accord, or podman sees it end and cannot kill it again.
                if error.status_code not in (409, 500) or time.monotonic() > until:
                    raise
                time.sleep(0.05)
            else:
                return

    def outside_cause(self, identity: str) -> str | None:
        """Who asked the engine to end a container; None where nobody did, so that it ended by itself.

        What the engine did for want of memory within the container's limit is no cause from outside.
        """
        self.client.ping()
        wanted = {"type": "container", "container": identity}
        until = int(_engine_time(self.client.info())) + 1
        events = self.client.events(since=self._opened, until=until, filters=wanted, decode=True)
        with contextlib.closing(events):
            for event in events:
                if (action := event.get("Action", "")) in ("kill", "stop", "restart", "pause", "checkpoint"):
                    return f"somebody asked the Docker engine to {action} it"
        return None

    async def start(self, name: str) -> tuple[Container, StreamLink, str]:
        """Create, attach, start; the supervisor's first word tells whether it stands."""
        door = Door.make() if self._doors else None
        try:
            return await self._start(name, door)
        except SandboxUnavailable as error:
            if door is None or not (door.path in str(error) or PLACE in str(error)):
                raise
            self._doors = False  # the engine does not see the files of this machine, or shows no sockets
        finally:
            if door is not None:
                door.close()
        return await self._start(name, None)

    async def _start(self, name: str, door: Door | None) -> tuple[Container, StreamLink, str]:
        import docker as sdk

        try:
            identity, attached = await asyncio.to_thread(self._create, door)
        except (sdk.errors.DockerException, OSError) as error:
            raise SandboxUnavailable(f"sandbox {name}: the Docker engine could not start it: {error}") from error
        container = Container(self, identity, attached)
        raw = attached._sock if hasattr(attached, "_sock") else attached
        relayed = await AttachedLink.over(socket.socket(fileno=os.dup(raw.fileno())), name)
        assert isinstance(relayed, AttachedLink)
        try:
            try:
                await asyncio.to_thread(self.client.start, identity)
            except (sdk.errors.DockerException, OSError) as error:
                raise SandboxUnavailable(
                    f"sandbox {name}: the Docker engine could not start it: {error}"
                ) from error
            link = await _through(door, relayed)
            if link is not relayed:
                relayed.close()
                container.detach()
            elif self._gvisor:
                raise SandboxUnavailable(f"sandbox {name}: {GVISOR_STREAM}")
            elif door is not None:
                self._doors = False  # the engine shows something of that name, and it leads nowhere
            said = await link.hello()
        except BaseException:
            relayed.close()
            await container.kill()
            raise
        return container, link, str(said["home"])

    def _create(self, door: Door | None) -> tuple[str, Any]:
        """In a thread: a container that waits to be started, and its attached stream."""
        user = USER if self._podman else _user_of_its_own()
        try:
            created = self.client.create_container(
                self.spec.image,
                command=self._command(door),
                entrypoint=[],
                stdin_open=True,
                user=f"{user}:{USER}",
                working_dir="/",
                hostname=HOSTNAME,
                environment={"PYTHONHASHSEED": "0"},
                labels={
                    LABEL: self._run,
                    "agentrl.boot": boot_id(),
                    "agentrl.expires": str(int(time.time() + self.spec.ttl_s + 600)),
                },
                host_config=self._host_config(door, user),
            )
        except BaseException:
            _users_in_use.discard(user)
            raise
        identity = str(created["Id"])
        self._containers[identity] = user
        try:
            streams = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
            return identity, self.client.attach_socket(identity, params=streams)
        except BaseException:
            self.remove(identity)
            raise

    def _command(self, door: Door | None) -> list[str]:
        spec = self.spec
        order = {
            "home": PODMAN_HOME if self._podman else HOME,
            "env": dict(spec.env), "memory_mb": spec.memory_mb, "ttl_s": spec.ttl_s,
            "rlimits": USER_RLIMITS | ({"DATA": spec.memory_mb << 20} if self._gvisor else {}),
            "own_kernel": self._gvisor,
            "python_path": spec.python_path, "door": PLACE if door is not None else "",
        }  # fmt: skip
        text = f"{bundle.program('contained')}{json.dumps(json.dumps(order))})\n"
        return ["python3", "-S", "-s", "-B", "-X", "utf8", "-c", text]

    def _host_config(self, door: Door | None, user: int) -> Any:
        from docker.types import Mount

        spec = self.spec
        owner = f"uid={user},gid={USER}"
        side_mb = max(8, spec.workspace_mb // 4)
        memory_mb = spec.memory_mb + spec.supervisor_mb + (GVISOR_MB if self._gvisor else 0)
        quiet = f"rw,nosuid,nodev,{owner}"
        disks = {
            HOME: f"{quiet},mode=755,exec,size={spec.workspace_mb}m,nr_inodes={spec.inodes}",
            "/tmp": f"{quiet},mode=1777,exec,size={side_mb}m,nr_inodes={max(1000, spec.inodes // 4)}",
        }
        if self._podman:
            disks = {"/tmp": f"rw,nosuid,nodev,exec,size={spec.workspace_mb}m"}
        return self.client.create_host_config(
            auto_remove=True,
            network_mode="bridge" if spec.network else "none",
            extra_hosts={HOSTNAME: "127.0.0.1"},
            mem_limit=f"{memory_mb}m",
            memswap_limit=f"{memory_mb}m",
            pids_limit=None if self._gvisor else spec.pids + 2,
            nano_cpus=int(spec.cpus * 1e9) if spec.cpus is not None else None,
            read_only=True,
            cap_drop=["ALL"],
            # podman reads a profile from a file on its own side and has one by default.
            security_opt=["no-new-privileges:true", *([] if self._podman else [seccomp_option()])],
            ipc_mode="private",
            shm_size=f"{side_mb}m",
            tmpfs=disks,
            binds=[f"{path}:{path}:ro" for path in spec.readonly],
            # A mount, for a bind of what an engine cannot see would be a new folder over there.
            mounts=[Mount(PLACE, door.path, type="bind", read_only=True)] if door is not None else None,
            ulimits=[*self._ulimits, {"Name": "core", "Soft": 0, "Hard": 0}],
            log_config={"Type": "none", "Config": {}},
            runtime=spec.runtime,
        )

    def promises(self) -> tuple[frozenset[str], frozenset[str]]:
        """See contract.Backend."""
        always = frozenset(PROMISES) - {"cpu_share"} - ({"disk", "own_quotas"} if self._podman else set())
        if self._gvisor:
            always -= GVISOR_LACKS
            return always, frozenset(PROMISES) - GVISOR_LACKS
        return always, frozenset(PROMISES)

    def remove_all(self) -> None:
        """Remove every container of this back-end, without an event loop."""
        for identity in list(self._containers):
            with contextlib.suppress(Exception):
                self.remove(identity)

    async def close(self) -> None:
        """End everything; idempotent."""
        if self._client is None:
            return
        await asyncio.shield(asyncio.to_thread(self.remove_all))
        self._client.close()
        self._client = None
        _open_backends.discard(self)


def _user_of_its_own() -> int:
    """A user that no living container of this process has; called from several threads.

    Raises:
        SandboxUnavailable: there is none left.
    """
    with _users_lock:
        if len(_users_in_use) >= USERS:
            raise SandboxUnavailable(f"{USERS} containers are running: there is no user id left for another")
        while (user := USER + secrets.randbelow(USERS)) in _users_in_use:
            pass
        _users_in_use.add(user)
    return user


def _engine_time(info: Mapping[str, Any]) -> float:
    """The engine's clock, which may be another machine's; ours where it does not say."""
    text = str(info.get("SystemTime", ""))
    try:
        return datetime.datetime.fromisoformat(re.sub(r"\.\d+", "", text).replace("Z", "+00:00")).timestamp()
    except ValueError:
        return time.time()


@functools.cache
def seccomp_option() -> str:
    """The profile as an engine wants to be given it: its text, not its place."""
    return f"seccomp={json.dumps(json.loads(PROFILE.read_text(encoding='utf-8')), separators=(',', ':'))}"


def boot_id() -> str:
    """What tells this boot of the machine from another; labels of another machine's containers differ."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            return f.read().strip()
    except OSError:
        return ""


@atexit.register
def _at_exit() -> None:
    for backend in list(_open_backends):
        backend.remove_all()
