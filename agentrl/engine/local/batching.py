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
from agentrl.engine.local.drafts import CONTEXT, Drafts
from agentrl.engine.local.slots import BatchRequest, IntArray, SlotTable
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

    def abort(self, error: Exception | None = None) -> None:
        """Answer everything at once: with `error`, or with the tokens sampled so far and finish "abort"."""
        for slot in np.flatnonzero(self.table.active):
            self.waiting[self._leave(int(slot))] = None
        for request in self.waiting:
            request.deliver(error or self._completion(request, "abort"))
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
        widths = 1 + self._draft(decode)
        spans, ready = self._spans(active[pending > 1], int(widths.sum()))
        logits = self._run(decode, widths, spans, ready)
        drawing = np.concatenate([decode.repeat(widths), np.array([span.slot for span in ready], dtype=np.int64)])
        if len(drawing):
            self._draw(drawing, np.concatenate([_columns(widths), np.zeros(len(ready), dtype=np.int64)]), logits)

    # -- one forward pass --------------------------------------------------------------------------------------

    def _spans(self, slots: IntArray, offset: int) -> tuple[list[CacheSpan], list[CacheSpan]]:
        """Return prefill chunks, first come first served, and the slots whose prefill they complete."""
        spans, ready, room = [], [], self.limits.prefill_chunk
        for slot in slots[np.argsort(self.table.stamp[slots])].tolist():
            start = int(self.table.computed[slot])
            pending = int(self.table.known[slot]) - start
            span = CacheSpan(slot, start, min(pending, room), offset)
            spans.append(span)
            if span.count == pending:
                ready.append(span)
            offset, room = offset + span.count, room - span.count
            if room <= 0:
                break
        return spans, ready

    def _draft(self, decode: IntArray) -> IntArray:
        """Write drafts behind the known tokens of these slots; returns how many each got."""
        table = self.table
        if self.drafts is None or not len(decode):
            return np.zeros(len(decode), dtype=np.int64)
        known = table.known[decode]
        room = np.where(table.special[decode] | (known < CONTEXT), 0, table.room(decode))
        room = np.minimum(room, DRAFT_SCORES // ((int(decode[-1]) + 1) * int(known.max())) - 1)
        room = np.minimum(room, DRAFT_LOGITS // (self._vocabulary * len(decode)) - 1)
        contexts = table.before(decode, np.maximum(known, CONTEXT), CONTEXT)
        guesses = self.drafts.guess(contexts, room, max(1, int(WORTH_DRAFTING * len(decode))))
        rows, columns = np.nonzero(guesses >= 0)
        table.tokens[decode[rows], known[rows] + columns] = guesses[rows, columns]
        return np.bincount(rows, minlength=len(decode))

    def _run(
        self, decode: IntArray, widths: IntArray, spans: Sequence[CacheSpan], ready: Sequence[CacheSpan]
    ) -> Tensor:
        table, device = self.table, self.cache.shape.device
        if self.replayed is not None and not spans:
            positions = table.computed[decode]
            logits = self.replayed(decode, table.tokens[decode, positions], positions)
            table.computed[decode] += 1
            return logits
        slots = np.concatenate([decode.repeat(widths), *(np.full(span.count, span.slot) for span in spans)])
        positions = np.concatenate(
            [
                table.computed[decode].repeat(widths) + _columns(widths),
                *(np.arange(span.start, span.start + span.count) for span in spans),
            ]
        )
        keep = [*range(int(widths.sum())), *(span.offset + span.count - 1 for span in ready)]
        slots_N = torch.from_numpy(slots).to(device)
        positions_N = torch.from_numpy(positions).to(device)
        prefix = table.shared(decode) if device.type == "cpu" else 0
        prefix = prefix if prefix * len(decode) >= WORTH_SHARING else 0
        plan = CachedAttention(self.cache, slots_N, positions_N, widths.tolist(), spans, prefix)
        ids_N = torch.from_numpy(table.tokens[slots, positions]).to(device)
        logits = self.forward(ids_N, positions_N, plan, torch.tensor(keep, dtype=torch.long, device=device))
        table.computed[decode] += 1
        for span in spans:
            table.computed[span.slot] += span.count
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
        ids_N, logprobs_N = sample_constrained(logits, table.draw(slots, ahead), by_row, alone)
        finite = torch.isfinite(logprobs_N).cpu().numpy()
        ids, logprobs = ids_N.cpu().numpy(), logprobs_N.cpu().numpy()
        kept = table.kept(slots, ahead, ids)
        finished = self._append(slots[kept], ahead[kept], ids[kept], logprobs[kept])
        tell(by_row, logits, table.temperature[slots], ids_N, logprobs_N, self.version)
        for slot in np.unique(slots[~finite]).tolist():
            request = self._leave(slot)
            request.deliver(EngineError(f"the model's logits are not finite (policy version {self.version})"))
        if not finite.all():
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

        It waits for a free slot or, if `request.leader` is set, for a prefix that is being computed.
        """
        table, ids, session = self.table, request.ids, request.session
        slot = self._own_slot(request)
        if slot is not None and table.extends(slot, ids):
            reuse = min(int(table.computed[slot]), len(ids) - 1)
        else:
            common = np.minimum(table.common(ids), len(ids) - 1)
            usable = np.minimum(common, table.computed)
            running = np.where(table.active, common, 0)
            source, coming = int(usable.argmax()), int(running.argmax())
            if running[coming] >= usable[source] + WORTH_WAITING:
                request.leader, request.shared = table.request[coming], int(running[coming])
                return False
            slot = self._free_slot() if slot is None else slot
            if slot is None:
                request.leader = None
                return False
            reuse, copied = int(usable[slot]) if slot < len(usable) else 0, int(usable[source])
            if copied >= reuse + WORTH_COPYING:
                self.cache.copy(source, slot, copied)
                reuse = copied
        request.leader = None
        self._forget(slot)
        limit = min(request.prompt + request.sampling.max_tokens, self.limits.max_context)
        table.occupy(slot, request, computed=reuse, limit=limit, stamp=next(self._stamps))
        if request.cached_tokens is None:
            request.cached_tokens = reuse
        if session is not None:
            self._keep(session, slot)
        del self.waiting[request]
        return True

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


def _columns(widths: IntArray) -> IntArray:
    """Return 0 to w - 1 for each width w, end to end."""
    ends = np.cumsum(widths)
    return np.arange(int(widths.sum())) - (ends - widths).repeat(widths)
