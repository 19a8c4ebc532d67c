"""Time per call, and code of an env that blocks the event loop."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from statistics import median
from types import FrameType

from agentrl.exam.arena import ExamEpisode, policy_acts, policy_begins
from agentrl.exam.marks import CallTime, ExamResult, Level

SLOW_S = 2.0
SLOWISH_S = 0.75
BLOCKED_S = 0.5
HUNG_S = 15.0
_TICK_S = 0.02
_HOUSE = str(Path(__file__).parents[1])
_POLICY = (policy_begins.__code__, policy_acts.__code__)
_STDLIB = sysconfig.get_paths()["stdlib"]


class LoopBlocked(Exception):
    """Raised inside code of an env that held the event loop for `HUNG_S`."""


class LoopWatch:
    """Notes code of an env that holds the event loop, and interrupts it after `HUNG_S`.

    Time without a processor, and in the garbage collector of this process, does not count.

    Attributes:
        blocked: by function, the seconds of each time that it held the loop.
    """

    def __init__(self) -> None:
        self.blocked: dict[str, dict[float, float]] = {}
        self._tick = time.monotonic()
        self._thread_id = threading.get_ident()
        self._native_id = threading.get_native_id()
        self._collected_s = self._collecting_since = 0.0
        self._waited = self._idle_s()
        self._stop = threading.Event()
        self._suspect = ""

    async def beat(self) -> None:
        """Tick while the loop is responsive."""
        while True:
            self._waited = self._idle_s()
            self._tick = time.monotonic()
            await asyncio.sleep(_TICK_S)

    def watch(self) -> None:
        """Watch the loop's thread while it does not tick."""
        while not self._stop.wait(0.1):
            since = time.monotonic() - self._tick - (self._idle_s() - self._waited)
            place = _env_code(sys._current_frames().get(self._thread_id)) if since > BLOCKED_S / 2 else ""
            if place and place == self._suspect and since >= BLOCKED_S:
                self.blocked.setdefault(place, {})[self._tick] = since
                if since > HUNG_S and threading.main_thread().ident == self._thread_id:
                    signal.pthread_kill(self._thread_id, signal.SIGUSR2)
            self._suspect = place

    def collects(self, phase: str, info: dict[str, int]) -> None:
        """Called by the garbage collector, which stops all threads."""
        if phase == "start":
            self._collecting_since = time.monotonic()
        else:
            self._collected_s += time.monotonic() - self._collecting_since
            self._collecting_since = 0.0

    def _idle_s(self) -> float:
        running = time.monotonic() - since if (since := self._collecting_since) else 0.0
        return self._collected_s + running + _queued_s(self._native_id)

    @property
    def repeatedly(self) -> bool:
        """Whether the same code held the loop more than once; once may be a first import."""
        return any(len(times) > 1 for times in list(self.blocked.values()))

    def end(self) -> None:
        """Stop watching."""
        self._stop.set()


def _queued_s(native_id: int) -> float:
    """Seconds that a thread of this process has waited for a processor; 0 if the kernel does not report it.

    Source: Linux, `Documentation/scheduler/sched-stats.rst`.
    """
    try:
        return int(Path(f"/proc/self/task/{native_id}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _env_code(frame: FrameType | None) -> str:
    """The innermost line of code that belongs to neither Python, nor this package, if the loop is running it."""
    found = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_STDLIB) and "/asyncio/" in file:
            return found
        if frame.f_code in _POLICY:
            return ""
        outside = not file.startswith("<") and not (file.startswith(_STDLIB) and "site-packages" not in file)
        if outside and not found and (not file.startswith(_HOUSE) or file.startswith(f"{_HOUSE}/envs/")):
            found = f"{frame.f_code.co_name} ({Path(file).name}:{frame.f_code.co_firstlineno})"
        frame = frame.f_back
    return ""


@asynccontextmanager
async def watching_loop() -> AsyncIterator[LoopWatch]:
    """Watch the running event loop."""
    watch = LoopWatch()
    main = threading.current_thread() is threading.main_thread()
    old = signal.signal(signal.SIGUSR2, _interrupt) if main else None
    thread = threading.Thread(target=watch.watch, daemon=True)
    thread.start()
    beat = asyncio.ensure_future(watch.beat())
    gc.callbacks.append(watch.collects)
    try:
        yield watch
    finally:
        gc.callbacks.remove(watch.collects)
        watch.end()
        thread.join()
        beat.cancel()
        with suppress(asyncio.CancelledError):
            await beat
        if main:
            signal.signal(signal.SIGUSR2, old)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if _env_code(frame):
        raise LoopBlocked(f"held the event loop for {HUNG_S:g} s at {traceback.format_stack(frame, 1)[0].strip()}")


def judge_blocking(result: ExamResult, watch: LoopWatch) -> None:
    """Report code that blocked the event loop."""
    for place, times in sorted(watch.blocked.items(), key=lambda item: -max(item[1].values()))[:3]:
        seconds = max(times.values())
        if len(times) < 2 and seconds < HUNG_S:
            continue  # once, such as a first import
        text = (
            f"{place} blocks the event loop for {seconds:.1f} s, and every other episode with it; write a plain "
            "method, which runs in a thread, or await"
        )
        result.add("speed", Level.ERROR, text)


def judge_times(result: ExamResult, seen: Sequence[ExamEpisode]) -> None:
    """Time per call by tool; a tool that is slow in every call, and episodes that did not end."""
    times: dict[str, list[float]] = {}
    for played in seen:
        for turn in played.episode.turns if played.episode else ():
            for record in turn.calls:
                if record.outcome in ("ok", "tool_timeout", "tool_exception"):
                    times.setdefault(record.call.name, []).append(record.seconds)
            if not turn.calls:
                times.setdefault("(step without a call)", []).append(turn.env_seconds)
        if played.episode is not None:
            in_steps = sum(turn.env_seconds for turn in played.episode.turns)
            times.setdefault("(reset and rewards)", []).append(played.episode.seconds - in_steps)
    for name, values in sorted(times.items()):
        result.calls.append(CallTime(name, len(values), median(values), max(values)))
        best = sorted(values)[
            len(values) // 4
        ]  # most calls are at least this slow, whatever else the machine does
        if len(values) >= 2 and best >= SLOWISH_S:
            level = Level.ERROR if best >= SLOW_S else Level.WARNING
            result.add("speed", level, f"{name} takes {median(values):.2f} s per call")
    _judge_ends(result, seen)


def _judge_ends(result: ExamResult, seen: Sequence[ExamEpisode]) -> None:
    stuck = [p for p in seen if p.error.startswith("no end within")]
    if stuck:
        text = f"{len(stuck)} episodes did not end, e.g. ({stuck[0].policy}): {stuck[0].error}"
        result.add("speed", Level.ERROR, text, list(dict.fromkeys(p.task.id for p in stuck)))
    late = {
        record.call.name
        for p in seen
        for turn in (p.episode.turns if p.episode else ())
        for record in turn.calls
        if record.outcome == "tool_timeout"
    }
    for name in sorted(late):
        result.add("speed", Level.ERROR, f"{name} ran into its timeout")
