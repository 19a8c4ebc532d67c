"""Env workers on Ray, in a process of their own: the same episodes as here, and none lost with a worker."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.run import RunConfig
from agentrl.rollout.ray.worker import pack_setup

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the program saw."""
    done = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).parent / "workers_program.py"),
            str(tmp_path_factory.mktemp("workers")),
        ],
        capture_output=True,
        text=True,
        timeout=380,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_episodes_on_workers_are_those_played_here(found: dict[str, Any]):
    assert found["same"]
    assert found["processes"] == 2, "both workers played"
    assert found["released"] >= 32, "the engine was told to forget the sessions"
    assert found["checked"] == 32, "the driver's watch counted those here and those there"


def test_contexts_that_fill_up_are_shortened_on_workers_as_here(found: dict[str, Any]):
    assert found["compacted"]["same"]
    assert all(times and times >= 1 for times in found["compacted"]["times"])


def test_a_run_with_workers_trains_the_same_episodes(found: dict[str, Any]):
    here, there = found["runs"]
    assert len(here) == 4
    assert there == here


def test_the_loss_of_a_worker_costs_its_episodes_which_are_refilled(found: dict[str, Any]):
    assert found["complete"] == [4] * 5
    assert found["errors"] == ["WorkerLost"]
    assert 1 <= found["lost"] <= 20
    assert found["processes_after"] == 3, "another one was started in its place"


def test_the_death_of_ray_is_an_error_and_no_wait_for_each_episode(found: dict[str, Any]):
    said = "AgentRLError: env worker . died with Ray's own process on this machine .*: run the same command again"
    assert re.match(said, found["without_ray"]), found["without_ray"]


def test_an_env_that_does_not_import_on_a_worker_is_one_error_that_says_where(found: dict[str, Any]):
    assert found["unusable"].startswith(f"rollout.workers: on {platform.node()}: ")
    assert "not_on_this_node" in found["unusable"]
    assert "Traceback" not in found["unusable"]


def test_a_classifier_on_a_worker_scores_as_one_here_and_is_started_again(found: dict[str, Any]):
    scoring = found["scoring"]
    assert scoring["scores"] == pytest.approx(scoring["wanted"], abs=1e-6)
    assert scoring["again"] == pytest.approx(scoring["wanted"][0], abs=1e-6)
    assert scoring["started_again"]
    assert scoring["lost"].startswith("WorkerLost: worker 0 of the reward model is lost (reward_model.workers): ")
    assert scoring["missing"].startswith("reward_model.workers: a worker cannot find ")


def test_an_engine_error_reaches_the_episode(found: dict[str, Any]):
    assert "the last one: EngineError: no engine here" in found["broken"]


def test_running_out_of_time_during_an_outage_is_an_infrastructure_failure_there_too(found: dict[str, Any]):
    said = "InfraError: an episode during which no server could answer took longer than 5 s"
    assert found["outage"] == [said, None]


def test_a_call_that_cannot_be_stopped_is_scored_whatever_the_servers_did_before(found: dict[str, Any]):
    assert found["stuck"] == ["timeout", None, 1.0]


def test_episodes_that_nobody_waits_for_are_stopped_and_their_envs_closed(found: dict[str, Any]):
    assert found["closed"] == 4
    assert found["tasks_left"] == 0


def test_the_code_of_an_env_named_by_path_travels_with_its_neighbours(tmp_path: Path):
    (tmp_path / "env.py").write_text("import other")
    (tmp_path / "other.py").write_text("X = 1")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"heavy")
    config = RunConfig(env=f"{tmp_path}/env.py:E", model={"path": str(tmp_path)})
    kit = pack_setup(config, tmp_path, 10)
    assert kit.code == {"env.py": b"import other", "other.py": b"X = 1"}
    assert set(kit.tokenizer) == {"tokenizer.json"}
    assert not pack_setup(RunConfig(env="a.b:E", model={"tiny": {}}), tmp_path, 10).code
