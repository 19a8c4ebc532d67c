"""The doctor during a run: it looks at the run folder after some steps.

A look parses hundreds of episodes in Python. A thread of the run would hold the interpreter's lock meanwhile, and
the rollout and the update would wait for it; so another process looks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Self

from agentrl.doctor.examine import findings
from agentrl.doctor.finding import Finding

EXAMINE_AT, EXAMINE_EVERY = (1, 3, 10), 20
"""Steps after which the doctor looks at the run."""
FEW_EPISODES = 32
"""With fewer episodes per step, a look takes less time than starting a process."""
LAST_LOOK_S = 30.0
"""How long the end of a run waits for a process that looks."""

Found = list[Finding] | str
"""What the doctor found, or why it failed."""


class Examiner:
    """Looks at a run in the background, one look at a time; a context manager.

    The end of a run waits for the last look, at most `LAST_LOOK_S` for a process. A run that fails does not wait
    for one.

    Args:
        run: the run folder.
        episodes: episodes per step.
    """

    def __init__(self, run: Path, episodes: int) -> None:
        self._run = run
        python = bool(sys.executable) and not getattr(sys, "frozen", False)
        self._look = self._by_process if python and episodes >= FEW_EPISODES else self._in_thread
        self._thread = ThreadPoolExecutor(1, "agentrl-doctor")
        self._next: Future[None] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._over = False

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
            found = self._look(step)
        except Exception as e:  # a fault of the doctor must not end the run
            found = f"{type(e).__name__}: {e}"
        report(step, found)

    def _in_thread(self, step: int) -> Found:
        return findings(self._run, step)

    def _by_process(self, step: int) -> Found:
        words = [sys.executable, "-P", "-m", "agentrl.doctor.look", str(self._run), str(step)]
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        with subprocess.Popen(
            words,
            env=os.environ | {"PYTHONPATH": paths},  # it imports what this process would
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is meant for the run
        ) as process:
            self._process = process
            if self._over:
                process.kill()
            out, said = process.communicate()
            self._process = None
        if process.returncode and self._over:
            return "the end of the run did not wait for it"
        if process.returncode:
            reason = said.decode(errors="replace").strip().rpartition("\n")[2]
            return f"its process ended with exit code {process.returncode}" + (f": {reason}" if reason else "")
        return [Finding(**known | {"series": tuple(known["series"])}) for known in json.loads(out)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and self._next is not None and self._look == self._by_process:
                wait([self._next], LAST_LOOK_S)
        finally:
            self._over = True
            if (process := self._process) is not None:
                process.kill()
            self._thread.shutdown(cancel_futures=error is not None)
