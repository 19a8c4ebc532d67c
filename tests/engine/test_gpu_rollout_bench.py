"""The bench for GPUs, on the CPU with a tiny shape: it runs through, and refuses to pretend."""

from __future__ import annotations

import json

import pytest
import torch

from bench import gpu_rollout


def test_the_smoke_run_measures_every_cell_and_ends_with_one_line_of_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.argv", ["gpu_rollout.py", "--smoke"])
    assert gpu_rollout.main() == 0
    out, err = capsys.readouterr()
    cells = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
    assert [cell["sequences"] for cell in cells] == [1, 4]
    # By hand: weights in bfloat16 (embedding, two layers, last norm), and 20 tokens of keys and values a sequence.
    layer = 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 128 + 2 * 64 + 2 * 16
    weights, token = 2 * (500 * 64 + 2 * layer + 64), 2 * 2 * 2 * 2 * 16
    assert [cell["bytes_per_step"] for cell in cells] == [weights + count * 20 * token for count in (1, 4)]
    line = json.loads(out.splitlines()[-1])
    assert line["bench"] == "gpu_rollout"
    assert line["device"] == "cpu"
    assert line["ours"] == min(cell["share"] for cell in cells)


def test_a_cell_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def measured(shape: str, sequences: int, *_: object) -> dict[str, object]:
        if sequences == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"share": 0.5, "cuda_graphs": False}

    monkeypatch.setattr("sys.argv", ["gpu_rollout.py", "--smoke"])
    monkeypatch.setattr(gpu_rollout, "measured", measured)
    assert gpu_rollout.main() == 1
    out, err = capsys.readouterr()
    first, second = (json.loads(line) for line in err.splitlines() if line.startswith("{"))
    assert first["failed"] == "OutOfMemoryError: CUDA out of memory"
    assert second["share"] == json.loads(out.splitlines()[-1])["ours"] == 0.5
