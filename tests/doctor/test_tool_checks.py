"""One tool of several that is never called: broken, or just not needed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.doctor.evidence import Evidence, Played
from agentrl.doctor.tool_checks import never_called, one_error, slows_down

CALL = {
    "call": {"name": "search", "arguments": {"query": "x"}},
    "result": "found",
    "outcome": "ok",
    "seconds": 0.1,
}


def episode(number: int, said: str, *, errors: tuple[str, ...] = ()) -> Played:
    """One that called `search`, and then said something."""
    answer = {"role": "assistant", "content": said, "parse_errors": list(errors)}
    raw: dict[str, Any] = {
        "id": f"s1/g0/e{number}",
        "task": {"id": "t", "row": {}},
        "reward": 0.0,
        "tools": [{"function": {"name": name}} for name in ("search", "submit")],
        "turns": [{"calls": [CALL]}],
        "messages": [answer],
    }
    return Played(1, 0, (), raw)


def found(tmp_path: Path, *episodes: Played) -> list[str]:
    """The tools that are said to be never called."""
    evidence = Evidence.of(tmp_path)
    evidence.episodes = list(episodes)
    return [finding.text.partition(" ")[0] for finding in never_called(evidence) if finding.severity != "hint"]


@pytest.mark.parametrize(
    ("said", "errors"),
    [
        ('<tool_call>{"name": "submit", "answer": 3}', ()),
        ("<function=submit><parameter=answer>3", ()),
        ("", ('unknown fields in {"name": "submit"}',)),
        ("submit(3)", ()),
    ],
)
def test_calls_of_one_tool_that_are_not_read(tmp_path: Path, said: str, errors: tuple[str, ...]):
    assert found(tmp_path, *(episode(n, said, errors=errors) for n in range(40))) == ["submit"]


def test_a_tool_that_nobody_needs_is_no_finding(tmp_path: Path):
    assert found(tmp_path, *(episode(n, "I submit that it is 3.") for n in range(40))) == []


def answered(tmp_path: Path, results: list[str]) -> list[str]:
    """What is said of calls with different arguments that got these results."""
    calls = [
        {**CALL, "call": {"name": "search", "arguments": {"query": f"q{n}"}}, "result": result}
        for n, result in enumerate(results)
    ]
    evidence = Evidence.of(tmp_path)
    evidence.episodes = [
        Played(1, 0, (), {**episode(n, "").raw, "turns": [{"calls": [call]}]}) for n, call in enumerate(calls)
    ]
    return [finding.name for finding in one_error(evidence)]


def test_an_error_inside_of_json_is_an_error(tmp_path: Path):
    error = '{{"status": "failed", "code": 401, "request": "b51f{:04x}"}}'
    assert answered(tmp_path, [error.format(n) for n in range(40)]) == ["tool-always-fails"]
    found = '{{"title": "page {}", "text": "word{}"}}'
    assert answered(tmp_path, [found.format(n, "e" * n) for n in range(40)]) == []
    rows = '{{"log": "{} {}"}}'
    words = ("error", "ok", "started", "stopped")
    assert answered(tmp_path, [rows.format(words[n % 4], n) for n in range(40)]) == []


def test_numbers_are_not_the_same_result(tmp_path: Path):
    assert answered(tmp_path, [str(n) for n in range(40)]) == []
    assert answered(tmp_path, ["42"] * 40) == ["tool-answers-the-same"]


def slower(tmp_path: Path, seconds: Callable[[int], float], size: Callable[[int], int]) -> bool:
    """Whether the doctor says that a tool slows down over 24 steps of 8 calls each."""
    episodes = []
    for number in range(24 * 8):
        step = number // 8
        query = {**CALL["call"], "arguments": {"query": "x" * size(step)}}  # type: ignore[dict-item]
        call = {**CALL, "call": query, "seconds": seconds(step) * (1 + 0.2 * math.sin(number))}
        one = episode(number, "done")
        episodes.append(Played(step + 1, 0, (), {**one.raw, "turns": [{"calls": [call]}]}))
    evidence = Evidence.of(tmp_path)
    evidence.episodes = episodes
    return any(finding.name == "tool-slows-down" for finding in slows_down(evidence))


def test_a_tool_slows_down_unless_its_calls_get_longer(tmp_path: Path):
    assert slower(tmp_path, lambda step: 0.05 + 0.02 * step, lambda step: 20)
    assert not slower(tmp_path, lambda step: 0.05 + 0.02 * step, lambda step: 20 + 10 * step)
    assert not slower(tmp_path, lambda step: 0.5, lambda step: 20)
    assert not slower(tmp_path, lambda step: 1.0 if step > 21 else 0.1, lambda step: 20), "two busy steps"
