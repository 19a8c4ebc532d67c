"""Run the doctor during training, without slowing it down.

The doctor parses hundreds of episodes in Python. In a thread, it would hold the GIL and stall the rollout and the
update, so it gets a separate process.
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
"""Steps after which the run is examined."""
FEW_EPISODES = 32
"""With fewer episodes per step, examining them takes less time than starting a process."""
LAST_WAIT_S = 30.0
"""How long a run that has ended waits for the doctor's process."""

Found = list[Finding] | str
"""The findings, or why there are none to report."""


class Examiner:
    """Examines a run in the background, one step at a time.

    A context manager: on exit, it waits for the last examination, up to `LAST_WAIT_S` if that is a process. After
    an exception, it kills the process instead.

    Args:
        run: the run folder.
        episodes: episodes per step.
    """

    def __init__(self, run: Path, episodes: int) -> None:
        self._run = run
        python = bool(sys.executable) and not getattr(sys, "frozen", False)
        self._separate = python and episodes >= FEW_EPISODES
        self._thread = ThreadPoolExecutor(1, "agentrl-doctor")
        self._next: Future[None] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._over = False

    def after(self, step: int, report: Callable[[int, Found], None]) -> None:
        """Examine the run if this step calls for it.

        An examination that has not started when the next one is due is skipped: the next one covers its steps.

        Args:
            report: called from a thread with the step and the result.
        """
        if step in EXAMINE_AT or step % EXAMINE_EVERY == 0:
            if self._next is not None:
                self._next.cancel()
            self._next = self._thread.submit(self._examine, step, report)

    def _examine(self, step: int, report: Callable[[int, Found], None]) -> None:
        try:
            found: Found = self._by_process(step) if self._separate else findings(self._run, step)
        except Exception as e:  # a fault of the doctor must not end the run
            found = f"{type(e).__name__}: {e}"
        report(step, found)

    def _by_process(self, step: int) -> Found:
        words = [sys.executable, "-P", "-m", "agentrl.doctor", str(self._run), str(step)]
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        with subprocess.Popen(
            words,
            env=os.environ | {"PYTHONPATH": paths},  # the same imports as here
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Its own process group, so that Ctrl-C does not reach it. In its own session, its priority would have
            # no effect: Linux gives each session an equal share of the cores (autogroup).
            process_group=0,
        ) as process:
            self._process = process
            if self._over:
                process.kill()
            out, said = process.communicate()
            self._process = None
        if process.returncode and self._over:
            return "the run ended first"
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
            if error is None and self._next is not None and self._separate:
                wait([self._next], LAST_WAIT_S)
        finally:
            self._over = True
            if (process := self._process) is not None:
                process.kill()
            self._thread.shutdown(cancel_futures=error is not None)
