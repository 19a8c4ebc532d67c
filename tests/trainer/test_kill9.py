"""A run that is killed again and again leaves what an unbroken one leaves: `bench/kill9.py`, small."""

from __future__ import annotations

import importlib.util
import random
import signal
from pathlib import Path
from types import ModuleType

import pytest

from agentrl.run_folder import checkpoints

pytest.importorskip("ray", reason="Ray is not installed (extra: ray)")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def kill9() -> ModuleType:
    file = Path(__file__).parents[2] / "bench" / "kill9.py"
    spec = importlib.util.spec_from_file_location("bench_kill9", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(600)
def test_kill_9_of_the_run_and_of_a_rank_changes_nothing(kill9: ModuleType, tmp_path: Path):
    """In a step, during a checkpoint, a rank of two; the rest in one process. The curve is the unbroken run's."""
    kill9.write(tmp_path, steps=10, every=1)
    whole = kill9.start(tmp_path, "whole")
    run, rng = tmp_path / "killed", random.Random(0)
    for kind, ranks in (("moment", 1), ("checkpoint", 1), ("rank", 2)):
        killed = kill9.kill_once(tmp_path, kind, rng, ahead=1, ranks=ranks)
        assert killed is not None, f"the run ended before it could be killed: {kind}"
        assert killed["left_behind"] == []
        assert (killed["exit"] == -signal.SIGKILL) == (kind != "rank")
    assert "died in" in (tmp_path / "killed.log").read_text()
    last = kill9.start(tmp_path, "killed")
    assert last.wait() == 0, (tmp_path / "killed.log").read_text()[-2000:]
    assert whole.wait() == 0, (tmp_path / "whole.log").read_text()[-2000:]
    assert kill9.differences(kill9.curve(tmp_path / "whole"), kill9.curve(run), 1e-3) == []
    assert checkpoints.steps_saved(run / "checkpoints")[-1] == 10
