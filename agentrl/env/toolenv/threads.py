"""Run plain functions off the event loop: all functions of an episode on one thread, in order.

SQLite connections, browsers and many SDKs may only be used on the thread that created them, so `setup`, tools,
rewards and `teardown` of an episode share one. The thread is leased at the first call, keeps thread-local state
and context variables between calls, and serves no other episode in the meantime. After the episode, the thread
waits for another one; before that starts, thread-local and context variables are dropped, as if the thread had
ended.

A call that exceeds its timeout is stopped in steps: first the env's `on_timeout` is called, then an exception is
raised in the thread, which stops Python code but not a blocking C call. If neither helps within `GRACE_S` seconds,
the thread is abandoned: later calls run on another thread, and the old one ends with its call.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import ctypes
import functools
import inspect
import itertools
import os
import queue
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from agentrl.errors import InfraError

T = TypeVar("T")
Hook = Callable[[str], Awaitable[bool]]
"""Called with the function's name to stop a call that exceeded its timeout; returns whether it tried."""

GRACE_S = 3.0
"""How long a call may take to stop before its thread is abandoned."""
MOMENT_S = 0.05
"""Time that a cancelled call has to return before it is stopped."""
PROMPT_S = 1.0
"""How long a timeout waits for its call to stop before it is reported anyway."""
MAX_IDLE = 256 if sys.version_info < (3, 13) else 0
"""Maximum idle threads; further ones end with their episode. From Python 3.13 on, what an episode left in a
`threading.local` cannot be dropped while its thread lives."""
CLEAN_AFTER_S = 0.5
"""How long an idle thread may keep the thread-local variables of its last episode."""
MAX_STUCK = 64
"""Maximum threads of this process stuck in calls; beyond it, no plain function runs."""


class CallTimeout(Exception):
    """The call exceeded its timeout and is being stopped."""


class Abandoned(BaseException):
    """Raised inside the thread of a call that exceeded its timeout, to stop Python code."""


class ToolRaised(Exception):
    """Wraps an exception of a tool that is not a plain Exception (SystemExit, StopIteration, ...)."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


class EpisodeThread:
    """The thread of one episode; a system thread is leased at the first call.

    Args:
        on_timeout: called before an exception is raised in a call that exceeded its timeout.
    """

    def __init__(self, on_timeout: Hook | None = None) -> None:
        self.lost = ""
        """The name of the function that could not be stopped, after its thread was abandoned."""
        self.on_timeout = on_timeout
        self._worker: _Worker | None = None
        self._lease: weakref.finalize[Any, EpisodeThread] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._order = asyncio.Lock()

    async def run(self, function: Callable[[], T], timeout_s: float | None) -> T:
        """Call `function()` on the thread after pending calls; the timeout starts with the call.

        Raises:
            CallTimeout: the time is up. Cancelling this coroutine stops the call in the same way.
            InfraError: no thread could be started.
        """
        async with self._order:
            await self.held()
            if self._worker is None or not self._worker.thread.is_alive():  # threads do not survive a fork
                self._worker = _lease_worker()
                self._lease = weakref.finalize(self, self._worker.give_back)
                self._lease.atexit = False
            worker, job = self._worker, _Job(function)
            worker.queue.put(job)
            try:
                finished = await _settled(job.future, timeout_s)
            except asyncio.CancelledError:
                self._ending = asyncio.ensure_future(self._end(worker, job, MOMENT_S))
                raise
            if not finished:
                self._ending = asyncio.ensure_future(self._end(worker, job))
                await _settled(self._ending, PROMPT_S)
                raise CallTimeout(f"no result after {timeout_s:g} s")
            value: T = job.value()
            return value

    async def held(self) -> bool:
        """Wait for a call that exceeded its timeout; returns whether it could not be stopped and its thread is
        lost."""
        if self._ending is not None:
            if not self._ending.done() and self._ending.get_loop() is asyncio.get_running_loop():
                await asyncio.shield(self._ending)
            self._ending = None
        return bool(self.lost)

    async def close(self) -> None:
        """Return the thread. A later call leases one again."""
        await self.held()
        self._give_back()
        _clean_later()

    def _give_back(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None and self._lease is not None and self._lease.detach():
            worker.give_back()

    async def _end(self, worker: _Worker, job: _Job, patience_s: float = 0.0) -> None:
        """Stop a call, unless it returns within `patience_s`: most calls that nobody waits for any more do."""
        job.future.add_done_callback(job.discard)
        if await _settled(job.future, patience_s):
            return
        if (
            self.on_timeout is not None
            and await self.on_timeout(job.name)
            and await _settled(job.future, PROMPT_S)
        ):
            return
        worker.tell(job)
        if await _settled(job.future, GRACE_S):
            return
        self.lost, self._worker = job.name, None
        if self._lease is not None:
            self._lease.detach()
        with _lock:
            _stuck[worker] = job.name
        worker.end()  # removed when the call eventually returns


async def run_apart(function: Callable[[], T], timeout_s: float | None, on_timeout: Hook | None = None) -> T:
    """Call `function()` on a dedicated thread.

    Raises:
        CallTimeout: the time is up.
        InfraError: no thread could be started.
    """
    thread = EpisodeThread(on_timeout)
    try:
        return await thread.run(function, timeout_s)
    finally:
        if thread._ending is None:
            await thread.close()
        elif not thread._ending.done():
            _endings.add(thread._ending)
            thread._ending.add_done_callback(functools.partial(_ended_apart, thread))


def stuck() -> list[str]:
    """Names of the functions that could not be stopped and are still running."""
    with _lock:
        return list(_stuck.values())


class _Job:
    """One call. The worker resolves its future, always with None: the outcome is stored here."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function: Callable[[], Any] | None = function
        """None after it has returned: its references are released where the call was made, not in the thread."""
        self.name = name_of(function)
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self.loop.create_future()
        self.told = False
        self.ok = False
        self.result: Any = None

    def value(self) -> Any:
        """The function's return value; raises its exception."""
        result, self.result = self.result, None
        if self.ok:
            return result
        try:
            raise result
        finally:
            del result  # it references this frame

    def discard(self, _: object) -> None:
        """Drop the outcome: a coroutine that nobody awaits would warn."""
        if inspect.iscoroutine(self.result):
            self.result.close()
        self.result = None


class _Worker:
    """A thread that runs jobs in order and keeps no references to them or to an `EpisodeThread`."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[_Job | _Clean | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name=f"agentrl-tool-{next(_numbers)}", daemon=True)
        self._used = False  # the thread may hold thread-local variables of an episode that is over
        self.renew()
        self._job: _Job | None = None  # the current job; changes under the lock
        self._lock = threading.Lock()

    def renew(self) -> None:
        """Adopt the caller's context variables for the next episode; the thread must be idle."""
        self._context = contextvars.copy_context()
        self._context.run(current.set, None)

    def end(self) -> None:
        """Let the thread end after its queued jobs."""
        self.queue.put(None)

    def give_back(self) -> None:
        """The episode is over: keep the thread idle for another one, or end it if enough are idle."""
        with _lock:
            kept = len(_idle) < MAX_IDLE
            if kept:
                self._context, self._used = contextvars.Context(), True
                _idle.append(self)
        if not kept:
            self.end()

    def clean(self) -> None:
        """Let the thread drop what its last episode left now, not only before its next job."""
        if self._used:
            self.queue.put(_Clean())

    def tell(self, job: _Job) -> None:
        """Raise `Abandoned` in the thread, once, if it is still running `job`."""
        with self._lock:
            if self._job is job and not job.told:
                job.told = True
                _raise_in(self.thread.ident, Abandoned)

    def _work(self) -> None:
        try:
            while (job := self.queue.get()) is not None:
                if self._used:
                    self._used = False
                    _forget_locals()
                if isinstance(job, _Job):
                    self._perform(job)
                    mailbox_of(job.loop).post(job)
                job = None  # an idle thread must not keep an env alive
        finally:
            _forget(self)

    def _perform(self, job: _Job) -> None:
        try:
            with self._lock:
                self._job = job
            self._call(job)
            with self._lock:
                self._job = None
            if job.told:
                _raise_in(self.thread.ident, None)  # a late exception must not reach the next job
        except Abandoned as e:  # raised after the function had returned; it comes only once
            with self._lock:
                self._job = None
            job.ok, job.result = False, ToolRaised(e)
        job.function = None

    def _call(self, job: _Job) -> None:
        assert job.function is not None
        try:
            job.result, job.ok = self._context.run(job.function), True
        except BaseException as e:
            # A StopIteration cannot leave a coroutine, and SystemExit must not leave through the loop.
            plain = isinstance(e, Exception) and not isinstance(e, StopIteration)
            job.result = e if plain else ToolRaised(e)


class _Clean:
    """Wakes a worker to forget its episode."""


class _Mailbox:
    """Finished jobs of one event loop; the loop is woken once for all jobs that finished in the meantime."""

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
            except RuntimeError:  # the loop is closed: there are no waiters
                self.done.clear()

    def deliver(self) -> None:
        self.woken = False
        while self.done:
            job = self.done.popleft()
            if not job.future.done():
                job.future.set_result(None)


current: contextvars.ContextVar[EpisodeThread | None] = contextvars.ContextVar("episode_thread", default=None)
"""The thread of the current episode; None outside of an episode."""

_numbers = itertools.count(1)
_lock = threading.Lock()
_alive: set[_Worker] = set()
_idle: list[_Worker] = []
_stuck: dict[_Worker, str] = {}
_endings: set[asyncio.Task[None]] = set()
_cleaning: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.TimerHandle] = weakref.WeakKeyDictionary()
_mailboxes: dict[asyncio.AbstractEventLoop, _Mailbox] = {}


def mailbox_of(loop: asyncio.AbstractEventLoop) -> _Mailbox:
    """The mailbox of an event loop; those of closed loops are dropped."""
    box = _mailboxes.get(loop)
    if box is None:
        with _lock:
            for closed in [known for known in _mailboxes if known.is_closed()]:
                del _mailboxes[closed]
            box = _mailboxes.setdefault(loop, _Mailbox(loop))
    return box


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function, with partials unwrapped."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _lease_worker() -> _Worker:
    """An idle worker, or a new one. Raises InfraError if no thread is available."""
    names = stuck()
    if len(names) >= MAX_STUCK:
        raise InfraError(
            f"{len(names)} threads hang in calls that outlived their limits and cannot be ended (the last one: "
            f"{names[-1]}); end such calls in the env's `on_timeout`, or make the method async"
        )
    with _lock:
        while _idle:
            worker = _idle.pop()  # the most recent one: its stack is still in cache
            if worker.thread.is_alive():
                worker.renew()
                return worker
    worker = _Worker()
    with _lock:
        _alive.add(worker)
    try:
        worker.thread.start()
    except RuntimeError as e:
        _forget(worker)
        raise InfraError(
            f"no thread for the plain methods of an episode: {e} ({threading.active_count()} are running); "
            "play fewer episodes at a time, raise the limit of processes (ulimit -u) or of memory (ulimit -v), or "
            "make the methods async"
        ) from e
    return worker


def _forget(worker: _Worker) -> None:
    with _lock:
        _alive.discard(worker)
        _stuck.pop(worker, None)
        if worker in _idle:
            _idle.remove(worker)


def _ended_apart(thread: EpisodeThread, ending: asyncio.Task[None]) -> None:
    _endings.discard(ending)
    thread._give_back()


async def _settled(future: asyncio.Future[Any], timeout_s: float | None) -> bool:
    """Whether `future` is done within `timeout_s`; does not cancel it."""
    if future.done():
        return True
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()

    def wake(settled: object = None) -> None:
        if not waiter.done():
            waiter.set_result(None)

    future.add_done_callback(wake)
    timer = None if timeout_s is None else loop.call_later(timeout_s, wake)
    try:
        await waiter  # asyncio.wait does the same at twice the cost
    finally:
        future.remove_done_callback(wake)
        if timer is not None:
            timer.cancel()
    return future.done()


def _raise_in(ident: int | None, what: type[BaseException] | None) -> None:
    """Raise in a thread, or drop what has not been raised yet.

    Dropping slows the interpreter down until something else is raised this way, and in Python 3.11 a traced
    function then never returns: only where something was raised.
    """
    assert ident is not None
    value = None if what is None else ctypes.py_object(what)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), value)


def _clean_later() -> None:
    """Release episode state in threads that are not leased again soon; those that are clean up at that point."""
    loop = asyncio.get_running_loop()
    if _cleaning.get(loop) is None:
        _cleaning[loop] = loop.call_later(CLEAN_AFTER_S, _clean_idle, loop)


def _clean_idle(loop: asyncio.AbstractEventLoop) -> None:
    _cleaning.pop(loop, None)
    with _lock:
        for worker in _idle:
            worker.clean()


def _forget_locals() -> None:
    """Drop the values of all `threading.local` of this thread, as happens when a thread ends."""
    address = _thread_dict()
    if address:
        ctypes.cast(address, ctypes.py_object).value.clear()


_thread_dict = ctypes.pythonapi.PyThreadState_GetDict
_thread_dict.restype = ctypes.c_void_p


def _close_threads(patience_s: float = 1.0) -> None:
    """End the idle threads and wait for them; those in the middle of a call are abandoned."""
    with _lock:
        workers = list(_alive)
    for worker in workers:
        worker.end()
    until = time.monotonic() + patience_s
    for worker in workers:
        worker.thread.join(max(0.0, until - time.monotonic()))


def _forget_all() -> None:
    global _lock
    _lock = threading.Lock()
    _alive.clear()
    _idle.clear()
    _stuck.clear()
    _mailboxes.clear()


atexit.register(_close_threads)  # a daemon thread that frees foreign objects while Python ends can abort it
os.register_at_fork(after_in_child=_forget_all)  # threads do not survive a fork
