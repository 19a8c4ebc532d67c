"""Admission: whatever ends when, no group is older than allowed when it is trained, and none is lost."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algo.entries import Signal
from agentrl.env.curriculum import TaskSampler
from agentrl.env.mixture import MixedSampler
from agentrl.errors import ConfigError
from agentrl.rollout.admission import Admission, Batch, Ticket
from agentrl.types import Episode, Group, StopReason, Task

TASKS = [Task(f"t{i}") for i in range(1000)]


def make(num: int = 3, last: int = 6, **more: int) -> Admission:
    return Admission(TaskSampler(TASKS), groups_per_step=num, last_step=last, **more)


def make_with_parts(num: int, refill: int) -> Admission:
    signals = {"": Signal("parts")}
    return Admission(TaskSampler(TASKS), groups_per_step=num, last_step=6, refill=refill, signals=signals)


def complete(ticket: Ticket, *rewards: float, solved: bool | None = None) -> None:
    episodes = tuple(
        Episode(f"{ticket.name}/e{i}", ticket.task, (), (), (), StopReason.ANSWERED, reward, solved=solved)
        for i, reward in enumerate(rewards or (0.0, 1.0))
    )
    ticket.group = Group(ticket.task, episodes)


def names(tickets: Sequence[Ticket]) -> list[str]:
    return [t.name for t in tickets]


def played(batch: Batch | None) -> list[str]:
    assert batch is not None
    return [g.task.id for g in batch.groups]


class TestSynchronous:
    def test_a_run_that_begins_later_names_its_groups_by_its_steps(self):
        admission = make(num=2, last=5, first_step=4)
        tickets = admission.admit(3)
        assert names(tickets) == ["s4/g0", "s4/g1"]
        assert [t.place.order for t in tickets] == [6, 7]

    def test_the_signal_of_an_env_is_what_differs_in_its_groups(self):
        admission = make_with_parts(num=1, refill=1)
        (ticket,) = admission.admit(0)
        complete(ticket, 1.0, 1.0)  # the sums are equal, the parts are not
        assert ticket.group is not None
        parts = ({"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0})
        episodes = tuple(replace(e, rewards=part) for e, part in zip(ticket.group.episodes, parts, strict=True))
        ticket.group = replace(ticket.group, episodes=episodes)
        assert played(admission.form()) == ["t0"]

    def test_a_step_plays_its_groups_and_waits_for_all_of_them(self):
        admission = make()
        first = admission.admit(0)
        assert names(first) == ["s1/g0", "s1/g1", "s1/g2"]
        assert not admission.admit(0)
        for ticket in reversed(first[1:]):
            complete(ticket)
            assert admission.form() is None
        complete(first[0])
        assert played(admission.form()) == ["t0", "t1", "t2"]
        assert not admission.admit(0), "nothing begins with the weights before the update"
        assert names(admission.admit(1)) == ["s2/g0", "s2/g1", "s2/g2"]

    def test_a_group_without_signal_gives_its_place_to_the_next_task(self):
        admission = make(refill=3)
        a, b, c = admission.admit(0)
        complete(a, 1.0, 1.0)
        complete(b)
        complete(c, 0.0, 0.0)
        assert admission.form() is None
        d, e = admission.admit(0)
        assert names([d, e]) == ["s1/refill0/g0", "s1/refill0/g1"]
        complete(d, 0.0, 0.0)
        assert admission.form() is None, "the group that took the place of the third is not complete"
        complete(e)
        assert admission.form() is None
        (f,) = admission.admit(0)
        assert f.name == "s1/refill2/g0"
        complete(f, 0.0, 0.0)
        batch = admission.form()
        assert played(batch) == ["t5", "t1", "t4"], "the cap is reached: the last one is trained as it is"
        assert [g.task.id for g in batch.aside] == ["t0", "t2", "t3"]
        assert names(admission.admit(1)) == ["s2/g0", "s2/g1", "s2/g2"]
        assert [t.task.id for t in admission.under_way] == ["t6", "t7", "t8"]

    def test_each_env_has_its_own_number_of_replacements(self):
        samplers = {name: TaskSampler([Task(f"{name}{i}", env=name) for i in range(9)]) for name in "ab"}
        mixed = MixedSampler(samplers, {"a": 1.0, "b": 1.0})
        admission = Admission(mixed, groups_per_step=2, last_step=6, refill={"a": 0, "b": 1})
        for ticket in admission.admit(0):
            complete(ticket, 0.0, 0.0)
        assert admission.form() is None
        (ticket,) = admission.admit(0)
        complete(ticket)
        batch = admission.form()
        assert sorted(played(batch)) == ["a0", "b1"]
        assert [g.task.id for g in batch.aside] == ["b0"]

    def test_the_result_of_a_group_is_reported_once(self):
        sampler = TaskSampler(TASKS[:1], order="weighted", window=4)
        admission = Admission(sampler, groups_per_step=2, last_step=6, refill=1)
        dull, other = admission.admit(0)
        complete(dull, 1.0, 1.0, solved=True)
        complete(other, 0.0, 1.0, solved=False)
        assert admission.form() is None
        (again,) = admission.admit(0)
        complete(again, 0.0, 1.0, solved=True)
        assert admission.form() is not None
        assert sampler.state()["results"] == {"0": [1.0, 0.0, 1.0]}

    def test_what_was_reported_and_replaced_in_a_step_survives_a_resume(self):
        """A run that has to leave within a step saves this."""
        sampler = TaskSampler(TASKS[:6], order="weighted", window=9)
        admission = Admission(sampler, groups_per_step=2, last_step=6, refill=1)
        one, dull = admission.admit(0)
        complete(one, 0.0, 1.0, solved=False)
        complete(dull, 1.0, 1.0, solved=True)
        assert admission.form() is None
        before = sampler.state()["results"]
        resumed = TaskSampler(TASKS[:6], order="weighted", window=9)
        again = Admission(resumed, groups_per_step=2, last_step=6, refill=1)
        again.restore(json.loads(json.dumps(admission.state())))
        assert again.state() == admission.state()
        tickets = again.admit(0)
        assert [t.name for t in tickets] == [one.name, "s1/refill0/g0"]
        complete(tickets[0], 0.0, 1.0, solved=True)
        assert again.form() is None
        complete(tickets[1], 0.0, 0.0, solved=False)
        batch = again.form()
        assert batch is not None, "the one replacement of the step is used up"
        assert sum(map(len, resumed.state()["results"].values())) == sum(map(len, before.values())) + 1
        assert again.state()["reported"] == again.state()["replaced"] == []

    def test_nothing_is_played_that_would_not_be_trained(self):
        admission = make(last=2, max_staleness=4)
        assert len(admission.admit(0)) == 6
        for ticket in admission.under_way:
            complete(ticket)
        assert admission.form().step == 1
        assert not admission.admit(1)
        assert admission.form().step == 2
        assert admission.over


class TestAhead:
    def test_one_step_ahead_the_next_groups_begin_before_the_update(self):
        admission = make(max_staleness=1)
        first = admission.admit(0)
        assert len(first) == 6
        for ticket in first[3:]:
            complete(ticket)
        assert played(admission.form()) == ["t3", "t4", "t5"], "the quick ones go first while none is due"
        assert not admission.admit(0), "during the update three are under way, as many as step 2 can take"
        second = admission.admit(1)
        assert len(second) == 3
        for ticket in second:
            complete(ticket)
        assert admission.form() is None, "the three that are due in step 2 must be trained now"
        for ticket in first[:3]:
            complete(ticket)
        assert played(admission.form()) == ["t0", "t1", "t2"]

    def test_a_batch_is_in_the_order_of_the_tasks_whatever_weights_its_groups_began_with(self):
        admission = make(num=2, max_staleness=1, refill=1)
        for ticket in admission.admit(0):
            complete(ticket)
        assert played(admission.form()) == ["t0", "t1"]
        complete(admission.under_way[0], 1.0, 1.0)
        assert admission.form() is None
        replacing = admission.admit(1)
        assert [order for order, *_ in admission.state()["again"]] == [2, 3, 4, 5], "a resumed run keeps the order"
        for ticket in replacing:
            complete(ticket)
        batch = admission.form()
        assert played(batch) == ["t4", "t3"], "the first one began later, in place of the third task"

    def test_with_fewer_ahead_a_slow_group_is_carried_over(self):
        admission = make(max_staleness=2, groups_ahead=1)
        slow, *others = admission.admit(0)
        assert len(others) == 3
        for ticket in others:
            complete(ticket)
        assert played(admission.form()) == ["t1", "t2", "t3"]
        assert len(admission.admit(0)) == 3
        for ticket in admission.under_way[1:]:
            complete(ticket)
        assert played(admission.form()) == ["t4", "t5", "t6"], "two updates may pass"
        assert len(admission.admit(2)) == 3
        for ticket in admission.under_way[1:]:
            complete(ticket)
        assert admission.form() is None, "now it is due"
        complete(slow)
        assert played(admission.form())[0] == "t0"


@given(
    num=st.integers(1, 5),
    steps=st.integers(1, 8),
    max_staleness=st.integers(0, 4),
    ahead=st.none() | st.integers(0, 20),
    refill=st.integers(0, 3),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=300, deadline=None)
def test_whatever_ends_when_the_bound_holds_and_every_task_is_trained_once(
    num: int, steps: int, max_staleness: int, ahead: int | None, refill: int, seed: int
):
    rng = random.Random(seed)
    more = {"max_staleness": max_staleness, "refill": refill}
    if ahead is not None:
        more["groups_ahead"] = min(ahead, max_staleness * num)
    admission, version, began = make(num, steps, **more), 0, {}
    trained: list[str] = []
    while not admission.over:
        if rng.random() < 0.2:  # the run is killed and goes on from what a checkpoint would hold
            state = admission.state()
            admission = make(num, steps, first_step=admission.next_step, **more)
            admission.restore(state)
            version = admission.next_step - 1
        began |= {t.name: version for t in admission.admit(version)}
        assert len(admission.under_way) <= num + admission.groups_ahead
        while (batch := admission.form()) is None:
            began |= {t.name: version for t in admission.admit(version)}
            open_ones = [t for t in admission.under_way if t.group is None]
            assert open_ones, "all are complete and still there is no batch"
            complete(rng.choice(open_ones), rng.choice((0.0, 1.0)), rng.choice((0.0, 1.0)))
        assert len(batch.groups) == num
        assert len(batch.aside) <= refill
        for group in batch.groups:
            name = group.episodes[0].id.rpartition("/")[0]
            assert batch.step - 1 - began[name] <= max_staleness
        trained += [g.task.id for g in (*batch.groups, *batch.aside)]
        began |= {t.name: version for t in admission.admit(version)}  # during the update
        version = batch.step
    assert len(trained) == len(set(trained)), "no task is played twice"
    assert sorted(trained, key=lambda t: int(t[1:])) == [f"t{i}" for i in range(len(trained))], "none is left out"


def test_a_run_resumed_with_fewer_tasks_plays_others_in_place_of_those_that_are_gone():
    admission = make(max_staleness=1)
    for ticket in admission.admit(0)[:3]:
        complete(ticket)
    admission.form()
    again = Admission(TaskSampler(TASKS[:4]), groups_per_step=3, first_step=2, last_step=6, max_staleness=1)
    again.restore(admission.state())
    tickets = again.admit(1)[:3]
    assert names(tickets) == ["s2/g0", "s2/g1", "s2/g2"]
    assert [t.task.id for t in tickets] == ["t3", "t2", "t3"], "the fifth and the sixth are gone"
    assert [again.sampler.task(t.place.position).id for t in tickets] == ["t3", "t2", "t3"], "also the next time"


@pytest.mark.parametrize("max_staleness", [1, 3])
def test_a_resumed_run_trains_the_groups_that_were_under_way_under_their_names(max_staleness: int):
    admission = make(max_staleness=max_staleness, last=9)
    first = admission.admit(0)
    for ticket in first[2:5]:
        complete(ticket)
    assert played(admission.form()) == ["t2", "t3", "t4"]
    again = make(max_staleness=max_staleness, last=9, first_step=2)
    again.restore(admission.state())
    replayed = again.admit(1)
    assert names(replayed)[:3] == ["s1/g0", "s1/g1", "s2/g2"]
    assert [t.task.id for t in replayed][:3] == ["t0", "t1", "t5"]
    assert len(replayed) == 3 * (max_staleness + 1)


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_names_stay_unique_where_the_number_of_groups_changes(max_staleness: int):
    seen: list[str] = []
    state: dict[str, Any] = {}
    for resumed, num in enumerate((4, 2, 5, 4)):
        first = 1 + 2 * resumed
        admission = make(num, 99, first_step=first, max_staleness=max_staleness)
        if state:
            admission.restore(json.loads(json.dumps(state)))
        for step in (first, first + 1):
            for ticket in admission.admit(step - 1):
                complete(ticket)
            assert len({*seen, *names(admission.under_way)}) == len(seen) + len(admission.under_way)
            batch = admission.form()
            assert batch is not None
            trained = [group.episodes[0].id.rpartition("/")[0] for group in batch.groups]
            if max_staleness == 0:
                assert trained == [f"s{step}/g{number}" for number in range(num)]
            seen += trained
        state = admission.state()
    assert len(seen) == len(set(seen)) == 30


class TestWeightedOrder:
    """Episodes that say nothing of what counts as solved count as unsolved; they are no missing declaration."""

    def form(self, **more: Any) -> None:
        admission = Admission(TaskSampler(TASKS, 0, "weighted"), groups_per_step=1, last_step=3)
        (ticket,) = admission.admit(0)
        parts: dict[str, Any] = {"stop_reason": StopReason.ANSWERED, "reward": 0.0} | more
        episodes = tuple(Episode(f"e{i}", ticket.task, (), (), (), **parts) for i in range(2))
        ticket.group = Group(ticket.task, episodes)
        assert admission.form() is not None
        (found,) = admission.sampler.state()["results"].values()
        assert found == [0.0]

    @pytest.mark.parametrize(
        "odd", [{"faults": {"score": "raised"}}, {"stop_reason": StopReason.SANDBOX_BROKEN}, {"solved": False}]
    )
    def test_a_group_whose_rewards_all_raised_does_not_stop_the_run(self, odd: dict[str, Any]):
        self.form(**odd)

    def test_a_missing_declaration_does(self):
        with pytest.raises(ConfigError, match=r"weighted has to know when an episode is solved"):
            self.form()
