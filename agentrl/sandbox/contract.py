"""Types shared by all back-ends and callers: limits, results, capabilities and sandbox specs.

Program failures are data (`ExecResult`) and file errors are plain OSErrors. Only failures of the sandbox itself
are `SandboxError`, an infrastructure failure.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Protocol

from agentrl.errors import ConfigError, SandboxError

Outcome = Literal["exit", "signal", "timeout", "oom", "output_limit", "cancelled"]
SessionKind = Literal["bash", "python", "sqlite"]

DEFAULT_BACKEND = "namespace"

CUT = b"\n[... cut ...]\n"
"""Separates the first and last parts of truncated output."""

GRACE_S = 5.0
"""Grace period after a call's time limit before an unresponsive sandbox counts as dead."""

PROMISES: Mapping[str, str] = {
    "files": "the host's files are hidden, apart from the declared read-only ones",
    "environment": "no variable of the host's environment is visible",
    "network": "nothing outside can be reached, the host's loopback included",
    "processes": "other processes cannot be seen, signaled or read",
    "privileges": "no capability, no way to get one, never uid 0",
    "syscalls": "dangerous system calls are refused",
    "memory": "all processes together stay below the limit",
    "pids": "the number of processes and threads is limited",
    "disk": "bytes and files on the writable disk are limited in total",
    "clean_end": "nothing survives a call, nor the end of the sandbox",
    "own_quotas": "one sandbox cannot use up inotify instances, pipe pages or pending signals for another",
    "cpu_share": "all processes together get at most `cpus` processors",
}
"""Promises a back-end may make in addition to the time and output limits, which every back-end enforces."""


USER_RLIMITS = {"SIGPENDING": 1024, "MSGQUEUE": 1 << 20}
"""Resources that the kernel counts per user and that one sandbox must not exhaust for that user."""

WATCHED = (
    "watched every 20 ms and limited per process; page tables and the buffers of pipes and sockets are not counted"
)
"""Why such back-ends do not promise `memory`."""

SHARED_USER = "all sandboxes run as one user, and these are counted for each user"
"""Why such back-ends do not promise `own_quotas`."""


CallLimits = tuple[float, int, int, int]
"""Seconds, bytes of stdout kept, bytes of stderr kept, and total output bytes at which the program is ended."""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Resource limits of programs. The first group can be narrowed per call; the second belongs to the sandbox."""

    wall_s: float = 10.0
    """Seconds until the program and everything it started are killed."""
    cpu_s: float | None = None
    """CPU seconds per process, rounded up to whole ones; None: bounded by `wall_s` only. The kernel counts clock
    ticks, which on a busy machine can be ahead of the time that `ExecResult.cpu_s` reports."""
    stdout_bytes: int = 1 << 20
    """Bytes of stdout to keep, half from the beginning and half from the end."""
    stderr_bytes: int = 1 << 20
    """Bytes of stderr to keep, half from the beginning and half from the end."""
    output_total_mb: int = 256
    """MiB of output, kept or not, at which the program is ended with outcome `output_limit`."""
    file_mb: int = 64
    """Maximum size of one file, in MiB."""
    open_files: int = 256
    """Open file descriptors per process."""

    memory_mb: int = 256
    """MiB of memory for all processes together, including files on the sandbox's in-memory disk."""
    pids: int = 64
    """Maximum number of simultaneous processes and threads."""
    cpus: float | None = None
    """CPU cores for all processes together, fractions allowed; None: no limit."""
    workspace_mb: int = 64
    """MiB of writable disk, shared by `/workspace`, `/tmp` and `/dev/shm` (docker: see Back-ends)."""
    inodes: int = 20_000
    """Maximum number of files and directories on the writable disk."""

    def __post_init__(self) -> None:
        for name in (
            "wall_s",
            "cpu_s",
            "memory_mb",
            "pids",
            "cpus",
            "workspace_mb",
            "inodes",
            "file_mb",
            "open_files",
        ):
            value = getattr(self, name)
            if value is None and name in ("cpu_s", "cpus"):
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"sandbox limit {name} must be a number, got {value!r}")
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"sandbox limit {name} must be positive, got {value!r}")
        for name in ("stdout_bytes", "stderr_bytes", "output_total_mb"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"sandbox limit {name} must be a whole number, got {value!r}")
            if value < 0:
                raise ConfigError(f"sandbox limit {name} must not be negative, got {value!r}")
        if self.workspace_mb > self.memory_mb:
            raise ConfigError(
                f"sandbox limit workspace_mb={self.workspace_mb} exceeds memory_mb={self.memory_mb}: "
                "the sandbox's disk is held in memory, so raise memory_mb as well"
            )

    def rlimits(self) -> dict[str, int]:
        """Return the per-process resource limits by name."""
        limits = {"FSIZE": self.file_mb << 20, "NOFILE": self.open_files, "CORE": 0}
        if self.cpu_s is not None:
            limits["CPU"] = max(1, math.ceil(self.cpu_s))
        return limits

    def call_limits(self) -> CallLimits:
        """Return the limits that the supervisor enforces for a call; see `CallLimits`."""
        return self.wall_s, self.stdout_bytes, self.stderr_bytes, self.output_total_mb << 20


PER_CALL = ("wall_s", "cpu_s", "stdout_bytes", "stderr_bytes", "output_total_mb", "file_mb", "open_files")


@dataclass(frozen=True, kw_only=True)
class Sandbox(SandboxLimits):
    """The sandbox an environment needs: declared on the class, leased from a pool for each episode.

    For example, `sandbox = Sandbox(cpu_s=10, memory_mb=512)`. Equal specs share a pool.
    """

    backend: str = DEFAULT_BACKEND
    """namespace, docker, landlock, remote, process, or `module:Name` for a custom back-end."""
    network: bool = False
    """Give programs access to the host's network (docker: a bridge network)."""
    require: tuple[str, ...] | None = None
    """Promises that must hold, by name (see Back-ends); None: those the back-end always makes."""
    readonly: tuple[str, ...] = ()
    """Absolute host paths mounted read-only at the same path inside. Every user must be able to read them. With
    `namespace` and `docker`, programs can also use the sockets and pipes in them, whatever `network` is."""
    writable: tuple[str, ...] = ()
    """namespace, docker: absolute paths of further writable folders, for example `("/app",)`; they start empty
    and count toward the disk. With docker, each may have `workspace_mb`."""
    python_path: tuple[str, ...] = ()
    """Directories, visible inside, to append to the module search path of `box.python` and Python sessions."""
    env: tuple[tuple[str, str], ...] = ()
    """Environment variables as (name, value) pairs, added to a minimal environment; nothing is inherited."""
    image: str = "agentrl/sandbox:latest"
    """docker: the image; it needs `python3`, version 3.9 or later."""
    runtime: str | None = None
    """docker: the runtime, for example `runsc`; None: the engine's default."""
    trusted: bool = False
    """process: must be True, because that back-end provides no isolation."""
    python: str | None = None
    """Path of the interpreter for local back-ends; None: the interpreter running this program."""
    run_as: int | None = None
    """namespace, landlock: run everything as this user id; only root can choose a different user id."""
    url: str | None = None
    """remote: address of `agentrl sandbox serve`, `http://host:port`; comma-separated servers are used in turn."""
    token_file: str | None = None
    """remote: path of the file that holds the server's token."""
    ttl_s: float = 3600.0
    """Seconds after which a leased sandbox ends automatically if it is never released. A sandbox that ends during
    its episode counts as broken by the policy: allow for the episode and its rewards, each of which may take
    `rollout.timeout_s`."""
    on_death: Literal["score", "infra"] = "score"
    """How to handle an episode whose sandbox dies, for no known outside cause, after a program has run in it.

    `"score"` ends it with stop reason `sandbox_broken` and reward `death_reward`. `"infra"` replays it, which lets
    a policy escape a bad episode by breaking its sandbox.
    """
    death_reward: float = 0.0
    """Total reward of an episode that ends with `sandbox_broken`. If your env's rewards can be negative, use the
    lowest of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_types(self)
        unknown = [name for name in self.require or () if name not in PROMISES]
        if unknown:
            raise ConfigError(f"sandbox require={unknown[0]!r}: not a promise; known: {', '.join(PROMISES)}")
        if self.backend == "process" and not self.trusted:
            raise ConfigError(
                "sandbox backend 'process' isolates nothing: say trusted=True if every program that runs in it "
                "is your own, or choose 'namespace', 'docker' or 'landlock'"
            )
        given = self.url is not None, self.token_file is not None
        if not all(given) if self.backend == "remote" else any(given):
            raise ConfigError(
                f"sandbox backend={self.backend!r} with url={self.url!r} and token_file={self.token_file!r}: "
                "backend 'remote' needs both of them, and no other back-end takes one"
            )
        _check_effects(self)
        if self.on_death not in ("score", "infra"):
            raise ConfigError(f"sandbox on_death={self.on_death!r}: use 'score' or 'infra'")
        if not math.isfinite(self.death_reward):
            raise ConfigError(f"sandbox death_reward={self.death_reward!r}: must be a finite number")
        if self.on_death == "infra" and self.death_reward:
            raise ConfigError(
                f"sandbox death_reward={self.death_reward!r} has no effect with on_death='infra': "
                "remove one of the two"
            )
        for path in self.readonly:
            if not path.startswith("/"):
                raise ConfigError(f"sandbox readonly={path!r}: must be an absolute path")
        _check_writable(self)

    @property
    def supervisor_mb(self) -> int:
        """Memory the supervisor may use on top of the programs' limit: its own, output, chunks of files."""
        return 24 + 3 * (self.stdout_bytes + self.stderr_bytes >> 20)

    @property
    def limits(self) -> SandboxLimits:
        """Return only the limits."""
        return SandboxLimits(**{f.name: getattr(self, f.name) for f in fields(SandboxLimits)})


_ONLY_WITH = {"image": "docker", "runtime": "docker", "trusted": "process"}


def _check_effects(spec: Sandbox) -> None:
    """Raise ConfigError for a field that this back-end does not read."""
    defaults = {field.name: field.default for field in fields(spec)}
    for name, backend in _ONLY_WITH.items():
        value = getattr(spec, name)
        if value != defaults[name] and spec.backend in {"namespace", "docker", "landlock", "process"} - {backend}:
            raise ConfigError(f"sandbox {name}={value!r} has an effect with backend={backend!r} only")


_OCCUPIED = ("bin", "dev", "disk", "etc", "lib", "lib64", "proc", "sbin", "sys", "tmp", "usr", "workspace")
"""Folders of the root that have a purpose in every sandbox."""


def _check_writable(spec: Sandbox) -> None:
    """Raise ConfigError for a folder that cannot be made writable."""
    if spec.writable and spec.backend not in ("namespace", "docker"):
        raise ConfigError(
            f"sandbox writable={spec.writable[0]!r}: backend {spec.backend!r} cannot add folders; use namespace "
            "or docker"
        )
    for path in spec.writable:
        parts = path.split("/")
        if parts[0] or len(parts) < 2 or any(part in ("", ".", "..") for part in parts[1:]):
            raise ConfigError(f"sandbox writable={path!r}: must be an absolute path, for example '/app'")
        if parts[1] in _OCCUPIED:
            raise ConfigError(f"sandbox writable={path!r}: /{parts[1]} is reserved in a sandbox")
        inside = [other for other in spec.writable if other != path and path.startswith(f"{other}/")]
        if inside or spec.writable.count(path) > 1:
            raise ConfigError(f"sandbox writable={path!r}: is already part of {(inside or [path])[0]!r}")


_TEXTS = ("backend", "image", "runtime", "python", "url", "token_file")


def _check_types(spec: Sandbox) -> None:
    """Raise ConfigError for the first field of a spec with the wrong type."""
    for name in _TEXTS:
        value = getattr(spec, name)
        if not isinstance(value, str) and not (value is None and name not in ("backend", "image")):
            raise ConfigError(f"sandbox {name}={value!r}: must be text")
    for name in ("network", "trusted"):
        if not isinstance(getattr(spec, name), bool):
            raise ConfigError(f"sandbox {name}={getattr(spec, name)!r}: must be True or False")
    for name in ("readonly", "writable", "python_path", "require"):
        value = getattr(spec, name)
        texts = isinstance(value, tuple) and all(isinstance(item, str) for item in value)
        if not texts and not (value is None and name == "require"):
            raise ConfigError(f"sandbox {name}={value!r}: must be a tuple of texts")
    pairs = spec.env if isinstance(spec.env, tuple) else (None,)
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(part, str) for part in pair)):
            raise ConfigError(f'sandbox env={spec.env!r}: must be a tuple of pairs of texts, (("NAME", "value"),)')
    if spec.run_as is not None and (isinstance(spec.run_as, bool) or not isinstance(spec.run_as, int)):
        raise ConfigError(f"sandbox run_as={spec.run_as!r}: must be a user id, a whole number")
    for name in ("ttl_s", "death_reward"):
        value = getattr(spec, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"sandbox {name}={value!r}: must be a number")


def narrowed(base: SandboxLimits, wall_s: float | None, limits: SandboxLimits | None) -> SandboxLimits:
    """Return the limits of one call: those of the sandbox, but for what `limits` has other than its default.

    Raises:
        ConfigError: `limits` changes a limit of the sandbox as a whole.
    """
    changed: dict[str, Any] = {} if wall_s is None else {"wall_s": wall_s}
    for f in fields(SandboxLimits) if limits is not None else ():
        asked = getattr(limits, f.name)
        if asked == f.default or f.name in changed:
            continue
        if f.name not in PER_CALL and asked != getattr(base, f.name):
            raise ConfigError(
                f"limit {f.name}={asked!r} belongs to the sandbox and cannot change with a call: "
                "set it on the Sandbox spec"
            )
        changed[f.name] = asked
    return replace(base, **changed) if changed else base


@dataclass(frozen=True, slots=True)
class ExecResult:
    """The result of one program. There is exactly one `outcome`; output is kept whatever the outcome."""

    outcome: Outcome
    exit_code: int | None
    """0 to 255 if the program exited; values such as 137 or 124 come from the program itself."""
    signal: int | None
    """The signal that killed it."""
    stdout: bytes
    """All output, or its first and last parts with a mark between them."""
    stderr: bytes
    stdout_total: int
    """Bytes printed, kept or not."""
    stderr_total: int
    wall_s: float
    cpu_s: float
    """CPU seconds of the program and the children it waited for."""
    max_rss_kb: int = 0
    oom_kills: int = 0
    """Processes killed by the out-of-memory killer; above 0 the outcome is "oom" even if the program exited
    normally."""
    reaped: int = 0
    """Processes it left behind, which were killed."""
    truncated: bool = False
    """Whether output was dropped; CUT marks the place."""
    session_lost: bool = False
    """Whether the session ended with this call; the next call starts a new, empty one."""

    @property
    def ok(self) -> bool:
        """Whether it exited with code 0."""
        return self.outcome == "exit" and self.exit_code == 0

    def text(self) -> str:
        """Return stdout as text; invalid UTF-8 becomes replacement characters."""
        return self.stdout.decode("utf-8", "replace")

    def error_text(self) -> str:
        """Return stderr as text; invalid UTF-8 becomes replacement characters."""
        return self.stderr.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Usage:
    """Current resource usage of a sandbox."""

    cpu_s: float
    """CPU seconds of all finished calls."""
    memory_bytes: int
    processes: int
    disk_bytes: int
    files: int


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One entry in the sandbox's file system."""

    name: str
    kind: Literal["file", "directory", "link", "other"]
    size: int
    mode: int
    mtime: float


@dataclass(frozen=True, slots=True)
class BoxSnapshot:
    """The files of a sandbox's home directory at one point in time, links included; see `Box.reset`."""

    data: bytes
    """Packed as received from the sandbox (see `inside.packing`) and validated on receipt."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a back-end can enforce on this machine, determined by testing. `notes` explains how, or why not."""

    backend: str
    kept: frozenset[str]
    notes: Mapping[str, str] = field(default_factory=dict)

    def missing(self, asked: frozenset[str]) -> list[str]:
        """Return the promises in `asked` that are not kept, in the order of PROMISES."""
        return [name for name in PROMISES if name in asked and name not in self.kept]


class Process(Protocol):
    """One started sandbox, as seen by its back-end."""

    async def kill(self) -> None:
        """Kill it immediately and wait until nothing of it is left; idempotent."""
        ...

    async def cause(self) -> str | None:
        """Return what ended it, as seen from outside: `kill`, a lost engine or node, or a host out of memory.

        None if nothing outside explains its end. The sandbox's own reports never count, because they may be false.
        """
        ...


class Backend(Protocol):
    """Start sandboxes of one spec."""

    name: str

    async def open(self) -> None:
        """Prepare the back-end; raises SandboxUnavailable if it cannot run here."""
        ...

    async def start(self, name: str) -> tuple[Process, Link, str]:
        """Start one and return its process, the link to its supervisor, and its home directory."""
        ...

    def promises(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return (promises always kept, promises this machine seems to allow); a canary tests them."""
        ...

    async def close(self) -> None:
        """Stop everything it started; idempotent."""
        ...


class Link(Protocol):
    """Frames to and from one supervisor."""

    async def hello(self) -> Mapping[str, Any]:
        """Return the supervisor's first message; raises SandboxUnavailable if it reports that it cannot start."""
        ...

    def send(self, header: dict[str, Any], payload: bytes = b"") -> asyncio.Future[tuple[dict[str, Any], bytes]]:
        """Send an order; the future resolves to its answer, or raises SandboxDied if the link breaks."""
        ...

    def fail(self, error: SandboxError) -> None:
        """Break the link and fail all waiters with this error."""
        ...

    def close(self) -> None:
        """Break the link."""
        ...
