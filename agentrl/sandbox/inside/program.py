"""One child of the supervisor: its pipes, the output kept, and the order it runs."""

from __future__ import annotations

import mmap
import os
import select
import socket
import time
from typing import Any

from . import child, frames, tree

READ_SIZE = 1 << 16
CONTROL_TIMEOUT_S = 2.0


class Tail:
    """The first and last bytes of a stream; the bytes between them are counted and dropped."""

    def __init__(self, limit: int) -> None:
        self.limit, self.total = limit, 0
        self._head = bytearray()
        self._tail = bytearray()

    def add(self, data: bytes) -> None:
        """Add the next bytes."""
        self.total += len(data)
        room = self.limit // 2 + self.limit % 2 - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data
            keep = self.limit // 2
            if len(self._tail) > 2 * keep + READ_SIZE:
                del self._tail[: len(self._tail) - keep]

    @property
    def is_cut(self) -> bool:
        """Whether anything was dropped."""
        return self.total > self.limit

    def whole(self) -> bytes:
        """Return everything that was kept."""
        return b"".join(self.parts()) if self._tail else bytes(self._head)

    def parts(self) -> tuple[bytes, bytes]:
        """Return (head, tail) as kept; together they are the whole stream if nothing was dropped."""
        keep = self.limit // 2
        tail = self._tail[max(0, len(self._tail) - keep) :] if keep else b""
        return bytes(self._head), bytes(tail)


class Program:
    """One child with its pipes: the spare before its order, the call during it, or a standing session."""

    def __init__(self, confinement: child.Confinement) -> None:
        self.page = mmap.mmap(-1, mmap.PAGESIZE)
        control, theirs = socket.socketpair()
        stdin_r, self.stdin = os.pipe2(os.O_CLOEXEC)
        self.stdout, stdout_w = os.pipe2(os.O_CLOEXEC)
        self.stderr, stderr_w = os.pipe2(os.O_CLOEXEC)
        try:
            self.pid = confinement.fork()
        except OSError:
            for fd in (stdin_r, stdout_w, stderr_w, self.stdin, self.stdout, self.stderr):
                os.close(fd)
            for end in (control, theirs, self.page):
                end.close()
            raise
        if self.pid == 0:
            child.spare(confinement, self.page, theirs.fileno(), stdin_r, stdout_w, stderr_w)
        theirs.close()
        for fd in (stdin_r, stdout_w, stderr_w):
            os.close(fd)
        self.control = control
        self.pidfd = tree.pidfd(self.pid)
        for fd in (self.stdin, self.stdout, self.stderr):
            os.set_blocking(fd, False)
        self.control.setblocking(False)
        self.kind = ""
        self.outputs = select.poll()
        """Polls stdout and stderr of a session for pending output."""
        self.ended: set[int] = set()
        """The streams that have ended."""
        self.late = {"stdout": Tail(1 << 16), "stderr": Tail(1 << 16)}
        """Output of a session's background jobs between its calls."""
        self.status: int | None = None
        """The wait status once it has ended."""
        self.rusage: Any = None

    def order(self, data: bytes) -> None:
        """Send an order. A child that does not read it (because it is stopped) is killed, as its pidfd will
        show."""
        try:
            try:
                sent = self.control.send(data)
            except BlockingIOError:
                sent = 0
            if sent < len(data):  # a large one
                self.control.settimeout(CONTROL_TIMEOUT_S)
                self.control.sendall(memoryview(data)[sent:])
                self.control.setblocking(False)
        except OSError:
            if self.status is None:
                tree.kill(self.pid)

    def word(self) -> tuple[bool, int, int]:
        """What the child reports about itself; see child.WORD."""
        return child.WORD.unpack_from(self.page)

    def has_accepted(self) -> bool:
        """Whether it accepted its order, shown by the one message that the program cannot send or retract."""
        try:
            return self.control.recv(1) == child.ACCEPTED
        except OSError:
            return False

    def is_alive(self) -> bool:
        """Return whether it is running; reaps it if not."""
        if self.status is None:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self.status, self.rusage = status, usage
        return self.status is None

    def close(self) -> None:
        """Close everything still open."""
        self.control.close()
        self.page.close()
        for name in ("stdin", "stdout", "stderr", "pidfd"):
            fd = getattr(self, name)
            if fd >= 0:
                os.close(fd)
                setattr(self, name, -1)


CallLimits = tuple[float, int, int, int]
"""Seconds, bytes of stdout and of stderr to keep, and total output bytes at which the program is ended."""


class ProgramCall:
    """The order being run."""

    def __init__(self, header: frames.Header, program: Program, stdin: bytes, limits: CallLimits) -> None:
        self.id: int = header["id"]
        self.retried = False
        self.order = b""
        self.program, self.header = program, header
        self.given, self.stdin = stdin, memoryview(stdin)
        """Its standard input: the whole, and the part not yet written."""
        wall_s, stdout_bytes, stderr_bytes, self.output_total = limits
        self.out, self.err = Tail(stdout_bytes), Tail(stderr_bytes)
        self.started = time.monotonic()
        self.deadline = self.started + wall_s
        self.session: str | None = header.get("session")
        self.answer = b""
        """What a session has written to its control descriptor."""
        self.verdict: str | None = None
        """Set when the supervisor ended the call: timeout, oom, output_limit or cancelled."""
        self.interrupted_at: float | None = None
        self.stream: int = header.get("stream", 0)
        """Bytes of stdout that may be streamed out instead of kept; 0: none."""
        self.streamed = 0
        self.is_quick = True
        """Its output has not been read yet."""
