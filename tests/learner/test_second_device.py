"""Training on a device that is not the CPU, without one: all tensors are where the operations want them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.config.run import TinyModel
from agentrl.models.tiny import make_tiny_model
from tests.learner import second_device
from tests.learner.second_device_program import curve
from tests.trainer.test_changed_runs import TINY

ROOT = Path(__file__).parents[2]
KEYS = ["loss", "grad_norm", "reward", "sampled_tokens", "entropy", "observation_loss", "critic/grad_norm"]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_on_another_device_is_the_run_on_the_cpu(tmp_path: Path):
    model = tmp_path / "model"
    make_tiny_model(model, ["Say something about it", "Go on"] * 9, TinyModel(**TINY["tiny"]))
    program, name = "tests.learner.second_device_program", second_device.NAME
    done = run("-m", program, name, str(model), str(tmp_path / "there"))
    assert done.returncode == 0, done.stderr[-3000:]
    there = json.loads(done.stdout.splitlines()[-1])
    here = curve("whole", "cpu", model, tmp_path / "here")
    for step in range(2):  # the second with tokens of the updated engine
        for key in KEYS:
            assert there["whole"][step][key] == pytest.approx(here[step][key], rel=1e-4, abs=1e-7), (step, key)
    assert [0 < line["grad_norm"] < 100 for line in there["adapters"]] == [True, True]
    assert max(line["drift/mean_abs"] for line in there["adapters"]) < 0.01


MIXED = """
from tests.learner import second_device
second_device.install()
import torch
there = torch.arange(6.0, device=second_device.NAME)
print(there[torch.tensor([1, 2])].tolist(), (there * torch.tensor(2.0)).sum().item(), there.device.type)
on_cpu = torch.ones(6)
for broken in ("there + on_cpu", "on_cpu[there.long()]", "there.numpy()", "torch.cat([there, on_cpu])"):
    try:
        eval(broken)
    except (RuntimeError, TypeError):
        print("refused")
"""


def test_that_device_refuses_what_cuda_refuses():
    done = run("-c", MIXED)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == ["[1.0, 2.0] 30.0 pretended", *["refused"] * 4]
