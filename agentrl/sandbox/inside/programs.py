"""The other programs in a sandbox during a call: the spare child and the sessions."""

from __future__ import annotations

import contextlib
import functools
import os
import select

from . import child, tree
from .loop import Loop
from .program import READ_SIZE, Program, ProgramCall


class Programs(Loop):
    """The spare child and the sessions: reading their output, noticing their exits, and ending them."""

    def __init__(self, link_in: int, link_out: int, confinement: child.Confinement, owns_all: bool) -> None:
        super().__init__(link_in, link_out)
        self.confinement, self.owns_all = confinement, owns_all
        self.call: ProgramCall | None = None
        self.spare: Program | None = None
        self.spare_is_wanted = False
        self.sessions: dict[str, Program] = {}
        self.orphans = False
        """Whether a session ended during a call of another program: what it left behind ends with that call."""
        self.wakeup = -1
        """Without pidfds, a byte written here makes the supervisor check for exited children."""

    def _drain(self, program: Program, name: str) -> None:
        """Read the output of a program."""
        raise NotImplementedError

    def _ended(self, program: Program) -> None:
        """Handle the exit of the main process of a call or session."""
        raise NotImplementedError

    def _watch_signalled_ends(self) -> None:
        """Without pidfds, learn about exited children by signal."""
        probe = tree.pidfd(os.getpid())
        if probe >= 0:
            os.close(probe)
            return
        ends, self.wakeup = tree.signalled_ends()
        self.confinement.signalled_ends = True

        def look() -> None:
            os.read(ends, READ_SIZE)
            running = [self.call.program] if self.call is not None else []
            for program in {*running, *self.sessions.values()}:
                if program.status is None and tree.is_over(program.pid):
                    self._ended(program)

        self._watch(ends, look)

    def _watch_end(self, program: Program) -> None:
        if program.pidfd >= 0:
            self._watch(program.pidfd, lambda: self._ended(program))
        else:
            os.write(self.wakeup, b".")  # it may have ended before anybody checked

    def _take_spare(self) -> Program:
        program, self.spare = self.spare, None
        if program is not None and not program.is_alive():
            program.close()
            program = None
        return program if program is not None else Program(self.confinement)

    def _wants_spare(self) -> bool:
        """Whether to keep a spare; with sessions running, only if the kernel protects it from them."""
        return self.spare_is_wanted and self.call is None and (self.confinement.fences or not self.sessions)

    def _still(self, number: int) -> None:
        """Stop (SIGSTOP) or resume (SIGCONT) the processes of sessions around a file operation, if nothing else
        protects the child that performs it."""
        if self.sessions and self.owns_all and not self.confinement.fences:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, number)

    def _watch_output(self, program: Program) -> None:
        for name in ("stdout", "stderr"):
            fd = getattr(program, name)
            if fd in self.handlers:
                self.poll.modify(fd, select.POLLIN)
            elif fd not in program.ended:
                self._watch(fd, functools.partial(self._drain, program, name))

    def _unwatch_program(self, program: Program) -> None:
        for fd in (program.stdout, program.stderr, program.pidfd, program.stdin, program.control.fileno()):
            self._unwatch(fd)

    def _kill_strays(self) -> int:
        """Kill everything that belongs to no session; return the number of processes killed."""
        self.orphans = False
        keep = [p.pid for p in self.sessions.values() if p.status is None]
        if not keep and self.spare is None:
            return tree.kill_all(self.owns_all)
        if self.spare is not None:
            keep.append(self.spare.pid)
        known = [p.pid for p in self.sessions.values()] + ([self.spare.pid] if self.spare is not None else [])
        return tree.kill_except(keep, known)

    def _close_session(self, name: str) -> None:
        program = self.sessions.pop(name, None)
        if program is None:
            return
        self._unwatch_program(program)
        if program.status is None:
            end_with_all_below(program)
        self.orphans = self.call is not None
        if not self.orphans:
            self._kill_strays()
        program.close()

    def _end_all(self) -> None:
        """End every process here: the running call, the spare, the sessions, and everything they started."""
        programs = {self.call.program} if self.call is not None else set()
        programs |= {*self.sessions.values(), *([self.spare] if self.spare is not None else [])}
        self.call = self.spare = None
        self.sessions.clear()
        for program in programs:
            self._unwatch_program(program)
        tree.kill_all(self.owns_all)
        tree.reap([])
        for program in programs:
            program.close()


def end_with_all_below(program: Program) -> None:
    """Kill a program and its descendants, and wait for it."""
    for pid in tree.below(program.pid):
        tree.kill(pid)
    tree.kill(program.pid)
    _, program.status, program.rusage = os.wait4(program.pid, 0)
