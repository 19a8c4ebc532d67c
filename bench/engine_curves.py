"""The same training with the local engine and with SGLang: does the reward climb, and do the curves agree?

    python bench/engine_curves.py --start POLICY --python SGLANG_PYTHON [--steps 16] [--seeds 3] [--held-out 96]
        [--lora] [--keep FOLDER] [--out bench/results/sglang.json]
    python bench/engine_curves.py --quick [--start POLICY]

Every run begins with the policy in POLICY (a model directory that solves some of the calculator's tasks, for
instance `start/` of a run folder). The runs of one seed train on the same tasks in the same order; what differs
is the sampling: SGLang ignores seeds on a CPU, and the local engine draws by its own. With `--lora` one more run
trains an adapter, and SGLang is sent the adapter alone. A finished run is kept in FOLDER and not run again, and
the results are written after each, so that the bench may be cut off and called again.

`--quick` needs no SGLang: the local engine plays one seed twice, which must sample and score the same, and another
seed, which must not. The last line is JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.config.run import RunConfig
from agentrl.reporting.report import Silent, Summary
from agentrl.run_folder.store import RunStore
from agentrl.trainer.run import train_run

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.shared.verdict import finish

OUT = Path(__file__).parent / "results" / "sglang.json"
LORA = {"rank": 8, "alpha": 16}
T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom."""


def config(start: Path | None, engine: Mapping[str, Any], steps: int, seed: int, held_out: int) -> RunConfig:
    """One run; all runs of one seed differ in `engine` only, but adapters learn at a rate of their own."""
    adapter = engine.get("sync") == "lora"
    return RunConfig.model_validate(
        {
            "name": "curves",
            "seed": seed,
            "steps": steps,
            "env": "agentrl.envs.calculator:Calculator",
            "data": {"options": {"max_operations": 2}},
            "model": {"path": str(start)} if start else {"tiny": {"hidden": 64, "layers": 2}},
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
            "engine": {"device": "cpu", "max_slots": 64, **engine},
        }
    )


def curve(start: Path | None, engine: Mapping[str, Any], steps: int, seed: int, held_out: int) -> dict[str, Any]:
    """Train once."""
    with tempfile.TemporaryDirectory() as folder:
        run = config(start, engine, steps, seed, held_out)
        with RunStore.open(run, Path(folder) / "run") as store:
            summary = train_run(run, store, Silent())
            lines = [line for line in store.metrics() if line["step"] > 0]
    if not summary.finished:
        raise SystemExit(f"stopped after {len(lines)} steps of {name(engine)}, seed {seed}")
    return described(name(engine), seed, held_out, lines, summary)


def name(engine: Mapping[str, Any]) -> str:
    """What a run's engine is called in the results."""
    return str(engine["kind"]) + (", adapter" if engine.get("sync") == "lora" else "")


def described(
    engine: str, seed: int, held_out: int, lines: Sequence[Mapping[str, float]], summary: Summary
) -> dict[str, Any]:
    """What is kept of a run: `lines` are the metrics of its steps."""
    return {
        "engine": engine,
        "seed": seed,
        "reward": [round(line["reward"], 4) for line in lines],
        "sampled_tokens": [round(line["sampled_tokens"]) for line in lines],
        "held_out_tasks": held_out,
        "held_out": [summary.held_out_before, summary.held_out_after],
        "largest_sync_gap": max((line.get("sync_gap", 0.0) for line in lines), default=0.0),
        "largest_drift": max((line.get("drift/mean_abs", 0.0) for line in lines), default=0.0),
        "largest_drift_of_a_token": max((line.get("drift/max_abs", 0.0) for line in lines), default=0.0),
        "infra_failures": summary.infra_failures,
    }


def kept(
    folder: Path, start: Path, engine: Mapping[str, Any], steps: int, seed: int, held_out: int
) -> dict[str, Any]:
    """What a finished run of the same settings left in `folder`; else run it, and leave it there."""
    settings = config(start, engine, steps, seed, held_out).model_dump(mode="json", exclude={"engine": {"server"}})
    settings["model"]["path"] = hashlib.sha256((start / "model.safetensors").read_bytes()).hexdigest()
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
    file = folder / f"{name(engine).replace(', ', '-')}-{seed}-{digest}.json"
    if file.is_file():
        found: dict[str, Any] = json.loads(file.read_text())
        return found
    run = curve(start, engine, steps, seed, held_out)
    folder.mkdir(parents=True, exist_ok=True)
    written(file, run)
    return run


def compared(runs: Sequence[Mapping[str, Any]], steps: int) -> dict[str, Any]:
    """The local engine less SGLang over the seeds that both have finished, and all the runs.

    Standard errors are over seeds (each engine's own spread, as of two independent samples), and the interval is
    Student's with as many degrees of freedom as both samples leave; neither exists for one seed.
    """
    both = [{run["seed"]: run for run in runs if run["engine"] == kind} for kind in ("local", "sglang")]
    seeds = sorted(set(both[0]) & set(both[1]))
    quarter = max(1, steps // 4)
    measures = {
        "mean_reward": lambda run: statistics.mean(run["reward"]),
        "mean_reward_of_the_last_quarter": lambda run: statistics.mean(run["reward"][-quarter:]),
        "held_out_after": lambda run: run["held_out"][1],
    }
    found = {
        measure: differing(*([of(runs_of[seed]) for seed in seeds] for runs_of in both))
        for measure, of in measures.items()
        if seeds
    }
    return {"steps": steps, "seeds": seeds, "compared": found, "runs": list(runs)}


def differing(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """The means of both, their difference, its standard error and its 95 % interval."""
    seeds, difference = len(ours), statistics.mean(ours) - statistics.mean(theirs)
    found: dict[str, Any] = {
        "local": [round(value, 4) for value in ours],
        "sglang": [round(value, 4) for value in theirs],
        "difference": round(difference, 4),
    }
    if seeds < 2:
        return found
    error = ((statistics.variance(ours) + statistics.variance(theirs)) / seeds) ** 0.5
    reach = T95[min(2 * (seeds - 1), len(T95)) - 1] * error
    interval = [round(difference - reach, 4), round(difference + reach, 4)]
    return found | {"standard_error": round(error, 4), "interval_95": interval}


def line(result: Mapping[str, Any]) -> dict[str, Any]:
    """The last line that is printed."""
    reward = result["compared"].get("mean_reward", {})
    interval = reward.get("interval_95")
    return {
        "bench": "engine_curves",
        "ours": reward.get("difference"),
        "unit": "mean reward while training, local less SGLang",
        "standard_error": reward.get("standard_error"),
        "seeds": len(result["seeds"]),
        "goal": "0 in the 95 % interval over seeds",
        "met": interval is not None and interval[0] <= 0 <= interval[1],
    }


def written(file: Path, content: Any) -> None:
    """Write aside and rename, so that what is there is whole."""
    aside = file.with_suffix(".part")
    aside.write_text(json.dumps(content, indent=2) + "\n")
    aside.replace(file)


def quick(start: Path | None, steps: int) -> dict[str, Any]:
    """The local engine against itself: one seed twice, and another."""
    runs = [curve(start, {"kind": "local"}, steps, seed, 8) for seed in (0, 0, 1)]
    # Not the drift: how requests share a batch depends on the clock, and the last bits of a logprob on the batch.
    first, again, other = ([run["sampled_tokens"], run["reward"], run["held_out"]] for run in runs)
    return {
        "bench": "engine_curves",
        "ours": first == again,
        "unit": "a seed repeated gives the same steps",
        "another_seed_differs": other != first,
        "sampled_tokens": first[0],
        "goal": True,
        "met": first == again and other != first,
    }


def main() -> int:
    """Run both engines on every seed and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=Path, help="a model directory; --quick does with an untrained one")
    parser.add_argument("--python", help="Python of the environment that SGLang is installed in")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--held-out", type=int, default=96)
    parser.add_argument("--lora", action="store_true", help="one more run, with an adapter that is sent alone")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="where finished runs are kept (default: nowhere)")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--quick", action="store_true", help="the local engine against itself, without SGLang")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as scratch:
        if args.quick:
            found = quick(args.start, min(args.steps, 2))
            finish(found)
            return 0 if found["met"] else 1
        if args.start is None or args.python is None:
            parser.error("--start and --python are needed (without --quick)")
        sglang = {"kind": "sglang", "server": {"python": args.python}}
        wanted: list[tuple[Mapping[str, Any], int]] = [
            (engine, seed) for seed in range(args.seeds) for engine in ({"kind": "local"}, sglang)
        ]
        wanted += [(sglang | {"sync": "lora"}, 0)] if args.lora else []
        runs: list[dict[str, Any]] = []
        for engine, seed in wanted:
            runs.append(
                kept(args.keep or Path(scratch), args.start.absolute(), engine, args.steps, seed, args.held_out)
            )
            print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
            written(args.out, compared(runs, args.steps))
    found = line(compared(runs, args.steps))
    finish(found)
    return 0 if found["met"] else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
