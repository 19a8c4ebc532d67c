"""Feed loggers from separate threads, so that none stops, slows or breaks a run."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from agentrl.reporting.loggers.protocol import Abandonable, Logger, RunInfo
from agentrl.reporting.loggers.sample_table import sample_rows
from agentrl.reporting.metric_docs import curated
from agentrl.types import Episode

QUEUED = 512
"""Calls that may wait for a logger; more are dropped."""
FLUSH_S = 15.0
"""How long the end of a run waits for all loggers together."""

Tell = Callable[[str], None]
_Call = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Fed:
    """A logger with what it gets.

    Args:
        series: `curated`, `all`, or the names of metrics.
        samples: episodes per step; 0 for none.
    """

    name: str
    logger: Logger
    series: str | Sequence[str] = "curated"
    samples: int = 0

    def chosen(self, values: Mapping[str, float]) -> dict[str, float]:
        """The finite values that it gets."""
        if self.series == "all":
            names: Sequence[str] = list(values)
        elif self.series == "curated":
            names = curated(values)
        else:
            names = [name for name in self.series if name in values]
        numbers = {name: float(values[name]) for name in names if values[name] is not None}
        return {name: value for name, value in numbers.items() if math.isfinite(value)}


class _Worker:
    """One logger's thread and queue."""

    def __init__(self, fed: Fed, tell: Tell) -> None:
        self.fed = fed
        self._tell = tell
        self._calls: queue.Queue[_Call] = queue.Queue(QUEUED)
        self._off = False
        self._last: _Call | None = None
        self._asked = False
        self._dropped = 0
        self.thread = threading.Thread(target=self._work, name=f"agentrl-logger-{fed.name}", daemon=True)

    def put(self, call: _Call) -> None:
        """Ask for a call; it is dropped if the logger is too far behind."""
        if self._off:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                self._say(
                    f"is {QUEUED} calls behind; further calls are dropped until it catches up. The run folder has "
                    "everything"
                )

    def ask_last(self, call: _Call, wait_s: float = 0.0) -> None:
        """Ask for the last call; it is not asked for yet if the queue is full."""
        self._last = call
        try:
            self._calls.put(call, timeout=wait_s)
            self._asked = True
        except queue.Full:
            pass

    def end(self, until: float) -> None:
        """Wait for the last call until that time."""
        while not self._asked and not self._off and self.thread.is_alive() and self._last is not None:
            left = until - time.monotonic()
            if left <= 0:
                break
            self.ask_last(self._last, min(0.1, left))
        self.thread.join(max(0.0, until - time.monotonic()))
        if self.thread.is_alive() and not self._off:
            self._off = True
            if isinstance(self.fed.logger, Abandonable):
                self.fed.logger.abandon()
            self._say(f"did not finish within {FLUSH_S:g} s; the run ends without it")
        elif self._dropped:
            self._say(f"did not get {self._dropped} calls, because it was too slow")

    def _work(self) -> None:
        while not self._off:
            call = self._calls.get()
            try:
                call()
            except BaseException as e:  # a logger may even raise SystemExit; the run continues
                off, self._off = self._off, True
                if not off:
                    self._say(f"failed and gets nothing more: {_first_line(e)}")
            if call is self._last:
                return

    def _say(self, text: str) -> None:
        self._tell(f"logger {self.fed.name} {text}")


class LogFeed:
    """Feeds all loggers of a run.

    Args:
        tell: notes for the user; called at most a few times per logger, from any thread.
    """

    def __init__(self, loggers: Sequence[Fed], tell: Tell) -> None:
        self._workers = [_Worker(fed, tell) for fed in loggers]
        self._ended = False

    def start(self, run: RunInfo) -> None:
        """Start every logger; each gets a separate folder below `run.folder`."""
        for worker in self._workers:
            folder = run.folder / "".join(c if c.isalnum() or c in "._-" else "-" for c in worker.fed.name)
            worker.put(partial(_start, worker.fed.logger, replace(run, folder=folder)))
            worker.thread.start()

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """A step's metrics."""
        for worker in self._workers:
            if chosen := worker.fed.chosen(values):
                worker.put(partial(worker.fed.logger.metrics, step, chosen))

    def episodes(self, step: int, episodes: Sequence[Episode]) -> None:
        """A step's episodes; each logger gets a few of them."""
        for worker in self._workers:
            if worker.fed.samples:
                rows = sample_rows(episodes, worker.fed.samples)  # here, so that the queue keeps no whole step
                if rows:
                    worker.put(partial(worker.fed.logger.episodes, step, rows))

    def finish(self, summary: Mapping[str, object]) -> None:
        """Flush, at most for `FLUSH_S`; only the first call counts."""
        if self._ended:
            return
        self._ended = True
        until = time.monotonic() + FLUSH_S
        started = [worker for worker in self._workers if worker.thread.ident is not None]
        for worker in started:  # all at once: one that hangs takes no time from the others
            worker.ask_last(partial(worker.fed.logger.finish, summary))
        for worker in started:
            worker.end(until)


def _start(logger: Logger, run: RunInfo) -> None:
    run.folder.mkdir(parents=True, exist_ok=True)
    logger.start(run)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
