"""Admission of groups: no group is staler than `max_staleness` when it trains, and none is dropped.

Plain bookkeeping without a clock; `rollout/scheduler.py` plays the admitted groups. For the reasoning behind the
rule, see docs/design/staleness-bound.md.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from agentrl.algo.entries import SUM, Signal
from agentrl.env.mixture import TaskSource
from agentrl.rollout.episode_metrics import group_has_signal
from agentrl.rollout.group_filter import GroupFilter
from agentrl.types import Group, Task


@dataclass(frozen=True, slots=True)
class Place:
    """A group to be trained: its task and its name.

    `order` is its place among all groups; `label` and `number` name its episodes and seed their sampling;
    `position` is the task's position in the sampler.
    """

    order: int
    label: str
    number: int
    position: int


@dataclass(slots=True, eq=False)
class Ticket:
    """A group in flight, or complete but not yet trained. `version` is the version of its initial weights."""

    place: Place
    task: Task
    version: int
    group: Group | None = None
    trains: bool | None = None
    """Whether its group may train; None until that has been asked."""
    refused: bool = False
    """Whether the filter says that it may not."""

    @property
    def name(self) -> str:
        """Prefix of its episodes' names."""
        return f"{self.place.label}/g{self.place.number}"


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one step, in the order of their tasks.

    Groups in `aside` were also complete, but all their episodes scored the same, or a filter refused them, so
    other groups replaced them. The filter also refused `refused` of `groups`, which train because the limit of
    replacements was reached. `metrics` describe the wait for the batch and the groups in flight at its completion.
    """

    step: int
    groups: tuple[Group, ...]
    aside: tuple[Group, ...] = ()
    refused: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


class Admission:
    """Admits groups and forms the batch of each step.

    Step N (counted from 1) trains weights of version N - 1, so a group that started with version v has a staleness
    of N - 1 - v. A group's deadline is the last step at which this is at most `max_staleness`. Invariant: for
    every future step N, at most (N - next_step + 1) * groups_per_step groups in flight have a deadline up to N.
    This suffices to train every group in time, and both `admit` and `form` maintain it.
    """

    def __init__(
        self,
        sampler: TaskSource,
        *,
        groups_per_step: int,
        last_step: int,
        first_step: int = 1,
        max_staleness: int = 0,
        groups_ahead: int | None = None,
        refill: int | Mapping[str, int] = 0,
        signals: Mapping[str, Signal] = MappingProxyType({}),
        group_filter: GroupFilter | None = None,
        label: str = "s{step}",
    ) -> None:
        """Start before step `first_step`.

        Args:
            sampler: samples the tasks and records the results of their groups.
            groups_per_step: number of groups per step.
            last_step: no group is admitted that would train after this step.
            first_step: the next step.
            max_staleness: maximum age of a group's initial weights in steps; 0 is synchronous.
            groups_ahead: maximum groups in flight beyond those of the next step; by default as many as the bound
                allows.
            refill: maximum groups per step that are replaced because all their episodes scored the same, or the
                filter refuses them; or that number for each env by name.
            signals: by env, what of the rewards has to differ; else their sums.
            group_filter: returns whether a complete group may train; called once for each.
            label: name prefix for the groups of a step.
        """
        self.sampler, self.next_step, self.last_step = sampler, first_step, last_step
        self.groups_per_step, self.max_staleness = groups_per_step, max_staleness
        self.refill = refill if isinstance(refill, Mapping) else {"": refill}
        self.groups_ahead = max_staleness * groups_per_step if groups_ahead is None else groups_ahead
        self._label, self._signals, self._filter = label, signals, group_filter
        self._planned = (first_step - 1) * groups_per_step
        self._following = (first_step, 0)  # the step and the number that name the next group
        self._pending: deque[Place] = deque()  # admitted before new ones
        self._under_way: list[Ticket] = []
        self._aside: list[Group] = []
        self._replaced: list[str] = []  # the allowance of each group that was replaced in this step
        self._reported = set[str]()  # names of groups in flight whose results the sampler has

    @property
    def over(self) -> bool:
        """Whether the last step's batch has been formed."""
        return self.next_step > self.last_step

    @property
    def under_way(self) -> Sequence[Ticket]:
        """Groups admitted but not yet trained, in order of admission."""
        return self._under_way

    def admit(self, version: int) -> list[Ticket]:
        """Admit as many groups as may start now, with weights of this version."""
        # The deadline of a new group is step version + 1 + max_staleness, the latest of all.
        in_time = (version + self.max_staleness - self.next_step + 2) * self.groups_per_step
        wanted = (self.last_step - self.next_step + 1) * self.groups_per_step
        room = min(in_time, self.groups_per_step + self.groups_ahead, wanted) - len(self._under_way)
        tickets = [self._ticket(version) for _ in range(room)]
        self._under_way += tickets
        return tickets

    def form(self) -> Batch | None:
        """The next step's batch if it is complete: the oldest complete groups, including all that are due.

        Groups that may not train are set aside up to `refill`; replacements must then be admitted, and None is
        returned unless enough groups are already complete.
        """
        while (chosen := self._choose()) is not None:
            self._report(chosen)
            refused = self._replaceable([t for t in chosen if not self._may_train(t)])
            if refused:
                self._put_aside(refused)
                continue
            for ticket in chosen:
                self._under_way.remove(ticket)
            left = sum(ticket.refused for ticket in chosen)
            batch = Batch(self.next_step, tuple(t.group for t in chosen if t.group), tuple(self._aside), left)
            self.next_step += 1
            self._reported -= {ticket.name for ticket in chosen}
            self._aside, self._replaced = [], []
            return batch
        return None

    def state(self) -> dict[str, Any]:
        """The state needed to resume, as JSON data; groups in flight are replayed after a resume."""
        places = sorted([*self._pending, *(t.place for t in self._under_way)], key=lambda p: p.order)
        again = [[p.order, p.label, p.number, p.position] for p in places]
        return self.sampler.state() | {
            "planned": self._planned,
            "named": self._following,
            "again": again,
            "replaced": self._replaced,
            "reported": sorted(self._reported),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved `state`. Raises KeyError, TypeError or ValueError if it is invalid."""
        self.sampler.restore(state)
        self._planned = int(state.get("planned", self._planned))
        again = [(int(o), str(label), int(n), int(p)) for o, label, n, p in state.get("again", ())]
        self._pending = deque(Place(*place) for place in again)
        # Exactly this many groups were planned, unless a resumed run has another number of groups per step.
        self._planned = max(self._planned, (self.next_step - 1) * self.groups_per_step + len(again))
        steps, number = divmod(self._planned, self.groups_per_step)
        step, number = state.get("named", (steps + 1, number))
        self._following = (int(step), int(number))
        self._replaced = [str(env) for env in state.get("replaced", ())]
        self._reported = {str(name) for name in state.get("reported", ())}

    def _ticket(self, version: int) -> Ticket:
        if self._pending:
            place = self._pending.popleft()
            try:
                task = self.sampler.task(place.position)
            except IndexError:  # a resumed run has fewer tasks
                position, task = self.sampler.replacement(place.position)
                place = replace(place, position=position)
            return Ticket(place, task, version)
        step, number = self._following
        ((position, task),) = self.sampler.take(1)
        place = Place(self._planned, self._named(step), number, position)
        self._planned += 1
        self._following = (step, number + 1) if number + 1 < self.groups_per_step else (step + 1, 0)
        return Ticket(place, task, version)

    def _named(self, step: int) -> str:
        return self._label.replace("{step}", str(step))

    def _choose(self) -> list[Ticket] | None:
        """The tickets of the next batch by order, or None if it is not complete."""
        complete = [t for t in self._under_way if t.group is not None]
        chosen = sorted(complete, key=lambda t: (t.version, t.place.order))[: self.groups_per_step]
        if len(chosen) < self.groups_per_step:
            return None
        taken = {id(ticket) for ticket in chosen}
        deadlines = sorted(t.version + 1 + self.max_staleness for t in self._under_way if id(t) not in taken)
        for count, deadline in enumerate(deadlines, 1):
            if count > (deadline - self.next_step) * self.groups_per_step:
                return None
        return sorted(chosen, key=lambda t: t.place.order)

    def _may_train(self, ticket: Ticket) -> bool:
        """Whether its group has signal, and the filter takes it; True if it could not be replaced anyway."""
        group = ticket.group
        if group is None or not self.refill.get(_allowance(ticket.task, self.refill)):
            return True
        if ticket.trains is None:
            signal = self._signals.get(group.task.env, SUM)
            has_signal = group_has_signal(group, signal)
            ticket.refused = has_signal and self._filter is not None and not self._filter(group)
            ticket.trains = has_signal and not ticket.refused
        return ticket.trains

    def _report(self, chosen: Sequence[Ticket]) -> None:
        for ticket in chosen:
            if ticket.name not in self._reported and ticket.group is not None:
                self._reported.add(ticket.name)
                if self.sampler.rated:
                    self.sampler.report(ticket.place.position, ticket.group)

    def _replaceable(self, refused: Sequence[Ticket]) -> list[Ticket]:
        """Those of these groups that the step may still replace, in their order."""
        left = Counter(self.refill)
        left.subtract(self._replaced)
        found = []
        for ticket in refused:
            env = _allowance(ticket.task, self.refill)
            left[env] -= 1
            if left[env] >= 0:
                found.append(ticket)
        return found

    def _put_aside(self, refused: Sequence[Ticket]) -> None:
        """Release the slots of these groups for the next tasks."""
        label = f"{self._named(self.next_step)}/refill{len(self._replaced)}"
        drawn = [self.sampler.replacement(ticket.place.position) for ticket in refused]
        new = []
        for number, (ticket, (position, _)) in enumerate(zip(refused, drawn, strict=True)):
            new.append(replace(ticket.place, label=label, number=number, position=position))
            self._under_way.remove(ticket)
            self._aside += [ticket.group] if ticket.group is not None else []
            self._replaced.append(_allowance(ticket.task, self.refill))
            self._reported.discard(ticket.name)
        self._pending.extendleft(reversed(new))


def _allowance(task: Task, refill: Mapping[str, int]) -> str:
    """The allowance that a group's replacement counts toward: its env's, or the run's."""
    return task.env if task.env in refill else ""
