"""Which tasks of two evaluations are compared, by which value, and in which order losses are named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import ConfigError
from agentrl.eval.compare import Comparison, compare
from agentrl.eval.result import EvalSpec, Prices, estimates_of, result_of
from agentrl.eval.stats import estimate, paired
from agentrl.run_folder.files import write_atomic
from agentrl.run_folder.records import EpisodeRecord, compress, episodes_file
from agentrl.types import Episode, Message, Segment, StopReason, Task, Turn

Attempts = Sequence[tuple[float, bool | None]]
"""Reward, and whether it is solved, of each attempt."""


def records(tasks: Mapping[str, Attempts], rows: Mapping[str, str] | None = None) -> list[EpisodeRecord]:
    return [
        EpisodeRecord(
            1, group, episode(f"g{group}/e{n}", Task(name, {"word": (rows or {}).get(name, name)}), *one)
        )
        for group, (name, attempts) in enumerate(tasks.items())
        for n, one in enumerate(attempts)
    ]


def episode(name: str, task: Task, reward: float, solved: bool | None = None, **more: Any) -> Episode:
    given: dict[str, Any] = {"messages": (), "turns": (), "segments": (), "stop_reason": StopReason.ANSWERED}
    return Episode(name, task, reward=reward, solved=solved, **(given | more))


def write(
    folder: Path,
    tasks: Mapping[str, Attempts],
    rows: Mapping[str, str] | None = None,
    solved: str = "",
    **spec: Any,
) -> Path:
    made = {"policy": "p", "env": "e", "split": "held_out", "temperature": 1.0, "seed": 0, "digest": ""}
    of = EvalSpec(tasks=len(tasks), attempts=1, **(made | spec))
    found = records(tasks, rows)
    (folder / "episodes").mkdir(parents=True)
    write_atomic(episodes_file(folder, 1), compress(found))
    result = result_of(folder, of, found, lost=0, seconds=1.0, prices=None, solved=solved)
    write_atomic(folder / "results.json", result.to_json().encode())
    return folder


def compared(tmp_path: Path, a: Mapping[str, Attempts], b: Mapping[str, Attempts]) -> Comparison:
    return compare(write(tmp_path / "a", a), write(tmp_path / "b", b))


def test_the_greatest_losses_are_named_first_and_by_what_is_solved(tmp_path: Path):
    a = {"one": [(0.0, True), (0.0, True)], "two": [(0.0, True)], "three": [(5.0, False)], "four": [(9.0, True)]}
    b = {"one": [(9.0, True), (9.0, False)], "two": [(9.0, False)], "three": [(0.0, True)], "four": [(0.0, True)]}
    found = compared(tmp_path, a, b)
    assert found.worst == ["two", "one"], "the reward says otherwise"
    assert (found.values["solved"].better, found.values["reward"].better) == (1, 2)


def test_without_a_declaration_in_both_the_reward_is_compared(tmp_path: Path):
    found = compared(
        tmp_path, {"one": [(1.0, True)], "two": [(1.0, True)]}, {"one": [(0.5, None)], "two": [(2.0, None)]}
    )
    assert (list(found.values), found.worst) == (["reward"], ["one"])


def test_values_are_shares_if_they_are_so_in_both(tmp_path: Path):
    ones, halves = [1.0, 0.0, 1.0, 0.0, 1.0, 1.0], [0.5, 0.25, 1.0, 0.5, 1.0, 0.0]
    a, b = ({f"t{n}": [(value, None)] for n, value in enumerate(values)} for values in (ones, halves))
    found = compared(tmp_path, a, b).values["reward"].difference
    assert found == paired(ones, halves).difference
    assert found != paired(ones, halves, shares=True).difference


def test_equal_rows_with_other_ids_are_paired_only_if_each_has_one_left(tmp_path: Path):
    once: Attempts = [(1.0, True)]
    a = write(tmp_path / "a", {"a0": once, "a1": once, "a2": once}, rows={"a0": "x", "a1": "y", "a2": "y"})
    b = write(tmp_path / "b", {"b0": once, "b1": once}, rows={"b0": "x", "b1": "y"})
    found = compare(a, b)
    assert (found.tasks, found.only_a, found.only_b, found.changed) == (1, 2, 1, 0)
    with pytest.raises(ConfigError, match="no task in common"):
        compare(a, write(tmp_path / "c", {"c0": once}, rows={"c0": "y"}))


def test_another_temperature_and_another_meaning_of_solved_are_named(tmp_path: Path):
    once: dict[str, Attempts] = {"one": [(1.0, True)]}
    a = write(tmp_path / "a", once, solved="solved()")
    b = write(tmp_path / "b", once, solved="reward > 0", temperature=0.5)
    assert compare(a, b).notes == ["temperature: 1.0 and 0.5", "definition of solved: solved() and reward > 0"]


def test_pass_at_k_is_estimated_for_the_attempts_that_every_task_has():
    tasks = {"one": [(1.0, True), (0.0, False), (0.0, False)], "two": [(1.0, True), (1.0, True)]}
    found = estimates_of(records(tasks))
    assert [name for name in found if "pass" in name] == ["pass@2", "pass^2"]
    assert (found["pass@2"].mean, found["pass^2"].mean) == (pytest.approx((2 / 3 + 1) / 2), pytest.approx(1 / 2))
    wanted = estimate([2 / 3, 1.0], shares=True)
    assert (found["pass@2"].low, found["pass@2"].high) == pytest.approx((wanted.low, wanted.high))


def test_a_task_that_is_there_twice_counts_twice_and_a_reward_that_is_not_given_is_0():
    task = Task("t", {"word": "x"})
    given = [{"style": 1.0}, {"style": 0.5}, {}]
    played = [
        EpisodeRecord(1, group, episode(f"g{group}/e0", task, float(group), rewards=part))
        for group, part in enumerate(given)
    ]
    found = estimates_of(played)
    assert found["reward/style"] == estimate([1.0, 0.5, 0.0])
    assert found["reward"] == estimate([0.0, 1.0, 2.0]), "three tasks, not one of three attempts"


def test_a_result_counts_what_was_read_and_costs_what_was_not_cached(tmp_path: Path):
    """A prompt of 5 tokens, 3 sampled, an answer of 2, 4 sampled: read 5 + 10; and a branch from the prompt, 1."""
    said = [
        Segment((1,) * n, "sampled", parent, 1, (-1.0,) * n, (0,) * n) for n, parent in ((3, 0), (4, 2), (1, 0))
    ]
    segments = (Segment((0,) * 5, "prompt", -1, 0), said[0], Segment((0,) * 2, "observation", 1, 2), *said[1:])
    turns = tuple(Turn(Message("assistant", "x"), (), 0.0, "stop", 3, t, 0.0) for t in (1.0, 3.0))
    more = {"turns": turns, "segments": segments, "metrics": {"usage/cached_tokens": 6.0}, "seconds": 9.0}
    limited = {"stop_reason": StopReason.MAX_TURNS}
    failed = {"error": "SandboxError: gone", "stop_reason": StopReason.INFRA}
    played = [
        episode("g0/e0", Task("t"), 1.0, True, **more),
        episode("g0/e1", Task("t"), 0.0, False, **limited),
        episode("g0/e2", Task("t"), 0.0, None, **failed),
    ]
    spec = EvalSpec("p", "e", "held_out", 1, 2, 1.0, 0, "")
    found = result_of(
        tmp_path,
        spec,
        [EpisodeRecord(1, 0, one) for one in played],
        lost=7,
        seconds=1.0,
        prices=Prices(1e6, 1e7, 0.0),
    )
    assert (found.episodes, found.lost, found.infra_failures, found.limits, found.turns) == (2, 7, 1, 1, 1.0)
    assert (found.prompt_tokens, found.cached_tokens, found.sampled_tokens) == (5 + 10 + 5, 6, 8)
    assert found.cost == pytest.approx((20 - 6) * 1 + 8 * 10), "what was cached is free"
    assert found.turn_seconds == pytest.approx((2.0, 2.8, 2.98))
    assert (found.metrics()["limits"], found.metrics()["solved"]) == (1.0, 0.5)
