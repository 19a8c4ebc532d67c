"""Ranks that split rows (`learner.sequence_ranks`) train what one rank trains, on gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All cases, in forks of one process."""
    folder = tmp_path_factory.mktemp("sequence")
    done = subprocess.run(
        [sys.executable, "-m", "tests.learner.sequence_program", str(folder)],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


@pytest.mark.timeout(600)
@pytest.mark.parametrize("shape", ["2-2", "4-4", "4-2"])
def test_five_steps_are_those_of_one_rank(found: dict[str, Any], shape: str):
    """Heads that ranks divide or not, windows, experts, replayed ones, adapters, a critic, GSPO, chunks,
    checkpointing."""
    cases = {name: case for name, case in found[shape].items() if name != "said"}
    assert cases
    for name, case in cases.items():
        one = found["1-1"][name]
        assert case["gap"] < 1e-6, name
        assert_same(one["curve"], case["curve"])
        for ours, theirs in zip(one["probe"], case["probe"], strict=True):
            assert theirs == pytest.approx(ours, abs=1e-5)


def test_checkpoints_go_on_with_any_ranks(found: dict[str, Any]):
    wanted = found["resumed"]["critic-1-1"]
    for other in (found["resumed"]["critic-4-2"], *found["split"].values()):
        assert_same(wanted, other)


def test_what_cannot_be_exact_is_refused_on_all_ranks(found: dict[str, Any]):
    mixing, heads = found["4-4"]["said"]
    assert "qwen3_moe models mix tokens outside attention, so learner.sequence_ranks" in mixing
    assert "the model has 3 attention heads" in heads
    assert "set learner.sequence_ranks to 3 or less" in heads


def assert_same(wanted: list[dict[str, float]], found: list[dict[str, float]]) -> None:
    assert len(wanted) == len(found)
    for one, other in zip(wanted, found, strict=True):
        assert other.keys() == one.keys()
        for name, value in one.items():
            near = 0.05 if name.startswith("routes/") else 1e-4  # shared tokens count in each batch that has them
            assert other[name] == pytest.approx(value, rel=1e-3, abs=near), name
