"""A real vLLM server on the CPU, driven and trained through.

`scripts/ci-vllm` installs one; AGENTRL_VLLM_PYTHON names its Python.
"""

from __future__ import annotations

import os
import urllib.request
from pathlib import Path

import pytest

from agentrl.config.engine import ServerConfig
from agentrl.engine.servers.vllm import VLLMServer
from tests.trainer import engine_tests
from tests.trainer.real_servers import AGREE, Killer, calculator, train

PYTHON = os.environ.get("AGENTRL_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not PYTHON,
        reason=os.environ.get("AGENTRL_VLLM_MISSING") or "AGENTRL_VLLM_PYTHON is not set: see scripts/ci-vllm",
    ),
]
SERVER = ServerConfig(python=PYTHON or None, environment={"VLLM_CPU_KVCACHE_SPACE": "1"})


def _running(url: str) -> int:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{")))


class TestEngine(engine_tests.EngineTests):
    KIND = engine_tests.Kind(
        "vllm", SERVER, hidden=128, connect=lambda url, sync: VLLMServer(url, sync=sync), running=_running
    )


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:.*(was|is) lost")
@pytest.mark.filterwarnings("ignore:.*answers again")
def test_training_through_vllm_survives_the_death_of_its_server(tmp_path: Path) -> None:
    config = calculator(
        steps=4,
        model={"tiny": {"hidden": 128, "layers": 2, "vocab": 400, "max_context": 512}},
        warmup={"num": 60, "max_epochs": 2, "at_least": 0.0, "options": {"max_operations": 1}},
        eval={"tasks": 8},
        engine={"kind": "vllm", "device": "cpu", "max_slots": 64, "server": SERVER.model_dump(exclude_unset=True)},
    )
    killer = Killer()
    summary, lines = train(config, tmp_path / "run", killer)
    killer.timer.join()
    steps = [line for line in lines if line["step"] > 0]
    assert killer.killed, "no server was found"
    assert summary.steps == 4
    assert summary.infra_failures == 0
    assert all(line["sync_gap"] < AGREE for line in steps)
    assert all(line["drift/mean_abs"] < AGREE for line in steps)
