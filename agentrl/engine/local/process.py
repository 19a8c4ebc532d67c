"""The local engine in a separate process: sampling and the event loop do not compete for one GIL.

The loop communicates with it over one pipe, in lists of orders and lists of answers, so that a burst of requests
costs one message. The tokens are the same as with `LocalEngine`; figures are in docs/design/local-engine.md.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import itertools
import multiprocessing
import os
import queue
import secrets
import signal
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from agentrl.engine.base import Engine, EngineCapabilities
from agentrl.engine.checks import check_prompt, check_sampling, check_session
from agentrl.engine.fork_server import fork_server
from agentrl.engine.local.flat_model import FlatModel
from agentrl.engine.local.local_engine import Answers, Bounds, EngineCore, deliver, settle
from agentrl.engine.local.sampler import IntArray
from agentrl.engine.local.slots import BatchRequest
from agentrl.errors import AgentRLError, EngineError
from agentrl.types import Completion, Sampling

END_TIMEOUT_S = 10.0
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Generate:
    """Order: continue `ids`; the answer is a completion."""

    number: int
    ids: IntArray
    sampling: Sampling
    seed: int
    session: str | None


@dataclass(frozen=True, slots=True)
class Cancel:
    """Order: cancel the request with that number, in any state."""

    number: int


@dataclass(frozen=True, slots=True)
class Release:
    """Order: drop the state kept for a session."""

    session: str


@dataclass(frozen=True, slots=True)
class UpdateWeights:
    """Order: new weights, as bytes of each tensor in the order of the state dict that the engine reported."""

    number: int
    weights: Mapping[str, tuple[torch.dtype, tuple[int, ...], bytes]]
    version: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine's first message."""

    max_context: int
    vocabulary: int
    routes: bool
    small: bool


Order = Generate | Cancel | Release | UpdateWeights | None
"""None stops the engine."""
Answer = tuple[int, Completion | Exception | None]


class ProcessEngine(Engine):
    """A `LocalEngine` in another process. It reports whole completions only.

    Attributes:
        small: whether the model is so small that the engine computes with one thread.
    """

    def __init__(self, process: multiprocessing.process.BaseProcess, pipe: Connection, ready: Ready) -> None:
        """Take over a process that has sent `ready`; see `start`."""
        self.capabilities = EngineCapabilities(routes=ready.routes)
        self.max_context = ready.max_context
        self.small = ready.small
        self._vocabulary = ready.vocabulary
        self._process, self._pipe = process, pipe
        self.owner = os.getpid()
        self._version = 0
        self._waiting: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Future[Any]]] = {}
        self._lock = threading.Lock()
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._over: EngineError | None = None
        self._closing = False
        self._threads = [
            threading.Thread(target=work, name=f"agentrl-engine-{name}", daemon=True)
            for name, work in (("orders", self._send), ("answers", self._receive))
        ]
        for thread in self._threads:
            thread.start()
        _running.add(self)

    @classmethod
    async def start(
        cls, path: str | Path, *, dtype: str = "float32", routes: bool = False, **bounds: Unpack[Bounds]
    ) -> ProcessEngine:
        """Load the model in a new process.

        Args:
            routes: return with each completion which experts the model's routers chose.

        Raises:
            ConfigError: the directory or the model cannot be used.
            EngineError: the process ended before it had loaded the model.
        """
        return cls(*await asyncio.to_thread(_launch, str(path), {"dtype": dtype, "routes": routes, **bounds}))

    @property
    def pid(self) -> int:
        """The process."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def policy_version(self) -> int:
        """Version of the weights of the newest update that the engine has confirmed."""
        return self._version

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, session: str | None = None) -> Completion:
        """Continue `ids`; see `Engine.generate`. Without a seed, every call samples differently."""
        check_sampling(sampling)
        check_session(session)
        prompt = check_prompt(ids, self._vocabulary, self.max_context)
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed % 2**64
        number, future = self._expect()
        self._orders.put(Generate(number, prompt, sampling, seed, session))
        try:
            completion: Completion = await future
        except asyncio.CancelledError:
            self._waiting.pop(number, None)
            self._orders.put(Cancel(number))
            raise
        return completion

    async def release(self, session: str) -> None:
        """Drop the state kept for `session`."""
        self._orders.put(Release(session))

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Replace the weights between two steps; see `LocalEngine.update_weights`."""
        sent = {name: (tensor.dtype, tuple(tensor.shape), _bytes(tensor)) for name, tensor in weights.items()}
        number, future = self._expect()
        self._orders.put(UpdateWeights(number, sent, version))
        await future
        self._version = version

    async def close(self) -> None:
        """Stop; running requests end with finish "abort" and the tokens sampled so far."""
        await asyncio.to_thread(self.end)

    def end(self) -> None:
        """Like `close`, for use without an event loop."""
        self._closing = True
        self._orders.put(None)
        self._process.join(END_TIMEOUT_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        for thread in self._threads:
            thread.join()
        self._pipe.close()
        _running.discard(self)

    # -- answers ------------------------------------------------------------------------------------------------

    def _expect(self) -> tuple[int, asyncio.Future[Any]]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        number = next(_numbers)
        with self._lock:
            if self._over is not None:
                raise EngineError(str(self._over)) from self._over
            self._waiting[number] = loop, future
        return number, future

    def _send(self) -> None:
        """Run the writer thread: orders that arrive together are sent as one message."""
        try:
            for orders in _batches(self._orders):
                self._pipe.send(orders)
        except OSError:
            pass  # the other end is gone; `_receive` reports it
        except Exception:
            self._process.kill()  # an order that cannot be sent: nobody may wait for the ones behind it
            raise

    def _receive(self) -> None:
        """Run the reader thread, until the process ends."""
        try:
            while True:
                self._hand_over(self._pipe.recv())
        except (EOFError, OSError):
            pass
        self._process.join(END_TIMEOUT_S)
        text = "the local engine is closed" if self._closing else f"the local engine's process {self._how_ended()}"
        with self._lock:
            self._over = EngineError(text)
            left = list(self._waiting)
        self._orders.put(None)
        self._hand_over([(number, self._over) for number in left])

    def _how_ended(self) -> str:
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}; out of memory is the usual reason for SIGKILL"
        return f"ended with exit code {code}; its output is on stderr"

    def _hand_over(self, answers: Sequence[Answer]) -> None:
        by_loop: Answers = {}
        for number, answer in answers:
            if (waiting := self._waiting.pop(number, None)) is not None:
                loop, future = waiting
                by_loop.setdefault(loop, []).append(partial(settle, future, answer))
        deliver(by_loop)


def _batches(orders: queue.SimpleQueue[Order]) -> Iterator[list[Order]]:
    """Yield lists of what has arrived since the last one; the last list ends with None."""
    while True:
        batch = [orders.get()]
        while batch[-1] is not None and not orders.empty():
            batch.append(orders.get())
        yield batch
        if batch[-1] is None:
            return


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


# -- the process --------------------------------------------------------------------------------------------------


def _launch(
    path: str, options: Mapping[str, Any]
) -> tuple[multiprocessing.process.BaseProcess, Connection, Ready]:
    context = fork_server()
    here, there = context.Pipe()
    given = (there, path, dict(options), torch.get_num_threads())
    process = context.Process(target=_main, args=given, name="agentrl-engine", daemon=True)
    with _starting, _no_main():
        process.start()
    there.close()
    try:
        said = here.recv()
    except EOFError:
        process.join(END_TIMEOUT_S)
        raise EngineError(f"the local engine's process ended with exit code {process.exitcode} at start") from None
    if isinstance(said, Exception):
        process.join(END_TIMEOUT_S)
        raise said
    return process, here, said


_starting = threading.Lock()


@contextlib.contextmanager
def _no_main() -> Iterator[None]:
    """Prevent new processes from importing the user's script: the engine needs nothing from it."""
    main = sys.modules["__main__"]
    hidden = {name: main.__dict__.pop(name) for name in ("__file__", "__spec__") if name in main.__dict__}
    main.__dict__["__spec__"] = None
    try:
        yield
    finally:
        main.__dict__.update({"__spec__": None} | hidden)


def _main(pipe: Connection, path: str, options: Mapping[str, Any], threads: int) -> None:
    """Main loop of the process: orders in, one step, answers out, until None arrives or the pipe breaks.

    Args:
        threads: torch's number in the process that wants the engine; one with a small model takes 1.
    """
    torch.set_num_threads(threads)
    for wish in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # for the run, which stops this process at its end
        signal.signal(wish, signal.SIG_IGN)
    try:
        core = EngineCore.from_directory(path, **options)
    except AgentRLError as error:
        pipe.send(error)
        return
    torch.set_num_threads(core.threads)
    gc.collect()
    gc.freeze()  # a full collection would look at every object of every module
    desk = _Desk(core)
    with contextlib.suppress(EOFError, OSError), torch.inference_mode():
        routes = isinstance(core.model, FlatModel) and core.model.shape.routes is not None
        pipe.send(Ready(core.max_context, core.vocabulary, routes, core.small))
        going = True
        while going:
            while going and (pipe.poll() or not core.scheduler.busy):
                going = desk.take(pipe.recv())
                desk.flush(pipe)
            if going:
                core.scheduler.step()
                desk.flush(pipe)
        core.scheduler.abort()
        desk.flush(pipe)


class _Desk:
    """Connects the pipe and the scheduler."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._requests: dict[int, BatchRequest] = {}
        self._answers: list[Answer] = []

    def take(self, orders: Sequence[Order]) -> bool:
        """Execute orders; return False if the engine is to stop."""
        scheduler = self._core.scheduler
        for order in orders:
            match order:
                case Generate(number, ids, sampling, seed, session):
                    request = BatchRequest(ids, sampling, seed, session, partial(self._answer, number))
                    self._requests[number] = request
                    scheduler.submit(request)
                case Cancel(number):
                    if (wanted := self._requests.pop(number, None)) is not None:
                        scheduler.cancel(wanted)
                case Release(session):
                    scheduler.release(session)
                case UpdateWeights(number, weights, version):
                    self._answer(number, self._update(weights, version))
                case None:
                    return False
        return True

    def flush(self, pipe: Connection) -> None:
        """Send the answers."""
        if self._answers:
            answers, self._answers = self._answers, []
            pipe.send(answers)

    def _answer(self, number: int, answer: Completion | Exception | None) -> None:
        self._requests.pop(number, None)
        self._answers.append((number, answer))

    def _update(
        self, weights: Mapping[str, tuple[torch.dtype, tuple[int, ...], bytes]], version: int
    ) -> Exception | None:
        try:
            self._core.update(
                {
                    name: torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy()).view(dtype).view(shape)
                    for name, (dtype, shape, data) in weights.items()
                },
                version,
            )
        except ValueError as error:
            return error
        return None


_running: weakref.WeakSet[ProcessEngine] = weakref.WeakSet()


def _end_running() -> None:
    for engine in list(_running):
        if engine.owner == os.getpid():  # not in a fork of it
            engine.end()


atexit.register(_end_running)
