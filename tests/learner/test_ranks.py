"""Ray ranks against one process: the same curve, checkpoints that fit any number of them, and ranks that die.

Ray runs in a separate process (`ranks_program.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed (extra: ray)")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    script, folder = Path(__file__).parent / "ranks_program.py", tmp_path_factory.mktemp("ranks")
    done = subprocess.run(
        [sys.executable, str(script), str(folder), "apart", "same_curve", "two_nodes", "near"],
        capture_output=True,
        text=True,
        timeout=1500,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def same_curve(scenarios: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return scenarios["same_curve"]


@pytest.fixture(scope="module")
def apart(scenarios: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return scenarios["apart"]


@pytest.mark.timeout(1600)
def test_ranks_are_one_process(same_curve: dict[str, Any]):
    """Uneven micro-batches, two updates a step, KL penalty, checkpointed activations, tied weights."""
    found = same_curve
    assert found["gap"] < 1e-5
    assert found["losses"][1] == pytest.approx(found["losses"][0], rel=1e-5)
    one, many = found["probes"]
    assert [len(row) for row in one] == [len(row) for row in many]
    assert [v for row in many for v in row] == pytest.approx([v for row in one for v in row], abs=1e-4)
    assert_same(*found["curves"])
    for curve in found["after"][1:]:  # saved on many and loaded on one, and the other way round
        assert_same(found["after"][0], curve)
    assert max(found["gaps_after"]) < 1e-5


@pytest.mark.timeout(1600)
def test_reference_and_critic_on_ranks_of_their_own_are_one_process(apart: dict[str, Any]):
    """PPO, two updates a step; checkpoints go on in one process, and on other ranks."""
    found = apart
    assert found["held"] == {"learner": 2, "reference": 1, "critic": 1}
    assert max(found["gaps"]) < 1e-6
    assert_same(*found["curves"])
    assert_same(found["wanted"], found["after"])
    assert "critic/value_error" in found["after"][0]
    assert "kl" in found["after"][0]
    # Nothing but rounding is left between the two: without it they are the same, two updates a step or not.
    assert found["double_gap"] < 1e-12
    for one, other in zip(*found["double"], strict=True):
        assert other == pytest.approx(one, rel=1e-9, abs=1e-9)
    assert found["said"].startswith(f"critic rank 0 of 1 (process {found['victim']} on ")
    assert "run the same command again to resume" in found["said"]


@pytest.mark.timeout(1600)
def test_on_two_nodes_adapters_critic_and_bfloat16_are_one_process(scenarios: dict[str, dict[str, Any]]):
    """Checkpoints go from one process to ranks on two nodes, and back to one."""
    found = scenarios["two_nodes"]
    full, low = found["adapters and critic"], found["bfloat16"]
    assert full["nodes"] == low["nodes"] == 2
    assert full["gap"] < 1e-5
    assert_same(full["wanted"], full["found"])
    assert "critic/value_error" in full["found"][0]
    apart = found["rows apart"]
    assert (apart["nodes"], apart["gap"] < 1e-5) == (2, True)
    assert_same(apart["wanted"], apart["found"])
    assert low["gap"] < 1e-3, "one learning rate: roundings of bfloat16 differ by how rows are packed"
    for one, many in zip(low["wanted"], low["found"], strict=True):
        assert many["entropy"] == pytest.approx(one["entropy"], rel=2e-2)
        assert many["grad_norm"] == pytest.approx(one["grad_norm"], rel=0.1)


def assert_same(wanted: list[dict[str, float]], found: list[dict[str, float]]) -> None:
    assert len(wanted) == len(found)
    for one, other in zip(wanted, found, strict=True):
        assert other == pytest.approx(one, rel=1e-3, abs=1e-4)


@pytest.mark.timeout(1600)
def test_a_rank_that_dies_is_named_and_ends_the_learner(same_curve: dict[str, Any]):
    said = same_curve["after_kill"]
    first = said["steps"][0]
    assert first.startswith(f"WorkerLost: learner rank 2 of 3 (process {same_curve['victim']} on ")
    assert "run the same command again to resume" in first
    assert len(said["steps"]) == len(said["disk"]) == 20
    assert {*said["steps"], *said["disk"]} == {first}, "for all calls of all threads"


@pytest.mark.timeout(1600)
def test_a_rank_that_has_answered_when_it_dies_is_named(same_curve: dict[str, Any]):
    said = same_curve["answered"]
    died, again = said["died"].splitlines()
    assert died.startswith("WorkerLost: learner rank 1 of 2 (process VICTIM on ")
    assert ") died in the update: " in died
    assert again == died
    text = said["failed"]
    assert "connection closed by peer" in text.partition("WorkerLost: ")[0]
    assert "WorkerLost: learner rank 0 of 2 (process " in text
    assert ") failed in the update: connection closed by peer" in text


@pytest.mark.timeout(1600)
def test_a_thread_that_waits_while_the_ranks_are_closed_gets_no_error_of_python(same_curve: dict[str, Any]):
    assert (
        same_curve["closed"]
        == "WorkerLost: the ranks of the learner have ended; run the same command again to resume"
    )


@pytest.mark.timeout(1600)
def test_ranks_survive_a_bad_gradient(same_curve: dict[str, Any]):
    assert same_curve["gradient"].startswith("AgentRLError: step 9: the gradient is nan; lower optim.lr (0.001)")
    assert same_curve["kept"]


@pytest.mark.timeout(1600)
def test_bad_input_is_one_error(apart: dict[str, Any]):
    cluster, gpus, offload, nowhere, room = apart["refused"]
    assert cluster.startswith("ConfigError: ray '127.0.0.1:1': no Ray cluster answers there")
    assert (
        gpus == "ConfigError: learner.ranks is 2, but the Ray cluster has 0 GPUs: use fewer ranks, or more nodes"
    )
    assert offload.startswith("ConfigError: learner.cpu_offload has no effect on the CPU")
    assert nowhere.startswith("ConfigError: learner rank 0 on ")
    assert "sees no model in" in nowhere
    assert room.startswith(
        "ConfigError: learner.ranks is 1 and learner.reference_ranks is 5000, but the Ray cluster"
    )


@pytest.mark.timeout(1600)
def test_the_learner_is_near_the_run_if_there_is_a_gpu(scenarios: dict[str, dict[str, Any]]):
    """NCCL refuses a group with a GPU twice: no server may have the first one, from which the run broadcasts."""
    found = scenarios["near"]
    assert found["free"] == [[found["head"]]] * 6
    first, second = found["taken"]
    assert (first, len(second)) == ([found["head"]], 1)
    assert second != first, "the second does not fit there, and is not torn apart"
