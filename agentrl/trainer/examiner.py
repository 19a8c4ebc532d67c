"""The doctor during a run: it looks at the run folder after some steps.

A look parses hundreds of episodes in Python. A thread of the run would hold the interpreter's lock meanwhile, and
the rollout and the update would wait for it; so another process looks.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Self

from agentrl.doctor.examine import findings
from agentrl.doctor.finding import Finding
from agentrl.engine.fork_server import light_context, start_without_main

EXAMINE_AT, EXAMINE_EVERY = (1, 3, 10), 20
"""Steps after which the doctor looks at the run."""
FEW_EPISODES = 32
"""With fewer episodes per step, a look takes less time than starting a process."""
LOWEST_PRIORITY = 19

Found = list[Finding] | str
"""What the doctor found, or why it failed."""


class Examiner:
    """Looks at a run in the background, one look at a time; a context manager that waits for the last one.

    Args:
        run: the run folder.
        episodes: episodes per step.
    """

    def __init__(self, run: Path, episodes: int) -> None:
        self._run = run
        daemon = multiprocessing.current_process().daemon  # it may not have children
        self._look = _found if episodes < FEW_EPISODES or daemon else _found_by_process
        self._thread = ThreadPoolExecutor(1, "agentrl-doctor")
        self._next: Future[None] | None = None

    def after(self, step: int, report: Callable[[int, Found], None]) -> None:
        """Look at the run if it is time.

        Args:
            report: called in a thread with the step and what was found. If a look has not begun when the next
                one is due, it is left out, since the next one sees more.
        """
        if step in EXAMINE_AT or step % EXAMINE_EVERY == 0:
            if self._next is not None:
                self._next.cancel()
            self._next = self._thread.submit(self._examine, step, report)

    def _examine(self, step: int, report: Callable[[int, Found], None]) -> None:
        try:
            found = self._look(self._run, step)
        except Exception as e:  # a fault of the doctor must not end the run
            found = f"{type(e).__name__}: {e}"
        report(step, found)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(cancel_futures=error is not None)


def _found(run: Path, upto: int) -> Found:
    return findings(run, upto)


def _found_by_process(run: Path, upto: int) -> Found:
    context = light_context()
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(there, run, upto), name="agentrl-doctor", daemon=True)
    start_without_main(process)
    there.close()
    with here:
        try:
            found: Found = here.recv()
        except EOFError:
            process.join()
            return f"its process ended with exit code {process.exitcode}"
    process.join()
    return found


def _main(pipe: Connection, run: Path, upto: int) -> None:
    for wish in (signal.SIGINT, signal.SIGTERM):  # meant for the run, which waits for the last look
        signal.signal(wish, signal.SIG_IGN)
    os.nice(LOWEST_PRIORITY)  # rollout and update go first
    try:
        found: Found = findings(run, upto)
    except Exception as e:
        found = f"{type(e).__name__}: {e}"
    pipe.send(found)
