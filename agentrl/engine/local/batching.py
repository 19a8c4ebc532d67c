"""Continuous batching: choose the tokens of the next forward pass and manage the slots.

Everything here runs on the engine's thread; `LocalEngine` is its asyncio interface.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.engine.base import GenerateOptions
from agentrl.engine.local.cache import CachedAttention, CacheShape, CacheSpan, KVCache
from agentrl.engine.local.constrained import sample_constrained, tell
from agentrl.engine.local.decode import Capture, Forward, ReplayedDecode
from agentrl.engine.local.drafts import CONTEXT, MOST, Drafts
from agentrl.engine.local.forward_rows import ForwardRows
from agentrl.engine.local.sampler import IntArray
from agentrl.engine.local.slots import BatchRequest, SlotTable, Twins
from agentrl.errors import EngineError
from agentrl.types import Completion

WORTH_COPYING = 8
"""Shorter common prefixes are recomputed, which is cheaper than copying them through all layers."""
WORTH_WAITING = 16
"""Minimum extra length of a prefix being computed by another request for it to be worth waiting for."""
WORTH_SHARING = 2048
"""On a CPU, keys and values of a common prefix are read once for all sequences that decode if that saves reading
so many tokens: below it, the additional operations take as long."""
WORTH_DRAFTING = 0.25
"""A step takes one more draft per sequence while at least this share of them has one: attention pads the rest."""
DRAFT_SCORES = 1 << 20
"""Maximum number of attention scores of a head in a step with drafts."""
DRAFT_LOGITS = 1 << 26
"""Maximum number of logits in a step with drafts: 256 MiB in float32."""
FIRST_SLOTS = 16
CAPACITY_STEP = 128
"""Slots grow in steps of this many tokens."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of the scheduler.

    `budget_tokens` is the cache capacity over all slots. Idle slots between decoding ones are read as well: always
    up to `gaps` of them, plus `gaps_per_running` for each decoding slot.
    """

    max_slots: int
    max_context: int
    budget_tokens: int
    prefill_chunk: int
    gaps: int = 16
    gaps_per_running: float = 2.0


@dataclass(frozen=True, slots=True)
class DecodeRecording:
    """Decode in steps that can be recorded, and record them with `capture` (None: compute without recording)."""

    vocabulary: int
    capture: Capture | None


class Batcher:
    """Take requests and complete them, one step at a time."""

    def __init__(
        self,
        forward: Forward,
        shape: CacheShape,
        limits: BatchLimits,
        recording: DecodeRecording | None = None,
        alone: Callable[[IntArray], Tensor] | None = None,
    ) -> None:
        """`alone` computes the logits (V,) after some tokens without a batch or cache. With it, sampled tokens do
        not depend on the rounding of the batch."""
        self.forward = forward
        self.alone = alone
        self.limits = limits
        self.version = 0
        capacity = min(CAPACITY_STEP, limits.max_context)
        # Recordings become invalid when the cache is moved, so it has all its slots from the start and doubles in
        # length.
        first = FIRST_SLOTS if recording is None else limits.max_slots
        slots = max(1, min(first, limits.max_slots, limits.budget_tokens // capacity))
        self.cache = KVCache(shape, slots, capacity, spare=recording is not None)
        self.replayed = (
            None
            if recording is None
            else ReplayedDecode(forward, self.cache, recording.vocabulary, recording.capture)
        )
        drafts = shape.device.type == "cpu" and recording is None and limits.max_context > CONTEXT
        self.drafts = Drafts() if drafts else None
        # Rows of recorded steps are fixed, and on other devices nothing was measured.
        self._shares = shape.device.type == "cpu" and recording is None
        self._vocabulary = 1  # until the first logits
        self.table = SlotTable(slots, capacity)
        self.waiting: OrderedDict[BatchRequest, None] = OrderedDict()
        self.sessions: dict[str, int] = {}
        self._stamps = itertools.count(1)

    # -- what the engine asks for ------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self.waiting) or bool(self.table.active.any())

    def requests(self) -> list[BatchRequest]:
        """All requests that are not answered."""
        return [*self.waiting, *(request for request in self.table.request if request is not None)]

    def submit(self, request: BatchRequest) -> None:
        """Queue a request; a later `step` answers it."""
        self.waiting[request] = None

    def cancel(self, request: BatchRequest) -> None:
        """Drop a request in any state and free its slot at once. No answer is delivered."""
        self.waiting.pop(request, None)
        if request.slot is not None:
            self._leave(request.slot)

    def release(self, session: str) -> None:
        """Drop the state kept for a session; a running request of the session continues."""
        slot = self.sessions.pop(session, None)
        if slot is not None:
            self.table.session[slot] = None

    def drop_states(self, version: int) -> None:
        """Invalidate the cache after a change of weights; running requests recompute their keys and values.

        Tokens that were sampled keep the routes that they were sampled with.
        """
        for slot in np.flatnonzero(self.table.active):
            self._keep_routes(int(slot))
        self.version = version
        self.table.computed[:] = 0
        for slot in np.flatnonzero(~self.table.active):
            self._forget(int(slot))

    def abort(self) -> None:
        """Answer everything at once, with the tokens sampled so far and finish "abort"."""
        for slot in np.flatnonzero(self.table.active):
            self.waiting[self._leave(int(slot))] = None
        for request in self.waiting:
            request.deliver(self._completion(request, "abort"))
        self.waiting.clear()

    def step(self) -> None:
        """Admit what fits, run one forward pass, and sample one token for every sequence that is ready."""
        self._admit()
        self._make_room()
        self._close_gaps()
        table = self.table
        active = np.flatnonzero(table.active)
        if not len(active):
            return
        pending = table.known[active] - table.computed[active]
        decode = active[pending == 1]
        twins = self._twins(decode)
        widths = 1 + self._draft(decode, twins)
        rows = ForwardRows(table, decode, twins, widths, self._spans(active[pending > 1], int(widths.sum())))
        logits = self._run(rows)
        if len(rows.slots):
            shared = len(logits) < len(rows.slots)
            self._draw(rows.slots, rows.ahead, logits[torch.from_numpy(rows.source)] if shared else logits)

    # -- one forward pass --------------------------------------------------------------------------------------

    def _twins(self, slots: IntArray) -> Twins:
        """Return which slots share rows."""
        if len(slots) > 1 and self._shares:
            return self.table.twins(slots)
        return Twins(np.arange(len(slots)), np.arange(len(slots)))

    def _spans(self, slots: IntArray, offset: int) -> list[CacheSpan]:
        """Return prefill chunks, first come first served."""
        twins = self._twins(slots)
        spans, room = list[CacheSpan](), self.limits.prefill_chunk
        for kind in np.argsort(self.table.stamp[slots[twins.first]]).tolist():
            slot, *others = slots[twins.kind == kind].tolist()
            start = int(self.table.computed[slot])
            span = CacheSpan(slot, start, min(int(self.table.known[slot]) - start, room), offset, tuple(others))
            spans.append(span)
            offset, room = offset + span.count, room - span.count
            if room <= 0:
                break
        return spans

    def _draft(self, decode: IntArray, twins: Twins) -> IntArray:
        """Write drafts behind the known tokens of these slots; returns how many each kind got."""
        table = self.table
        first = decode[twins.first]
        if self.drafts is None or not len(decode):
            return np.zeros(len(first), dtype=np.int64)
        known = table.known[first]
        room = np.full(len(first), MOST)
        np.minimum.at(room, twins.kind, np.where(table.special[decode], 0, table.room(decode)))
        room = np.where(known < CONTEXT, 0, room)
        room = np.minimum(room, DRAFT_SCORES // ((int(decode[-1]) + 1) * int(known.max())) - 1)
        room = np.minimum(room, DRAFT_LOGITS // (self._vocabulary * len(decode)) - 1)
        contexts = table.before(first, np.maximum(known, CONTEXT), CONTEXT)
        guesses = self.drafts.guess(contexts, room, max(1, int(WORTH_DRAFTING * len(first))))
        rows, columns = np.nonzero(guesses[twins.kind] >= 0)
        table.tokens[decode[rows], table.known[decode[rows]] + columns] = guesses[twins.kind[rows], columns]
        return np.asarray((guesses >= 0).sum(1))

    def _run(self, rows: ForwardRows) -> Tensor:
        """Compute the logits of the rows."""
        table, device = self.table, self.cache.shape.device
        if self.replayed is not None and not rows.spans:
            positions = table.computed[rows.decode]
            logits = self.replayed(rows.decode, table.tokens[rows.decode, positions], positions)
            rows.advance(table)
            return logits
        slots, positions = rows.computed(table)
        slots_N = torch.from_numpy(slots).to(device)
        positions_N = torch.from_numpy(positions).to(device)
        prefix = table.shared(rows.first) if device.type == "cpu" else 0
        prefix = prefix if prefix * len(rows.first) >= WORTH_SHARING else 0
        widths = rows.widths.tolist()
        plan = CachedAttention(self.cache, slots_N, positions_N, widths, rows.spans, prefix, rows.copies())
        ids_N = torch.from_numpy(table.tokens[slots, positions]).to(device)
        keep_k = torch.tensor(rows.kept(), dtype=torch.long, device=device)
        logits = self.forward(ids_N, positions_N, plan, keep_k)
        rows.advance(table)
        return logits

    def _draw(self, slots: IntArray, ahead: IntArray, logits: Tensor) -> None:
        """Sample a token for each row of the logits: that of a slot which is `ahead` of its next one."""
        table = self.table
        self._vocabulary = logits.shape[1]
        if ahead.any() and not torch.isfinite(logits.amax(-1)).all():
            self.drafts = None  # maybe because of one, even in rows before it: repeat without drafts
            self._clean()
            return
        special = np.flatnonzero(table.special[slots])
        by_row = {int(row): self._options(int(slots[row])) for row in special}
        alone = None if self.alone is None else partial(self._alone, slots, ahead)
        kept_of = partial(table.kept, slots, ahead)
        ids_N, logprobs_N, failed = sample_constrained(logits, table.draw(slots, ahead), by_row, alone, kept_of)
        finite = torch.isfinite(logprobs_N).cpu().numpy()
        ids, logprobs = ids_N.cpu().numpy(), logprobs_N.cpu().numpy()
        kept = kept_of(ids)
        finished = self._append(slots[kept], ahead[kept], ids[kept], logprobs[kept])
        for row, error in failed.items():
            del by_row[row]
            request = self._leave(int(slots[row]))
            request.deliver(EngineError(f"the request's mask of tokens failed: {type(error).__name__}: {error}"))
        tell(by_row, logits, table.temperature[slots], ids_N, logprobs_N, self.version)
        if not finite.all():
            for slot in np.unique(slots[~finite]).tolist():
                if not table.active[slot]:
                    continue
                request = self._leave(slot)
                request.deliver(EngineError(f"the model's logits are not finite (policy version {self.version})"))
            self._clean()
        for slot in finished.tolist():
            if not table.active[slot]:
                continue
            request = self._leave(slot)
            stopped = int(request.ids[-1]) in request.sampling.stop_ids
            request.deliver(self._completion(request, "stop" if stopped else "length"))

    def _append(self, slots: IntArray, ahead: IntArray, ids: IntArray, logprobs: NDArray[np.float32]) -> IntArray:
        """Add sampled tokens, and learn from them what to draft; returns the slots that are now finished."""
        table = self.table
        positions = table.known[slots] + ahead
        finished = table.append(slots, ahead, ids, logprobs, self.version)
        table.computed[slots[ahead > 0]] = positions[ahead > 0]  # the drafts before a slot's last token
        if self.drafts is not None:
            known = positions >= CONTEXT
            self.drafts.learn(table.before(slots[known], positions[known], CONTEXT), ids[known])
        return finished

    def _alone(self, slots: IntArray, ahead: IntArray, row: int) -> Tensor:
        assert self.alone is not None
        slot = int(slots[row])
        return self.alone(self.table.tokens[slot, : self.table.known[slot] + ahead[row]])

    def _options(self, slot: int) -> GenerateOptions:
        request = self.table.request[slot]
        assert request is not None
        assert request.options is not None
        return request.options

    def _clean(self) -> None:
        """Remove non-finite values from the cache, where they would meet a zero weight at masked positions."""
        self.cache.zero()
        self.drop_states(self.version)

    @staticmethod
    def _completion(request: BatchRequest, finish: Literal["stop", "length", "abort"]) -> Completion:
        return Completion(
            ids=tuple(request.ids[request.prompt :].tolist()),
            logprobs=tuple(request.logprobs.tolist()),
            versions=tuple(request.versions.tolist()),
            finish=finish,
            cached_tokens=request.cached_tokens or 0,
            routes=request.routes,
        )

    # -- slots -------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        for request in list(self.waiting):
            leader = request.leader
            if (
                leader is not None
                and leader.slot is not None
                and self.table.computed[leader.slot] < request.shared
            ):
                continue
            if request.ids.size + 1 > self.table.capacity and not self._grow(request.ids.size + 1):
                return
            if not self._place(request) and request.leader is None:
                return

    def _place(self, request: BatchRequest) -> bool:
        """Give the request a slot with as much of its prompt as is already computed; False if it has to wait.

        It waits for a free slot or, if `request.leader` is set, for a prefix that is being computed. If another
        request is computing the same prompt, they become twins at once.
        """
        table, ids, slot = self.table, request.ids, self._own_slot(request)
        if slot is not None and table.extends(slot, ids):
            reuse = min(int(table.computed[slot]), len(ids) - 1)
            self._occupy(request, slot, reuse, reuse)
            return True
        common = table.common(ids)
        usable = np.minimum(np.minimum(common, len(ids) - 1), table.computed)
        running = np.where(table.active, common, 0)
        source, coming = int(usable.argmax()), int(running.argmax())
        shared = min(int(running[coming]), len(ids) - 1)
        wait = shared >= usable[source] + WORTH_WAITING
        twin = wait and self._shares and common[coming] == len(ids) == table.known[coming]
        if wait and not twin:
            request.leader, request.shared = table.request[coming], shared
            return False
        slot = self._free_slot() if slot is None else slot
        if slot is None:
            request.leader = None
            return False
        reuse, copied = int(usable[slot]) if slot < len(usable) else 0, int(usable[coming if twin else source])
        if twin or copied >= reuse + WORTH_COPYING:
            self.cache.copy(coming if twin else source, slot, copied)
            reuse = copied
        self._occupy(request, slot, reuse, len(ids) - 1 if twin else reuse)
        return True

    def _occupy(self, request: BatchRequest, slot: int, computed: int, cached: int) -> None:
        """Give a waiting request the slot, whose first `computed` tokens are right; it did not need to compute
        `cached` of them itself."""
        request.leader = None
        self._forget(slot)
        limit = min(request.prompt + request.sampling.max_tokens, self.limits.max_context)
        self.table.occupy(slot, request, computed=computed, limit=limit, stamp=next(self._stamps))
        if request.cached_tokens is None:
            request.cached_tokens = cached
        if request.session is not None:
            self._keep(request.session, slot)
        del self.waiting[request]

    def _own_slot(self, request: BatchRequest) -> int | None:
        """Return the idle slot kept for the request's session."""
        slot = None if request.session is None else self.sessions.get(request.session)
        return None if slot is None or self.table.active[slot] else slot

    def _keep(self, session: str, slot: int) -> None:
        """Associate the slot with this session."""
        before = self.sessions.get(session)
        if before is not None and before != slot:
            self.table.session[before] = None
        self.sessions[session] = slot

    def _free_slot(self) -> int | None:
        """Return an idle slot: one without a session, else a new one, else that of the longest-idle session."""
        table = self.table
        idle = np.flatnonzero(~table.active)
        unkept = [slot for slot in idle.tolist() if table.session[slot] is None]
        if unkept:
            return int(unkept[0])
        more = min(2 * table.slots, self.limits.max_slots, self.limits.budget_tokens // table.capacity)
        if more > table.slots:
            first = table.slots
            self._resize(range(first), more, table.capacity)
            return first
        if len(idle):
            return int(idle[table.stamp[idle].argmin()])
        return None

    def _leave(self, slot: int) -> BatchRequest:
        self._keep_routes(slot)
        self.table.stamp[slot] = next(self._stamps)
        return self.table.vacate(slot)

    def _keep_routes(self, slot: int) -> None:
        """Give a request the routes that its tokens were sampled with, before they can change in the cache."""
        table, request = self.table, self.table.request[slot]
        if self.cache.routes is None or request is None or table.known[slot] == table.prompt[slot]:
            return
        done, computed = 0 if request.routed is None else len(request.routed), int(table.computed[slot])
        if computed > done:
            new = self.cache.routes[slot, done:computed].cpu().numpy()
            request.routed = new.copy() if request.routed is None else np.concatenate([request.routed, new])

    def _forget(self, slot: int) -> None:
        session = self.table.session[slot]
        if session is not None:
            del self.sessions[session]
        self.table.forget(slot)

    # -- memory ------------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Make room for one more token per running sequence; preempt the youngest if memory is insufficient."""
        table = self.table
        while table.active.any():
            longest = int(table.known[table.active].max()) + 1
            if longest <= table.capacity or self._grow(longest):
                return
            youngest = int(np.where(table.active, table.stamp, 0).argmax())
            request = self._leave(youngest)
            self.waiting[request] = None
            self.waiting.move_to_end(request, last=False)

    def _grow(self, length: int) -> bool:
        """Resize slots to at least `length` tokens; drops idle slots to stay in budget, never running ones."""
        table, limits = self.table, self.limits
        capacity = min(-(-length // CAPACITY_STEP) * CAPACITY_STEP, limits.max_context)
        if self.replayed is not None:
            doubled = min(2 * table.capacity, limits.max_context)
            capacity = max(capacity, doubled if doubled * table.slots <= limits.budget_tokens else 0)
        slots = min(table.slots, limits.budget_tokens // capacity)
        active = np.flatnonzero(table.active)
        if slots < max(len(active), 1):
            return False
        idle = np.flatnonzero(~table.active)
        idle = idle[np.argsort(-table.stamp[idle])]
        rows = np.sort(np.concatenate([active, idle])[:slots])
        self._resize(rows.tolist(), slots, capacity)
        return True

    def _resize(self, rows: Sequence[int], slots: int, capacity: int) -> None:
        lengths = self.table.computed[list(rows)].tolist()
        self.cache.rebuild(rows, lengths, slots, capacity)
        self.table.rebuild(list(rows), slots, capacity)
        if self.replayed is not None:
            self.replayed.reset()
        self._index_sessions()

    def _close_gaps(self) -> None:
        """Move running sequences to the low slots when too many idle slots are between them.

        An idle slot is often reused a moment later, when its session's tool has answered, and moving it costs more
        than reading past it for some steps: with two idle slots allowed per running one, moving took about 0.1 s
        of a rollout of 256 episodes on a CPU; with one for every four, 0.30 s of 3.3 s. On a GPU, where memory
        traffic dominates, a move is worth four steps of reading, so fewer are allowed.
        """
        table = self.table
        active = np.flatnonzero(table.active)
        count = len(active)
        allowed = max(self.limits.gaps, int(self.limits.gaps_per_running * count))
        if not count or int(active[-1]) + 1 - count <= allowed:
            return
        high = active[active >= count]
        low = np.flatnonzero(~table.active[:count])
        length = int(max(table.computed[high].max(), table.computed[low].max()))
        if length:
            self.cache.swap(low.tolist(), high.tolist(), length)
        table.swap(low.tolist(), high.tolist())
        self._index_sessions()

    def _index_sessions(self) -> None:
        self.sessions = {name: slot for slot, name in enumerate(self.table.session) if name is not None}
