"""The bench that compares training over engines: its statistics by hand, and that finished runs are kept."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "engine_curves.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("engine_curves", BENCH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(engine: str, seed: int, reward: float) -> dict[str, Any]:
    return {"engine": engine, "seed": seed, "reward": [0.0, reward, reward, reward], "held_out": [0.5, reward]}


def test_the_difference_has_its_standard_error_over_seeds(bench: ModuleType):
    found = bench.differing([0.6, 0.8, 1.0], [0.7, 0.7, 0.7])
    # Variances 0.04 and 0: sqrt(0.04 / 3) = 0.11547; Student's t for four degrees of freedom is 2.78.
    assert found["difference"] == 0.1
    assert found["standard_error"] == 0.1155
    assert found["interval_95"] == [-0.221, 0.421]
    assert "standard_error" not in bench.differing([0.6], [0.7])


def test_only_seeds_that_both_engines_finished_are_compared(bench: ModuleType):
    runs = [run("local", 0, 0.8), run("sglang", 0, 0.4), run("local", 1, 0.8), run("sglang, adapter", 1, 0.1)]
    result = bench.compared(runs, 4)
    assert result["seeds"] == [0]
    assert result["compared"]["mean_reward"]["difference"] == 0.3
    assert result["compared"]["held_out_after"]["sglang"] == [0.4]
    assert bench.line(result)["met"] is False  # one seed shows nothing
    assert bench.compared(runs[:1], 4)["compared"] == {}


def test_a_finished_run_is_not_run_again_and_other_settings_are(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    played: list[tuple[int, int]] = []

    def curve(start: Path, engine: dict[str, Any], steps: int, seed: int, held_out: int) -> dict[str, Any]:
        played.append((seed, steps))
        return run("local", seed, 0.5)

    monkeypatch.setattr(bench, "curve", curve)
    keep = tmp_path / "keep"
    for seed, steps in ((0, 2), (0, 2), (1, 2), (0, 3), (1, 2)):
        assert bench.kept(keep, tmp_path, {"kind": "local"}, steps, seed, 8)["seed"] == seed
    assert played == [(0, 2), (1, 2), (0, 3)]
    assert len([json.loads(file.read_text()) for file in keep.iterdir()]) == 3
