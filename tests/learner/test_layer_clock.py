"""The time of each rank's own layers: ranks that wait for a slow one are not slow themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.run import LearnerConfig, OptimConfig
from agentrl.doctor.examine import findings
from tests.learner.clock_program import SLEEP_S, STEPS
from tests.learner.direct import DirectLearner
from tests.learner.train_models import make_batch

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_slow_rank_is_named_although_all_updates_take_equally_long(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.learner.clock_program", str(tmp_path / "models")],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    steps = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(steps) == STEPS
    for step in steps:
        assert step["rank/1/forward_seconds"] >= SLEEP_S
        assert step["rank/0/forward_seconds"] + SLEEP_S <= step["update_seconds"], "rank 0 waited for rank 1"
        assert min(step["rank/0/tokens"], step["rank/1/tokens"]) > 0
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": number, **step}) + "\n" for number, step in enumerate(steps, 1))
    )
    (found,) = [finding for finding in findings(run) if finding.name == "slow-rank"]
    assert found.text.startswith("learner rank 1 takes ")
    assert (found.severity, found.step) == ("warning", STEPS)
    assert "rank 1" in found.setting
    assert "rank/1/forward_seconds" in found.series


def test_a_single_rank_is_not_timed(policy_dir: Path):
    learner = DirectLearner(
        policy_dir,
        algorithm=AlgorithmConfig(),
        optim=OptimConfig(lr=1e-3),
        config=LearnerConfig(device="cpu"),
        temperature=1.0,
        total_steps=2,
    )
    try:
        assert learner.step(make_batch(0)).timing == {}
    finally:
        learner.close()
