"""The run of all figures for GPUs, with tiny shapes on the CPU: every part measures, and leaves its files."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock, MagicMock

import pytest
import torch

from agentrl.engine.local.local_engine import LocalEngine
from agentrl.errors import EngineError
from bench import gpu_all
from bench.shared import gpu_parts

BENCH = Path(__file__).parents[2] / "bench" / "gpu_all.py"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_smoke_form_runs_every_part_and_keeps_what_it_measured(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH), "--smoke", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert (line["bench"], line["met"], line["failed"]) == ("gpu_all", "inconclusive", [])
    assert line["device"] == "cpu"
    found = {name: json.loads((tmp_path / f"{name}.json").read_text())["found"] for name in gpu_all.PARTS}
    assert sorted(file.stem for file in tmp_path.glob("*.log")) == sorted(gpu_all.PARTS)
    assert {cell["train"] for cell in found["learner"] if "train" in cell} == {"full", "lora"}
    assert {cell["sequences"] for cell in found["decode"] if "sequences" in cell} == {1, 4}
    assert all(cell["idle_s"] > 0 and cell["in_flight_s"] > 0 for cell in found["pause"])
    assert all(update["same"] for update in found["delta"])
    assert line["figures"]["delta"] > 10
    assert found["grpo"][-1]["agentrl"]["sampled_tokens_an_episode"] == 16
    norms = {cell["grad_norm"] for cell in found["trees"] if "grad_norm" in cell}
    assert max(norms) / min(norms) == pytest.approx(1, rel=0.05)  # bfloat16
    assert {cell["attention"] for cell in found["trees"] if "skipped" in cell} == {"flash", "flex"}
    assert [cell["when"] for cell in found["drift"]] == ["before", "across", "after"]
    assert all(0 < cell["mean_abs"] < 0.01 for cell in found["drift"])


def test_a_part_that_runs_too_long_or_fails_keeps_what_it_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, fails = tmp_path / "hangs.py", tmp_path / "fails.py"
    hangs.write_text("import json, time; print(json.dumps({'ratio': 2.0})); print('{\"cut'); time.sleep(60)")
    fails.write_text("raise OSError('no disk')")
    options = argparse.Namespace(out=tmp_path, smoke=False)
    part = replace(gpu_all.PARTS["grpo"], command=(str(hangs),), limit_s=3)
    monkeypatch.setitem(gpu_all.PARTS, "grpo", part)
    result = gpu_all.run("grpo", options)
    assert result["ended"] == "stopped after 3 s"
    assert (result["found"], result["figure"]) == ([{"ratio": 2.0}], 2.0)
    assert json.loads((tmp_path / "grpo.json").read_text()) == result
    hangs.write_text("import json, sys; print(json.dumps({'failed': 'no kernel'})); print('{}'); sys.exit(1)")
    cell = gpu_all.run("grpo", options)
    assert (cell["ended"], cell["why"]) == ("exit code 1", "no kernel")
    monkeypatch.setitem(gpu_all.PARTS, "grpo", replace(part, command=(str(fails),)))
    failed = gpu_all.run("grpo", options)
    assert (failed["ended"], failed["why"]) == ("exit code 1", "OSError: no disk")
    assert "exit code 1" in gpu_all.summary(failed)
    assert "(OSError: no disk)" in gpu_all.summary(failed)


def test_the_pause_is_the_median_of_the_updates_that_were_measured_before_the_end() -> None:
    case = {"shape": "8B", "train": "full"}
    lines = [{**case, "update": number, "in_flight_s": s} for number, s in enumerate((9.0, 0.2, 0.4), 1)]
    other = {"shape": "0.6B", "train": "full", "update": 2, "in_flight_s": 0.1}
    assert gpu_all.pause_s([other, *lines]) == pytest.approx(0.3)
    assert gpu_all.pause_s([other, *lines[:2]]) == 0.2
    assert gpu_all.pause_s([other, lines[0], {**case, "skipped": "out of memory"}]) is None


def test_updates_are_reported_as_they_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    async def pauses(*_: object) -> AsyncIterator[gpu_parts.Line]:
        yield {"update": 1}
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(gpu_parts, "_pauses", pauses)
    lines = gpu_parts.pause(torch.device("cpu"))
    assert next(lines) == {"shape": "smoke", "train": "full", "update": 1}
    assert next(lines) == {"shape": "smoke", "train": "full", "skipped": "out of memory"}
    assert next(lines)["train"] == "lora"


@pytest.mark.parametrize("failure", [None, "out of memory"])
async def test_sequences_that_end_before_an_update_are_not_waited_for(failure: str | None) -> None:
    class Ends:
        async def generate_streaming(self, *_: object) -> None:
            if failure:
                raise EngineError(failure)

    async def update() -> None:
        raise AssertionError("there is nothing to update")

    with pytest.raises(EngineError, match=failure or "ended before the update"):
        await gpu_parts._gap(cast(LocalEngine, Ends()), [[1], [2]], update, 2)


def test_a_drift_that_was_measured_before_an_error_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rank:
        policy = cast(Any, MagicMock())

    learner, engine = AsyncMock(), AsyncMock()
    learner.step.side_effect = torch.OutOfMemoryError("out of memory")
    monkeypatch.setattr(gpu_parts, "open_learner", lambda *_, **__: (Rank(), learner))
    monkeypatch.setattr(gpu_parts, "LocalEngine", lambda *_, **__: engine)
    monkeypatch.setattr(gpu_parts, "_sampled", AsyncMock(return_value=[]))
    monkeypatch.setattr(gpu_parts, "_difference", lambda *_: {"mean_abs": 0.5})
    lines = gpu_parts.drift(torch.device("cpu"))
    assert next(lines) == {"shape": "smoke", "when": "before", "mean_abs": 0.5}
    with pytest.raises(torch.OutOfMemoryError):
        next(lines)
    engine.close.assert_awaited_once()


def test_an_attention_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def update(shape: str, kind: str, *_: object) -> gpu_parts.Line:
        if kind == "flash":
            raise RuntimeError("no kernel image\nfor this device")
        return {"step_s": 1.0}

    monkeypatch.setattr(gpu_parts, "_update", update)
    found = list(gpu_parts.trees(torch.device("cpu")))
    assert [line["attention"] for line in found if "step_s" in line] == ["sdpa", "sdpa", "flex", "flex"]
    assert {line["failed"] for line in found if "failed" in line} == {"RuntimeError: no kernel image"}


def test_all_parts_fit_into_eight_minutes() -> None:
    assert sum(part.limit_s for part in gpu_all.PARTS.values()) <= 470
