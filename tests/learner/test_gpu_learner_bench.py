"""The bench for GPUs, on the CPU with a tiny shape: it runs through, counts right, and refuses to pretend."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench" / "gpu_learner.py"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_learner", BENCH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu_learner.py", *options])
    return bench.main()


def test_the_smoke_run_trains_whole_models_and_adapters(bench, monkeypatch, capsys):
    assert run(bench, monkeypatch, "--smoke", "--peak-tflops", "0.5") == 0
    out, err = capsys.readouterr()
    cells = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
    assert [cell["train"] for cell in cells] == ["full", "lora"]
    # By hand: four rows of 64 tokens, 60 of them trained; the layers, the output layer, and half of all pairs.
    linear = 2 * (64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 128)
    adapters = 2 * 16 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
    attention = 2 * 3 * 2 * 4 * 16 * 4 * 64**2
    for cell, each, more in zip(cells, (6, 4), (0, 6 * adapters * 256), strict=True):
        flops = each * (linear * 256 + 64 * 500 * 240) + attention + more
        assert cell["tokens"] == 256
        assert cell["attention"] == "sdpa"
        assert cell["tflops"] * cell["step_s"] == pytest.approx(flops / 1e12, rel=0.01)
        assert cell["mfu"] == pytest.approx(cell["tflops"] / 0.5, abs=1e-4)
    line = json.loads(out.splitlines()[-1])
    assert (line["bench"], line["ours"]) == ("gpu_learner", max(cell["mfu"] for cell in cells))


def test_without_peft_whole_models_are_still_measured(bench, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "peft", None)
    assert run(bench, monkeypatch, "--smoke") == 0
    full, lora = (json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{"))
    assert full["tokens_per_s"] > 0
    assert "peft" in lora["skipped"]


def test_the_peak_is_that_of_the_updates_and_the_flops_those_of_the_card(bench, monkeypatch, capsys):
    done: list[str] = []

    def opened(folder: Path, **options: object) -> tuple[object, object]:
        found = open_learner(folder, **{**options, "device": "cpu"})
        done.append("opened")
        return found

    open_learner = bench.open_learner
    monkeypatch.setattr(bench, "open_learner", opened)
    for name, answer in (("synchronize", None), ("empty_cache", None)):
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 NVL")
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: done.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: done.append("read") or 1 << 30)
    args = argparse.Namespace(
        smoke=False, micro_batch_tokens=128, micro_batches=1, steps=1, attention="sdpa", peak_tflops=None
    )
    cell = bench.measured("smoke", 64, False, args, 128)
    assert done == ["opened", "reset", "read"]
    assert (cell["peak_gib"], bench.peak_tflops(args)) == (1.0, 835.0)


def test_what_does_not_fit_is_computed_row_by_row(bench, monkeypatch, capsys):
    tried: list[tuple[bool, int]] = []

    def opened(folder: Path, *, tokens: int, lora: bool, **options: object) -> tuple[object, object]:
        tried.append((lora, tokens))
        if tokens > 64 or lora:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return open_learner(folder, tokens=tokens, lora=lora, **options)

    open_learner = bench.open_learner
    monkeypatch.setattr(bench, "open_learner", opened)
    assert run(bench, monkeypatch, "--smoke") == 0
    full, lora = (json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{"))
    assert tried == [(False, 128), (False, 64), (True, 128), (True, 64)]
    assert (full["micro_batch_tokens"], full["tokens"]) == (64, 256)
    assert lora == {"shape": "smoke", "length": 64, "train": "lora", "fits": False}


def test_a_cell_that_fails_leaves_the_others(bench, monkeypatch, capsys):
    def opened(folder: Path, *, lora: bool, **options: object) -> tuple[object, object]:
        if not lora:
            raise RuntimeError("no kernel image\nfor this device")
        return open_learner(folder, lora=lora, **options)

    open_learner = bench.open_learner
    monkeypatch.setattr(bench, "open_learner", opened)
    assert run(bench, monkeypatch, "--smoke") == 1
    full, lora = (json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{"))
    assert full == {"shape": "smoke", "length": 64, "train": "full", "failed": "RuntimeError: no kernel image"}
    assert lora["tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("AMD Instinct MI300X", None),
    ],
)
def test_a_card_that_is_not_known_is_not_judged(bench, monkeypatch, capsys, tmp_path, name, peak):
    cell = {"shape": "8B", "length": 8192, "train": "full", "mfu": None if peak is None else 0.55}
    monkeypatch.setattr(bench, "cells", lambda args: [cell])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert run(bench, monkeypatch, "--out", str(tmp_path / "found.json")) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (line["peak_tflops"], line["met"]) == (peak, "inconclusive" if peak is None else True)
