"""Decode steps with fixed shapes and addresses, so that they can be replayed as CUDA graphs.

A decode step consists of hundreds of short kernels, and launching them can take longer than running them. A
recorded graph is one launch, but its contents are fixed: row i of the batch is slot i of the cache, rows and
tokens are rounded up to a bucket, and changing inputs are copied into one persistent tensor. Rows that do not
decode write to the spare slot of the cache, and their results are dropped. Weights are replaced in place, so
graphs survive an update; they do not survive growth of the cache.

Shapes: R rows of the bucket, N sequences that decode, H query heads, K key-value heads, D head size, V vocabulary.
"""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from agentrl.engine.local.attention import AttentionPlan
from agentrl.engine.local.cache import KVCache, attend_rows, bias_of
from agentrl.engine.local.sampler import IntArray

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Records what a function does, and returns a function that repeats it: same addresses, no Python."""

LENGTH_UNIT = 128
"""The lengths of buckets are multiples of this many tokens."""
WORTH_RECORDING = 4
"""Steps in a bucket before it is recorded, so that a bucket that occurs once at the end of a rollout is not."""
MOST_GRAPHS = 96
"""Maximum number of graphs; the least recently used one is dropped first."""


class Forward(Protocol):
    """Runs the model on a flat batch; returns the logits (k, V) of the k tokens named in `keep`."""

    def __call__(self, ids_N: Tensor, positions_N: Tensor, plan: AttentionPlan, keep_k: Tensor) -> Tensor: ...


class RowAttention:
    """Plan of one static step: row i attends to slot i, up to its own position."""

    def __init__(self, cache: KVCache, targets_R: Tensor, positions_R: Tensor, length: int) -> None:
        """`targets_R` is the slot that each row writes to: its own, or the spare one."""
        self._cache, self._targets, self._positions, self._length = cache, targets_R, positions_R, length
        self._bias: dict[int | None, Tensor] = {}

    def attend(
        self,
        layer: int,
        query_NHD: Tensor,
        key_NKD: Tensor,
        value_NKD: Tensor,
        *,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        self._cache.write(layer, self._targets, self._positions, key_NKD, value_NKD)
        if window not in self._bias:
            bias_RC = bias_of(self._positions, self._length, window, query_NHD.dtype)
            rows, heads = key_NKD.shape[:2]
            self._bias[window] = bias_RC[:, None].expand(rows, heads, -1).reshape(rows * heads, 1, -1)
        return attend_rows(self._cache, layer, query_NHD, self._length, self._bias[window], scaling)

    def keep_routes(self, routes_NLk: Tensor) -> None:
        self._cache.write_routes(self._targets, self._positions, routes_NLk)


class DecodeStep:
    """One bucket: the next token of up to `rows` sequences of up to `length` tokens."""

    def __init__(self, forward: Forward, cache: KVCache, rows: int, length: int) -> None:
        device = cache.shape.device
        self._forward, self._cache, self._rows, self._length = forward, cache, rows, length
        self._inputs_3R = torch.zeros(3, rows, dtype=torch.long, device=device)
        self._host_3R = torch.zeros(3, rows, dtype=torch.long, pin_memory=device.type == "cuda")
        self._keep_R = torch.arange(rows, device=device)

    def fill(self, slots: IntArray, ids: IntArray, positions: IntArray) -> None:
        """Set what decodes now: slot, last token and its position, N of each, slots below `rows`."""
        host = self._host_3R.numpy()
        host[0], host[1], host[2] = 0, self._cache.slots, 0
        host[0, slots], host[1, slots], host[2, slots] = ids, slots, positions
        self._inputs_3R.copy_(self._host_3R, non_blocking=True)  # sampling awaits the step before the next fill

    def run(self, out_RV: Tensor) -> None:
        """Compute the logits of all rows, independent of the values of the inputs."""
        ids_R, targets_R, positions_R = self._inputs_3R
        plan = RowAttention(self._cache, targets_R, positions_R, self._length)
        out_RV.copy_(self._forward(ids_R, positions_R, plan, self._keep_R))


@dataclass(slots=True)
class _Bucket:
    step: DecodeStep
    uses: int = 0
    replay: Callable[[], None] | None = None


class ReplayedDecode:
    """Decode steps over a cache with a spare slot, recorded per bucket once the bucket has proved to be in use."""

    def __init__(self, forward: Forward, cache: KVCache, vocabulary: int, capture: Capture | None) -> None:
        self._forward, self._cache, self._vocabulary, self._capture = forward, cache, vocabulary, capture
        self._buckets: OrderedDict[tuple[int, int], _Bucket] = OrderedDict()
        self._out_SV: Tensor | None = None

    @property
    def recorded(self) -> list[tuple[int, int]]:
        """(rows, length) of the recorded buckets."""
        return [size for size, bucket in self._buckets.items() if bucket.replay is not None]

    def reset(self) -> None:
        """Drop all graphs because the cache has moved."""
        self._buckets.clear()
        self._out_SV = None

    def __call__(self, slots: IntArray, ids: IntArray, positions: IntArray) -> Tensor:
        """Return logits (N, V) after these tokens, one for each of N slots, ascending; valid until the next
        call."""
        rows = min(bucket_of(int(slots[-1]) + 1), self._cache.slots)
        length = min(bucket_of(int(positions.max()) + 1, LENGTH_UNIT), self._cache.capacity)
        bucket = self._bucket(rows, length)
        bucket.step.fill(slots, ids, positions)
        out_RV = self._out()[:rows]
        if bucket.replay is None:
            bucket.uses += 1
            if bucket.uses > WORTH_RECORDING:
                self._record(bucket, out_RV)
        if bucket.replay is None:
            bucket.step.run(out_RV)
        else:
            bucket.replay()
        return out_RV if len(slots) == rows else out_RV[torch.from_numpy(slots).to(out_RV.device)]

    def _bucket(self, rows: int, length: int) -> _Bucket:
        bucket = self._buckets.get((rows, length))
        if bucket is None:
            bucket = _Bucket(DecodeStep(self._forward, self._cache, rows, length))
            self._buckets[rows, length] = bucket
            if len(self._buckets) > MOST_GRAPHS:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end((rows, length))
        return bucket

    def _record(self, bucket: _Bucket, out_RV: Tensor) -> None:
        if self._capture is None:
            return
        try:
            bucket.replay = self._capture(lambda: bucket.step.run(out_RV))
        except RuntimeError as e:  # the model does something that cannot be recorded: slower but correct
            self._capture = None
            warnings.warn(f"decoding without CUDA graphs: {e}", stacklevel=2)

    def _out(self) -> Tensor:
        """Allocate one buffer (slots, V) for the logits of all graphs."""
        if self._out_SV is None:
            shape = self._cache.shape
            size = (self._cache.slots, self._vocabulary)
            self._out_SV = torch.empty(size, dtype=shape.dtype, device=shape.device)
        return self._out_SV


def bucket_of(number: int, unit: int = 1) -> int:
    """Return the smallest bucket that holds `number`: each multiple of `unit` up to 8, then four buckets per
    doubling.

    At most a quarter of the cache read by a step is unneeded, and the number of buckets stays small.
    """
    units = -(-number // unit)
    step = 1 << max(0, (units - 1).bit_length() - 3)
    return -(-units // step) * step * unit


def cuda_capture(device: torch.device) -> Capture:
    """Record CUDA graphs that share memory: they are only replayed one after another."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # one, or they would share nothing
    recorded: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def capture(run: Callable[[], None]) -> Callable[[], None]:
        here = torch.cuda.current_stream(device)
        # The second of these is for failures: PyTorch then leaves the other stream as the current one.
        with torch.cuda.device(device), torch.cuda.stream(here):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                run()  # allocations by libraries on first use must not be recorded
            here.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # PyTorch may refuse a pool whose graphs are all gone, as they are once the cache has moved.
            pool = next((other.pool() for other in recorded), None)
            # Other threads (a learner in this process) may use the device meanwhile.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                run()
        recorded.add(graph)
        return graph.replay

    return capture
