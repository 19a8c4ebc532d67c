"""Runs of several envs of which a teacher trains some: only the others need rewards that differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.doctor.examine import findings

SERVER = {"url": "http://127.0.0.1:9/v1", "model": "t"}
UNTAUGHT = {"algorithm": {"advantage": "rloo", "kl_coef": 0}}


def warned(folder: Path, config: dict[str, Any], signal: dict[str, float]) -> bool:
    """Whether the doctor misses a signal, of 10 groups of each env in each step."""
    lines = []
    for step in range(1, 9):
        line: dict[str, float] = {"step": step, "seconds": 1.0, "reward": 0.5}
        line["groups_with_signal"] = sum(signal.values())
        for env, loud in signal.items():
            line |= {f"env/{env}/groups": 10.0, f"env/{env}/groups_with_signal": loud}
        lines.append(json.dumps(line) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    rollout = {"groups_per_step": 10 * len(signal), "group_size": 4}
    (folder / "config.yaml").write_text(json.dumps({"rollout": rollout, **config}))
    return "no-signal" in {finding.name for finding in findings(folder)}


@pytest.mark.parametrize(
    "config",
    [
        {"envs": {"a": {"teacher": SERVER}, "b": {"teacher": SERVER}, "c": UNTAUGHT}},
        {"envs": {"a": {}, "b": {}, "c": UNTAUGHT}, "teacher": SERVER},
    ],
)
def test_only_the_envs_without_a_teacher_need_a_signal(tmp_path: Path, config: dict[str, Any]):
    config = {**config, "algorithm": {"advantage": "rloo"}}
    assert not warned(tmp_path, config, {"a": 0, "b": 0, "c": 2})
    assert warned(tmp_path, config, {"a": 9, "b": 9, "c": 0})


def test_no_env_needs_one_if_all_have_a_teacher(tmp_path: Path):
    config = {"envs": {"a": {"teacher": SERVER}, "b": {}}, "teacher": SERVER}
    assert not warned(tmp_path, config, {"a": 0, "b": 0})
    assert warned(tmp_path, {**config, "teacher": {**SERVER, "hint": "solved"}}, {"a": 0, "b": 0})
