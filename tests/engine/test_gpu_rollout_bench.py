"""The bench for GPUs, on the CPU with a tiny shape: it runs through, and refuses to pretend."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench" / "gpu_rollout.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(BENCH), *options], capture_output=True, text=True, check=False)


def test_the_smoke_run_measures_every_cell_and_ends_with_one_line_of_json():
    ended = run("--smoke")
    assert ended.returncode == 0, ended.stderr
    cells = [json.loads(line) for line in ended.stderr.splitlines() if line.startswith("{")]
    assert [cell["sequences"] for cell in cells] == [1, 4]
    # By hand: weights in bfloat16 (embedding, two layers, last norm), and 20 tokens of keys and values a sequence.
    layer = 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 128 + 2 * 64 + 2 * 16
    weights, token = 2 * (500 * 64 + 2 * layer + 64), 2 * 2 * 2 * 2 * 16
    assert [cell["bytes_per_step"] for cell in cells] == [weights + count * 20 * token for count in (1, 4)]
    line = json.loads(ended.stdout.splitlines()[-1])
    assert line["bench"] == "gpu_rollout"
    assert line["device"] == "cpu"
    assert line["ours"] == min(cell["share"] for cell in cells)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line():
    ended = run()
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith("gpu_rollout: PyTorch sees no GPU here")
    assert ended.stdout == ""
