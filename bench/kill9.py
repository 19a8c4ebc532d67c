#!/usr/bin/env python3
"""Kill a run again and again, resume it, and compare what it leaves with an uninterrupted run.

    python bench/kill9.py --kills 30 --out bench/results/kill9.json
    python bench/kill9.py --kills 8 --ranks 2 --kinds rank,rank,rank,checkpoint --out bench/results/kill9.json
    python bench/kill9.py --quick          two kills of a run of ten steps, in one process

Every kill is a SIGKILL: of the run at a random moment, of the run while it writes a checkpoint, or (with --ranks)
of one rank of the learner. After each, every finished checkpoint is verified; at the end the curves are compared.
The last line is JSON; the file keeps the results of each number of ranks. 30 kills take about ten minutes on two
cores; with two ranks a kill takes about a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from agentrl.run_folder import checkpoints
from agentrl.run_folder.records import read_metrics

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.shared.names import names_of
from bench.shared.verdict import finish

ENV = '''
from agentrl import ToolEnv, reward
from agentrl.env.read import final_answer
from agentrl.env.tasks import generated


class Vowels(ToolEnv):
    """Say vowels."""

    def setup(self, number: int) -> str:
        return f"Number {number}."

    @reward
    def vowels(self, episode) -> float:
        text = final_answer(episode) or ""
        return sum(letter in "aeiou" for letter in text) / max(1, len(text))

    @classmethod
    def tasks(cls, split, seed):
        return generated("vowels", split, seed, 8, lambda rng: {"number": rng.randrange(10)})
'''
YAML = """
name: kill9
env: env.py:Vowels
model: {{tiny: {{hidden: 32, layers: 1, heads: 2, intermediate: 64, vocab: 400}}}}
steps: {steps}
rollout: {{groups_per_step: 4, group_size: 4, max_turns: 1, max_tokens: 12, token_budget: 400, temperature: 1.0}}
optim: {{lr: 1.0e-3}}
engine: {{device: cpu}}
learner: {{device: cpu}}
checkpoint: {{every: {every}, keep: 3}}
"""
TIMES = ("seconds", "tokens_per_s")
"""Metrics that a clock decides, by the end of their names."""


def write(folder: Path, steps: int, every: int = 2) -> None:
    """The env and the configuration of the run."""
    (folder / "env.py").write_text(ENV)
    (folder / "tools.yaml").write_text(YAML.format(steps=steps, every=every))


def start(folder: Path, name: str, ranks: int = 1) -> subprocess.Popen[bytes]:
    """The run as a user starts it."""
    command = [
        sys.executable,
        "-m",
        "agentrl",
        "train",
        str(folder / "tools.yaml"),
        "--run-dir",
        str(folder / name),
        "--set",
        f"learner.ranks={ranks}",
    ]
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})


def steps_done(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def descendants(pid: int) -> dict[int, str]:
    """Processes that a process started, directly or not, with their command lines."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
    found, front = {}, {pid}
    while front := {child for child, parent in parents.items() if parent in front and child not in found}:
        for child in front:
            try:
                found[child] = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                found[child] = ""
    return found


def wait_for_moment(
    process: subprocess.Popen[bytes], run: Path, kind: str, rng: random.Random, ahead: int | None
) -> bool:
    """Wait until it is time to kill: `ahead` lines from here, or any number; False when the run ended before."""
    pause = rng.uniform(0, 1.0 if ahead is None else 0.1)
    if ahead is None:
        ahead = rng.randint(1 if kind == "rank" else 0, 4)
    after = steps_done(run) + ahead
    while process.poll() is None:
        writing = any((run / "checkpoints").glob(".writing-step-*")) if (run / "checkpoints").is_dir() else False
        if kind == "checkpoint" and writing:
            time.sleep(rng.uniform(0, 0.03))
            return process.poll() is None
        if kind != "checkpoint" and steps_done(run) >= after:
            time.sleep(pause)
            return process.poll() is None
        time.sleep(0.001 if kind == "checkpoint" else 0.02)
    return False


def kill_once(
    folder: Path, kind: str, rng: random.Random, ahead: int | None = None, ranks: int = 1
) -> dict[str, Any] | None:
    """Start or resume the run and kill it; None when it ended by itself."""
    run, process = folder / "killed", start(folder, "killed", ranks)
    if not wait_for_moment(process, run, kind, rng, ahead):
        process.wait()
        assert process.returncode == 0, (folder / "killed.log").read_text()[-2000:]
        return None
    family = descendants(process.pid)
    victim = process.pid
    if kind == "rank":
        victim = rng.choice([pid for pid, command in family.items() if "RankWorker" in command] or [victim])
    at = steps_done(run)
    os.kill(victim, signal.SIGKILL)
    code = process.wait()
    left = wait_until_gone(family)
    found = checkpoints.steps_saved(run / "checkpoints") if (run / "checkpoints").is_dir() else []
    for step in found:
        checkpoints.verify(run / "checkpoints" / f"step-{step}")
    return {"kind": kind, "after_lines": at, "exit": code, "checkpoints": found, "left_behind": left}


def wait_until_gone(family: dict[int, str], timeout_s: float = 90.0) -> list[str]:
    """Processes of a killed run that do not end by themselves; they are ended here."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        alive = [pid for pid in family if Path(f"/proc/{pid}").exists() and _state(pid) != "Z"]
        if not alive:
            return []
        time.sleep(0.2)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    return [family[pid][:80] for pid in alive]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def curve(run: Path) -> list[dict[str, Any]]:
    """The metrics of all steps, without times and without what depends on the number of ranks."""
    own = "rank/"
    return [
        {k: v for k, v in line.items() if not k.endswith(TIMES) and not k.startswith(own)}
        for line in read_metrics(run)
    ]


def differences(wanted: list[dict[str, Any]], found: list[dict[str, Any]], tolerance: float) -> list[str]:
    """Where two curves are not the same."""
    if [line["step"] for line in wanted] != [line["step"] for line in found]:
        return [f"steps {[line['step'] for line in found]}"]
    out = []
    for one, other in zip(wanted, found, strict=True):
        for name in one.keys() | other.keys():
            a, b = one.get(name), other.get(name)
            if a is None or b is None or abs(a - b) > tolerance * max(1.0, abs(a)):
                out.append(f"step {one['step']} {name}: {a} became {b}")
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument(
        "--kinds",
        type=names_of(("moment", "checkpoint", "rank")),
        help="moment, checkpoint, rank: in turn, with commas between",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="two kills of a run of ten steps: under a minute")
    options = parser.parse_args()
    if options.kills < 1:
        parser.error(f"--kills: {options.kills}; at least 1 is needed to compare")
    if options.quick:
        options.kills, options.steps, options.ranks, options.kinds = 2, 10, 1, "moment,checkpoint"
    rng, kills = random.Random(options.seed), list[Any]()
    kinds = (options.kinds or ("moment,checkpoint" if options.ranks == 1 else "moment,checkpoint,rank")).split(",")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, options.steps)
        whole = start(folder, "whole", options.ranks)
        assert whole.wait() == 0, (folder / "whole.log").read_text()[-3000:]
        rounds = 1
        while len(kills) < options.kills:
            killed = kill_once(folder, kinds[len(kills) % len(kinds)], rng, ranks=options.ranks)
            if killed is None:  # it got to its end: begin another
                if apart := differences(curve(folder / "whole"), curve(folder / "killed"), 1e-6):
                    break
                (folder / "killed").rename(folder / f"ended-{rounds}")
                rounds += 1
            else:
                kills.append(killed)
                print(json.dumps(killed), file=sys.stderr, flush=True)
        last = start(folder, "killed", options.ranks)
        assert last.wait() == 0, (folder / "killed.log").read_text()[-3000:]
        apart = differences(curve(folder / "whole"), curve(folder / "killed"), 1e-6)
        lines = len(curve(folder / "killed"))
    result = {
        "steps": options.steps, "ranks": options.ranks, "kills": len(kills), "runs": rounds, "lines": lines,
        "differences": apart, "left_behind": sum(len(k["left_behind"]) for k in kills), "each": kills,
    }  # fmt: skip
    if options.out:
        kept = json.loads(options.out.read_text()) if options.out.is_file() else {}
        kept[f"ranks {options.ranks}"] = result
        options.out.write_text(json.dumps(kept, indent=1) + "\n")
    finish(
        {
            "bench": "kill9",
            "ours": len(apart),
            "unit": "differences from the run that nothing killed",
            "goal": "no differences",
            "met": not apart,
            **{k: v for k, v in result.items() if k != "each"},
        }
    )
    return 1 if apart else 0


if __name__ == "__main__":
    sys.exit(main())
