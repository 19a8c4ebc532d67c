"""The state of each cache slot: its tokens, how far they are computed, its request, its sampling parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import NDArray

from agentrl.engine.base import GenerateOptions
from agentrl.engine.local.sampler import BoolArray, Draw, IntArray, mix, uniforms
from agentrl.types import Completion, Routes, Sampling

RouteArray = NDArray[np.signedinteger]
"""(T, L, k) experts of T tokens."""


@dataclass(eq=False, slots=True)
class BatchRequest:
    """One `generate` call in progress: `ids` includes sampled tokens if the request was preempted."""

    ids: IntArray
    sampling: Sampling
    seed: int
    session: str | None
    deliver: Callable[[Completion | Exception], None]
    """Called once, on the engine's thread."""
    options: GenerateOptions | None = None
    """Additional options of the caller; `on_token` is called on the engine's thread here."""
    prompt: int = field(init=False)
    """Number of prompt tokens; the rest of `ids` was sampled."""
    logprobs: NDArray[np.float32] = field(init=False)
    versions: IntArray = field(init=False)
    routed: RouteArray | None = None
    """Routes of its first tokens, as they were when the token after each was sampled; None if none are kept."""
    slot: int | None = None
    cached_tokens: int | None = None
    """How many prompt tokens were reused for this request; None before it has a slot."""
    leader: BatchRequest | None = None
    """Another request that is already computing `shared` tokens of this prompt: waiting for it is cheaper."""
    shared: int = 0

    def __post_init__(self) -> None:
        self.prompt = len(self.ids)
        self.logprobs = np.zeros(0, dtype=np.float32)
        self.versions = np.zeros(0, dtype=np.int64)

    @property
    def routes(self) -> Routes | None:
        """What a completion reports."""
        if self.routed is None:
            return None
        _, layers, top_k = self.routed.shape
        return Routes(self.routed.tobytes(), layers, top_k, self.routed.itemsize)


@dataclass(frozen=True, slots=True)
class Twins:
    """Which of n slots have the same tokens, of which equally many are computed: the model needs one of them.

    `first` (u,) are the places of the first slot of each kind, ascending; `kind` (n,) numbers the kinds in that
    order.
    """

    first: IntArray
    kind: IntArray


class SlotTable:
    """Numpy columns over the slots, so that a decode step needs no Python per sequence.

    `known[s]` tokens of slot s are given or sampled; the first `computed[s]` of them have keys and values in the
    cache. A slot without a request keeps its tokens, for its session or to copy from.
    """

    def __init__(self, slots: int, capacity: int) -> None:
        self.slots = slots
        self.capacity = capacity
        self.tokens = np.full((slots, capacity), -1, dtype=np.int64)
        self.logprobs = np.zeros((slots, capacity), dtype=np.float32)
        self.versions = np.zeros((slots, capacity), dtype=np.int64)
        self.known = np.zeros(slots, dtype=np.int64)
        self.computed = np.zeros(slots, dtype=np.int64)
        self.digest = np.zeros(slots, dtype=np.uint64)
        self._weights = mix(np.arange(1, capacity + 1, dtype=np.uint64))
        self.prompt = np.zeros(slots, dtype=np.int64)
        self.limit = np.zeros(slots, dtype=np.int64)
        self.stamp = np.zeros(slots, dtype=np.int64)
        self.active = np.zeros(slots, dtype=np.bool_)
        self.special = np.zeros(slots, dtype=np.bool_)
        self.temperature = np.ones(slots, dtype=np.float64)
        self.top_p = np.ones(slots, dtype=np.float64)
        self.top_k = np.zeros(slots, dtype=np.int64)
        self.min_p = np.zeros(slots, dtype=np.float64)
        self.seed = np.zeros(slots, dtype=np.uint64)
        self.stops = np.full((slots, 1), -1, dtype=np.int64)
        self.request: list[BatchRequest | None] = [None] * slots
        self.session: list[str | None] = [None] * slots

    _COLUMNS = (
        "tokens",
        "logprobs",
        "versions",
        "known",
        "computed",
        "digest",
        "prompt",
        "limit",
        "stamp",
        "active",
        "special",
    )
    _SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "stops")

    def occupy(self, slot: int, request: BatchRequest, *, computed: int, limit: int, stamp: int) -> None:
        """Assign the slot, whose first `computed` tokens are already correct, to a request."""
        known, prompt = len(request.ids), request.prompt
        self.tokens[slot, :known] = request.ids
        self.logprobs[slot, prompt:known] = request.logprobs
        self.versions[slot, prompt:known] = request.versions
        self.known[slot], self.computed[slot] = known, computed
        self.digest[slot] = self._digests(request.ids, np.arange(known)).sum()
        self.prompt[slot], self.limit[slot], self.stamp[slot] = prompt, limit, stamp
        self.active[slot] = True
        self.special[slot] = request.options is not None
        sampling = request.sampling
        self.temperature[slot], self.top_p[slot] = sampling.temperature, sampling.top_p
        self.top_k[slot], self.min_p[slot] = sampling.top_k, sampling.min_p
        self.seed[slot] = np.uint64(request.seed)
        stops = sorted(sampling.stop_ids)
        if len(stops) > self.stops.shape[1]:
            wider = np.full((self.slots, len(stops)), -1, dtype=np.int64)
            wider[:, : self.stops.shape[1]] = self.stops
            self.stops = wider
        self.stops[slot] = -1
        self.stops[slot, : len(stops)] = stops
        self.request[slot], self.session[slot] = request, request.session
        request.slot = slot

    def vacate(self, slot: int) -> BatchRequest:
        """Remove the request from its slot, with the tokens sampled so far; the slot keeps its tokens."""
        request = self.request[slot]
        assert request is not None
        known = int(self.known[slot])
        request.ids = self.tokens[slot, :known].copy()
        request.logprobs = self.logprobs[slot, request.prompt : known].copy()
        request.versions = self.versions[slot, request.prompt : known].copy()
        request.slot = None
        self.request[slot] = None
        self.active[slot] = False
        return request

    def forget(self, slot: int) -> None:
        """Clear an idle slot."""
        self.known[slot] = self.computed[slot] = 0
        self.session[slot] = None

    def common(self, ids: IntArray) -> IntArray:
        """Return (S,) lengths of the longest common prefix of `ids` with the known tokens of each slot."""
        width = min(len(ids), self.capacity)
        differs = self.tokens[:, :width] != ids[:width]
        first = np.where(differs.any(1), differs.argmax(1), width)
        return cast(IntArray, np.minimum(first, self.known))

    def shared(self, slots: IntArray) -> int:
        """Return how many computed tokens at the start of these slots are the same in all of them."""
        if not len(slots):
            return 0
        limit, high = int(self.computed[slots].min()), int(slots[-1]) + 1
        differs = (self.tokens[:high, :limit] != self.tokens[slots[0], :limit])[slots].any(0)
        return int(differs.argmax()) if differs.any() else limit

    def twins(self, slots: IntArray) -> Twins:
        """Return which of these slots with requests are the same to the model."""
        keys = self.digest[slots] + self._weights[self.computed[slots]]
        _, first, kind = np.unique(keys, return_index=True, return_inverse=True)
        order = np.argsort(first)
        first, kind = first[order], np.argsort(order)[kind]
        others = np.flatnonzero(first[kind] != np.arange(len(slots)))
        if len(others):
            these, those = slots[others], slots[first[kind[others]]]
            known = self.known[these]
            behind = np.arange(int(known.max())) >= known[:, None]
            equal = (self.tokens[these, : behind.shape[1]] == self.tokens[those, : behind.shape[1]]) | behind
            equal_too = (known == self.known[those]) & (self.computed[these] == self.computed[those])
            if not (equal.all() and equal_too.all()):  # two contexts with one digest
                return Twins(np.arange(len(slots)), np.arange(len(slots)))
        return Twins(first, kind)

    def _digests(self, ids: IntArray, positions: IntArray) -> NDArray[np.uint64]:
        """Return what each token adds to the digest of its slot."""
        return (ids.astype(np.uint64) + np.uint64(1)) * self._weights[positions]

    def extends(self, slot: int, ids: IntArray) -> bool:
        """Whether `ids` extends everything that is computed in the slot."""
        computed = int(self.computed[slot])
        return 0 < computed <= len(ids) and bool((self.tokens[slot, :computed] == ids[:computed]).all())

    def draw(self, slots: IntArray, ahead: IntArray) -> Draw:
        """Return sampling parameters and random numbers for these slots' tokens, `ahead` of the next one."""
        return Draw(
            temperature=self.temperature[slots],
            top_p=self.top_p[slots],
            top_k=self.top_k[slots],
            min_p=self.min_p[slots],
            uniform=uniforms(self.seed[slots], self.known[slots] + ahead - self.prompt[slots]),
        )

    def room(self, slots: IntArray) -> IntArray:
        """Return how many tokens each slot can take before the last one that its limit and capacity allow."""
        return np.minimum(self.limit[slots], self.capacity) - self.known[slots] - 1

    def before(self, slots: IntArray, positions: IntArray, count: int) -> IntArray:
        """Return (N, count) the tokens before these positions, which are at least `count`."""
        return cast(IntArray, self.tokens[slots[:, None], positions[:, None] + np.arange(-count, 0)])

    def kept(self, slots: IntArray, ahead: IntArray, ids: IntArray) -> BoolArray:
        """Return which sampled tokens follow from those before them: a slot's first, and each behind a draft that
        was sampled and did not end the sequence. The tokens of a slot are neighbors; drafts are behind the known
        ones."""
        if not ahead.any():
            return np.ones(len(slots), dtype=np.bool_)
        as_drafted = ids == self.tokens[slots, self.known[slots] + ahead]
        wrong = np.cumsum(~(as_drafted & ~self._stops_at(slots, ids)))
        before = np.concatenate([[0], wrong[:-1]])
        first = np.flatnonzero(ahead == 0)
        return cast(BoolArray, before == np.repeat(before[first], np.diff([*first, len(slots)])))

    def append(
        self, slots: IntArray, ahead: IntArray, ids: IntArray, logprobs: NDArray[np.float32], version: int
    ) -> IntArray:
        """Add sampled tokens, those of a slot next to each other; returns the slots that are now finished."""
        ends = np.flatnonzero(np.diff(slots, append=-1))
        known = self.known[slots] + ahead
        self.tokens[slots, known] = ids
        self.logprobs[slots, known] = logprobs
        self.versions[slots, known] = version
        np.add.at(self.digest, slots, self._digests(ids, known))
        last, slots = known[ends] + 1, slots[ends]
        self.known[slots] = last
        return slots[self._stops_at(slots, ids[ends]) | (last >= self.limit[slots])]

    def _stops_at(self, slots: IntArray, ids: IntArray) -> BoolArray:
        return cast(BoolArray, (ids[:, None] == self.stops[slots]).any(1))

    def swap(self, left: Sequence[int], right: Sequence[int]) -> None:
        """Swap slot left[i] and slot right[i], all i at once."""
        here, there = [*left, *right], [*right, *left]
        for name in (*self._COLUMNS, *self._SAMPLING):
            column = getattr(self, name)
            column[here] = column[there]
        for a, b in zip(left, right, strict=True):
            self.request[a], self.request[b] = self.request[b], self.request[a]
            self.session[a], self.session[b] = self.session[b], self.session[a]
        self._renumber()

    def rebuild(self, rows: Sequence[int], slots: int, capacity: int) -> None:
        """Resize: new slot i is old slot rows[i], further slots are empty. Dropped slots must be idle."""
        new = SlotTable(slots, capacity)
        kept, width = len(rows), min(capacity, self.capacity)
        new.stops = np.full((slots, self.stops.shape[1]), -1, dtype=np.int64)
        for name in ("tokens", "logprobs", "versions"):
            getattr(new, name)[:kept, :width] = getattr(self, name)[rows, :width]
        for name in (*self._COLUMNS[3:], *self._SAMPLING):
            getattr(new, name)[:kept] = getattr(self, name)[rows]
        new.request[:kept] = [self.request[row] for row in rows]
        new.session[:kept] = [self.session[row] for row in rows]
        self.__dict__ = new.__dict__
        self._renumber()

    def _renumber(self) -> None:
        for slot, request in enumerate(self.request):
            if request is not None:
                request.slot = slot
