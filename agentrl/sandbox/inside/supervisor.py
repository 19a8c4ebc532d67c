"""The supervisor of one sandbox: PID 1 of its namespace or container, and the only process that talks to the
outside.

It has one thread and one event loop, runs one order at a time, and enforces that order's limits. It never runs
untrusted code itself: it forks a spare child in advance and hands the order to it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import time
from typing import NoReturn

from . import child, frames, ipc, tree
from .loop import LinkLost
from .program import READ_SIZE, CallLimits, Program, ProgramCall, Tail
from .programs import Programs, end_with_all_below
from .reports import report

INTERRUPT_GRACE_S = 0.3
STATUSES = frozenset(b"%d" % status for status in range(256))
"""What a session can report about a call; anything else is invalid and ends the session."""
WATCH_EVERY_S = 0.02
SPARE_AFTER_MS = 2
"""Delay before a new spare: the caller's answer goes first, and an immediate next order does not need one."""
QUICK_S = 0.001
"""Output of calls that end within this time is read once, at the end; that of longer calls as it arrives."""


class Supervisor(Programs):
    """See the module docstring. `link` is the stream to the outside."""

    def __init__(
        self,
        link_in: int,
        link_out: int,
        confinement: child.Confinement,
        *,
        owns_all: bool,
        meter: tree.Meter,
        ttl_s: float,
    ) -> None:
        super().__init__(link_in, link_out, confinement, owns_all)
        self.meter = meter
        self.ttl_s = ttl_s
        self.expires = time.monotonic() + ttl_s
        self.reader = frames.FrameReader()
        self.used = False
        """Whether a program has run here: from then on, failures are outcomes of its calls."""
        self.cpu_s = 0.0
        self.watch_at = 0.0
        """When to look at the memory of a call next, if nobody else counts it."""
        self.asked: int | None = None
        """A pending usage request, answered once the interrupted call is over."""
        self.limits: CallLimits = (0.0, 0, 0, 0)
        """Limits of the calls, sent with the first call and whenever they change."""

    # The loop

    def run(self) -> NoReturn:
        """Serve until the other side is gone or the lifetime is over; then end everything."""
        try:
            child.prepare(self.confinement)
            gc.collect()
            gc.freeze()  # garbage collection in a child must not write to pages shared with the others
            gc.disable()
            self._watch(self.link_in, self._receive)
            self._watch_signalled_ends()
            self.send(
                {"hello": frames.VERSION, "home": self.confinement.home, "counted": not self.meter.must_watch}
            )
            while True:
                if self.call is not None and self.call.session is not None and self.call.is_quick:
                    tree.linger(self.poll)
                try:
                    self._turn()
                except LinkLost:
                    raise
                except Exception as error:  # a bug in agentrl, or caused by a program: the call is over
                    self._mishap(error)
        except LinkLost:
            pass
        finally:
            tree.kill_all(self.owns_all)
            os._exit(0)

    def _turn(self) -> None:
        """Wait for events and handle them."""
        for fd, _ in self.poll.poll(self._timeout_ms()):
            handler = self.handlers.get(fd)
            if handler is not None:
                handler()
        self._on_time()
        if self.spare is None and self._wants_spare() and not self.poll.poll(SPARE_AFTER_MS):
            with contextlib.suppress(OSError):  # the sandbox may be full of a session's background jobs
                self.spare = Program(self.confinement)

    def _mishap(self, error: Exception) -> None:
        """After an exception: end everything running here and answer the call. The sandbox itself continues."""
        call = self.call
        self.used = self.used or (call is not None and (call.session is not None or call.program.has_accepted()))
        self._end_all()
        if self.asked is not None:
            self._tell_usage(self.asked)
        if call is not None:
            self._refuse(call.id, f"{type(error).__name__}: {error}", lost=call.session is not None)

    def _timeout_ms(self) -> float:
        until = self.expires
        if self.call is not None:
            if self.call.is_quick:
                return QUICK_S * 1000
            if self.call.interrupted_at is not None:
                until = min(until, self.call.interrupted_at + INTERRUPT_GRACE_S)
            else:
                until = min(until, self.call.deadline)
                if self.meter.must_watch:
                    until = min(until, self.watch_at)
        return max(0.0, (until - time.monotonic()) * 1000 + 0.5)

    def _on_time(self) -> None:
        now = time.monotonic()
        if now >= self.expires:
            raise LinkLost("time to live")
        call = self.call
        if call is None:
            return
        if call.is_quick and now >= call.started + QUICK_S:
            call.is_quick = False
            self._watch_output(call.program)
        if call.interrupted_at is not None:
            if now >= call.interrupted_at + INTERRUPT_GRACE_S:
                self._finish()
        elif now >= call.deadline:
            self._stop("timeout")
        elif self.meter.must_watch and now >= self.watch_at:
            if self.meter.over():
                self._stop("oom")
            else:
                self._let_fork(call.program)
            self.watch_at = time.monotonic() + WATCH_EVERY_S

    def _receive(self) -> None:
        try:
            data = os.read(self.link_in, READ_SIZE)
        except OSError:
            data = b""
        if not data:
            raise LinkLost("the other side closed the connection")
        for header, payload in self.reader.feed(data):
            try:
                self._handle(header, payload)
            except LinkLost:
                raise
            except Exception as error:
                self._mishap(error)  # answers the call, if that is what failed
                if header["op"] != "call":
                    fault = f"{header['op']}: {type(error).__name__}: {error}"
                    self.send({"id": header["id"], "fault": fault, "used": self.used})

    def _handle(self, header: frames.Header, payload: bytes) -> None:
        op = header["op"]
        if op == "call":
            self._start(header, payload)
        elif op == "cancel":
            if self.call is not None and self.call.id == header["target"]:
                self._stop("cancelled")
        elif op == "open":
            self._open_session(header)
        elif op == "close":
            self._close_session(header["session"])
            self.send({"id": header["id"]})
        elif op == "usage":
            if self.call is not None and self.call.interrupted_at is not None:
                self.asked = header["id"]  # a cancelled session call: the caller waits for its end
            else:
                self._tell_usage(header["id"])
        elif op == "wake":
            # Answer first: the spare is forked while the caller prepares its next order.
            self.spare_is_wanted = True
            self.expires = time.monotonic() + min(header["ttl_s"], self.ttl_s)
            self.send({"id": header["id"]})

    def _tell_usage(self, number: int) -> None:
        self.asked = None
        self.send({"id": number, "cpu_s": self.cpu_s, **self.meter.usage()})

    # Orders

    def _start(self, header: frames.Header, payload: bytes) -> None:
        self.limits = header.get("limits", self.limits)
        if self.call is not None:
            self.send({"id": header["id"], "fault": "an order came while another was running", "used": self.used})
            return
        self.meter.begin()
        session = header.get("session")
        if session is not None:
            program = self.sessions.get(session)
            if program is None:
                self.send({"id": header["id"], "gone": True})
                return
            self._let_fork(program)
            if program.kind == "bash":
                program.order(b"%d\0%s\0" % (header["id"], payload.replace(b"\0", b"")))
            else:
                program.order(frames.pack_raw(b"%d" % header["id"], payload))
            self._prepare(program, ProgramCall(header, program, b"", self.limits))  # while it is already working
            return
        if "stream" in header:
            self._still(signal.SIGSTOP)
        try:
            program = self._take_spare()
        except OSError as error:
            self._still(signal.SIGCONT)
            self._refuse(header["id"], f"cannot start a process: {error.strerror}")
            return
        size = header["order_bytes"]
        self._launch(ProgramCall(header, program, payload[size:], self.limits), payload[:size])

    def _prepare(self, program: Program, call: ProgramCall) -> None:
        """Start the output of a session's next call with what it wrote since the last one."""
        self.call = call
        for fd in (program.stdout, program.stderr):
            if fd in self.handlers:
                self.poll.modify(fd, 0)
        for name, output in (("stdout", call.out), ("stderr", call.err)):
            if program.late[name].total:
                output.add(program.late[name].whole())
                program.late[name] = Tail(1 << 16)

    def _refuse(self, number: int, why: str, lost: bool = False) -> None:
        """Answer a call that could not be carried out, as a shell would, because of what runs here.

        Before any program has run, it is a failure of the sandbox itself.
        """
        if not self.used:
            self.send({"id": number, "fault": why})
            return
        text = f"sandbox: {why}\n".encode("utf-8", "replace")
        flags = frames.LOST if lost else 0
        report = frames.REPORT.pack(number, 0, flags, 126, 0, len(text), 0.0, 0.0, 0, self.meter.end(), 0)
        self._write(frames.pack_raw(report, text))

    def _launch(self, call: ProgramCall, order: bytes) -> None:
        """Hand a new call to its program."""
        program = call.program
        self.call, call.order = call, order
        self._let_fork(program)
        program.order(order)
        self._watch(program.stderr, lambda: self._drain(program, "stderr"))
        self._watch_end(program)
        if call.stdin:
            self._watch(program.stdin, self._feed_stdin, select.POLLOUT)
        else:
            os.close(program.stdin)
            program.stdin = -1

    def _let_fork(self, program: Program) -> None:
        """Set how many processes the program of a call may have, if its own limits cannot."""
        if self.confinement.user_limit is not None:
            self.confinement.user_limit.count()
            self.confinement.user_limit.give(program.pid)

    def _feed_stdin(self) -> None:
        call = self.call
        assert call is not None
        try:
            call.stdin = call.stdin[os.write(call.program.stdin, call.stdin[:READ_SIZE]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            call.stdin = memoryview(b"")
        if not call.stdin:
            self._unwatch(call.program.stdin)
            os.close(call.program.stdin)
            call.program.stdin = -1

    def _drain(self, program: Program, name: str, everything: bool = False) -> None:
        """Read available output, for the running call (or the session's next one)."""
        fd = getattr(program, name)
        while True:
            try:
                data = os.read(fd, READ_SIZE)
            except BlockingIOError:
                return
            call = self.call
            if not data:
                self._unwatch(fd)
                program.ended.add(fd)
                if call is not None and call.program is program and name == "stderr" and not everything:
                    self._at_the_end(call)
                return
            if call is None or call.program is not program:
                program.late[name].add(data)
            elif name == "stdout" and call.stream:
                call.streamed += len(data)
                if call.streamed > call.stream:
                    self._too_much(call, everything)
                    return
                self.send({"id": call.id, "part": True}, data)
            else:
                (call.out if name == "stdout" else call.err).add(data)
                if call.out.total + call.err.total > call.output_total:
                    self._too_much(call, everything)
                    return
            if not everything or len(data) < READ_SIZE:  # a pipe gives less than asked only when it is empty
                return

    def _too_much(self, call: ProgramCall, finishing: bool) -> None:
        """Handle more output than is allowed: end the call, unless it is already being finished."""
        if finishing:
            call.verdict = call.verdict or "output_limit"
        else:
            self._stop("output_limit")

    def _at_the_end(self, call: ProgramCall) -> None:
        """Handle the end of stderr, which closes last. A program that reports its end has nothing left to do: if
        no other process is running, it is answered before it is reaped."""
        program = call.program
        ended, status, max_rss_kb = program.word()
        if not ended or call.verdict is not None or program.status is not None:
            return
        if call.session is None and self.owns_all and not self.sessions and tree.everybody() == {1, program.pid}:
            try:
                program.rusage = tree.Cost(program.pid, max_rss_kb)
            except OSError:  # a kernel without such clocks: the costs are known at its exit
                return
            program.status = status << 8
            self._finish(early=True)

    def _ended(self, program: Program) -> None:
        """Handle the exit of the main process of a call or session."""
        self._unwatch(program.pidfd)
        _, program.status, program.rusage = os.wait4(program.pid, 0)
        if self.call is not None and self.call.program is program:
            self._finish()
        else:
            for name, other in list(self.sessions.items()):
                if other is program:
                    self._close_session(name)

    # Sessions

    def _open_session(self, header: frames.Header) -> None:
        try:
            program = self._take_spare()
        except OSError:
            self.send({"id": header["id"]})  # the next call finds it gone and reports why
            return
        program.kind = header["kind"]
        os.close(program.stdin)
        program.stdin = -1
        self._let_fork(program)
        program.order(frames.pack({"kind": header["kind"], "rlimits": header["rlimits"]}))
        name = header["session"]
        self.sessions[name] = program
        for fd in (program.stdout, program.stderr):
            program.outputs.register(fd, select.POLLIN)
        self._watch_output(program)
        self._watch_end(program)
        self._watch(program.control.fileno(), lambda: self._session_answer(program))
        self.send({"id": header["id"]})

    def _session_answer(self, program: Program) -> None:
        try:
            data = os.read(program.control.fileno(), 4096)  # it is readable or at its end: no need to wait
        except OSError:
            data = b""
        if not data:
            self._unwatch(program.control.fileno())
            return
        call = self.call
        if call is None or call.program is not program:
            return
        call.answer += data
        if b"\n" in call.answer or len(call.answer) > 100:
            self._finish()

    # Ends

    def _stop(self, verdict: str) -> None:
        """End the running call from the supervisor's side."""
        call = self.call
        assert call is not None
        if call.verdict is not None:
            return
        call.verdict = verdict
        if call.session is not None and verdict in ("timeout", "cancelled", "output_limit"):
            # Keep the session if possible: end what it started, interrupt the interpreter.
            for pid in tree.below(call.program.pid):
                tree.kill(pid)
            if call.program.kind != "bash" and call.program.status is None:
                os.kill(call.program.pid, signal.SIGINT)
            call.interrupted_at = time.monotonic()
            return
        self._finish()

    def _finish(self, early: bool = False) -> None:
        """Finish the running call: kill its processes, collect its output, report.

        Args:
            early: the program is the only process and about to exit: answer first, then wait for it.
        """
        call = self.call
        assert call is not None
        program, session = call.program, call.session
        status, lost, reaped = self._collect(call, early)
        oom_kills = self.meter.end()
        unstarted = session is None and not program.has_accepted() and not oom_kills and call.verdict is None
        if unstarted and os.WIFSIGNALED(program.status or 0) and not call.retried:
            # Somebody killed the spare before it accepted the order: none of it has been executed.
            program.close()
            again = ProgramCall(call.header, Program(self.confinement), call.given, self.limits)
            again.retried = True
            self._launch(again, call.order)
            return
        self.call = None
        is_file = "stream" in call.header
        if is_file:
            self._still(signal.SIGCONT)
        if session is not None and lost:
            self._close_session(session)
        elif self.orphans:
            self._kill_strays()
        if unstarted:
            text = call.err.whole().decode("utf-8", "replace").strip()
            self._refuse(call.id, f"the program could not be started: {text or 'no word from it'}")
        else:
            self.used = self.used or not is_file
            usage = program.rusage
            self.cpu_s += usage.ru_utime + usage.ru_stime if usage is not None else 0.0
            self._write(report(call, status, lost, oom_kills, reaped))
        if self.asked is not None:
            self._tell_usage(self.asked)
        if session is not None and not lost:
            self._watch_output(program)
        if early:
            tree.kill(program.pid)
            os.waitpid(program.pid, 0)
            self._kill_strays()  # of one that reported falsely
        if session is None:
            program.close()
            if self.owns_all and not self.sessions and not is_file:
                ipc.clear()

    def _collect(self, call: ProgramCall, early: bool) -> tuple[int | None, bool, int]:
        """End the processes of a call and read the rest of its output.

        Returns:
            The exit status as encoded by wait, whether the session is over, and how many processes were left.
        """
        program = call.program
        if call.session is not None:
            status, lost = self._session_status(call)
            for fd, _ in program.outputs.poll(0):
                self._drain(program, "stdout" if fd == program.stdout else "stderr", everything=True)
            return status, lost, 0
        self._unwatch_program(program)
        if program.status is None:
            if self.owns_all and not self.sessions:
                tree.kill_at_once()  # others would take CPU time from the one that must exit
            tree.kill(program.pid)
            _, program.status, program.rusage = os.wait4(program.pid, 0)
        reaped = 0 if early else self._kill_strays()
        self._drain(program, "stdout", everything=True)
        self._drain(program, "stderr", everything=True)
        return program.status, False, reaped

    def _session_status(self, call: ProgramCall) -> tuple[int | None, bool]:
        """Return (exit status as encoded by wait, whether the session is over)."""
        line = call.answer.partition(b"\n")[0].split()
        program = call.program
        if program.status is None and len(line) == 2 and line[0] == b"%d" % call.id and line[1] in STATUSES:
            return int(line[1]) << 8, False
        if program.status is None:
            end_with_all_below(program)
        return program.status, True
