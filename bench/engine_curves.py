"""The same training with the local engine and with SGLang: do the curves agree within noise?

    python bench/engine_curves.py --start POLICY --python SGLANG_PYTHON [--steps N] [--seeds N] [--json FILE]

Every run begins with the policy in POLICY (a model directory that solves some of the calculator's tasks, for
instance `start/` of a run folder) and trains on the same tasks in the same order. What differs is the sampling:
SGLang ignores seeds on a CPU, and the local engine draws by its own. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from agentrl.config.run import RunConfig
from agentrl.run.report import Silent
from agentrl.run.store import RunStore
from agentrl.train.run import train_run


def config(start: Path, engine: dict[str, Any], steps: int, seed: int) -> RunConfig:
    """One run; all runs of one seed differ in `engine` only."""
    return RunConfig.model_validate(
        {
            "name": "curves",
            "seed": seed,
            "steps": steps,
            "env": "agentrl.envs.calculator:Calculator",
            "data": {"options": {"max_operations": 2}},
            "model": {"path": str(start)},
            "rollout": {
                "groups_per_step": 8,
                "group_size": 8,
                "max_turns": 4,
                "max_tokens": 48,
                "token_budget": 400,
                "tokenization_check": "strict",
            },
            "algorithm": {"kl": {"coef": 0.003}},
            "optim": {"lr": 4e-4},
            "eval": {"tasks": 48},
            "learner": {"device": "cpu"},
            "engine": {"device": "cpu", "max_slots": 64} | engine,
        }
    )


def curve(start: Path, engine: dict[str, Any], steps: int, seed: int) -> dict[str, Any]:
    """Train once."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run = config(start, engine, steps, seed)
        with RunStore.open(run, Path(folder) / "run") as store:
            summary = train_run(run, store, Silent())
            lines = [line for line in store.metrics() if line["step"] > 0]
    return {
        "engine": engine["kind"],
        "seed": seed,
        "reward": [round(line["reward"], 4) for line in lines],
        "held_out": [summary.held_out_before, summary.held_out_after],
        "largest_sync_gap": max((line.get("sync_gap", 0.0) for line in lines), default=0.0),
        "largest_drift": max((line["drift/mean_abs"] for line in lines), default=0.0),
        "infra_failures": summary.infra_failures,
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    """Run both engines on every seed and compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--start", type=Path, required=True)
    parser.add_argument("--python", required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    runs = []
    for seed in range(args.seeds):
        for engine in ({"kind": "local"}, {"kind": "sglang", "server": {"python": args.python}}):
            runs.append(curve(args.start, engine, args.steps, seed))
            print(json.dumps(runs[-1]), flush=True)
    means = {
        kind: [statistics.mean(run["reward"]) for run in runs if run["engine"] == kind]
        for kind in ("local", "sglang")
    }
    pairs = [a - b for a, b in zip(means["local"], means["sglang"], strict=True)]
    # One step's mean reward is of 64 episodes; the mean over the steps of a run has this standard error at least.
    share = statistics.mean(means["local"] + means["sglang"])
    noise = (2 * share * (1 - share) / (64 * args.steps)) ** 0.5
    result = {
        "steps": args.steps,
        "runs": runs,
        "mean_reward": means,
        "difference": [round(pair, 4) for pair in pairs],
        "standard_error_of_one_difference": round(noise, 4),
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
