"""Decode steps that can be recorded: traced on a CPU, they give what the ordinary steps give."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from agentrl.engine.local.batching import Batcher, BatchLimits, DecodeRecording
from agentrl.engine.local.decode import DecodeStep, bucket_of, cuda_capture
from agentrl.engine.local.flat_model import FlatModel, load_model
from agentrl.engine.local.slots import BatchRequest
from agentrl.errors import EngineError
from agentrl.types import Completion, Sampling
from tests.engine.engine_models import VOCABULARY


def traced(run: Callable[[], None]) -> Callable[[], None]:
    """What a CUDA graph is, on a CPU: the operations of one run on the very same tensors, and no Python."""
    return make_fx(run)()


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()


class Rollout:
    """Two turns of many sequences with gaps between them, in a cache that grows, with new weights half-way."""

    def __init__(self, path: Path, recording: DecodeRecording | None, **limits: int) -> None:
        bounds = {"max_slots": 12, "max_context": 512, "budget_tokens": 100_000, "prefill_chunk": 512} | limits
        self.model = FlatModel(load_model(path, dtype="float32", device="cpu"))
        self.scheduler = Batcher(self.model, self.model.shape, BatchLimits(**bounds), recording)
        self.answers: dict[BatchRequest, Completion | Exception] = {}

    def submit(self, ids: list[int], sampling: Sampling, session: str) -> BatchRequest:
        request = BatchRequest(
            np.array(ids), sampling, sampling.seed or 0, session, lambda r: self.answers.update({request: r})
        )
        self.scheduler.submit(request)
        return request

    @torch.no_grad()
    def play(self) -> list[Completion]:
        first = [
            self.submit(
                prompt(5 + 9 * n, n), Sampling(temperature=0.8 * (n % 2), max_tokens=6 + 5 * n, seed=n), f"{n}"
            )
            for n in range(12)
        ]
        for _ in range(25):
            self.scheduler.step()
        self.scheduler.cancel(first[7])
        weights = {name: tensor * 1.01 for name, tensor in self.model.module.state_dict().items()}
        self.model.update(weights)
        self.scheduler.drop_states(1)
        second = [
            self.submit([*prompt(5 + 9 * n, n), *prompt(90, 99)], Sampling(max_tokens=60, seed=n), f"{n}")
            for n in (0, 2, 3)
        ]
        while self.scheduler.busy:
            self.scheduler.step()
        answers = [self.answers[request] for request in (*first[:7], *first[8:], *second)]
        return [answer for answer in answers if isinstance(answer, Completion)]


@pytest.mark.parametrize("kind", ["qwen3", "mistral"])  # fused, and by the model's own modules with a window
def test_recorded_steps_give_the_same_tokens_over_gaps_growth_and_new_weights(models: dict[str, Path], kind: str):
    plain = Rollout(models[kind], None).play()
    recorded = Rollout(models[kind], DecodeRecording(VOCABULARY, traced))
    ours = recorded.play()
    assert len(ours) == len(plain) == 14
    assert recorded.scheduler.replayed is not None
    assert len(recorded.scheduler.replayed.recorded) >= 2  # after the last growth
    for a, b in zip(ours, plain, strict=True):
        assert a.ids == b.ids
        assert a.versions == b.versions
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


@torch.no_grad()
def test_rows_that_do_not_decode_touch_no_slot(models: dict[str, Path]):
    rollout = Rollout(models["qwen3"], DecodeRecording(VOCABULARY, None))
    for n in range(6):
        rollout.submit(prompt(20 + n, n), Sampling(max_tokens=40, seed=n), f"{n}")
    for _ in range(3):
        rollout.scheduler.step()
    cache = rollout.scheduler.cache
    before = [tensor.clone() for tensor in (*cache.keys, *cache.values)]
    slots, positions = np.array([1, 4]), np.array([30, 31])
    step = DecodeStep(rollout.model, cache, 8, 128)
    step.fill(slots, np.array([5, 6]), positions)
    out = torch.empty(8, VOCABULARY)
    step.run(out)
    assert torch.isfinite(out).all()
    for index, (old, new) in enumerate(zip(before, (*cache.keys, *cache.values), strict=True)):
        changed = (old != new)[: cache.slots].movedim(3 if index < len(cache.keys) else 2, 1)  # (S, C, K, D)
        assert changed.flatten(2).any(2).nonzero().tolist() == [[1, 30], [4, 31]]


def test_what_cannot_be_recorded_is_computed_all_the_same(models: dict[str, Path]):
    def refusing(run: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    rollout = Rollout(models["qwen3"], DecodeRecording(VOCABULARY, refusing))
    with pytest.warns(UserWarning, match="decoding without CUDA graphs: operation not permitted"):
        ours = rollout.play()
    assert [a.ids for a in ours] == [b.ids for b in Rollout(models["qwen3"], None).play()]


def test_logits_that_are_not_finite_leave_nothing_behind_in_a_recorded_rollout(models: dict[str, Path]):
    rollout = Rollout(models["qwen3"], DecodeRecording(VOCABULARY, traced))
    with torch.no_grad():
        good = {name: tensor.clone() for name, tensor in rollout.model.module.state_dict().items()}
        rollout.model.update({name: tensor * torch.nan for name, tensor in good.items()})
        request = rollout.submit(prompt(9, 0), Sampling(max_tokens=9), "a")
        rollout.scheduler.step()
        assert isinstance(rollout.answers[request], EngineError)
        rollout.model.update(good)
    assert [a.ids for a in rollout.play()] == [b.ids for b in Rollout(models["qwen3"], None).play()]


def test_buckets_are_few_and_never_a_quarter_too_large():
    assert [bucket_of(number) for number in (1, 7, 8, 9, 17, 33, 255)] == [1, 7, 8, 10, 20, 40, 256]
    assert [bucket_of(number, 128) for number in (1, 128, 129, 1025)] == [128, 128, 256, 1280]
    sizes = {bucket_of(number) for number in range(1, 257)}
    assert len(sizes) == 28
    assert all(number <= bucket_of(number) <= 1.25 * number for number in range(1, 2000))


def make_stream(*_: object) -> SimpleNamespace:
    return SimpleNamespace(wait_stream=lambda _: None)


class PretendedCuda:
    """What records graphs in `torch.cuda`, with its rules for streams and pools; nothing is computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = self.default = make_stream()
        self.streams: list[object] = []
        self.pools: list[weakref.WeakSet[object]] = []
        self.fails = False
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", weakref.WeakSet)
        monkeypatch.setattr(torch.cuda, "Stream", make_stream)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.stream)
        monkeypatch.setattr(torch.cuda, "graph", self.graph)

    @contextmanager
    def stream(self, stream: SimpleNamespace) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(
        self, graph: Graph, pool: weakref.WeakSet[object] | None, stream: SimpleNamespace, **_: str
    ) -> Iterator[None]:
        assert pool is None or pool or pool not in self.pools, "use_count > 0 INTERNAL ASSERT FAILED"
        before, self.current = self.current, stream
        yield
        if self.fails:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.current, graph.used = before, weakref.WeakSet() if pool is None else pool
        graph.used.add(graph)
        self.streams.append(stream)
        self.pools.append(graph.used)


class Graph:
    used: weakref.WeakSet[object]

    def pool(self) -> object:
        return self.used

    def replay(self) -> None:
        """Nothing was recorded."""


def test_graphs_share_memory_until_all_of_them_are_gone(monkeypatch: pytest.MonkeyPatch):
    cuda, ran = PretendedCuda(monkeypatch), list[object]()
    capture = cuda_capture(torch.device("cuda"))
    held = [capture(lambda: ran.append(cuda.current)) for _ in range(3)]
    held = held[1:]
    held.append(capture(lambda: None))
    assert cuda.pools[0] is cuda.pools[1] is cuda.pools[2] is cuda.pools[3]
    held.clear()  # the cache has moved
    held += [capture(lambda: None), capture(lambda: None)]
    assert cuda.pools[4] is cuda.pools[5] is not cuda.pools[3]
    # Memory that one stream has freed is not given to another, not even within a pool.
    assert len(set(map(id, cuda.streams))) == 1
    assert ran == cuda.streams[:1] * 6
    assert cuda.current is cuda.default


def test_what_follows_a_failed_recording_is_computed_in_the_stream_before_it(monkeypatch: pytest.MonkeyPatch):
    cuda = PretendedCuda(monkeypatch)
    cuda.fails = True
    with pytest.raises(RuntimeError, match="during capture"):
        cuda_capture(torch.device("cuda"))(lambda: None)
    assert cuda.current is cuda.default
