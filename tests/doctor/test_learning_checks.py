"""A signal that is lost late in a run, and one that comes and goes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from agentrl.doctor.examine import findings


def names(folder: Path, signal: Sequence[int]) -> list[str]:
    """The findings for a run of eight groups per step; `signal` counts those with a signal in each step."""
    folder.mkdir()
    lines = [
        {"step": step, "reward": 0.4 + 0.01 * (step % 5), "groups_with_signal": groups}
        for step, groups in enumerate(signal, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text(json.dumps({"rollout": {"groups_per_step": 8, "group_size": 4}}))
    return [finding.name for finding in findings(folder)]


def test_a_signal_that_is_lost_late_is_reported(tmp_path: Path):
    assert names(tmp_path / "lost", [5] * 28 + [0] * 12) == ["no-signal"]
    assert names(tmp_path / "back", [5] * 20 + [0] * 12 + [4] * 8) == []
    assert names(tmp_path / "rare", [1, 0] * 20) == ["no-signal"]
    assert names(tmp_path / "sparse", [1] * 40) == []


def test_episodes_that_were_lost_do_not_make_the_others_shorter(tmp_path: Path):
    def found(*tokens: int) -> list[str]:
        folder = tmp_path / str(tokens[0])
        folder.mkdir()
        lines = [
            {
                "step": step,
                "reward": 0.4,
                "episodes": 100 + lost,
                "infra_failures": lost,
                "sampled_tokens": 100 * each,
            }
            for step, (each, lost) in enumerate(zip(tokens, (200, 200, 0, 0, 0, 0), strict=True), 1)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "config.yaml").write_text(json.dumps({"rollout": {"groups_per_step": 25, "group_size": 4}}))
        return [finding.text for finding in findings(folder) if finding.name == "length-explosion"]

    assert found(60, 60, 60, 60, 60, 60) == []
    assert "episodes grew from 20 to 90 sampled tokens" in found(20, 20, 60, 90, 90, 90)[0]
