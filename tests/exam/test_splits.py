"""Held-out tasks among the training tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from agentrl import Task
from agentrl.env.play import ScriptedPolicy
from agentrl.env.tasks import GeneratedTasks, NamedTasks
from agentrl.envs.gym_text import FrozenLake, Taxi
from agentrl.exam import splits
from agentrl.exam.arena import Arena
from agentrl.exam.marks import ExamFinding, ExamResult, Level
from agentrl.exam.splits import examine_splits
from tests.exam.healthy import Dice
from tests.exam.planted import Sums


def rows(name: str, sums: Sequence[tuple[int, int]]) -> list[Task]:
    return [Task(f"{name}-{i}", {"a": a, "b": b}, seed=hash(name) % 999 + i) for i, (a, b) in enumerate(sums)]


async def found(train: Sequence[Task], held_out: Sequence[Task], env: Any = Sums, oracle=True):
    result = ExamResult("", "sums")
    await examine_splits(result, Arena(env), train, held_out, env.oracle if oracle else None)
    return result.findings


async def test_one_row_among_many_is_a_warning_that_names_it():
    train = rows("train", [(n, 1) for n in range(3000)])
    [finding] = await found(train, rows("test", [(2999, 1), *((n, 2) for n in range(9))]))
    assert (finding.check, finding.level, finding.tasks) == ("splits", Level.WARNING, ("test-0",))
    assert finding.text.startswith("1 of 10 held-out tasks are among training tasks")
    assert "e.g. test-0 is train-2999" in finding.text


async def test_half_of_the_held_out_rows_are_an_error():
    [finding] = await found(rows("train", [(n, 1) for n in range(40)]), rows("test", [(n, 1) for n in range(80)]))
    assert finding.level is Level.ERROR
    assert finding.text.startswith("40 of 80")
    assert "on 12 of 12 played" in finding.text


async def test_generated_rows_are_sampled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(splits, "NUM_GENERATED", 30)
    made = GeneratedTasks(lambda i: Task(f"train-{i}", {"a": i, "b": 1}, i), 10**9)
    few = GeneratedTasks(lambda i: Task(f"test-{i}", {"a": i * 10**9 // 30, "b": 1}, i), 30)
    for train in (made, NamedTasks(made, "sums")):
        [finding] = await found(train, few)
        assert "30 of the 1,000,000,000 training tasks" in finding.text


async def test_equal_rows_whose_answer_comes_from_the_seed_are_other_tasks():
    train, held_out = [Task("a", {}, 1)], [Task("b", {}, 2)]
    assert await found(train, held_out, Dice) == [], "no row: only equal seeds are compared"

    class Hidden(Sums):
        def setup(self, a: int, b: int) -> str:
            self.a, self.b = a, self.rng.randint(0, 10**9)
            return f"What is {a} + my number?"

        @classmethod
        def oracle(cls, task):
            env = cls()
            env.task = task
            env.setup(**task.row)
            return ScriptedPolicy([str(env.a + env.b)])

    assert await found(rows("train", [(1, 1)]), rows("test", [(1, 1)]), Hidden) == []


async def test_without_an_oracle_a_column_with_the_answer_decides():
    plain: list[ExamFinding] = await found(rows("train", [(1, 1)]), rows("test", [(1, 1)]), oracle=False)
    assert plain == [], "the seeds differ, and nothing says what the answer is"

    class Told(Sums):
        def setup(self, a: int, b: int, answer: int, id: int) -> str:
            return super().setup(a, b)

    row = {"a": 1, "b": 1, "answer": 2}
    [told] = await found([Task("a", {**row, "id": 7}, 1)], [Task("b", {**row, "id": 8}, 2)], Told, oracle=False)
    assert told.level is Level.ERROR


@pytest.mark.parametrize("env", [FrozenLake, Taxi])
def test_shipped_games_hold_out_maps_and_starts(env: Any):
    def openings(split: str) -> set[str]:
        found = set()
        for task in (env.tasks(split)[i] for i in range(100)):
            game = env()
            game.task = task
            found.add(game.setup(**task.row))
        return found

    assert not openings("train") & openings("held_out")
    assert len(openings("held_out")) > 15
