"""A real SGLang server on the CPU, driven and trained through.

`scripts/ci-sglang` installs one; AGENTRL_SGLANG_PYTHON names its Python. Measured here: log-probabilities of
SGLang 0.5.23 and of the learner, both in float32, agree to 2e-6 per token; the tests allow 1e-4.
"""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path

import pytest

from agentrl.config.engine import ServerConfig
from agentrl.engine.servers.sglang import SGLangServer
from tests.trainer import engine_tests
from tests.trainer.real_servers import AGREE, Killer, calculator, train
from tests.trainer.test_routing_replay_run import moe_run, write_moe

PYTHON = os.environ.get("AGENTRL_SGLANG_PYTHON", "")
pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default::UserWarning", "default::FutureWarning"),  # of PyTorch's process groups
    pytest.mark.skipif(
        not PYTHON,
        reason=os.environ.get("AGENTRL_SGLANG_MISSING")
        or "AGENTRL_SGLANG_PYTHON is not set: see scripts/ci-sglang",
    ),
]


def _running(url: str) -> int:
    with urllib.request.urlopen(f"{url}/v1/loads", timeout=60) as answer:
        return sum(load["num_running_reqs"] for load in json.load(answer)["loads"])


class TestEngine(engine_tests.EngineTests):
    KIND = engine_tests.Kind(
        "sglang",
        ServerConfig(python=PYTHON or None),
        hidden=64,
        connect=lambda url, sync: SGLangServer(url, changes=sync == "delta"),
        running=_running,
        refusal_kills=True,
    )


def test_the_update_replays_the_experts_of_the_server(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 64, "intermediate_size": 64}
    model = write_moe(tmp_path / "moe", num_hidden_layers=3, **sizes)
    engine = {"kind": "sglang", "device": "cpu", "max_slots": 64, "server": {"python": PYTHON}}
    config = moe_run(tmp_path, steps=2, model={"path": str(model)}, engine=engine)
    _, lines = train(config, tmp_path / "run")
    steps = [line for line in lines if line["step"] > 0]
    assert len(steps) == 2
    for line in steps:
        assert 0.9 < line["routes/replayed"] < 1.0
        assert line["routes/experts_differ"] < 0.01
        assert line["drift/max_abs"] < AGREE


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:.*is lost")
@pytest.mark.filterwarnings("ignore:.*answers again")
@pytest.mark.filterwarnings("ignore:.*ignore seeds")
def test_training_through_sglang_survives_the_death_of_its_server(tmp_path: Path) -> None:
    cold = {
        "model": {"tiny": {"hidden": 96, "layers": 2, "vocab": 400, "max_context": 512}},
        "warmup": {
            "num": 300,
            "max_epochs": 14,
            "until_pass": 0.6,
            "anneal_epochs": 2,
            "at_least": 0.0,
            "probe_every": 60,
            "probe_tasks": 16,
            "probe_samples": 4,
            "lr": 2e-3,
            "options": {"quality": 0.9, "max_operations": 1},
        },
        # Only its start is used.
        "rollout": {"groups_per_step": 1, "group_size": 2, "max_turns": 4, "max_tokens": 40, "token_budget": 300},
        "eval": {"tasks": 1, "before_training": False},
    }
    train(calculator(steps=1, **cold), tmp_path / "cold")
    served = calculator(
        steps=6,
        optim={"lr": 4e-4, "warmup_steps": 0, "schedule": "linear"},  # the servers' draws are not seeded
        eval={"tasks": 200},
        model={"path": str(tmp_path / "cold" / "start")},
        engine={"kind": "sglang", "device": "cpu", "max_slots": 64, "server": {"python": PYTHON}},
    )
    killer = Killer()
    summary, lines = train(served, tmp_path / "served", killer)
    killer.timer.join()
    steps = [line for line in lines if line["step"] > 0]
    assert killer.killed, "no server was found"
    assert summary.steps == 6
    assert summary.infra_failures == 0
    assert all(line["sync_gap"] < AGREE for line in steps)
    assert all(line["drift/mean_abs"] < AGREE for line in steps)
    assert summary.held_out_before is not None
    assert summary.held_out_after is not None
    assert summary.held_out_after >= summary.held_out_before - 0.1
