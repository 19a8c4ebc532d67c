"""A function of the user's decides which groups may train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.env.curriculum import TaskSampler
from agentrl.env.mixture import MixedSampler
from agentrl.errors import ConfigError
from agentrl.rollout.admission import Admission, Ticket
from agentrl.rollout.group_filter import load_filter
from agentrl.types import Episode, Group, StopReason, Task

TASKS = [Task(f"t{i}") for i in range(20)]


def complete(ticket: Ticket, *rewards: float) -> None:
    stop = StopReason.ANSWERED
    ticket.group = Group(ticket.task, tuple(Episode("e", ticket.task, (), (), (), stop, r) for r in rewards))


def filtered(by: Callable[[Group], Any], *, refill: int = 4) -> Admission:
    globals()["given"] = by
    chosen = load_filter(f"{__name__}:given")
    return Admission(TaskSampler(TASKS), groups_per_step=3, last_step=6, refill=refill, group_filter=chosen)


def test_refused_groups_are_replaced_within_the_limit_and_each_is_asked_for_once():
    asked = []

    def high(group: Group) -> bool:
        asked.append(group.task.id)
        return max(e.reward or 0.0 for e in group.episodes) >= 0.5

    admission = filtered(high, refill=3)
    for ticket, rewards in zip(admission.admit(0), [(0.0, 0.2), (0.0, 1.0), (1.0, 1.0)], strict=True):
        complete(ticket, *rewards)
    assert admission.form() is None
    assert asked == ["t0", "t1"], "the third has no signal, so there is nothing to ask"
    again = admission.admit(0)
    assert [ticket.name for ticket in again] == ["s1/refill0/g0", "s1/refill0/g1"]
    for ticket in again:
        complete(ticket, 0.0, 0.1)
    assert admission.form() is None
    (last,) = admission.admit(0)
    complete(last, 0.0, 0.7)
    batch = admission.form()
    assert batch is not None
    assert [g.task.id for g in batch.groups] == ["t5", "t1", "t4"], "beyond the limit, a refused group trains"
    assert batch.refused == 1
    assert [g.task.id for g in batch.aside] == ["t0", "t2", "t3"]
    assert asked == ["t0", "t1", "t3", "t4", "t5"]


@pytest.mark.parametrize("found", [True, np.True_])
def test_what_it_takes_trains(found: object):
    admission = filtered(lambda group: found)
    for ticket in admission.admit(0):
        complete(ticket, 0.0, 1.0)
    batch = admission.form()
    assert batch is not None
    assert not batch.aside


@pytest.mark.parametrize("found", [None, 1, 0.5, "yes", []])
def test_anything_but_true_and_false_is_refused(found: object):
    admission = filtered(lambda group: found)
    for ticket in admission.admit(0):
        complete(ticket, 0.0, 1.0)
    with pytest.raises(ConfigError) as caught:
        admission.form()
    assert str(caught.value) == (
        f"rollout.group_filter {__name__}:given: must return True or False, got {found!r}"
    )


def test_an_exception_names_the_task_and_its_line():
    admission = filtered(lambda group: group.episodes[0].rewards["missing"] > 0)
    for ticket in admission.admit(0):
        complete(ticket, 0.0, 1.0)
    with pytest.raises(ConfigError) as caught:
        admission.form()
    said = str(caught.value)
    assert said.startswith(f"rollout.group_filter {__name__}:given: raised KeyError: 'missing' (")
    assert " on a group of task t0\n" in said
    assert 'rewards["missing"]' in said


def test_what_is_no_function_is_refused(tmp_path: Path):
    globals()["given"] = 3
    with pytest.raises(ConfigError, match=r"^rollout\.group_filter .*:given: is a int, not a function"):
        load_filter(f"{__name__}:given")
    globals()["given"] = Group
    with pytest.raises(ConfigError, match=r"^rollout\.group_filter .*:given: is a class, not a function"):
        load_filter(f"{__name__}:given")
    with pytest.raises(ConfigError, match=r"^rollout\.group_filter '.*/a\.py:f': "):
        load_filter(f"{tmp_path}/a.py:f")


def test_what_cannot_be_called_with_a_group_is_refused_before_the_run():
    async def later(group: Group) -> bool:
        return True

    with pytest.raises(ConfigError, match=r":given: is async, and nothing would await it"):
        filtered(later)
    slime: Any = lambda args, samples, **kwargs: True  # noqa: E731
    with pytest.raises(ConfigError, match=r":given: must take \(group\): missing a required argument: 'samples'"):
        filtered(slime)


class Threshold:
    def __call__(self, group: Group) -> bool:
        return True


def test_an_object_that_can_be_called_is_a_function():
    admission = filtered(Threshold())
    for ticket in admission.admit(0):
        complete(ticket, 0.0, 1.0)
    assert admission.form() is not None


def test_groups_of_an_env_without_a_limit_are_not_asked_for():
    asked = []

    def none(group: Group) -> bool:
        asked.append(group.task.env)
        return False

    globals()["given"] = none
    samplers = {env: TaskSampler([Task(f"{env}{i}", env=env) for i in range(9)]) for env in ("a", "b")}
    admission = Admission(
        MixedSampler(samplers, {"a": 1, "b": 1}),
        groups_per_step=4,
        last_step=1,
        refill={"a": 1, "b": 0},
        group_filter=load_filter(f"{__name__}:given"),
    )
    while (batch := admission.form()) is None:
        for ticket in admission.admit(0):
            complete(ticket, 0.0, 1.0)
    assert [g.task.env for g in batch.aside] == ["a"]
    assert asked == ["a", "a", "a"]
