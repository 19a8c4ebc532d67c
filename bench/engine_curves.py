"""The same training with the local engine and with SGLang: does the reward climb, and do the curves agree?

    python bench/engine_curves.py --start POLICY --python SGLANG_PYTHON [--steps N] [--seeds N] [--held-out N]
        [--lora] [--json FILE]

Every run begins with the policy in POLICY (a model directory that solves some of the calculator's tasks, for
instance `start/` of a run folder) and trains on the same tasks in the same order. What differs is the sampling:
SGLang ignores seeds on a CPU, and the local engine draws by its own. With `--lora` one more run trains an adapter,
and SGLang is sent the adapter alone. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.config.run import RunConfig
from agentrl.run.report import Silent, Summary
from agentrl.run.store import RunStore
from agentrl.train.run import train_run

LORA = {"rank": 8, "alpha": 16}


def config(start: Path, engine: dict[str, Any], steps: int, seed: int, held_out: int) -> RunConfig:
    """One run; all runs of one seed differ in `engine` only, but adapters learn at a rate of their own."""
    adapter = engine.get("sync") == "lora"
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
            "optim": {"lr": 4e-3 if adapter else 4e-4},
            "eval": {"tasks": held_out},
            "learner": {"device": "cpu"} | ({"lora": LORA} if adapter else {}),
            "engine": {"device": "cpu", "max_slots": 64} | engine,
        }
    )


def curve(start: Path, engine: dict[str, Any], steps: int, seed: int, held_out: int) -> dict[str, Any]:
    """Train once."""
    with tempfile.TemporaryDirectory() as folder:
        run = config(start, engine, steps, seed, held_out)
        with RunStore.open(run, Path(folder) / "run") as store:
            summary = train_run(run, store, Silent())
            lines = [line for line in store.metrics() if line["step"] > 0]
    return described(engine, seed, held_out, lines, summary)


def described(
    engine: dict[str, Any], seed: int, held_out: int, lines: Sequence[Mapping[str, float]], summary: Summary
) -> dict[str, Any]:
    """What is kept of a run: `lines` are the metrics of its steps."""
    return {
        "engine": engine["kind"] + (", adapter" if engine.get("sync") == "lora" else ""),
        "seed": seed,
        "reward": [round(line["reward"], 4) for line in lines],
        "held_out_tasks": held_out,
        "held_out": [summary.held_out_before, summary.held_out_after],
        "largest_sync_gap": max((line.get("sync_gap", 0.0) for line in lines), default=0.0),
        "largest_drift": max((line["drift/mean_abs"] for line in lines), default=0.0),
        "largest_drift_of_a_token": max((line["drift/max_abs"] for line in lines), default=0.0),
        "infra_failures": summary.infra_failures,
    }


def main() -> None:
    """Run both engines on every seed and compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--start", type=Path, required=True)
    parser.add_argument("--python", required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--held-out", type=int, default=96)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    sglang: dict[str, Any] = {"kind": "sglang", "server": {"python": args.python}}
    engines: list[dict[str, Any]] = [{"kind": "local"}, sglang] + (
        [sglang | {"sync": "lora"}] if args.lora else []
    )
    runs = []
    for seed in range(args.seeds):
        for engine in engines:
            runs.append(curve(args.start, engine, args.steps, seed, args.held_out))
            print(json.dumps(runs[-1]), flush=True)
    result = compared(runs, args.steps)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def compared(runs: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """The runs, and how far the local engine and SGLang are apart."""
    means = {
        kind: [statistics.mean(run["reward"]) for run in runs if run["engine"] == kind]
        for kind in ("local", "sglang")
    }
    pairs = [a - b for a, b in zip(means["local"], means["sglang"], strict=True)]
    # One step's mean reward is of 64 episodes; the mean over the steps of a run has this standard error at least.
    share = statistics.mean(means["local"] + means["sglang"])
    noise = (2 * share * (1 - share) / (64 * steps)) ** 0.5
    return {
        "steps": steps,
        "runs": runs,
        "mean_reward": means,
        "difference": [round(pair, 4) for pair in pairs],
        "standard_error_of_one_difference": round(noise, 4),
    }


if __name__ == "__main__":
    main()
