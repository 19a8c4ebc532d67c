"""Every script in bench/ has --quick and ends with the same JSON line; a busy machine cannot fail it."""

from __future__ import annotations

import ast
import asyncio
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import rollout
from bench.shared import verdict
from bench.shared.verdict import KEYS, Machine, last_line

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "bench").glob("*.py"))
GOOD = {"bench": "b", "ours": 1, "unit": "s", "goal": 2, "met": True}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_every_script_is_a_bench_with_a_short_form_and_a_last_line(script: Path) -> None:
    tree = ast.parse(script.read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    finishes = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "finish"]
    assert finishes, "it does not end with bench.shared.verdict.finish"
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert "--quick" in strings
    assert any(isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in tree.body)


@pytest.mark.parametrize("arguments", [["transcript"], ["sandbox", "chaos"]], ids="-".join)
def test_a_quick_bench_ends_with_the_contract(arguments: list[str]) -> None:
    command = [sys.executable, f"bench/{arguments[0]}.py", *arguments[1:], "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    line = json.loads(done.stdout.splitlines()[-1])
    assert list(line)[:7] == list(KEYS)
    assert line["bench"] == arguments[0]
    assert line["met"] in (True, False, "inconclusive")


def test_simulated_servers_play_and_take_new_weights() -> None:
    played = rollout.play(rollout.Workload(256, 2, rollout.Slow, slots=4, step_s=0.03))
    assert played.episodes == 128
    assert played.lost < 8, "sandboxes break on purpose, few of them"
    assert 0.5 < played.bound_s / played.wall_s <= 1.0


def test_a_line_without_its_goal_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks goal, met"):
        last_line({"bench": "b", "ours": 1, "unit": "s"})


def test_a_missed_time_is_inconclusive_on_a_busy_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    missed = GOOD | {"met": False}
    for taken, timed, met in [(0.6, True, "inconclusive"), (0.6, False, False), (0.1, True, False)]:
        monkeypatch.setattr(Machine, "elsewhere", lambda self, taken=taken: taken)
        assert last_line(missed, timed=timed)["met"] == met
        assert last_line(GOOD, timed=timed)["met"] is True
    assert last_line(GOOD | {"met": None})["met"] == "inconclusive"
    assert last_line(GOOD | {"met": None, "why": "no GPU"})["why"] == "no GPU"


def test_own_work_is_not_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, everything = iter([10.0, 13.0]), iter([(100.0, 0.0), (104.0, 0.5)])
    clock = iter([0.0, 2.0])
    monkeypatch.setattr(verdict, "_ours", lambda: next(ours))
    monkeypatch.setattr(verdict, "_machine", lambda: next(everything))
    monkeypatch.setattr(verdict.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(verdict.os, "cpu_count", lambda: 4)
    # By hand: 4 s used, 3 of them ours, and 0.5 s stolen, of 2 s on 4 cores.
    assert Machine().elsewhere() == pytest.approx(1.5 / 8)


@pytest.mark.parametrize("name", ["gpu_all", "gpu_learner", "gpu_rollout"])
def test_without_a_gpu_there_is_a_line_that_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = importlib.import_module(f"bench.{name}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [name, "--quick"])
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert bench.main() == 2
    out, err = capsys.readouterr()
    assert err == f"{name}: PyTorch sees no GPU here; --smoke runs the same code on the CPU\n"
    line = json.loads(out)
    assert (line["bench"], line["met"]) == (name, "inconclusive")
    assert "no GPU" in line["why"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["vs_trl", "--shapes", "short,nope"],
            "argument --shapes: there is no 'nope'; there are short, long, slow",
        ),
        (["learning_vs_trl", "--arms", "nope"], "there is no 'nope'; there are matched, defaults"),
        (["algorithms", "--only", "nope"], "argument --only: there is no 'nope'; there are lora_grpo"),
        (["integrity", "--rows", "nope"], "there is no 'nope'; there are namespace, user, landlock, docker"),
        (["integrity", "--only", "nope"], "--only: no attack has 'nope' in its name"),
        (["kill9", "--kinds", "nope"], "there is no 'nope'; there are moment, checkpoint, rank"),
        (["kill9", "--kills", "0"], "--kills: 0; at least 1 is needed to compare"),
        (["families", "--only", "nope"], "--only: unknown model type 'nope'"),
        (["reach", "nope"], "argument names: there is no 'nope'"),
        (["gpu_learner", "--smoke", "--shapes", "nope"], "argument --shapes: there is no 'nope'"),
        (["gpu_rollout", "--smoke", "--shapes", "nope"], "argument --shapes: there is no 'nope'"),
    ],
    ids=lambda each: "-".join(each) if isinstance(each, list) else "",
)
def test_names_that_a_bench_does_not_know_are_one_error(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = importlib.import_module(f"bench.{arguments[0]}")
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match="2"):
        asyncio.run(bench.main()) if asyncio.iscoroutinefunction(bench.main) else bench.main()
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
