"""The local engine: continuous batching in PyTorch, on CPU or CUDA; `process.py` runs it in a separate process.

One thread owns the model, the cache and the scheduler; the event loop communicates with it through a queue. The
design is explained, with figures, in docs/design/local-engine.md.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import queue
import secrets
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypedDict, TypeVar, Unpack

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.engine.base import Engine, EngineCapabilities, GenerateOptions, TokenLogprob
from agentrl.engine.checks import check_ids, check_prompt, check_sampling, check_session
from agentrl.engine.local.batching import Batcher, BatchLimits, DecodeRecording
from agentrl.engine.local.constrained import scored
from agentrl.engine.local.decode import cuda_capture
from agentrl.engine.local.flat_model import FlatModel, load_model
from agentrl.engine.local.own_cache import OwnCacheModel, TurnScheduler
from agentrl.engine.local.slots import BatchRequest
from agentrl.errors import ConfigError, EngineError
from agentrl.models.device import release_gpu_memory
from agentrl.models.small import is_small
from agentrl.torch_threads import compute_with
from agentrl.types import Completion, Sampling

T = TypeVar("T")
Answers = dict[asyncio.AbstractEventLoop, list[Callable[[], None]]]
"""What to call in each event loop, in order."""

SMALLEST_CONTEXT = 256
"""Minimum context that the cache must hold if `max_context` is not set."""


class Bounds(TypedDict, total=False):
    """What a local engine may use. None, or nothing given, means the default.

    Attributes:
        max_slots: number of sequences in the cache, running or kept for their session; default 256.
        max_context: tokens per sequence, prompt and completion; default: what model and cache allow.
        prefill_chunk: maximum prompt tokens per step, so that long prompts do not hold up other requests; default
        512 on CPU, 4096 on CUDA.
        cache_mb: size limit of the key-value cache in MiB; default a quarter of the machine's memory, on CUDA half
        of the free memory.
        threads: torch threads of the engine; default is torch's own, but 1 for a small model: its operations are
        so short that waiting for a second core costs more than it gains, especially on a busy machine.
        sharers: number of engines that share slots and memory if the model is small; default 1.
    """

    max_slots: int | None
    max_context: int | None
    prefill_chunk: int | None
    cache_mb: int | None
    threads: int | None
    sharers: int


class EngineCore:
    """Model, cache and scheduler, without the thread or process that they run in."""

    def __init__(
        self, model: PreTrainedModel, *, cuda_graphs: bool = True, routes: bool = False, **bounds: Unpack[Bounds]
    ) -> None:
        """See `LocalEngine`."""
        self.model = _model_of(model, routes)
        self.small = is_small(model)
        limits = _limits(self.model, bounds, bounds.get("sharers", 1) if self.small else 1)
        self.scheduler: Batcher | TurnScheduler
        if isinstance(self.model, FlatModel):
            alone = self.model.alone if self.model.dtype == torch.float32 else None  # others round too much
            recording = _recording(self.model, cuda_graphs)
            self.scheduler = Batcher(self.model, self.model.shape, limits, recording, alone)
        else:
            self.scheduler = TurnScheduler(self.model, limits)
        self.max_context = limits.max_context
        self.vocabulary = self.model.vocabulary
        self.threads = bounds.get("threads") or (1 if self.small else torch.get_num_threads())

    @classmethod
    def from_directory(
        cls,
        path: str | Path,
        *,
        dtype: str = "float32",
        routes: bool = False,
        **bounds: Unpack[Bounds],
    ) -> EngineCore:
        """Load the model from a Hugging Face directory, on the CPU.

        Raises:
            ConfigError: the directory or the model cannot be used.
        """
        return cls(load_model(path, dtype=dtype, device="cpu"), routes=routes, **bounds)

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Replace the weights between two steps.

        Raises:
            ValueError: names or shapes do not fit the model, or a parameter is missing; in that case nothing
            changes.
        """
        self.model.update(weights)
        self.scheduler.drop_states(version)


class LocalEngine(Engine):
    """An `Engine` over a transformers model in this process.

    Sequences are batched continuously: a request joins at the next token and leaves as soon as it ends. The state
    of a session is kept until its slot is needed; requests wait when every slot is running. Common prefixes are
    computed once. In float32, a fixed `seed` gives the same tokens regardless of the rest of the batch; logprobs
    can differ by the rounding of the matrix products. In bfloat16, that rounding can change tokens.
    """

    capabilities = EngineCapabilities(streaming=True, masks=True, prompt_logprobs=True)

    def __init__(
        self, model: PreTrainedModel, *, cuda_graphs: bool = True, routes: bool = False, **bounds: Unpack[Bounds]
    ) -> None:
        """Take over `model`: its attention is replaced, and no other code may use or change it.

        Args:
            model: on the device where it will run.
            cuda_graphs: record the decode steps and replay them; no effect unless the model is on CUDA.
            routes: return with each completion which experts the model's routers chose.
            **bounds: resource limits of the engine.

        Raises:
            ConfigError: the model's attention cannot be replaced, the bounds cannot be met, or `routes` is True
                and the model has no routers.
        """
        self._core = EngineCore(model, cuda_graphs=cuda_graphs, routes=routes, **bounds)
        self.capabilities = replace(type(self).capabilities, routes=routes)
        self._model, self._scheduler = self._core.model, self._core.scheduler
        self.max_context = self._core.max_context
        self._process = os.getpid()
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._answers: Answers = {}
        self._lock = threading.Lock()
        self._counted = threading.Event()
        self._closing = False
        self._over: EngineError | None = None
        self._thread = threading.Thread(target=self._main, name="agentrl-local-engine", daemon=True)
        self._thread.start()
        self._counted.wait()
        _running.add(self)

    @classmethod
    def from_directory(
        cls,
        path: str | Path,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        cuda_graphs: bool = True,
        routes: bool = False,
        **bounds: Unpack[Bounds],
    ) -> LocalEngine:
        """Load the model from a Hugging Face directory.

        Raises:
            ConfigError: the directory or the model cannot be used.
        """
        return cls(load_model(path, dtype=dtype, device=device), cuda_graphs=cuda_graphs, routes=routes, **bounds)

    @property
    def policy_version(self) -> int:
        """Version of the weights that the next token is sampled with."""
        return self._scheduler.version

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, session: str | None = None) -> Completion:
        """Continue `ids`; see `Engine.generate`. Without a seed, every call samples differently."""
        return await self._generate(ids, sampling, session, None)

    async def generate_streaming(
        self, ids: Sequence[int], sampling: Sampling, options: GenerateOptions, *, session: str | None = None
    ) -> Completion:
        """Continue `ids` and report each token as it is sampled; see `Engine.generate_streaming`."""
        if options.top < 0:
            raise ValueError(f"top must be 0 or more, got {options.top}")
        failed: list[Exception] = []
        loop, on_token = asyncio.get_running_loop(), options.on_token
        if on_token is not None:
            tell = on_token  # from the engine's thread to the caller's loop, in order and before the completion

            def report(drawn: TokenLogprob) -> None:
                if not failed:
                    try:
                        tell(drawn)
                    except Exception as error:
                        failed.append(error)

            def note(drawn: TokenLogprob) -> None:
                self._answers.setdefault(loop, []).append(partial(report, drawn))

            options = replace(options, on_token=note)
        completion = await self._generate(ids, sampling, session, options)
        if failed:
            raise failed[0]
        return completion

    async def _generate(
        self, ids: Sequence[int], sampling: Sampling, session: str | None, options: GenerateOptions | None
    ) -> Completion:
        check_sampling(sampling)
        check_session(session)
        prompt = check_prompt(ids, self._core.vocabulary, self.max_context)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed % 2**64
        request = BatchRequest(prompt, sampling, seed, session, partial(self._answer, loop, future), options)
        self._post(partial(self._scheduler.submit, request), request.deliver)
        try:
            return await future
        except asyncio.CancelledError:
            self._post_if_alive(partial(self._scheduler.cancel, request))
            raise

    async def release(self, session: str) -> None:
        """Drop the state kept for `session`."""
        self._post_if_alive(partial(self._scheduler.release, session))

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Replace the weights between two steps; see `Engine.update_weights`.

        Running requests recompute their keys and values, so every token is sampled from, and carries the version
        of, one set of weights over its whole context.

        Raises:
            ValueError: names or shapes do not fit the model, or a parameter is missing; in that case nothing
                changes.
        """

        await self._call(partial(self._core.update, weights, version))

    async def prompt_logprobs(self, ids: Sequence[int], *, top: int = 0) -> list[TokenLogprob]:
        """Score given tokens; see `Engine.prompt_logprobs`."""
        if top < 0:
            raise ValueError(f"top must be 0 or more, got {top}")
        row = check_ids(ids, self._core.vocabulary).tolist()
        return await self._call(lambda: self._scored(row, top))

    async def close(self) -> None:
        """Stop; running requests end with finish "abort" and the tokens sampled so far."""
        self._closing = True
        self._post_if_alive(lambda: None)  # wakes the thread
        await asyncio.to_thread(self._thread.join)
        _running.discard(self)

    def _scored(self, row: list[int], top: int) -> list[TokenLogprob]:
        found, left = list[TokenLogprob](), row[1:]
        for logprobs_kV in self._model.scores(row):
            here, left = left[: len(logprobs_kV)], left[len(logprobs_kV) :]
            found += scored(logprobs_kV, here, top, self.policy_version)
        return found

    # -- from the event loop to the thread ---------------------------------------------------------------------

    async def _call(self, function: Callable[[], T]) -> T:
        """Run a function on the engine's thread between two steps."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                result = function()
            except Exception as error:  # also of memory that a long row did not get: the engine goes on
                self._answer(loop, future, error)
            else:
                self._answer(loop, future, result)

        self._post(run, lambda error: self._answer(loop, future, error))
        return await future

    def _post(self, run: Callable[[], None], fail: Callable[[Exception], None]) -> None:
        if os.getpid() != self._process:
            raise EngineError("the local engine runs in the process that forked this one; create one here")
        with self._lock:
            if self._over is not None:
                raise EngineError(str(self._over)) from self._over
            self._inbox.put(_Command(run, fail))

    def _post_if_alive(self, run: Callable[[], None]) -> None:
        with self._lock:
            if self._over is None:
                self._inbox.put(_Command(run, lambda error: None))

    # -- on the thread -----------------------------------------------------------------------------------------

    def _main(self) -> None:
        compute_with(self._core.threads)
        self._counted.set()
        over = EngineError("the local engine is closed")
        try:
            with torch.inference_mode():
                self._serve()
            self._scheduler.abort()
        except BaseException as error:
            over = EngineError(f"the local engine's thread died: {type(error).__name__}: {error}")
            over.__cause__ = error
            for request in self._scheduler.requests():
                request.deliver(over)
        with self._lock:
            self._over = over
        while not self._inbox.empty():
            self._inbox.get().fail(over)
        self._flush()

    def _serve(self) -> None:
        while True:
            while not self._inbox.empty() or not self._scheduler.busy:
                self._inbox.get().run()
                if self._closing:
                    return
                self._flush()
            self._scheduler.step()
            self._flush()

    def _answer(self, loop: asyncio.AbstractEventLoop, future: asyncio.Future[T], result: T | Exception) -> None:
        """Record a result for `_flush` to deliver."""
        self._answers.setdefault(loop, []).append(partial(settle, future, result))

    def _flush(self) -> None:
        answers, self._answers = self._answers, {}
        deliver(answers)


_running: weakref.WeakSet[LocalEngine] = weakref.WeakSet()


def _stop_running() -> None:
    """Stop the threads of engines that were not closed: a daemon thread in torch at interpreter exit aborts it."""
    for engine in list(_running):
        engine._closing = True
        engine._post_if_alive(lambda: None)
        engine._thread.join(5.0)


atexit.register(_stop_running)


@dataclass(frozen=True, slots=True)
class _Command:
    """A task for the engine's thread; `fail` is called instead of `run` if the thread has ended."""

    run: Callable[[], None]
    fail: Callable[[Exception], None]


def settle(future: asyncio.Future[T], result: T | Exception) -> None:
    """Set the result of a future, unless its waiter is gone."""
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


def deliver(answers: Answers) -> None:
    """Deliver answers from another thread, with one call into each event loop regardless of their number."""
    for loop, calls in answers.items():
        with contextlib.suppress(RuntimeError):  # that loop is closed: nobody is waiting any more
            loop.call_soon_threadsafe(_run_all, calls)


def _run_all(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


def _model_of(model: PreTrainedModel, routes: bool) -> FlatModel | OwnCacheModel:
    """The model on flat batches if they can hold it, else with transformers' own cache.

    Raises:
        ConfigError: neither computes what the model computes on whole rows, or it has no routers and `routes` is
            True.
    """
    try:
        return FlatModel(model, routes=routes)
    except ConfigError:
        if routes:
            raise
        return OwnCacheModel(model)


def _limits(model: FlatModel | OwnCacheModel, bounds: Bounds, sharers: int) -> BatchLimits:
    for name, value in bounds.items():
        if isinstance(value, int) and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    max_context, cache_mb = bounds.get("max_context"), bounds.get("cache_mb")
    if max_context is not None and max_context > model.max_positions:
        raise ConfigError(
            f"max_context is {max_context}, but the model's max_position_embeddings is {model.max_positions}"
        )
    wanted = max_context or model.max_positions
    on_cuda = model.device.type == "cuda"
    if cache_mb is not None:
        memory = cache_mb << 20
    elif on_cuda:
        release_gpu_memory()  # memory that PyTorch keeps after a cold start would count as taken
        memory = torch.cuda.mem_get_info(model.device)[0] // 2
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    memory //= sharers
    budget = max(0, memory - model.bytes_per_sequence) // model.bytes_per_token
    if budget < min(wanted, max_context or SMALLEST_CONTEXT):
        raise ConfigError(
            f"a key-value cache of {memory >> 20} MiB holds {budget} tokens of this model "
            f"({model.bytes_per_token} bytes each), fewer than one sequence of "
            f"{min(wanted, max_context or SMALLEST_CONTEXT)} tokens; raise cache_mb or lower max_context"
        )
    return BatchLimits(
        max_slots=-(-(bounds.get("max_slots") or 256) // sharers),
        max_context=min(wanted, budget),
        budget_tokens=budget,
        prefill_chunk=bounds.get("prefill_chunk") or (4096 if on_cuda else 512),
        gaps=2 if on_cuda else 16,
        gaps_per_running=0.25 if on_cuda else 2.0,
    )


def _recording(model: FlatModel, cuda_graphs: bool) -> DecodeRecording | None:
    if model.device.type != "cuda":
        return None
    return DecodeRecording(model.vocabulary, cuda_capture(model.device)) if cuda_graphs else None
