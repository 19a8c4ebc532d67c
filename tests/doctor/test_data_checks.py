"""Answers that the policy can see: in which column they stand, and how they come into sight."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl.doctor.data_checks import CHECKS, answer_in_sight
from agentrl.doctor.evidence import Evidence, Played
from agentrl.doctor.examine import findings
from agentrl.run_folder.records import episodes_file
from agentrl.run_folder.task_digests import task_digests
from agentrl.types import Task
from tests.view.runs import make_run

SQL = "SELECT name FROM cities WHERE population > {} ORDER BY name"
PROSE = "The bridge over river {} was opened in the spring of that year by the mayor."
Said = Sequence[tuple[str, str]]


def episode(number: int, row: dict[str, Any], said: Said, prompt: str = "Which cities?") -> Played:
    """One in which policy and tools said this, in turn."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
    calls = []
    for role, text in said:
        if role == "call":
            call = {"id": "c", "name": "query", "arguments": {"sql": text}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            calls.append({"call": call, "result": "", "outcome": "ok", "seconds": 0.1})
        else:
            messages.append({"role": role, "content": text})
            if role == "tool":
                calls[-1]["result"] = text
    raw: dict[str, Any] = {
        "id": f"s1/g{number}/e0",
        "task": {"id": f"t{number}", "row": row},
        "reward": 1.0,
        "tools": [{"function": {"name": "query"}}],
        "turns": [{"calls": calls}, *({} for role, _ in said[-1:] if role == "assistant")],
        "messages": messages,
    }
    return Played(1, number, (), raw)


def found(tmp_path: Path, row: dict[str, Any], said: Said, prompt: str = "Which cities?") -> list[str]:
    """What is said of twelve episodes in which `{}` is another number each time."""

    def filled(value: Any, number: int) -> Any:
        if isinstance(value, dict):
            return {key: filled(inner, number) for key, inner in value.items()}
        if isinstance(value, list):
            return [filled(inner, number) for inner in value]
        return value.replace("{}", str(1000 + number)) if isinstance(value, str) else value

    evidence = Evidence.of(tmp_path)
    evidence.episodes = [
        episode(n, filled(row, n), [(role, filled(text, n)) for role, text in said], filled(prompt, n))
        for n in range(12)
    ]
    return [finding.name for finding in answer_in_sight(evidence)]


@pytest.mark.parametrize(
    "row", [{"sql": SQL}, {"gold_sql": SQL}, {"checks": {"sql": SQL}}, {"canonical_solution": SQL}]
)
def test_a_tool_that_shows_the_program_which_is_the_answer(tmp_path: Path, row: dict[str, Any]):
    said = [("call", "SELECT * FROM sqlite_master"), ("tool", f"log: {SQL};"), ("assistant", "done")]
    assert found(tmp_path, row, said) == ["answer-in-reach"]


@pytest.mark.parametrize("column", ["sql", "note", "text_2"])
@pytest.mark.parametrize("value", [SQL, PROSE])
def test_a_text_of_any_column_that_a_tool_shows_and_the_policy_hands_in(tmp_path: Path, column: str, value: str):
    wrapped = value.replace(" ", "\n  ", 2)
    for last in ("call", "assistant"):
        said = [("call", "SELECT 1"), ("tool", f"row 3: {wrapped}"), (last, f"So: {value}")]
        assert found(tmp_path, {"question": "q", column: value}, said) == ["answer-in-reach"]


@pytest.mark.parametrize(
    ("row", "said", "prompt"),
    [
        # its own work, which the tool repeats
        ({"sql": SQL}, [("call", SQL), ("tool", f"error near: {SQL}"), ("call", SQL), ("tool", "ok")], "Which?"),
        # a document that is read, and told in other words
        ({"document": PROSE}, [("call", "SELECT 1"), ("tool", PROSE), ("assistant", "in spring")], "When?"),
        # what the prompt shows anyway
        ({"text": PROSE}, [("call", "SELECT 1"), ("tool", PROSE), ("assistant", PROSE)], "Copy: " + PROSE),
        # what there is to choose from
        ({"labels": ["city {}", "town {}"]}, [("assistant", "city {}")], "city {} or town {}?"),
        ({"sql": SQL}, [("call", "SELECT 1"), ("tool", "1"), ("assistant", SQL)], "Which?"),
        ({"choices": ["{}", "town"], "answer": "{}"}, [("assistant", "{}")], "{} or town?"),
        # what there is to read
        ({"text": "No. {} is old. " * 20, "answer": "{}"}, [("assistant", "{}")], "Read: No. {} is old."),
        # the goal of the task
        ({"target": "{}"}, [("call", "add 3"), ("tool", "balance={}"), ("assistant", "done")], "Make it {}."),
        # what a program computes, a query asks for in words, the policy hands in, or the end of a game shows
        ({"answer": "{}"}, [("call", "result = 1 + 2; print(result)"), ("tool", "{}"), ("assistant", "{}")], "?"),
        ({"answer": "{}"}, [("call", "select 1 as result"), ("tool", "{}"), ("assistant", "{}")], "?"),
        ({"answer": "{}"}, [("call", "expected result of the vote"), ("tool", "{}"), ("assistant", "{}")], "?"),
        ({"answer": "{}"}, [("call", "answer={}"), ("tool", "{} is right"), ("assistant", "done")], "?"),
        ({"answer": "{}"}, [("call", "guess 7"), ("tool", "lost; answer: {}")], "?"),
    ],
)
def test_what_is_no_leak(tmp_path: Path, row: dict[str, Any], said: Said, prompt: str):
    assert found(tmp_path, row, said, prompt) == []


@pytest.mark.parametrize("call", ["select answer from tasks", "cat /data/answers.json", "solution"])
def test_a_call_that_asks_for_the_answer_by_its_name(tmp_path: Path, call: str):
    said = [("call", call), ("tool", "It is {}."), ("assistant", "{}")]
    assert found(tmp_path, {"answer": "{}"}, said) == ["answer-in-reach"]


@pytest.mark.parametrize("row", [{"reward_model": {"ground_truth": "{}"}}, {"answers": ["{}"]}, {"sql": SQL}])
def test_an_answer_in_the_prompt_wherever_it_stands_in_the_row(tmp_path: Path, row: dict[str, Any]):
    shown = SQL if "sql" in row else "{}"
    assert found(tmp_path, row, [("assistant", "done")], f"Expected: {shown}") == ["answer-in-prompt"]


def test_a_goal_that_the_policy_only_copies_is_the_answer(tmp_path: Path):
    assert found(tmp_path, {"target": "{}"}, [("assistant", "{}")], "Number {}") == ["answer-in-prompt"]


@pytest.mark.parametrize("numbering", [{"uid": 1}, {"extra": {"index": 1, "split": "1"}}])
def test_rows_that_differ_in_their_number_only(tmp_path: Path, numbering: dict[str, Any]):
    def tasks(split: str) -> list[Task]:
        first = 0 if split == "train" else 64
        rows = [json.loads(json.dumps(numbering).replace("1", str(first + n))) for n in range(64)]
        return [Task(f"{split}/{n}", {"question": f"What is {n % 4}?", **row}) for n, row in enumerate(rows)]

    (tmp_path / "tasks.json").write_bytes(task_digests(tasks("train"), tasks("held_out")))
    evidence = Evidence.of(tmp_path)
    evidence.episodes = [episode(n, dict(t.row), [], t.row["question"]) for n, t in enumerate(tasks("train")[:9])]
    assert [f.name for check in CHECKS for f in check(evidence)] == ["held-out-leak", "duplicate-tasks"]
    # an env that makes its tasks from the number shows the same prompt for all of them
    evidence.episodes = [episode(n, dict(t.row), [], "Play.") for n, t in enumerate(tasks("train")[:9])]
    assert [finding.name for check in CHECKS for finding in check(evidence)] == []


def test_a_file_of_episodes_that_was_cut(tmp_path: Path):
    run = make_run(tmp_path)
    assert "episodes-damaged" not in {finding.name for finding in findings(run)}
    file = episodes_file(run, 2)
    file.write_bytes(file.read_bytes()[:-40])
    cut = next(finding for finding in findings(run) if finding.name == "episodes-damaged")
    assert (cut.severity, cut.step) == ("warning", 2)
    assert str(file) in cut.text
    assert "damaged after" in cut.text
