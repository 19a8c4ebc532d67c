"""Episodes without a tool call that are paid as well: for nothing, or for what the policy knows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.doctor.evidence import Evidence, Played
from agentrl.doctor.reward_checks import agent_crashes, constant_parts, faults, ignores_tools


def episode(number: int, *, calls: bool, answer: str, reward: float, **parts: float) -> Played:
    """One that called a tool or did not, and then answered."""
    call = {"name": "look", "arguments": {}}
    done = {"call": call, "result": "r", "outcome": "ok", "seconds": 0.1}
    raw: dict[str, Any] = {
        "id": f"s1/g{number // 4}/e{number % 4}",
        "task": {"id": f"t{number // 4}", "row": {}},
        "reward": reward,
        "rewards": parts,
        "solved": reward > 0.5,
        "tools": [{"function": {"name": "look"}}],
        "turns": [{"calls": [done] if calls else [], "tokens": number}],
        "messages": [
            {"role": "assistant", "content": "", "tool_calls": [call] if calls else []},
            {"role": "assistant", "content": answer},
        ],
        "stop_reason": "answered",
    }
    return Played(1, number // 4, (), raw)


def of(tmp_path: Path, episodes: list[Played]) -> Evidence:
    """The evidence of these episodes, all of one step."""
    evidence = Evidence.of(tmp_path)
    evidence.episodes, evidence.steps = episodes, [1]
    return evidence


@pytest.mark.parametrize(
    ("answer", "reward", "severity"),
    [
        (lambda n: f"{n // 4 if n % 4 else 'x'}", lambda n: float(n % 4 > 0), "hint"),  # it knows, or guesses
        (lambda n: "done", lambda n: 1.0, "warning"),  # whatever it says
        (lambda n: f"{n // 4}", lambda n: float(n % 4 > 0), "warning"),  # luck
        (lambda n: f"{n}", lambda n: 1.0, "warning"),  # any number
    ],
)
def test_tasks_that_need_no_tool_are_a_hint(
    tmp_path: Path, answer: Callable[[int], str], reward: Callable[[int], float], severity: str
):
    episodes = [episode(n, calls=n // 4 % 2 == 0, answer=answer(n), reward=reward(n)) for n in range(320)]
    (finding,) = ignores_tools(of(tmp_path, episodes))
    assert (finding.name, finding.severity) == ("reward-ignores-tools", severity)


@pytest.mark.parametrize(
    ("name", "usual", "rare", "found"),
    [
        ("judge", 0.5, 0.0, ["warning"]),
        ("judge", 0.0, 0.5, []),  # a strict one
        ("progress", 0.5, 0.0, []),
        ("judge", 0.5, 0.5, ["warning"]),
    ],
)
def test_a_judge_that_nearly_always_says_the_same(
    tmp_path: Path, name: str, usual: float, rare: float, found: list[str]
):
    episodes = [
        episode(n, calls=True, answer=f"{n}", reward=n % 2, **{name: usual if n % 50 else rare, "solved": n % 2})
        for n in range(200)
    ]
    assert [finding.severity for finding in constant_parts(of(tmp_path, episodes))] == found


@pytest.mark.parametrize(("crashed", "found"), [(0, []), (1, []), (4, ["warning"]), (20, ["error"])])
def test_an_agent_that_crashes_is_told_with_its_error(tmp_path: Path, crashed: int, found: list[str]):
    episodes = [episode(n, calls=False, answer="x", reward=0.0) for n in range(20)]
    for played in episodes[:crashed]:
        played.raw["crash"] = "KeyError: 'tenant'\nTraceback: ..."
    findings = list(agent_crashes(of(tmp_path, episodes)))
    assert [finding.severity for finding in findings] == found
    for finding in findings:
        assert (
            finding.text == f"the agent crashed in {crashed} of 20 episodes, most often with: KeyError: 'tenant'"
        )


@pytest.mark.parametrize(
    ("text", "failed", "severity"),
    [
        ("reward 'right' of E raised KeyError: 'tenant'\nTraceback: ...", 20, "error"),  # every episode
        ("reward 'right' of E raised KeyError: 'tenant'\nTraceback: ...", 5, "warning"),
        ("reward 'right' of E returned nan, which is not finite", 5, "error"),
    ],
)
def test_a_reward_that_never_works_is_an_error_and_told_in_one_line(
    tmp_path: Path, text: str, failed: int, severity: str
):
    episodes = [episode(n, calls=False, answer="x", reward=0.0) for n in range(20)]
    for played in episodes[:failed]:
        played.raw["faults"] = {"right": text}
    (finding,) = faults(of(tmp_path, episodes))
    assert (finding.name, finding.severity) == ("reward-at-fault", severity)
    assert finding.text == f"the reward right failed in {failed} of 20 episodes: {text.splitlines()[0]}"
