"""A task order of the user's: what it is given, and what it may return."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agentrl.env.own_sampler import OwnSampler
from agentrl.errors import ConfigError
from agentrl.types import Episode, Group, StopReason, Task

TASKS = [Task(f"t{i}", {"level": i // 3}) for i in range(9)]


class Backward:
    """The last task first, without a state."""

    def __init__(self, tasks: Sequence[Task], seed: int, by: int = 1) -> None:
        self.tasks, self.by = tasks, by

    def choose(self, number: int) -> int:
        return -(number + 1) * self.by % len(self.tasks)


class Learning:
    """Tasks that were not solved yet, at random."""

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        self.left, self.seed = list(range(len(tasks))), seed

    def choose(self, number: int) -> int:
        return random.Random(f"{self.seed}/{number}").choice(self.left)

    def report(self, position: int, group: Group) -> None:
        if any(e.solved for e in group.episodes) and len(self.left) > 1:
            self.left = [other for other in self.left if other != position]

    def state(self) -> Any:
        return {"left": self.left}

    def restore(self, state: Any) -> None:
        self.left = state["left"]


def group(task: Task, *solved: bool) -> Group:
    stop = StopReason.ANSWERED
    return Group(task, tuple(Episode("e", task, (), (), (), stop, float(s), solved=s) for s in solved))


def own(kind: object, certain: int = 16, **options: Any) -> OwnSampler:
    globals()["Tried"] = kind
    sampler = OwnSampler(f"{__name__}:Tried", TASKS, 3, options)
    sampler.try_out(certain)
    return sampler


def drawn(sampler: OwnSampler, num: int) -> list[int]:
    found = sampler.take(num)
    assert [task for _, task in found] == [TASKS[position] for position, _ in found]
    return [position for position, _ in found]


def test_it_gets_the_tasks_the_seed_and_its_options():
    assert drawn(own(Backward), 4) == [8, 7, 6, 5]
    assert drawn(own(Backward, by=2), 4) == [7, 5, 3, 1]
    seeds = []

    def make(tasks: Sequence[Task], seed: int) -> Backward:
        assert [*tasks] == TASKS
        seeds.append(seed)
        return Backward(tasks, seed)

    own(make)
    assert set(seeds) == {3}


def test_the_trial_leaves_no_trace_in_the_run():
    class Counting(Backward):
        count = 0

        def choose(self, number: int) -> int:
            self.count += 1
            return (self.count - 1) % 9

        def state(self) -> int:
            return self.count

        def restore(self, state: int) -> None:
            self.count = state

    assert drawn(own(Counting), 4) == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", [Backward, Learning])
def test_a_resumed_order_continues_and_a_replacement_is_the_next_one(kind: type):
    one = own(kind)
    for position in drawn(one, 12):
        if one.rated:
            one.report(position, group(TASKS[position], position % 2 == 0, False))
    saved = json.loads(json.dumps(one.state()))
    other = own(kind)
    other.restore(saved)
    assert other.state() == one.state() == saved
    assert other.replacement(3) == one.replacement(3)
    assert drawn(other, 30) == drawn(one, 30)
    if kind is Learning:
        assert set(drawn(one, 60)) == {1, 3, 5, 7} | set(
            json.loads(json.dumps(one.state()))["own"]["state"]["left"]
        )


class Queue:
    """A task is chosen again once its last group was reported."""

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        self.queue = [*range(len(tasks))]

    def choose(self, number: int) -> int:
        return self.queue.pop(0)

    def report(self, position: int, group: Group) -> None:
        self.queue.append(position)

    def state(self) -> Any:
        return {"queue": self.queue}

    def restore(self, state: Any) -> None:
        self.queue = state.pop("queue")


def test_a_choice_that_needs_reports_may_fail_in_the_trial_but_not_one_that_comes_before_them():
    sampler = own(Queue, certain=4)
    for _ in range(5):
        (position,) = drawn(sampler, 1)
        sampler.report(position, group(TASKS[position], True))
    with pytest.raises(ConfigError, match=r"choose\(9\) raised IndexError: pop from empty list"):
        own(Queue, certain=10)


def test_it_cannot_move_the_tasks_of_others():
    class Sorting(Backward):
        def __init__(self, tasks: Any, seed: int) -> None:
            tasks.sort(key=lambda task: task.id, reverse=True)

    with pytest.raises(ConfigError, match="AttributeError: 'tuple' object has no attribute 'sort'"):
        own(Sorting)
    assert [task.id for task in TASKS] == [f"t{i}" for i in range(9)]


def test_a_partial_is_the_class_in_it():
    one = own(partial(Learning))
    (position,) = drawn(one, 1)
    one.report(position, group(TASKS[position], True))
    other = own(Learning)
    other.restore(one.state())
    assert other.state() == one.state()


def test_numpy_integers_are_positions_and_a_large_sequence_is_not_copied():
    numpy = pytest.importorskip("numpy")

    class Numpy(Backward):
        def choose(self, number: int) -> Any:
            return numpy.int64(number % 9)

    assert drawn(own(Numpy), 3) == [0, 1, 2]


def test_another_order_or_number_of_tasks_keeps_only_the_count():
    one = own(Learning)
    for position in drawn(one, 6):
        one.report(position, group(TASKS[position], True))
    saved = one.state()
    assert len(saved["own"]["state"]["left"]) < 9
    fewer = OwnSampler(f"{__name__}:Learning", TASKS[:8], 3, {})
    fewer.restore(saved)
    assert fewer.state() == {
        "drawn": 6,
        "results": {},
        "size": 8,
        "own": {"class": "Learning", "state": {"left": [*range(8)]}},
    }
    other = own(Backward)
    other.restore(saved)
    assert drawn(other, 1) == [2]
    for built_in in ({"drawn": 6, "results": {"2": [0.5]}, "size": 9}, {"drawn": 6, "results": {}}):
        other.restore(built_in)
        assert drawn(other, 1) == [2]


def test_a_state_that_restore_refuses_is_named():
    sampler = own(Learning)
    with pytest.raises(
        ConfigError, match=r"data\.sampler\.order .*:Tried: restore\(\{'links': \[\]\}\) raised KeyError: 'left'"
    ):
        sampler.restore({"drawn": 2, "size": 9, "own": {"class": "Learning", "state": {"links": []}}})


class TestRefusals:
    def refused(self, kind: object, said: str, **options: Any) -> None:
        with pytest.raises(ConfigError) as caught:
            own(kind, **options)
        assert str(caught.value).startswith("data.sampler.order tests.env.test_own_sampler:Tried")
        assert said in str(caught.value)

    def test_what_is_no_class(self):
        self.refused(3, "must be a class, got a value of type int")

    def test_a_missing_file_or_name(self, tmp_path: Path):
        for use in (f"{tmp_path}/a.py:B", f"{__name__}:Lerning"):
            with pytest.raises(ConfigError, match=r"^data\.sampler\.order '"):
                OwnSampler(use, TASKS, 0, {})

    def test_options_that_it_does_not_take(self):
        self.refused(Backward, "unexpected keyword argument 'until'", until=3)

    def test_an_object_without_choose(self):
        self.refused(lambda tasks, seed: object(), "has no method `choose`")

    @pytest.mark.parametrize(
        ("missing", "said"),
        [
            ("state", "has no method `state`, which `report` needs"),
            ("restore", "has no method `restore`, which `report` needs"),
        ],
    )
    def test_reports_without_a_state(self, missing: str, said: str):
        parts = {name: value for name, value in vars(Learning).items() if name != missing}
        self.refused(type("Learning", (), parts), said)

    def test_a_state_that_is_never_restored(self):
        self.refused(
            type("S", (Backward,), {"state": lambda self: 1}), "has no method `restore`, which `state` needs"
        )

    def test_what_is_no_method(self):
        parts = {"state": {"count": 1}, "restore": lambda self, state: None}
        self.refused(type("S", (Backward,), parts), "`state` must be a method, got a value of type dict")

    def test_a_method_that_nothing_would_run(self):
        """Before the run: the first groups are reported after the first step."""

        async def later(self: object, position: int, group: Group) -> None: ...

        def lazily(self: object, position: int, group: Group) -> Iterator[None]:
            yield

        said = "is async, and nothing would await it", "is a generator: write `return` instead of `yield`"
        for report, message in zip((later, lazily), said, strict=True):
            self.refused(type("Odd", (Learning,), {"report": report}), f"`report` {message}")

    def test_other_arguments(self):
        kind = type("Odd", (Learning,), {"report": lambda self, group: None})
        self.refused(kind, "`report` must take (position, group): too many positional arguments")
        self.refused(type("Odd", (Backward,), {"choose": lambda self: 0}), "`choose` must take (number)")

    @pytest.mark.parametrize("chosen", [9, -1, 2.0, "3", None, True, (1,)])
    def test_what_is_no_position(self, chosen: object):
        kind = type("Odd", (Backward,), {"choose": lambda self, number: chosen})
        self.refused(kind, f"choose(0) must return the position of a task, 0 to 8, got {chosen!r}")

    def test_an_exception_shows_its_line(self):
        def choose(self: object, number: int) -> int:
            raise KeyError("level")

        self.refused(type("Odd", (Backward,), {"choose": choose}), "choose(0) raised KeyError: 'level'")
        self.refused(type("Odd", (Backward,), {"choose": choose}), 'raise KeyError("level")')

    def test_random_numbers_without_a_seed(self):
        kind = type("Odd", (Backward,), {"choose": lambda self, number: random.randrange(9)})
        self.refused(kind, "so a resumed run would play other tasks")

    def test_a_state_that_lacks_what_changes(self):
        class Forgetful(Backward):
            count = 0

            def choose(self, number: int) -> int:
                self.count += 1
                return self.count % 9

        self.refused(Forgetful, "choose(8) returned 0, and 1 after restore(state()) in a new object")

    def test_what_objects_share(self):
        """Else the trial would change what the run chooses."""

        class Sharing(Backward):
            seen: list[int] = []  # noqa: RUF012 - that is the mistake

            def choose(self, number: int) -> int:
                self.seen.append(number)
                return len(self.seen) % 9

            def state(self) -> Any:
                return self.seen

            def restore(self, state: Any) -> None:
                self.seen = state

        self.refused(Sharing, "choose(0) returned 1, and 8 in another new object")

    @pytest.mark.parametrize(
        ("state", "said"),
        [
            ({3: "a"}, "{3: 'a'} would become {'3': 'a'}"),
            ((1, 2), "(1, 2) would become [1, 2]"),
            ([float("nan")], "no NaN"),
            ({1, 2}, "state() must return JSON data: Object of type set"),
            (object(), "state() must return JSON data: Object of type object"),
        ],
    )
    def test_a_state_that_json_changes(self, state: object, said: str):
        parts = {"state": lambda self: state, "restore": lambda self, state: None}
        self.refused(type("Odd", (Backward,), parts), said)

    def test_a_state_that_is_no_json_after_a_report(self):
        """It is seen at once, not when the first checkpoint needs it."""

        class Rates(Learning):
            rates: dict[Any, Any]

            def report(self, position: int, group: Group) -> None:
                self.rates = {**self.__dict__.get("rates", {}), position: 0.5}

            def state(self) -> Any:
                return self.__dict__.get("rates", {})

            def restore(self, state: Any) -> None:
                self.rates = state

        sampler = own(Rates)
        with pytest.raises(ConfigError, match=r"\{4: 0\.5\} would become \{'4': 0\.5\}"):
            sampler.report(4, group(TASKS[4], True))

    def test_a_restore_that_forgets_what_was_reported(self):
        class Forgets(Learning):
            def restore(self, state: Any) -> None:
                pass

        sampler = own(Forgets)
        with pytest.raises(
            ConfigError, match=r"after restore\(state\(\)\), a new object has another state: \{'left'"
        ):
            sampler.report(4, group(TASKS[4], True))

    def test_a_state_that_is_no_json_after_some_reports(self):
        class Rates(Learning):
            def __init__(self, tasks: Sequence[Task], seed: int) -> None:
                super().__init__(tasks, seed)
                self.rates: dict[Any, Any] = {}

            def report(self, position: int, group: Group) -> None:
                if any(e.solved for e in group.episodes):
                    self.rates[position] = 1.0

            def state(self) -> Any:
                return self.rates

            def restore(self, state: Any) -> None:
                self.rates = state

        sampler = own(Rates)
        sampler.report(3, group(TASKS[3], False))
        with pytest.raises(ConfigError, match=r"\{4: 1\.0\} would become \{'4': 1\.0\}"):
            sampler.report(4, group(TASKS[4], True))


def test_the_curriculum_of_the_documentation_opens_a_level_when_the_last_one_is_solved(tmp_path: Path):
    text = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
    (tmp_path / "levels.py").write_text("# levels.py" + text.split("```python\n# levels.py")[1].split("```")[0])

    def made() -> OwnSampler:
        return OwnSampler(f"{tmp_path}/levels.py:Levels", TASKS, 3, {"until": 0.8})

    sampler = made()
    sampler.try_out(4)
    for hardest in (0, 1, 2, 2):
        drawn_levels = set()
        for count in range(60):
            ((position, task),) = sampler.take(1)
            drawn_levels.add(task.row["level"])
            sampler.report(position, group(task, *[True] * 4, count % 7 > 0))
            if sampler.state()["own"]["state"]["open"] > hardest + 1:
                break
            if count == 10:  # a resume changes nothing
                again = made()
                again.restore(json.loads(json.dumps(sampler.state())))
                assert again.state() == sampler.state()
                sampler = again
        assert drawn_levels == set(range(hardest + 1))
