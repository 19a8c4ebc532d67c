"""A leased sandbox: run programs, use sessions and handle files, all through its supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentrl.async_tasks import shielded
from agentrl.errors import SandboxError
from agentrl.sandbox import trees
from agentrl.sandbox.box_session import BoxSession
from agentrl.sandbox.contract import (
    GRACE_S,
    Backend,
    BoxSnapshot,
    CallLimits,
    ExecResult,
    FileInfo,
    Link,
    Process,
    Sandbox,
    SandboxLimits,
    SessionKind,
    Usage,
    narrowed,
)
from agentrl.sandbox.errors import SandboxBroken, SandboxCreateTimeout, SandboxDied
from agentrl.sandbox.inside import frames, packing
from agentrl.sandbox.results import result_of

CHUNK = 2 << 20
FILE_LIMITS: CallLimits = (60.0, 0, 4 << 20, 4 << 20)
"""File contents are transferred in chunks of this size."""

CAUSE_TIMEOUT_S = 25.0
"""Time limit for the back-end to find out what ended a sandbox."""

PATIENCE_S = 20.0
"""Extra wait for a supervisor after a program has run, so that a busy host is not mistaken for a broken
sandbox."""

MAX_INPUT = 8 << 20
"""Maximum bytes of program text plus stdin per call; the supervisor holds them in its own memory."""


_NOTE = "met by a file operation in sandbox "


@contextlib.contextmanager
def _met_inside(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        error.add_note(f"{_NOTE}{name}")
        raise


def met_inside(error: BaseException) -> bool:
    """Return whether this error, or one in its cause chain, was raised by a file operation inside a sandbox."""
    link: BaseException | None = error
    while link is not None:
        if any(note.startswith(_NOTE) for note in getattr(link, "__notes__", ())):
            return True
        link = link.__cause__ or link.__context__
    return False


class Box:
    """One leased sandbox. Calls are queued: one program runs at a time, and sessions stay alive between calls.

    Program failures are returned as ExecResult. Every method raises SandboxError once the sandbox itself is gone.
    If a program had already run, the error is SandboxBroken unless the back-end knows of an outside cause.
    """

    def __init__(self, spec: Sandbox, backend: Backend, name: str) -> None:
        self.spec, self.name = spec, name
        self._backend = backend
        self._process: Process | None = None
        self._link: Link | None = None
        self.home = ""
        """Working directory of programs, as they see it; relative paths start here."""
        self.facts: Mapping[str, object] = {}
        """What the supervisor reported at startup."""
        self._lock = asyncio.Lock()
        self._dead: SandboxError | None = None
        self._closed = False
        self._awaited: tuple[str, float, float] | None = None
        """The order awaiting its answer, its time limit and its deadline."""
        self._timer: asyncio.TimerHandle | None = None
        self._told: CallLimits | None = None
        """The limits that the supervisor currently enforces."""
        self._used = False
        """Whether a program may have run in it or left files in it, so that the policy may have caused its
        death."""
        self._generation = 0
        self._sessions = 0
        self._open_sessions: set[str] = set()

    async def start(self, timeout_s: float = 30.0) -> None:
        """Create the sandbox and wait for its supervisor.

        Raises:
            SandboxUnavailable: it could not be created.
        """
        self._generation += 1
        self._told = None
        self._used = False
        self._open_sessions.clear()
        try:
            async with asyncio.timeout(timeout_s):
                started = await self._backend.start(f"{self.name}.{self._generation}")
                self._process, self._link, self.home = started
                self.facts = await self._link.hello()
        except TimeoutError:
            await self._destroy()
            raise SandboxCreateTimeout(f"sandbox {self.name} was not ready after {timeout_s:g} s") from None
        except BaseException:
            await self._destroy()
            raise

    # Programs

    async def run(
        self,
        command: Sequence[str] | str,
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        wall_s: float | None = None,
        limits: SandboxLimits | None = None,
    ) -> ExecResult:
        """Run a program and wait for it to finish; a string is a bash command line.

        Args:
            command: the program and its arguments, or a line for `bash -c`.
            stdin: data for its standard input.
            cwd: working directory; None: the home directory.
            env: variables added to the sandbox's environment.
            wall_s: shorthand for the limit of the same name.
            limits: other limits to narrow for this call; those at their default stay the sandbox's.
        """
        argv = ["bash", "-c", command] if isinstance(command, str) else list(command)
        if not argv:
            raise ValueError("run: the command is empty")
        order: dict[str, object] = {"kind": "exec", "argv": argv, "cwd": cwd or self.home, "env": dict(env or {})}
        return await self._execute(order, b"", stdin, narrowed(self.spec, wall_s, limits))

    async def python(
        self,
        code: str,
        *,
        argv: Sequence[str] = (),
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        wall_s: float | None = None,
        limits: SandboxLimits | None = None,
    ) -> ExecResult:
        """Run a complete Python program in a fresh interpreter (a pre-forked, warmed-up child)."""
        order: dict[str, object] = {
            "kind": "python", "argv": list(argv), "cwd": cwd or self.home, "env": dict(env or {})
        }  # fmt: skip
        source = code.encode("utf-8", "surrogatepass")
        return await self._execute(order, source, stdin, narrowed(self.spec, wall_s, limits))

    async def session(self, kind: SessionKind) -> BoxSession:
        """Start a program that keeps its state between calls."""
        session = BoxSession(self, kind)
        await session.restart()
        return session

    async def _execute(
        self, order: dict[str, object], code: bytes, stdin: bytes, limits: SandboxLimits
    ) -> ExecResult:
        order["rlimits"], order["beside"] = limits.rlimits(), bool(self._open_sessions)
        framed = frames.pack(order, code)  # in the program's own format: the supervisor only forwards it
        self._used = True
        header = {"op": "call", "order_bytes": len(framed)}
        async with self._lock:
            answer, output = await self._call(header, framed + stdin if stdin else framed, limits.call_limits())
        return result_of(answer, output)

    async def _call(
        self, header: dict[str, object], payload: bytes, limits: CallLimits
    ) -> tuple[dict[str, Any], bytes]:
        """Run a program and await its answer, holding the lock. Limits stay in force until they are changed."""
        if limits != self._told:
            header["limits"], self._told = limits, None
        answer = await self._exchange(header, payload, limits[0] + GRACE_S)
        self._told = limits
        return answer

    async def _exchange(
        self, header: dict[str, Any], payload: bytes, timeout_s: float
    ) -> tuple[dict[str, Any], bytes]:
        """Send one order and await its answer, holding the lock. Cancelling the wait leaves the sandbox idle."""
        if self._dead is not None:
            raise self._dead
        if len(payload) > MAX_INPUT:
            raise ValueError(
                f"sandbox {self.name}: program and stdin have {len(payload)} bytes, at most {MAX_INPUT} go with a "
                "call: write a file and read that"
            )
        link = self._link
        if link is None:
            raise SandboxDied(f"sandbox {self.name} has not been started")
        future = link.send(header, payload)
        self._wait(header["op"], timeout_s)
        try:
            answer, output = await future
        except asyncio.CancelledError:
            await shielded(self._cancel(link, header, payload))
            raise
        except SandboxError as error:
            raise await self._died(error) from None
        finally:
            self._awaited = None
        if "fault" in answer:
            text = f"sandbox {self.name}: {answer['fault']}"
            raise self._broken(text) if answer.get("used") else SandboxError(text)
        return answer, output

    async def _died(self, error: SandboxError) -> SandboxError:
        """Record its death and decide what caused it; only evidence from outside the sandbox counts."""
        if self._dead is None and self._used:
            cause, process = None, self._process
            if process is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CAUSE_TIMEOUT_S):
                        cause = await process.cause()
            error = SandboxDied(f"{error} ({cause})") if cause else self._broken(str(error))
        self._dead = self._dead or error
        return self._dead

    def _broken(self, text: str) -> SandboxError:
        if self.spec.on_death == "infra":
            return SandboxDied(text)
        return SandboxBroken(
            f"{text}; a program had run in it and nothing outside explains its end, so the episode is to blame",
            self.spec.death_reward,
        )

    async def _cancel(self, link: Link, header: dict[str, object], payload: bytes) -> None:
        """Stop what the abandoned order is running; destroy the sandbox if that fails."""
        try:
            async with asyncio.timeout(GRACE_S + (PATIENCE_S if self._used else 0.0)):
                link.send({"op": "cancel", "target": header["id"]}).cancel()
                await link.send({"op": "usage"})
        except (TimeoutError, SandboxError) as error:
            await self._died(SandboxDied(f"sandbox {self.name} did not stop a cancelled program: {error}"))
            await self._destroy()

    def _wait(self, what: str, timeout_s: float) -> None:
        """Set a deadline for the supervisor's answer. Calls share one timer, because most finish well before
        it."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        self._awaited = what, timeout_s, until
        if self._timer is None or self._timer.when() > until:
            self._stop_timer()
            self._timer = loop.call_at(until, self._ring)

    def _ring(self) -> None:
        """Give up on the supervisor if it does not answer."""
        self._timer = None
        if self._awaited is None:
            return
        what, after_s, until = self._awaited
        if self._used:
            until += PATIENCE_S
            after_s += PATIENCE_S
        loop = asyncio.get_running_loop()
        if loop.time() < until:
            self._timer = loop.call_at(until, self._ring)
            return
        if self._link is not None:
            self._link.fail(SandboxDied(f"sandbox {self.name} did not answer {what!r} within {after_s:g} s"))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # Files, handled by a child process with the same rights as the programs inside

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20, offset: int = 0) -> bytes:
        """Read up to `max_bytes` bytes of a regular file, starting at `offset`.

        Raises:
            OSError: same as `open` (FileNotFoundError, IsADirectoryError, PermissionError, ...).
        """
        parts: list[bytes] = []
        done = 0
        while done < max_bytes:
            want = min(CHUNK, max_bytes - done)
            order = {"op": "read", "path": path, "offset": offset + done, "max_bytes": want}
            _, data = await self._file(order, most=want)
            parts.append(data)
            done += len(data)
            if len(data) < want:
                break
        return b"".join(parts)

    async def write_file(self, path: str, data: bytes | str, *, mode: int = 0o644, parents: bool = True) -> None:
        """Write a regular file; text is encoded as UTF-8.

        Raises:
            OSError: same as `open` and `write`; ENOSPC if the sandbox's disk is full, EILSEQ if the text has a
            lone surrogate, EIO if the data written differs from the data sent.
        """
        try:
            raw = data.encode() if isinstance(data, str) else data
        except UnicodeEncodeError as e:
            raise OSError(errno.EILSEQ, f"{os.strerror(errno.EILSEQ)}: {e.reason}", path) from None
        for begin in range(0, len(raw) or 1, CHUNK):
            part = raw[begin : begin + CHUNK]
            order = {
                "op": "write", "path": path, "offset": begin, "mode": mode, "parents": parents,
                "last": begin + CHUNK >= len(raw),
            }  # fmt: skip
            await self._file(order, part)

    async def list_dir(self, path: str = ".", *, max_entries: int = 10_000) -> list[FileInfo]:
        """List a directory, sorted by name."""
        answer, _ = await self._file({"op": "list", "path": path, "max_entries": max_entries})
        return trees.listing(answer, path, max_entries)

    async def stat(self, path: str) -> FileInfo:
        """Describe the entry at a path; links are not followed."""
        answer, _ = await self._file({"op": "stat", "path": path})
        return trees.file_info(os.path.basename(path.rstrip("/")) or path, answer)

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Delete a file, or a directory (with `recursive`, including its contents)."""
        await self._file({"op": "remove", "path": path, "recursive": recursive})

    async def make_dir(self, path: str) -> None:
        """Create a directory and its parents."""
        await self._file({"op": "mkdir", "path": path})

    async def put_tree(self, files: Mapping[str, bytes | str], path: str = ".") -> None:
        """Write many files below `path` in one operation; names are relative and may not leave it.

        Existing files and links at the target names are replaced. A link in place of a directory is an error:
        nothing is written through it.

        Raises:
            OSError: same as `write_file`; ENOTDIR if a link takes the place of a directory.
        """
        await self._unpack(path, trees.of_files(files))

    async def get_tree(
        self, path: str = ".", *, max_bytes: int = 16 << 20, max_files: int = 10_000
    ) -> dict[str, bytes]:
        """Read the regular files below `path`, keyed by relative name; links, devices and pipes are skipped.

        Raises:
            OSError: the tree exceeds `max_bytes` or `max_files`, or the answer is not a valid tree.
        """
        entries = await self.get_entries(path, max_bytes=max_bytes, max_files=max_files)
        return {entry.name: entry.content for entry in entries if entry.kind == packing.FILE}

    async def put_entries(self, entries: Sequence[trees.Entry], path: str = ".") -> None:
        """Write files, folders and links below `path`, with their modes; see `put_tree`."""
        await self._unpack(path, entries)

    async def get_entries(
        self, path: str = ".", *, max_bytes: int = 16 << 20, max_files: int = 10_000
    ) -> Sequence[trees.Entry]:
        """Read the files, folders and links below `path`, with their modes; see `get_tree`."""
        data = await self._pack(path, max_bytes, max_files)
        with _met_inside(self.name):
            return trees.read(data, max_bytes=max_bytes, max_files=max_files)

    async def _pack(self, path: str, max_bytes: int, max_files: int) -> bytes:
        order = {"op": "pack", "path": path, "max_bytes": max_bytes, "max_files": max_files}
        _, data = await self._file(order, most=trees.stream_limit(max_bytes, max_files))
        return data

    async def _unpack(self, path: str, entries: Sequence[trees.Entry]) -> None:
        """Write a tree below `path` in portions, so that the supervisor holds only one portion at a time."""
        for portion in trees.portions(entries, CHUNK):
            await self._file({"op": "unpack", "path": path}, portion)

    async def _file(
        self, order: dict[str, object], data: bytes = b"", most: int = 0
    ) -> tuple[dict[str, object], bytes]:
        """Run one file operation and return its answer and data; errors it encountered are raised as OSError.

        Args:
            most: maximum bytes to receive; a longer answer aborts the operation.
        """
        framed = frames.pack({"kind": "file", "file": order, "rlimits": {}})
        header = {"op": "call", "order_bytes": len(framed), "stream": most}
        async with self._lock:
            answer, output = await self._call(header, framed + data, FILE_LIMITS)
        streamed = answer.get("streamed", b"")
        with _met_inside(self.name):
            return trees.answer_of(result_of(answer, output), order, data, streamed), streamed

    # The sandbox as a whole

    async def snapshot(self, *, max_bytes: int = 256 << 20, max_files: int = 100_000) -> BoxSnapshot:
        """Capture the files of the home directory in their current state."""
        data = await self._pack(self.home, max_bytes, max_files)
        with _met_inside(self.name):
            await asyncio.to_thread(trees.read, data, max_bytes=max_bytes, max_files=max_files)
        return BoxSnapshot(data)

    async def reset(self, to: BoxSnapshot | None = None) -> None:
        """Reset to a fresh sandbox, with nothing left of what ran here, then restore the files of a snapshot.

        All sessions end. Names, contents, modes, modification times and links are restored from the snapshot.
        """
        entries = _entries(to) if to is not None else []
        async with self._lock:
            await shielded(self._restart())  # a policy may choose when its tool is cancelled
        await self._load(entries)

    async def _restart(self) -> None:
        await self._destroy()
        self._dead = None
        await self.start()
        if self._closed:  # nobody else would end the new one
            await self.close()
        await self._wake()

    async def load(self, files: BoxSnapshot) -> None:
        """Write the files of a snapshot into the home directory; it may be of another sandbox."""
        await self._load(_entries(files))

    async def _load(self, entries: Sequence[trees.Entry]) -> None:
        if entries:
            self._used = True  # programs may have left files in it
            await self._unpack(self.home, entries)

    async def usage(self) -> Usage:
        """Return its current resource usage."""
        async with self._lock:
            answer, _ = await self._exchange({"op": "usage"}, b"", GRACE_S)
        return Usage(**{name: answer[name] for name in Usage.__slots__})

    async def wake(self) -> None:
        """Check that it responds, restart its lifetime timer, and have a spare child ready."""
        async with self._lock:
            await self._wake()

    async def _wake(self) -> None:
        await self._exchange({"op": "wake", "ttl_s": self.spec.ttl_s}, b"", GRACE_S)

    async def alive(self) -> bool:
        """Return whether it still responds."""
        try:
            await self.usage()
        except SandboxError:
            return False
        return True

    async def close(self) -> None:
        """Destroy the sandbox and everything in it; idempotent, and completes even if the caller is cancelled."""
        self._closed = True
        self._dead = self._dead or SandboxDied(f"sandbox {self.name} has been closed")
        await asyncio.shield(asyncio.ensure_future(self._destroy()))

    async def _destroy(self) -> None:
        link, process = self._link, self._process
        self._link = self._process = None
        self._stop_timer()
        if link is not None:
            link.close()
        if process is not None:
            await process.kill()

    async def __aenter__(self) -> Box:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _entries(files: BoxSnapshot) -> list[trees.Entry]:
    """The files of a snapshot. Raises OSError if it is malformed."""
    return trees.read(files.data, max_bytes=len(files.data), max_files=len(files.data))
