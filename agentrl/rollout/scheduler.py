"""Batches of groups for the training loop; `max_staleness` selects synchronous, one-step-ahead or asynchronous.

Event-driven: a completed group wakes the waiter for a batch, and taking a batch admits new groups.
`rollout/admission.py` decides which groups may start.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from agentrl.rollout.admission import Admission, Batch, Ticket
from agentrl.rollout.group import PlaysGroups
from agentrl.types import Group


@dataclass(frozen=True, slots=True)
class Stall:
    """When a step has waited too long for an episode, and who is notified."""

    after_s: float
    tell: Callable[[str], None]


class Scheduler:
    """Plays the groups admitted by `admission` and returns them in batches; a context manager.

    Episodes continue while the learner trains an earlier batch and while the engine loads new weights; on exit,
    episodes in flight are cancelled and their envs closed.

    Args:
        groups: plays the groups.
        admission: decides which groups start and when a batch is complete.
        version: returns the policy version of the next sampled token.
        amend: final adjustment of a complete group's rewards, before anything compares them.
        stall: reports steps that wait for a long time.
    """

    def __init__(
        self,
        groups: PlaysGroups,
        admission: Admission,
        *,
        version: Callable[[], int],
        amend: Callable[[Group], Group] | None = None,
        stall: Stall | None = None,
    ) -> None:
        self.groups, self.admission = groups, admission
        self._version, self._amend, self._stall = version, amend, stall
        self._changed = asyncio.Event()
        self._tasks = asyncio.TaskGroup()
        self._running: set[asyncio.Task[None]] = set()
        self._failure: Exception | None = None

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._running:
            task.cancel()
        await self._tasks.__aexit__(None, None, None)

    async def batches(self) -> AsyncIterator[Batch]:
        """Yield the batch of each following step.

        Groups start with the engine's weights when a batch is taken or requested; groups that run while the loop
        is busy (an update, an evaluation) were admitted before.

        Raises:
            InfraError: a group could not be completed.
        """
        while not self.admission.over:
            yield await self._next()

    async def _next(self) -> Batch:
        asked = time.monotonic()
        while True:
            self._begin()
            self._changed.clear()
            if self._failure is not None:
                raise self._failure
            batch = self.admission.form()
            if batch is not None:
                break
            self._begin()  # to replace groups that were set aside
            assert self._running, "nothing is played and no batch can be formed"
            await self._wait(asked)
        self._begin()
        return replace(batch, metrics=self._metrics(time.monotonic() - asked))

    def _begin(self) -> None:
        for ticket in self.admission.admit(self._version()):
            task = self._tasks.create_task(self._play(ticket), name=ticket.name)
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _play(self, ticket: Ticket) -> None:
        try:
            group = await self.groups.play(ticket.task, ticket.place.label, ticket.place.number)
            ticket.group = self._amend(group) if self._amend else group
        except Exception as e:  # raised when the loop requests a batch: the step in flight is not lost
            self._failure = self._failure or e
        self._changed.set()

    async def _wait(self, asked: float) -> None:
        """Wait until a group is complete; periodically report the oldest pending episode."""
        if self._stall is None:
            await self._changed.wait()
            return
        after_s = self._stall.after_s
        while after_s <= time.monotonic() - asked:
            after_s *= 2
        while True:
            try:
                async with asyncio.timeout(asked + after_s - time.monotonic()):
                    await self._changed.wait()
                return
            except TimeoutError:
                self._stall.tell(self._waits_for(time.monotonic() - asked))
                after_s *= 2

    def _waits_for(self, seconds: float) -> str:
        under_way = self.admission.under_way
        oldest = next(iter(self.groups.playing.values()), "no episode: rewards per group are computed")
        return (
            f"step {self.admission.next_step} has waited for {seconds:.0f} s; "
            f"{sum(t.group is None for t in under_way)} of {len(under_way)} groups are not complete; "
            f"the oldest: {oldest}"
        )

    def _metrics(self, waited: float) -> dict[str, float]:
        oldest = next(iter(self.groups.playing.values()), None)
        complete = sum(t.group is not None for t in self.admission.under_way)
        return {
            "rollout_seconds": waited,
            "in_flight/episodes": float(len(self.groups.playing)),
            "in_flight/complete_groups": float(complete),
            "in_flight/oldest_seconds": 0.0 if oldest is None else time.monotonic() - oldest.started,
        }
