"""Learning from a teacher against GRPO, from the same start: a student that solves little or nothing.

    python bench/distill.py [--seeds 0,1,2,3,4] [--json FILE] [--quick]

A teacher of 100,000 parameters learns the env of the planted faults (`tests/doctor/planted_envs.py`) from
demonstrations (it solves half of the tasks, as the demonstrations do: what is measured is how closely students
follow it). A student a quarter of its size, with a cold start that is too short, then trains for 40 steps: by the
teacher alone (`advantage: none`, `kl.kind: full`), by a teacher elsewhere (`centered`), and by GRPO. `--quick`
takes one seed. The last line is JSON: held-out results of the first and of GRPO as shares of the teacher's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from agentrl.config import RunConfig
from bench.shared.curves import curve
from bench.shared.verdict import finish, last_line
from tests.doctor.planted import BASE, ENVS, merged, train

GOAL = 0.95
SMALL = {"hidden": 32, "layers": 1, "heads": 2, "intermediate": 64}
LARGE = {"hidden": 64, "layers": 2, "heads": 4, "intermediate": 128}
TEACHER = {"steps": 1, "warmup": {"num": 400, "max_epochs": 20}, "eval": {"every": 1, "tasks": 32}}
STUDENT = {"steps": 40, "warmup": {"max_epochs": 4}, "eval": {"every": 5, "tasks": 32}, "optim": {"lr": 3e-3}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--json", type=Path, help="write all curves here as well")
    parser.add_argument("--quick", action="store_true", help="one seed")
    args = parser.parse_args()
    seeds = [0] if args.quick else [int(seed) for seed in args.seeds.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        found = play(Path(folder), seeds)
    teacher = found["teacher"]["held_out"][-1]
    shares = {
        name: mean(run["held_out"][-1] / teacher for run in found[name]) for name in ("full", "centered", "grpo")
    }
    line = {
        "bench": "distill",
        "ours": round(shares["full"], 3),
        "baseline": round(shares["grpo"], 3),
        "ratio": round(shares["full"] / shares["grpo"], 2) if shares["grpo"] else None,
        "unit": "held-out result as a share of the teacher's; baseline: GRPO from the same start",
        "goal": GOAL,
        "met": shares["full"] >= GOAL,
        "centered": round(shares["centered"], 3),
        "kl_first": round(mean(run["kl"][0] for run in found["full"]), 3),
        "kl_last": round(mean(run["kl"][-1] for run in found["full"]), 3),
    }
    if args.json:
        args.json.write_text(json.dumps({"runs": found, "line": last_line(line)}, indent=1) + "\n")
    finish(line)


def play(folder: Path, seeds: list[int]) -> dict[str, Any]:
    """Train the teacher, then the students of each seed; returns their curves."""
    run(folder / "teacher", merged(TEACHER, {"model": {"tiny": {**LARGE, "vocab": 400}}}))
    found: dict[str, Any] = {"teacher": curve(folder / "teacher"), "full": [], "centered": [], "grpo": []}
    given = {"model": {"tiny": SMALL}, "teacher": {"path": str(folder / "teacher/checkpoints/step-1")}}
    for seed in seeds:
        for kind in ("full", "centered"):
            algorithm = {"advantage": "none", "kl": {"coef": 1.0, "kind": kind}}
            run(folder / f"{kind}-{seed}", merged(STUDENT, {"seed": seed, **given, "algorithm": algorithm}))
        start = {"path": str(folder / f"full-{seed}/start")}
        grpo = {**STUDENT, "seed": seed, "model": start, "warmup": None}
        run(folder / f"grpo-{seed}", grpo)
        for name in ("full", "centered", "grpo"):
            one = curve(folder / f"{name}-{seed}")
            found[name].append(one)
            print(f"seed {seed} {name:8} held out {one['held_out']}  kl {one['kl'][0]:.2f} -> {one['kl'][-1]:.2f}")
    return found


def run(folder: Path, changes: Mapping[str, Any]) -> None:
    """Train into this folder."""
    base = {key: value for key, value in BASE.items() if key != "model"}
    train(RunConfig.model_validate(merged({**base, "env": f"{ENVS}:Buttons"}, changes)), folder)


if __name__ == "__main__":
    main()
