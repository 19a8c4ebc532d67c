"""One tool of several that is never called: broken, or just not needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.doctor.evidence import Evidence, Played
from agentrl.doctor.tool_checks import never_called

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
