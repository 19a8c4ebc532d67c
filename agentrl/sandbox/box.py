"""A leased sandbox: run programs, talk to sessions, handle files, all through its supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
from agentrl.sandbox.inside import frames
from agentrl.sandbox.results import result_of

CHUNK = 2 << 20
FILE_LIMITS: CallLimits = (60.0, 0, 4 << 20, 4 << 20)
"""File contents travel in pieces of this size."""

CAUSE_TIMEOUT_S = 10.0
"""How long the back-end may look for what ended a sandbox."""

PATIENCE_S = 20.0
"""Extra wait for a supervisor once a program has run: a busy host must not look like a broken sandbox."""

MAX_INPUT = 8 << 20
"""Bytes of program and stdin that one call can take; the supervisor holds them in memory of its own."""


_NOTE = "met by a file operation in sandbox "


@contextlib.contextmanager
def _met_inside(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        error.add_note(f"{_NOTE}{name}")
        raise


def met_inside(error: BaseException) -> bool:
    """Whether this error, or one that it follows from, was met by a file operation inside a sandbox."""
    link: BaseException | None = error
    while link is not None:
        if any(note.startswith(_NOTE) for note in getattr(link, "__notes__", ())):
            return True
        link = link.__cause__ or link.__context__
    return False


class Box:
    """One sandbox. Calls queue up: one program runs at a time; sessions stay alive between their calls.

    Whatever a program does is an ExecResult. Every method raises SandboxError when the sandbox itself is gone;
    after that, all of them do. Once a program has run, that is a SandboxBroken unless the back-end knows of
    something outside the sandbox that ended it.
    """

    def __init__(self, spec: Sandbox, backend: Backend, name: str) -> None:
        self.spec, self.name = spec, name
        self._backend = backend
        self._process: Process | None = None
        self._link: Link | None = None
        self.home = ""
        """Directory where programs start, as they see it; relative paths begin here."""
        self.facts: Mapping[str, Any] = {}
        """What the supervisor said of itself."""
        self._lock = asyncio.Lock()
        self._dead: SandboxError | None = None
        self._awaited: tuple[str, float, float] | None = None
        """The order that waits for its answer, for how long at most, and until when."""
        self._timer: asyncio.TimerHandle | None = None
        self._told: CallLimits | None = None
        """The limits that the supervisor holds calls to unless it is told others."""
        self._used = False
        """Whether a program may have run in it, or left the files in it: its death may be the policy's doing."""
        self._generation = 0
        self._sessions = 0

    async def start(self, timeout_s: float = 30.0) -> None:
        """Build it and wait for its supervisor.

        Raises:
            SandboxUnavailable: it could not be built.
        """
        self._generation += 1
        self._told = None
        self._used = False
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
        """Run a program and wait for its end; a string is a bash command line.

        Args:
            command: the program and its arguments, or a line for `bash -c`.
            stdin: what it can read.
            cwd: where it starts; None: the home directory.
            env: variables added to the sandbox's own.
            wall_s: short for the limit of that name.
            limits: others of the limits that a call can narrow.
        """
        argv = ["bash", "-c", command] if isinstance(command, str) else list(command)
        if not argv:
            raise ValueError("run: the command is empty")
        order: dict[str, Any] = {"kind": "exec", "argv": argv, "cwd": cwd or self.home, "env": dict(env or {})}
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
        """Run a whole Python program in a fresh interpreter state (a child forked and warmed beforehand)."""
        order: dict[str, Any] = {
            "kind": "python", "argv": list(argv), "cwd": cwd or self.home, "env": dict(env or {})
        }  # fmt: skip
        source = code.encode("utf-8", "surrogatepass")
        return await self._execute(order, source, stdin, narrowed(self.spec, wall_s, limits))

    async def session(self, kind: SessionKind) -> BoxSession:
        """Begin a program that keeps its state between calls."""
        session = BoxSession(self, kind)
        await session.restart()
        return session

    async def _execute(
        self, order: dict[str, Any], code: bytes, stdin: bytes, limits: SandboxLimits
    ) -> ExecResult:
        order["rlimits"] = limits.rlimits()
        framed = frames.pack(order, code)  # as the program reads it: the supervisor only passes it on
        self._used = True
        header = {"op": "call", "order_bytes": len(framed)}
        async with self._lock:
            answer, output = await self._call(header, framed + stdin if stdin else framed, limits.call_limits())
        return result_of(answer, output)

    async def _call(
        self, header: dict[str, Any], payload: bytes, limits: CallLimits
    ) -> tuple[dict[str, Any], bytes]:
        """Run a program and await its answer, under the lock. Limits stand until others are told."""
        if limits != self._told:
            header["limits"], self._told = limits, None
        answer = await self._exchange(header, payload, limits[0] + GRACE_S)
        self._told = limits
        return answer

    async def _exchange(
        self, header: dict[str, Any], payload: bytes, timeout_s: float
    ) -> tuple[dict[str, Any], bytes]:
        """One order and its answer, under the lock. A cancelled wait leaves a quiet box."""
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
            await asyncio.shield(self._cancel(link, header, payload))
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
        """Note its death and decide whose doing it was; only evidence from outside the sandbox counts."""
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

    async def _cancel(self, link: Link, header: dict[str, Any], payload: bytes) -> None:
        """Stop what the abandoned order runs; a sandbox that cannot is destroyed."""
        try:
            async with asyncio.timeout(GRACE_S + (PATIENCE_S if self._used else 0.0)):
                link.send({"op": "cancel", "target": header["id"]}).cancel()
                await link.send({"op": "usage"})
        except (TimeoutError, SandboxError) as error:
            await self._died(SandboxDied(f"sandbox {self.name} did not stop a cancelled program: {error}"))
            await self._destroy()

    def _wait(self, what: str, timeout_s: float) -> None:
        """Give the supervisor that long to answer. One timer serves many calls: most end long before it rings."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        self._awaited = what, timeout_s, until
        if self._timer is None or self._timer.when() > until:
            self._stop_timer()
            self._timer = loop.call_at(until, self._ring)

    def _ring(self) -> None:
        """Where the supervisor is not answering, give up on it."""
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

    # Files, handled by a child with the rights of the programs inside

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20, offset: int = 0) -> bytes:
        """The bytes of a regular file from `offset` on, at most `max_bytes`.

        Raises:
            OSError: as `open` would (FileNotFoundError, IsADirectoryError, PermissionError, ...).
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
        """Write a regular file; text is UTF-8.

        Raises:
            OSError: as `open` and `write` would; ENOSPC when the disk of the sandbox is full; EIO when what was
                written is not what was sent.
        """
        raw = data.encode() if isinstance(data, str) else data
        for begin in range(0, len(raw) or 1, CHUNK):
            part = raw[begin : begin + CHUNK]
            order = {
                "op": "write", "path": path, "offset": begin, "mode": mode, "parents": parents,
                "last": begin + CHUNK >= len(raw),
            }  # fmt: skip
            await self._file(order, part)

    async def list_dir(self, path: str = ".", *, max_entries: int = 10_000) -> list[FileInfo]:
        """What is in a directory, sorted by name."""
        answer, _ = await self._file({"op": "list", "path": path, "max_entries": max_entries})
        return trees.listing(answer, path, max_entries)

    async def stat(self, path: str) -> FileInfo:
        """What is at a path; links are not followed."""
        answer, _ = await self._file({"op": "stat", "path": path})
        return trees.file_info(os.path.basename(path.rstrip("/")) or path, answer)

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Delete a file, or a directory (with `recursive`, whatever is in it)."""
        await self._file({"op": "remove", "path": path, "recursive": recursive})

    async def make_dir(self, path: str) -> None:
        """Create a directory and its parents."""
        await self._file({"op": "mkdir", "path": path})

    async def put_tree(self, files: Mapping[str, bytes | str], path: str = ".") -> None:
        """Write many files below `path` in one go; names are relative and may not leave it.

        A file or link that is in the way gives way. A link in place of a directory does not: nothing is written
        through it.

        Raises:
            OSError: as for `write_file`; ENOTDIR where a link stands in place of a directory.
        """
        await self._unpack(path, trees.of_files(files))

    async def get_tree(
        self, path: str = ".", *, max_bytes: int = 16 << 20, max_files: int = 10_000
    ) -> dict[str, bytes]:
        """The regular files below `path` by relative name; links, devices and pipes are left out.

        Raises:
            OSError: there is more than `max_bytes` or `max_files`, or what came is no tree.
        """
        data = await self._pack(path, max_bytes, max_files)
        with _met_inside(self.name):
            return trees.files_of(trees.read(data, max_bytes=max_bytes, max_files=max_files))

    async def _pack(self, path: str, max_bytes: int, max_files: int) -> bytes:
        order = {"op": "pack", "path": path, "max_bytes": max_bytes, "max_files": max_files}
        _, data = await self._file(order, most=trees.stream_limit(max_bytes, max_files))
        return data

    async def _unpack(self, path: str, entries: Sequence[trees.Entry]) -> None:
        """Write a tree below `path`, in portions: the supervisor holds no more than one of them."""
        for portion in trees.portions(entries, CHUNK):
            await self._file({"op": "unpack", "path": path}, portion)

    async def _file(self, order: dict[str, Any], data: bytes = b"", most: int = 0) -> tuple[dict[str, Any], bytes]:
        """One file operation: its answer and its data; the errors that it met as OSError.

        Args:
            most: bytes that may come. More of them end the operation while they arrive.
        """
        framed = frames.pack({"kind": "file", "file": order, "rlimits": {}})
        header = {"op": "call", "order_bytes": len(framed), "stream": most}
        async with self._lock:
            answer, output = await self._call(header, framed + data, FILE_LIMITS)
        streamed = answer.get("streamed", b"")
        with _met_inside(self.name):
            return trees.answer_of(result_of(answer, output), order, data, streamed), streamed

    # The box as a whole

    async def snapshot(self, *, max_bytes: int = 256 << 20, max_files: int = 100_000) -> BoxSnapshot:
        """The files of the home directory as they are now."""
        data = await self._pack(self.home, max_bytes, max_files)
        with _met_inside(self.name):
            await asyncio.to_thread(trees.read, data, max_bytes=max_bytes, max_files=max_files)
        return BoxSnapshot(data)

    async def reset(self, to: BoxSnapshot | None = None) -> None:
        """Become a new sandbox: nothing of what ran here remains; then put the files of a snapshot back.

        Sessions of before are over. Names, contents, modes, times of change and links are those of the snapshot.
        """
        size = len(to.data) if to is not None else 0
        entries = trees.read(to.data, max_bytes=size, max_files=size) if to is not None else []
        async with self._lock:
            await self._destroy()
            self._dead = None
            await self.start()
            await self._wake()
        if entries:
            self._used = True  # what a program left may be in it
            await self._unpack(self.home, entries)

    async def usage(self) -> Usage:
        """What it holds now."""
        async with self._lock:
            answer, _ = await self._exchange({"op": "usage"}, b"", GRACE_S)
        return Usage(**{name: answer[name] for name in Usage.__slots__})

    async def wake(self) -> None:
        """Make sure that it answers, start its time to live anew, and have a spare child ready."""
        async with self._lock:
            await self._wake()

    async def _wake(self) -> None:
        await self._exchange({"op": "wake", "ttl_s": self.spec.ttl_s}, b"", GRACE_S)

    async def park(self) -> None:
        """Give the spare child up: an idle sandbox is one process."""
        async with self._lock:
            await self._exchange({"op": "park"}, b"", GRACE_S)

    async def alive(self) -> bool:
        """Whether it still answers."""
        try:
            await self.usage()
        except SandboxError:
            return False
        return True

    async def close(self) -> None:
        """End it and everything in it; idempotent, and finishes even when the caller is cancelled."""
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
