"""Batches of groups for the loop: synchronous, one step ahead and asynchronous by `max_staleness` alone.

Event-driven: a group that completes wakes whoever waits for a batch, and a batch that is taken admits new groups.
What may run when is decided in `rollout/admission.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from agentrl.rollout.admission import Admission, Batch, Ticket
from agentrl.rollout.group import GroupPlayer
from agentrl.types import Group


@dataclass(frozen=True, slots=True)
class Stall:
    """When a step has waited too long for an episode, and who is notified."""

    after_s: float
    tell: Callable[[str], None]


class Scheduler:
    """Plays groups as `admission` lets them begin and hands them over as batches; a context manager.

    Episodes go on while the learner works on an earlier batch and while the engine takes new weights; on leaving
    the context those still in flight are cancelled and their envs closed.

    Args:
        groups: plays the groups.
        admission: says which, and when a batch is complete.
        version: the policy version that the next token is drawn with.
        amend: has the last word on the rewards of a group that is about to be trained.
        stall: tells of steps that wait for long.
    """

    def __init__(
        self,
        groups: GroupPlayer,
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
        """The batch of each step to come.

        Groups begin with the weights that the engine has when a batch is taken or asked for; what is played while
        the loop is busy with something else (an update, an evaluation) was admitted before.

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
            self._begin()  # in place of groups that were put aside
            assert self._running, "nothing is played and no batch can be formed"
            await self._wait(asked)
        self._begin()
        groups = tuple(map(self._amend, batch.groups)) if self._amend else batch.groups
        return replace(batch, groups=groups, metrics=self._metrics(time.monotonic() - asked))

    def _begin(self) -> None:
        for ticket in self.admission.admit(self._version()):
            task = self._tasks.create_task(self._play(ticket), name=ticket.name)
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _play(self, ticket: Ticket) -> None:
        try:
            ticket.group = await self.groups.play(ticket.task, ticket.place.label, ticket.place.number)
        except Exception as e:  # raised where the loop asks for a batch: the step in flight is not lost
            self._failure = self._failure or e
        self._changed.set()

    async def _wait(self, asked: float) -> None:
        """Until a group is complete; now and then say which episode is waited for."""
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
