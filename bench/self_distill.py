"""The policy as its own teacher, with hints: against GRPO from the same start.

    python -m bench.self_distill [--seeds 0,1,2,3,4] [--json FILE] [--quick]

A policy of 100,000 parameters learns from demonstrations to open doors with a color that half of its prompts name;
without it, it guesses between the two colors that a door may have, or (the start `certain`) always names the wrong
one. Then it plays with prompts that name no color, and each of the 8 doors always has the same. Self-distillation
(`teacher.policy`, `teacher.hint: env`) sees no reward: only the teacher's prompt has the color. `forward` is
`initial` with the forward KL (`kl.jsd_beta: 0`). GRPO sees rewards and no hint, with the same learning rate. All
take 60 steps of 32 episodes. `--quick` takes one seed, and plays `initial` and `grpo` from the first start only.
The last line is JSON: the share of the 8 tasks that is solved afterwards, sampled greedily.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from agentrl.config import RunConfig
from bench.shared.curves import curve
from bench.shared.verdict import finish, last_line
from tests.doctor.planted import merged, train

GOAL = 0.95
ENV = f"{Path(__file__).parent / 'shared/doors.py'}:Doors"
ROLLOUT = {"groups_per_step": 8, "group_size": 4, "max_turns": 1, "max_tokens": 32, "token_budget": 400}
READS: Mapping[str, Any] = {
    "name": "reads",
    "steps": 1,
    "env": {"use": ENV},
    "model": {"tiny": {"hidden": 64, "layers": 2, "heads": 4, "intermediate": 128, "vocab": 400}},
    "warmup": {"num": 1500, "max_epochs": 12, "probe_every": 1000, "until_pass": 1.0, "at_least": 0.0, "lr": 5e-3},
    "rollout": ROLLOUT,
    "optim": {"lr": 1e-3, "warmup_steps": 0},
    "eval": {"tasks": 64, "every": 0},
}
KNOWS: Mapping[str, Any] = {
    "steps": 60,
    "env": {"use": ENV},
    "rollout": ROLLOUT,
    "optim": {"warmup_steps": 0},
    "eval": {"tasks": 8, "every": 10},
}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "initial": {
        "teacher": {"policy": "initial", "hint": "env"},
        "algorithm": {"advantage": "none", "kl": {"coef": 1.0}},
        "optim": {"lr": 1e-3},
    },
    "average": {
        "teacher": {"policy": "average", "hint": "env"},
        "algorithm": {"advantage": "none", "kl": {"coef": 1.0}},
        "optim": {"lr": 1e-3},
    },
    "forward": {
        "teacher": {"policy": "initial", "hint": "env"},
        "algorithm": {"advantage": "none", "kl": {"coef": 1.0, "jsd_beta": 0.0}},
        "optim": {"lr": 1e-3},
    },
    "grpo": {"optim": {"lr": 1e-3}},
}
STARTS = {"guess": ("initial", "average", "grpo"), "certain": ("initial", "forward", "grpo")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--json", type=Path, help="write all curves here as well")
    parser.add_argument("--quick", action="store_true", help="one seed")
    args = parser.parse_args()
    seeds = [0] if args.quick else [int(seed) for seed in args.seeds.split(",")]
    starts = {"guess": ("initial", "grpo")} if args.quick else STARTS
    with tempfile.TemporaryDirectory() as folder:
        found = {start: play(Path(folder) / start, start, seeds, names) for start, names in starts.items()}
    solved, certain = _solved(found["guess"]), _solved(found.get("certain", {}))
    line = {
        "bench": "self_distill",
        "ours": solved["initial"],
        "baseline": solved["grpo"],
        "ratio": round(solved["initial"] / solved["grpo"], 2) if solved["grpo"] else None,
        "unit": "share of the tasks solved after training; baseline: GRPO from the same start",
        "goal": GOAL,
        "met": solved["initial"] >= GOAL,
        "average": solved.get("average"),
        "before": round(mean(run["held_out"][0] for run in found["guess"]["initial"]), 3),
        "with_hint": solved["reads"],
        "certain_of_wrong": {name: value for name, value in certain.items() if name != "reads"},
    }
    if args.json:
        args.json.write_text(json.dumps({"runs": found, "line": last_line(line)}, indent=1) + "\n")
    finish(line)


def _solved(found: Mapping[str, Any]) -> dict[str, float]:
    """The mean over all seeds at the end, by way."""
    return {name: round(mean(run["held_out"][-1] for run in runs), 3) for name, runs in found.items()}


def play(folder: Path, start_with: str, seeds: list[int], names: Sequence[str]) -> dict[str, Any]:
    """For each seed a policy that reads hints, then each way to learn what they say; returns their curves."""
    found: dict[str, Any] = {"reads": [], **{name: [] for name in names}}
    for seed in seeds:
        start = folder / f"reads-{seed}"
        run(start, {**READS, "seed": seed, "data": {"options": {"size": 4000, "reading": start_with}}})
        found["reads"].append(curve(start))
        model = {"path": str(start / f"checkpoints/step-{READS['steps']}")}
        for name in names:
            given = {**KNOWS, "name": name, "seed": seed, "model": model}
            run(folder / f"{name}-{seed}", merged(given, WAYS[name]))
            one = curve(folder / f"{name}-{seed}")
            found[name].append(one)
            far = f"{one['kl'][0]:.2f} -> {one['kl'][-1]:.3f}"
            print(f"{start_with} {seed} {name:8} solved {one['held_out']}  kl {far}", flush=True)
    return found


def run(folder: Path, given: Mapping[str, Any]) -> None:
    """Train into this folder."""
    train(RunConfig.model_validate(given), folder)


if __name__ == "__main__":
    main()
