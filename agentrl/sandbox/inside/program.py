"""One child of the supervisor with its pipes, what is kept of its output, and the order that it runs."""

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
    """The first and the last bytes of a stream; what lies between is counted and dropped."""

    def __init__(self, limit: int) -> None:
        self.limit, self.total = limit, 0
        self._head = bytearray()
        self._tail = bytearray()

    def add(self, data: bytes) -> None:
        """Take the next bytes."""
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
        """Whether something was dropped."""
        return self.total > self.limit

    def whole(self) -> bytes:
        """Everything that is kept."""
        return b"".join(self.parts()) if self._tail else bytes(self._head)

    def parts(self) -> tuple[bytes, bytes]:
        """(head, tail) as kept; together they are everything when nothing was dropped."""
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
        """Tells which of stdout and stderr of a session have something to be read."""
        self.ended: set[int] = set()
        """Those of its streams that have come to an end."""
        self.late = {"stdout": Tail(1 << 16), "stderr": Tail(1 << 16)}
        """What a session's background jobs wrote between its calls."""
        self.status: int | None = None
        """The wait status once it has ended."""
        self.rusage: Any = None

    def order(self, data: bytes) -> None:
        """Hand an order over. A child that does not take it (stopped, say) is killed; its pidfd tells the rest."""
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
        """What it says of itself; see child.WORD."""
        return child.WORD.unpack_from(self.page)

    def has_accepted(self) -> bool:
        """Whether it took its order, by the one word that the order's program cannot say or take back."""
        try:
            return self.control.recv(1) == child.ACCEPTED
        except OSError:
            return False

    def is_alive(self) -> bool:
        """Whether it runs; collects it when not."""
        if self.status is None:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self.status, self.rusage = status, usage
        return self.status is None

    def close(self) -> None:
        """Close what is still open."""
        self.control.close()
        self.page.close()
        for name in ("stdin", "stdout", "stderr", "pidfd"):
            fd = getattr(self, name)
            if fd >= 0:
                os.close(fd)
                setattr(self, name, -1)


CallLimits = tuple[float, int, int, int]
"""Seconds, bytes of stdout and of stderr that are kept, bytes of both that end the program."""


class ProgramCall:
    """The order that runs now."""

    def __init__(self, header: frames.Header, program: Program, stdin: bytes, limits: CallLimits) -> None:
        self.id: int = header["id"]
        self.retried = False
        self.order = b""
        self.program, self.header = program, header
        self.given, self.stdin = stdin, memoryview(stdin)
        """What it can read on stdin: all of it, and what has not been handed over yet."""
        wall_s, stdout_bytes, stderr_bytes, self.output_total = limits
        self.out, self.err = Tail(stdout_bytes), Tail(stderr_bytes)
        self.started = time.monotonic()
        self.deadline = self.started + wall_s
        self.session: str | None = header.get("session")
        self.answer = b""
        """What a session has written on its control descriptor."""
        self.verdict: str | None = None
        """Set when the call was ended from here: timeout, oom, output_limit or cancelled."""
        self.interrupted_at: float | None = None
        self.stream: int = header.get("stream", 0)
        """Bytes of stdout that may go out as they come, rather than be kept; 0: none does."""
        self.streamed = 0
        self.is_quick = True
        """Its output is not read yet."""
