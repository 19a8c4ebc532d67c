"""Models that the flat batches of the local engine cannot hold: transformers' own cache, one sequence at a time.

Layers with a state of another kind than keys and values (linear attention, convolutions, state spaces) keep it in
a cache that transformers makes, one for each sequence. Sequences take turns, a forward pass each, so this is
slower than `Batcher`; tokens, log-probabilities and versions mean the same.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.engine.local.batching import BatchLimits
from agentrl.engine.local.constrained import sample_constrained, tell
from agentrl.engine.local.flat_model import LOGITS_AT_ONCE, WHERE, EngineModel
from agentrl.engine.local.sampler import Draw, IntArray, uniforms
from agentrl.engine.local.slots import BatchRequest
from agentrl.errors import ConfigError, EngineError
from agentrl.models.trial import ALONE, ENDS, SHARED, probe, use_own_attention, with_eager_attention
from agentrl.types import Completion

Cache = Any
"""What a model of transformers returns under one of `_CACHE_KEYS`."""
_CACHE_KEYS = ("past_key_values", "cache_params")


class OwnCacheModel(EngineModel):
    """A transformers model with its own cache; construction checks that against whole rows.

    Attributes:
        chunks: whether a cache can be continued by several tokens at once. Some families compute those as if
            nothing came before them; the context is then recomputed, or continued token by token.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Take over the model.

        Raises:
            ConfigError: it computes something else with a cache than without, or cannot say what it keeps.
        """
        super().__init__(model)
        use_own_attention(model)
        takes = inspect.signature(model.forward).parameters
        self._can_keep = "logits_to_keep" in takes
        self._cache_key = next((key for key in _CACHE_KEYS if key in takes), _CACHE_KEYS[0])
        self.chunks = True
        try:
            self._probe()
        except ConfigError:
            self.chunks = False
            self._probe()
        self.bytes_per_token, self.bytes_per_sequence = self._bytes()
        self._state = dict(model.state_dict())

    def extend(self, cache: Cache, ids: Sequence[int] | IntArray) -> tuple[Tensor, Cache]:
        """Logits (V,) behind these tokens, which follow what is in the cache (None: nothing), and the cache."""
        logits_LV, cache = self._extend(self.module, cache, ids, logits_to_keep=1)
        return logits_LV[-1], cache

    def alone(self, ids: Sequence[int] | IntArray) -> Tensor:
        """Compute the logits (V,) after these tokens, the same bits each time: without a cache."""
        ids_1L = torch.tensor(ids, dtype=torch.long, device=self.device)[None]
        logits: Tensor = self.module(input_ids=ids_1L, use_cache=False, **self._keeping(1)).logits
        return logits[0, -1]

    def scores(self, row: Sequence[int]) -> Iterator[Tensor]:
        """Compute log-probabilities (k, V) at temperature 1 after all tokens of a row but the last, k at a time.

        Each part is a pass over the row; families that give all logits only make them at once.
        """
        ids_1L = torch.tensor([row], device=self.device)
        places_T = torch.arange(len(row) - 1, device=self.device)
        at_once = max(1, LOGITS_AT_ONCE // self.vocabulary) if self._can_keep else len(row)
        for keep_k in torch.split(places_T, at_once):
            logits: Tensor = self.module(input_ids=ids_1L, use_cache=False, **self._keeping(keep_k)).logits
            yield torch.log_softmax(logits[0, : len(keep_k)].float(), -1)

    def _extend(
        self, model: PreTrainedModel, cache: Cache, ids: Sequence[int] | IntArray, logits_to_keep: int = 0
    ) -> tuple[Tensor, Cache]:
        ids_1L = torch.tensor(ids, dtype=torch.long, device=self.device)[None]
        given = {self._cache_key: cache, **self._keeping(logits_to_keep)}
        out = model(input_ids=ids_1L, use_cache=True, **given)
        if (kept := getattr(out, self._cache_key, None)) is None:
            raise ConfigError(f"{type(model).__name__} keeps its state in no cache that can be handed to it again")
        return out.logits[0], kept

    def _keeping(self, last: int | Tensor) -> dict[str, Any]:
        return {"logits_to_keep": last} if self._can_keep else {}

    def _probe(self) -> None:
        """Compare two sequences that take turns with whole rows."""
        rows = [[token % self.vocabulary for token in row] for row in (ALONE, (*SHARED, *ENDS[1]))]

        def in_turns(tried: PreTrainedModel) -> Tensor:
            caches: list[Cache] = [None, None]
            found: list[list[Tensor]] = [[], []]
            cuts = [0, *([6] if self.chunks else []), *range(10, len(ALONE) + 1)]
            for start, stop in pairwise(cuts):
                for number, row in enumerate(rows):
                    if part := row[start:stop]:
                        logits_LV, caches[number] = self._extend(tried, caches[number], part)
                        found[number].append(logits_LV)
            return torch.cat([logits for each in found for logits in each])

        def alone(tried: PreTrainedModel) -> list[Tensor]:
            plain = with_eager_attention(tried)
            return [plain(input_ids=torch.tensor([row], device=self.device)).logits[0] for row in rows]

        probe(
            self.module, in_turns, alone, where=WHERE, advice="use engine sglang or vllm", together="with a cache"
        )

    def _bytes(self) -> tuple[int, int]:
        """The bytes that a cache takes for each token, and for each sequence on top of it."""
        with torch.no_grad():
            small, large = (
                _bytes_of(self.extend(None, [token % self.vocabulary for token in ALONE[:count]])[1])
                for count in (8, 16)
            )
        per_token = max(1, (large - small) // 8)
        return per_token, max(0, small - 8 * per_token)


def _bytes_of(value: object, seen: set[int] | None = None) -> int:
    """The bytes of the tensors in a cache."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else None
    if inner is None:
        inner = vars(value).values() if type(value).__module__.startswith("transformers.") else ()
    return sum(_bytes_of(each, seen) for each in inner)


@dataclass(eq=False, slots=True)
class _Sequence:
    """A request with a cache: the first `computed` of its tokens are in it."""

    request: BatchRequest
    limit: int
    """Tokens at which it ends, prompt included."""
    cache: Cache = None
    computed: int = 0
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def ids(self) -> IntArray:
        return self.request.ids


@dataclass(frozen=True, slots=True)
class _Kept:
    """The cache of a session between its requests, and the tokens in it."""

    ids: IntArray
    cache: Cache


class TurnScheduler:
    """Take requests and complete them, one step at a time; see `Batcher`, whose place it takes."""

    def __init__(self, model: OwnCacheModel, limits: BatchLimits) -> None:
        self.limits, self.version = limits, 0
        self._model = model
        self._waiting: OrderedDict[BatchRequest, None] = OrderedDict()
        self._running: list[_Sequence] = []
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._alone = model.dtype == torch.float32  # others round too much

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._waiting or self._running)

    def requests(self) -> list[BatchRequest]:
        """All requests that are not answered."""
        return [*self._waiting, *(each.request for each in self._running)]

    def submit(self, request: BatchRequest) -> None:
        """Queue a request; a later `step` answers it."""
        self._waiting[request] = None

    def cancel(self, request: BatchRequest) -> None:
        """Drop a request in any state. No answer is delivered."""
        self._waiting.pop(request, None)
        self._running = [each for each in self._running if each.request is not request]

    def release(self, session: str) -> None:
        """Drop the state kept for a session; a running request of the session continues."""
        self._kept.pop(session, None)

    def drop_states(self, version: int) -> None:
        """Invalidate the caches after a change of weights; running requests recompute theirs."""
        self.version = version
        self._kept.clear()
        for each in self._running:
            each.cache, each.computed = None, 0

    def abort(self) -> None:
        """Answer everything at once, with the tokens sampled so far and finish "abort"."""
        running, self._running = self._running, []
        for each in [*running, *(_Sequence(request, 0) for request in self._waiting)]:
            each.request.deliver(_completion(each, "abort"))
        self._waiting.clear()

    def step(self) -> None:
        """Admit what fits, and compute one token, or a part of its prompt, for every sequence."""
        self._admit()
        ready: list[tuple[_Sequence, Tensor]] = []
        room = self.limits.prefill_chunk
        for each in self._running:
            pending = len(each.ids) - each.computed
            twin = None if each.computed else next((t for t in ready if np.array_equal(t[0].ids, each.ids)), None)
            if twin is not None:  # the episodes of a group begin with the same prompt
                each.cache, each.computed = copy.deepcopy(twin[0].cache), twin[0].computed
                if not each.logprobs:  # else its cache was dropped on the way
                    each.request.cached_tokens = len(each.ids) - 1
                ready.append((each, twin[1]))
            elif pending == 1 or room > 0:
                room -= pending if pending > 1 else 0
                if (logits_V := self._advance(each, pending)) is not None:
                    ready.append((each, logits_V))
        if ready:
            self._draw([each for each, _ in ready], torch.stack([logits_V for _, logits_V in ready]))

    def _advance(self, each: _Sequence, pending: int) -> Tensor | None:
        """Compute what is pending, or a part of it; returns logits (V,) if that is all."""
        stop = len(each.ids)
        if self._model.chunks:
            stop = min(stop, each.computed + self.limits.prefill_chunk)
        elif pending > 1:
            each.cache, each.computed = None, 0
        logits_V, each.cache = self._model.extend(each.cache, each.ids[each.computed : stop])
        each.computed = stop
        return logits_V if stop == len(each.ids) else None

    def _draw(self, ready: Sequence[_Sequence], logits_BV: Tensor) -> None:
        """Sample the next token of each of these sequences."""
        draw = _draw_of(ready)
        options = {row: each.request.options for row, each in enumerate(ready)}
        by_row = {row: each for row, each in options.items() if each is not None}

        def alone(row: int) -> Tensor:
            return self._model.alone(ready[row].ids)

        ids_B, logprobs_B, failed = sample_constrained(
            logits_BV, draw, by_row, alone if self._alone else None, lambda ids: np.ones(len(ids), dtype=np.bool_)
        )
        for row, error in failed.items():
            del by_row[row]
            self._end(
                ready[row], EngineError(f"the request's mask of tokens failed: {type(error).__name__}: {error}")
            )
        tell(by_row, logits_BV, draw.temperature, ids_B, logprobs_B, self.version)
        for row, (id, logprob) in enumerate(zip(ids_B.tolist(), logprobs_B.tolist(), strict=True)):
            if row in failed:
                continue
            each = ready[row]
            if not np.isfinite(logprob):
                self._end(each, EngineError(f"the model's logits are not finite (policy version {self.version})"))
                continue
            each.request.ids = np.append(each.ids, id)
            each.logprobs.append(logprob)
            each.versions.append(self.version)
            if id in each.request.sampling.stop_ids:
                self._end(each, "stop")
            elif len(each.ids) >= each.limit:
                self._end(each, "length")

    def _end(self, each: _Sequence, how: Literal["stop", "length"] | EngineError) -> None:
        """Answer a running request, and keep its cache for its session."""
        self._running.remove(each)
        if isinstance(how, EngineError):
            each.request.deliver(how)
            return
        if each.request.session is not None:
            self._kept[each.request.session] = _Kept(each.ids[: each.computed], each.cache)
            self._kept.move_to_end(each.request.session)
        each.request.deliver(_completion(each, how))

    def _admit(self) -> None:
        """Start waiting requests as long as the memory of their caches, at full length, is there."""
        for request in list(self._waiting):
            limit = min(request.prompt + request.sampling.max_tokens, self.limits.max_context)
            each = _Sequence(request, limit)
            wanted = self._reserved(limit)
            used = sum(self._reserved(other.limit) for other in self._running)
            if self._running and (used + wanted > self._budget or len(self._running) >= self.limits.max_slots):
                return
            kept = self._kept.pop(request.session, None) if request.session is not None else None
            if kept is not None and self._continues(kept, request.ids):
                each.cache, each.computed = kept.cache, len(kept.ids)
            request.cached_tokens = each.computed
            self._running.append(each)
            while self._kept and (
                used + wanted + self._held() > self._budget
                or len(self._running) + len(self._kept) > self.limits.max_slots
            ):
                self._kept.popitem(last=False)
            del self._waiting[request]

    def _continues(self, kept: _Kept, ids: IntArray) -> bool:
        length = len(kept.ids)
        if not (self._model.chunks or length == len(ids) - 1):
            return False
        return length < len(ids) and np.array_equal(kept.ids, ids[:length])

    @property
    def _budget(self) -> int:
        return self._reserved(self.limits.budget_tokens)

    def _reserved(self, tokens: int) -> int:
        return self._model.bytes_per_sequence + tokens * self._model.bytes_per_token

    def _held(self) -> int:
        return sum(self._reserved(len(kept.ids)) for kept in self._kept.values())


def _draw_of(ready: Sequence[_Sequence]) -> Draw:
    sampling = [each.request.sampling for each in ready]
    seeds = np.array([each.request.seed for each in ready], dtype=np.uint64)
    positions = np.array([len(each.ids) - each.request.prompt for each in ready], dtype=np.int64)
    return Draw(
        temperature=np.array([each.temperature for each in sampling], dtype=np.float64),
        top_p=np.array([each.top_p for each in sampling], dtype=np.float64),
        top_k=np.array([each.top_k for each in sampling], dtype=np.int64),
        min_p=np.array([each.min_p for each in sampling], dtype=np.float64),
        uniform=uniforms(seeds, positions),
    )


def _completion(each: _Sequence, finish: Literal["stop", "length", "abort"]) -> Completion:
    return Completion(
        ids=tuple(each.ids[each.request.prompt :].tolist()),
        logprobs=tuple(each.logprobs),
        versions=tuple(each.versions),
        finish=finish,
        cached_tokens=each.request.cached_tokens or 0,
        routes=None,
    )
