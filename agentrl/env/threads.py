"""Plain functions run off the event loop: a shared pool made for very many very short calls.

One thread serves the queue as long as it moves; more are started only when a call has waited for some
milliseconds, so a microsecond tool costs one hand-over and a slow one still runs beside many others. A call
that outlives its timeout is abandoned: its thread is told to raise (which ends Python code, but not a blocking
C call), no longer counts, and ends with the call.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import ctypes
import itertools
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_PATIENCE_S = 0.005
_IDLE_S = 10.0


class CallTimeout(Exception):
    """The call outlived its limit; its thread has been abandoned."""


class Abandoned(BaseException):
    """Raised inside the thread of an abandoned call, so that Python code ends."""


class _Job:
    """One call. `ident`, `started`, `finished` and `abandoned` change under the pool's lock."""

    def __init__(self, function: Callable[[], Any], loop: asyncio.AbstractEventLoop) -> None:
        self.function: Callable[[], Any] | None = function
        """None once it has returned: what it holds is freed where the call was made, not in the thread."""
        self.context = contextvars.copy_context()
        self.loop = loop
        self.future: asyncio.Future[Any] = loop.create_future()
        self.queued = time.monotonic()
        self.started = 0.0
        self.ident = 0
        self.finished = False
        self.abandoned = False
        self.ok = False
        self.result: Any = None


class _Mailbox:
    """Finished jobs of one event loop; a loop is woken once for all that finished meanwhile."""

    __slots__ = ("done", "loop", "woken")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self.woken = loop, False
        self.done: deque[_Job] = deque()

    def post(self, job: _Job) -> None:
        self.done.append(job)
        if not self.woken:
            self.woken = True
            try:
                self.loop.call_soon_threadsafe(self.deliver)
            except RuntimeError:  # the loop is closed: nobody waits any more
                self.done.clear()

    def deliver(self) -> None:
        self.woken = False
        while self.done:
            job = self.done.popleft()
            if job.future.done():
                continue
            if job.ok:
                job.future.set_result(job.result)
            else:
                job.future.set_exception(job.result)


class ToolThreads:
    """A pool of daemon threads. `leftover` holds the abandoned calls that still run."""

    def __init__(self, max_threads: int = 64) -> None:
        self.max_threads = max_threads
        self.leftover: set[_Job] = set()
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._alive: set[threading.Thread] = set()
        self._numbers = itertools.count(1)
        self._mailboxes: dict[asyncio.AbstractEventLoop, _Mailbox] = {}
        self._waiting: deque[_Job] = deque()
        self._watching: set[asyncio.AbstractEventLoop] = set()

    async def run(self, function: Callable[[], T], timeout_s: float | None) -> T:
        """Call `function()` in a thread; the limit counts from when it starts.

        Raises:
            CallTimeout: the limit is over. Cancelling this coroutine abandons the call in the same way.
        """
        loop = asyncio.get_running_loop()
        job = _Job(function, loop)
        self._submit(job)
        timer = None if timeout_s is None else loop.call_later(timeout_s, self._expire, job, timeout_s)
        try:
            value: T = await job.future
            return value
        except asyncio.CancelledError:
            self._abandon(job)
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def _submit(self, job: _Job) -> None:
        if job.loop not in self._mailboxes:
            with self._lock:
                self._mailboxes = {loop: box for loop, box in self._mailboxes.items() if not loop.is_closed()}
                self._mailboxes[job.loop] = _Mailbox(job.loop)
                self._watching = {loop for loop in self._watching if not loop.is_closed()}
        self._waiting.append(job)
        self._queue.put(job)
        if not self._threads:
            self._start_thread()
        if job.loop not in self._watching:
            self._watching.add(job.loop)
            job.loop.call_later(_PATIENCE_S, self._watch, job.loop)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start threads when the oldest call has waited too long."""
        while self._waiting and (self._waiting[0].ident or self._waiting[0].abandoned):
            self._waiting.popleft()
        if not self._waiting:
            self._watching.discard(loop)
            return
        if time.monotonic() - self._waiting[0].queued > _PATIENCE_S:
            for _ in range(min(self._queue.qsize(), self.max_threads - self._threads)):
                self._start_thread()
        loop.call_later(_PATIENCE_S, self._watch, loop)

    def close(self, patience_s: float = 1.0) -> None:
        """End the idle threads and wait for them; those in the middle of a call are left behind."""
        with self._lock:
            alive = list(self._alive)
        for _ in alive:
            self._queue.put(None)
        until = time.monotonic() + patience_s
        for thread in alive:
            thread.join(max(0.0, until - time.monotonic()))

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._work, name=f"agentrl-tool-{next(self._numbers)}", daemon=True)
        with self._lock:
            self._threads += 1
            self._alive.add(thread)
        thread.start()

    def _work(self) -> None:
        job: _Job | None = None
        try:
            while (job := self._next()) is not None:
                with self._lock:
                    if job.abandoned:
                        continue
                    job.ident, job.started = threading.get_ident(), time.monotonic()
                self._perform(job)
                with self._lock:
                    if job.abandoned:
                        self.leftover.discard(job)
                        return
                    job.finished = True
                self._mailboxes[job.loop].post(job)
                job = None  # an idle thread keeps nobody's env alive
        except Abandoned:
            with self._lock:
                if job is not None:
                    self.leftover.discard(job)
        finally:
            with self._lock:
                self._alive.discard(threading.current_thread())

    def _next(self) -> _Job | None:
        while True:
            try:
                job = self._queue.get(timeout=_IDLE_S)
                if job is None:  # `close`
                    with self._lock:
                        self._threads -= 1
                return job
            except queue.Empty:
                with self._lock:
                    if self._threads > 1 or self._queue.empty():
                        self._threads -= 1
                        return None

    def _perform(self, job: _Job) -> None:
        assert job.function is not None
        try:
            job.result, job.ok = job.context.run(job.function), True
        except Abandoned:
            raise
        except BaseException as e:
            # A StopIteration cannot be set on a future, and SystemExit must not leave through the loop.
            plain = isinstance(e, Exception) and not isinstance(e, StopIteration)
            job.result = e if plain else ToolRaised(e)
        job.function = None

    def _expire(self, job: _Job, timeout_s: float) -> None:
        if job.future.done():
            return
        ran = time.monotonic() - job.started if job.ident else 0.0
        if ran < timeout_s:
            job.loop.call_later(max(timeout_s - ran, _PATIENCE_S), self._expire, job, timeout_s)
            return
        self._abandon(job)
        job.future.set_exception(CallTimeout(f"no result after {timeout_s:g} s"))

    def _abandon(self, job: _Job) -> None:
        with self._lock:
            if job.finished or job.abandoned:
                return
            job.abandoned = True
            if job.ident:
                self._threads -= 1
                self.leftover.add(job)
                raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
                raise_in(ctypes.c_ulong(job.ident), ctypes.py_object(Abandoned))


class ToolRaised(Exception):
    """Carries what a tool raised that is no plain Exception (SystemExit, StopIteration, ...)."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


_pool = ToolThreads()


def pool() -> ToolThreads:
    """The pool of this process."""
    return _pool


def _fresh_pool() -> None:
    global _pool
    _pool = ToolThreads()


def _close_pool() -> None:
    _pool.close()


atexit.register(_close_pool)  # a daemon thread that frees foreign objects while Python ends can abort it
os.register_at_fork(after_in_child=_fresh_pool)  # threads do not survive a fork
