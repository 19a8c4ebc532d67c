"""Every algorithm from the same start: greedy success of the calculator on 200 held-out tasks, before and after.

    python bench/algorithms.py [--start DIRECTORY] [--only ppo,rloo] [--steps 24] [--runs runs/algorithms]
    python bench/algorithms.py --quick     one small step each from an untrained policy; writes nothing

Trains LoRA GRPO, PPO with a critic, GSPO, RLOO and REINFORCE++ one after the other from the policy in DIRECTORY (a
folder `start` of a run of `examples/calculator/tools.yaml`; by default one is made), each into RUNS/NAME; what is
finished there is only read. Writes bench/results/algorithms.json; the last line is JSON: how many rose by 0.15.
The whole takes about half an hour on two cores. `--quick` shows that all of them run, not what they learn.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.shared.names import names_of
from bench.shared.verdict import finish

HERE = Path(__file__).parent
EXAMPLE = HERE.parent / "examples" / "calculator" / "tools.yaml"
RESULT = HERE / "results" / "algorithms.json"
RISE = 0.15
BASE: dict[str, Any] = {
    "env": "agentrl.envs.calculator:Calculator",
    "data": {"options": {"max_operations": 2}},
    "rollout": {
        "groups_per_step": 16, "group_size": 8, "max_turns": 4, "max_tokens": 48, "token_budget": 400,
        "tokenization_check": "strict",
    },
    "algorithm": {"kl": {"coef": 0.003}},
    "optim": {"lr": 4e-4, "warmup_steps": 2},
    "checkpoint": {"every": 0},
    "eval": {"tasks": 200, "every": 0},
}  # fmt: skip
ALGORITHMS: dict[str, dict[str, Any]] = {
    "lora_grpo": {"learner": {"lora": {"rank": 16, "alpha": 32}}, "optim": {"lr": 2e-3}},
    "ppo": {"algorithm": {"advantage": "gae"}, "critic": {"lr": 1e-3, "warmup_steps": 3}},
    "gspo": {
        "algorithm": {
            "loss": {"name": "gspo", "clip_low": 0.05, "clip_high": 0.05}, "aggregation": "seq-mean-token-mean",
            "updates_per_step": 2,
        }
    },
    "rloo": {"algorithm": {"advantage": "rloo", "loss": "reinforce"}},
    "reinforce_plus_plus": {"algorithm": {"advantage": "reinforce_plus_plus"}},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=Path, help="the policy that all begin with")
    parser.add_argument(
        "--only", type=names_of(ALGORITHMS), default=",".join(ALGORITHMS), help="names, with commas between"
    )
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--runs", type=Path, default=Path("runs/algorithms"), help="folder of the run folders")
    parser.add_argument("--quick", action="store_true", help="one small step each, untrained: under a minute")
    args = parser.parse_args()
    if args.quick:
        with tempfile.TemporaryDirectory() as folder:
            return say(
                {name: run(name, None, Path(folder) / name, 1) for name in args.only.split(",")}, quick=True
            )
    args.runs.mkdir(parents=True, exist_ok=True)
    start = (args.start or make_start(args.runs / "cold")).absolute()
    found = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
    for name in args.only.split(","):
        found[name] = run(name, start, args.runs / name, args.steps)
        RESULT.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{name}: {found[name]['before']:.3f} to {found[name]['after']:.3f}", flush=True)
    say(found)


def say(found: dict[str, Any], *, quick: bool = False) -> None:
    """The last line."""
    good = [name for name, r in found.items() if quick or r["after"] - r["before"] >= RISE]
    asked = len(found) if quick else len(ALGORITHMS)
    line = {
        "bench": "algorithms",
        "ours": len(good),
        "baseline": asked,
        "ratio": len(good) / asked,
        "unit": "algorithms that " + ("take a step" if quick else f"raise held-out success by at least {RISE}"),
        "goal": "all",
        "met": len(good) == asked,
        "quick": quick,
    }
    finish(line)


def make_start(folder: Path) -> Path:
    """The cold start of the example, and one step."""
    if not (folder / "start" / "config.json").is_file():
        train(EXAMPLE, folder, "--set", "steps=1", "--set", "eval.tasks=1")
    return folder / "start"


def run(name: str, start: Path | None, folder: Path, steps: int) -> dict[str, Any]:
    """Train with one algorithm, unless it is trained; what its run folder says. No start: small and untrained."""
    summary = folder / "summary.json"
    chosen = ALGORITHMS[name]
    if not summary.is_file() or not json.loads(summary.read_text())["finished"]:
        config = {**BASE, "name": name.replace("_", "-"), "model": {"path": str(start)}, "steps": steps}
        if start is None:
            tiny = {"hidden": 32, "layers": 1, "heads": 2, "intermediate": 64, "vocab": 400}
            config |= {"model": {"tiny": tiny}, "eval": {"tasks": 4}}
            config["rollout"] = {**BASE["rollout"], "groups_per_step": 2, "group_size": 4}
        for key, value in chosen.items():
            config[key] = {**config.get(key, {}), **value}
        if start is None:
            for key in config.keys() & {"optim", "critic"}:
                config[key] = {**config[key], "warmup_steps": 0}
        file = folder.parent / f"{name}.yaml"
        file.write_text(json.dumps(config, indent=1))  # JSON is YAML
        train(file, folder)
    said = json.loads(summary.read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["step"] > 0]
    return {
        "before": said["held_out_before"],
        "after": said["held_out_after"],
        "steps": said["steps"],
        "episodes": said["episodes"],
        "settings": {
            **BASE["optim"],
            **chosen.get("optim", {}),
            **{k: v for k, v in chosen.items() if k != "optim"},
        },
        "solved": [round(line["solved"], 4) for line in trained],
        "kl": [round(line["kl"], 5) for line in trained if "kl" in line],
    }


def train(file: Path, folder: Path, *options: str) -> None:
    command = [sys.executable, "-m", "agentrl", "train", str(file), "--run-dir", str(folder), *options]
    subprocess.run(command, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    main()
