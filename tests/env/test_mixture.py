"""Several envs share the prompts: exactly, in a stable order, and resumable."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from agentrl.env.curriculum import TaskSampler
from agentrl.env.mixture import MixedSampler
from agentrl.env.own_sampler import OwnSampler
from agentrl.errors import ConfigError
from agentrl.types import Group, Task
from tests.env.solved_groups import solved

SHARES = {"a": 1.0, "b": 3.0, "c": 0.5, "d": 0.1}


def sampler(
    shares: dict[str, float] = SHARES, *, by_solve_rate: bool = False, order: str = "shuffled"
) -> MixedSampler:
    tasks = {name: [Task(f"{name}{i}", env=name) for i in range(7)] for name in shares}
    own = {name: TaskSampler(tasks[name], 5, order) for name in shares}
    return MixedSampler(own, shares, by_solve_rate=by_solve_rate)


@pytest.mark.parametrize("shares", [SHARES, {"a": 1, "b": 1}, {"a": 0.1, "b": 0.2, "c": 0.7}, {"a": 99, "b": 1}])
def test_shares_hold_after_every_task(shares: dict[str, float]):
    source, given = sampler(shares), Counter[str]()
    total = sum(shares.values())
    for n in range(1, 2001):
        ((_, task),) = source.take(1)
        given[task.env] += 1
        assert all(abs(given[name] - n * share / total) < 1 for name, share in shares.items()), n


def test_whole_shares_are_met_exactly_at_the_end_of_each_round():
    given = Counter(task.env for _, task in sampler({"a": 0.1, "b": 0.2, "c": 0.7}).take(1000))
    assert given == {"a": 100, "b": 200, "c": 700}


def test_each_env_keeps_its_own_order_and_positions_name_the_task():
    source, alone = sampler(), TaskSampler([Task(f"b{i}") for i in range(7)], 5, "shuffled")
    drawn = source.take(60)
    assert all(source.task(position) == task for position, task in drawn)
    own = [task.id for _, task in drawn if task.env == "b"]
    assert own == [task.id for _, task in alone.take(len(own))]


def test_a_replacement_is_of_the_same_env_and_moves_no_share():
    source, other = sampler(), sampler()
    for _ in range(50):
        ((position, task),) = source.take(1)
        assert source.replacement(position)[1].env == task.env
        assert task.env == other.take(1)[0][1].env


@pytest.mark.parametrize("by_solve_rate", [False, True])
def test_a_restored_source_continues_where_the_other_stood(by_solve_rate: bool):
    source = sampler(by_solve_rate=by_solve_rate, order="weighted")
    for number, (position, _) in enumerate(source.take(40)):
        source.report(position, solved(number % 5, 4))
    saved = json.loads(json.dumps(source.state()))
    restored = sampler(by_solve_rate=by_solve_rate, order="weighted")
    restored.restore(saved)
    assert restored.take(200) == source.take(200)
    assert restored.state() == source.state()


@pytest.mark.parametrize("by_solve_rate", [False, True])
def test_positions_keep_their_tasks_if_the_envs_are_restored_in_another_order(by_solve_rate: bool):
    """Groups in flight are restored by their positions."""
    source = sampler(by_solve_rate=by_solve_rate)
    taken = source.take(20)
    for position, _ in taken:
        source.report(position, solved(9))
    restored = sampler(dict(reversed(SHARES.items())), by_solve_rate=by_solve_rate)
    restored.restore(json.loads(json.dumps(source.state())))
    assert [restored.task(position) for position, _ in taken] == [task for _, task in taken]
    assert restored.take(30) == source.take(30)
    assert restored.state() == source.state()


def test_an_env_that_is_always_solved_gives_its_share_to_those_that_can_be_learned():
    source = sampler({"easy": 1, "fair": 1, "new": 1}, by_solve_rate=True)
    for position, task in source.take(90):
        if task.env != "new":
            source.report(position, solved(10 if task.env == "easy" else 5))
    assert source.shares() == pytest.approx({"easy": 0.1 / 2.1, "fair": 1 / 2.1, "new": 1 / 2.1}, abs=1e-5)
    assert sum(source.shares().values()) == pytest.approx(1)
    given = Counter(task.env for _, task in source.take(210))
    assert abs(given["easy"] - 10) <= 1
    assert abs(given["fair"] - 100) <= 1


def test_an_env_may_have_an_order_of_your_own():
    tasks = {name: [Task(f"{name}{i}", env=name) for i in range(7)] for name in ("own", "other")}

    def source() -> MixedSampler:
        own = OwnSampler("tests.env.test_own_sampler:Learning", tasks["own"], 5, {})
        return MixedSampler({"own": own, "other": TaskSampler(tasks["other"])}, {"own": 2, "other": 1})

    one = source()
    assert one.rated
    for position, task in one.take(30):
        one.report(position, solved(1 if task.id == "own3" else 0))
    other = source()
    other.restore(json.loads(json.dumps(one.state())))
    assert [task.id for _, task in other.take(60)] == (following := [task.id for _, task in one.take(60)])
    assert set(following) == {f"{name}{i}" for name in tasks for i in range(7)} - {"own3"}


def test_a_declaration_is_only_needed_where_a_solve_rate_is():
    group = solved(1)
    unsaid = Group(group.task, tuple(replace(e, solved=None) for e in group.episodes))
    orders = {"a": "weighted", "b": "shuffled"}
    samplers = {name: TaskSampler([Task(f"{name}0", env=name)], 5, order) for name, order in orders.items()}
    source = MixedSampler(samplers, {"a": 1, "b": 1})
    position = {task.env: position for position, task in source.take(2)}
    source.report(position["b"], unsaid)
    with pytest.raises(
        ConfigError, match=r"^data\.sampler\.order: weighted has to know when an episode is solved"
    ):
        source.report(position["a"], unsaid)
    rated = MixedSampler({"b": samplers["b"]}, {"b": 1}, by_solve_rate=True)
    with pytest.raises(ConfigError, match=r"^rollout\.env_shares: solve_rate has to know"):
        rated.report(0, unsaid)
