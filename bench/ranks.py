"""Ranks against one process on the calculator: the same curve, and checkpoints that fit any number of ranks.

    python bench/ranks.py [--start DIRECTORY] [--steps 20] [--out bench/results/ranks.json]
    python bench/ranks.py --quick          two steps from an untrained policy on 2 ranks; writes nothing

One process trains from the policy in DIRECTORY (a folder `start` of a run of `examples/calculator/tools.yaml`; by
default one is made), and the rows of its steps are kept. 2 and 4 Ray ranks take the same steps on these rows; what
4 save at half way is taken up by 2 ranks and by one. Then `agentrl train` itself: it begins on 4 ranks, is
stopped, goes on with 2, is stopped, and ends with 1. The last line is JSON. The whole takes about a quarter of an
hour on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from agentrl.config import RunConfig
from agentrl.learner.learner import Learner
from agentrl.learner.split import StepResult, StepRows
from agentrl.reporting.report import Silent
from agentrl.run_folder.records import read_metrics
from agentrl.run_folder.store import RunStore
from agentrl.trainer import run as runs
from agentrl.trainer.start import make_learner

sys.path.insert(0, str(Path(__file__).parents[1]))  # it is missing with `python -m` or when loaded by a path
from bench.kill9 import ENV
from bench.shared.verdict import finish

HERE = Path(__file__).parent
EXAMPLE = HERE.parent / "examples" / "calculator" / "tools.yaml"
GOAL = 1e-5
CONFIG: dict[str, Any] = {
    "name": "ranks",
    "env": "agentrl.envs.calculator:Calculator",
    "data": {"options": {"max_operations": 2}},
    "rollout": {"groups_per_step": 8, "group_size": 4, "max_turns": 4, "max_tokens": 48, "token_budget": 400},
    "algorithm": {"kl": {"coef": 0.003}},
    "optim": {"lr": 4e-4, "schedule": "linear"},
    "learner": {"device": "cpu", "tokens_per_micro_batch": 1024},
    "engine": {"device": "cpu"},
    "eval": {"tasks": 1},
}
CURVE = ("kl", "entropy", "policy_kl", "clip_fraction", "grad_norm", "drift/mean_abs")
"""What the learner says of a step; the loss itself is 0 on policy, these are not."""
WAYS = (
    ("2 ranks", 2, False),
    ("4 ranks", 4, False),
    ("saved on 4, 2 ranks", 2, True),
    ("saved on 4, 1 process", 1, True),
)
"""Ranks that take the recorded steps, and whether from what 4 ranks saved at half way."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=Path, help="the policy to begin with")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "ranks.json")
    parser.add_argument("--quick", action="store_true", help="two steps on 2 ranks, untrained: about a minute")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        curve, found = quick(Path(name)) if args.quick else whole(Path(name), args.start, args.steps)
    met = all(part["met"] for part in found.values())
    if not args.quick:
        result = {"steps": args.steps, "goal": GOAL, "met": met, "each": found, "curve": curve}
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    worst = max(part["parameters_apart"] for part in found.values() if "parameters_apart" in part)
    finish(
        {
            "bench": "ranks",
            "ours": worst,
            "unit": "largest difference of a parameter",
            "goal": GOAL,
            "met": met,
            "quick": args.quick,
        }
    )
    return 0 if met else 1


Found = tuple[list[dict[str, float]], dict[str, Any]]
"""The curve of one process, and what came of each other way."""


def whole(folder: Path, start: Path | None, steps: int) -> Found:
    """All of it."""
    start = (start or made_start(folder / "cold")).absolute()
    settings = {**CONFIG, "model": {"path": str(start)}, "steps": steps, "checkpoint": {"every": steps // 2}}
    config = RunConfig.model_validate(settings)
    recording = recorded(config, folder / "one")
    say("recorded")
    found = replayed(config, start, *recording, folder)
    (folder / "tools.yaml").write_text(json.dumps(settings))  # JSON is YAML
    found["agentrl train, 4 ranks then 2 then 1"] = commanded(folder, steps)
    return recording[1], found


def quick(folder: Path) -> Found:
    """Two steps on 2 ranks; the policy is untrained, so the env rewards part of an answer."""
    (folder / "env.py").write_text(ENV)
    settings = {
        **CONFIG,
        "env": f"{folder}/env.py:Vowels",
        "data": {},
        "rollout": {"groups_per_step": 4, "group_size": 4, "max_turns": 1, "max_tokens": 12, "token_budget": 400},
        "model": {"tiny": {}},
        "steps": 2,
        "checkpoint": {"every": 0},
    }
    recording = recorded(RunConfig.model_validate(settings), folder / "one")
    config = RunConfig.model_validate({**settings, "model": {"path": str(folder / "one" / "start")}})
    return recording[1], replayed(config, folder / "one" / "start", *recording, folder, ways=WAYS[:1])


def made_start(folder: Path) -> Path:
    """The cold start of the example, and one step."""
    command = [sys.executable, "-m", "agentrl", "train", str(EXAMPLE), "--run-dir", str(folder)]
    subprocess.run([*command, "--set", "steps=1", "--set", "eval.tasks=1"], check=True, stdout=sys.stderr)
    return folder / "start"


def recorded(
    config: RunConfig, folder: Path
) -> tuple[list[StepRows], list[dict[str, float]], dict[str, torch.Tensor]]:
    """Train in this process: what the learner was given, what it said, and the parameters at the end."""
    steps: list[StepRows] = []
    curve: list[dict[str, float]] = []
    weights: dict[str, torch.Tensor] = {}

    async def recording(*given: Any) -> Learner:
        learner = await make_learner(*given)
        step, close = learner.step, learner.close

        async def keep(rows: StepRows) -> StepResult:
            result = await step(rows)
            steps.append(rows)
            curve.append(shown(result.metrics))
            return result

        async def closing() -> None:
            weights.update({name: value.clone() for name, value in (await learner.weights()).items()})
            await close()

        learner.step, learner.close = keep, closing  # type: ignore[method-assign]
        return learner

    kept: Any = vars(runs)["make_learner"]
    setattr(runs, "make_learner", recording)  # noqa: B010
    try:
        with RunStore.open(config, folder) as store:
            runs.train_run(config, store, Silent())
    finally:
        setattr(runs, "make_learner", kept)  # noqa: B010
    return steps, curve, weights


async def steps_of(
    config: RunConfig, saved: Path, steps: Sequence[StepRows], start: Path, *, first: int, half: int
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """The steps from `first` on, and the parameters at the end; 4 ranks save at half way."""
    learner = await make_learner(config, saved if first else start, start)
    try:
        if first:
            await learner.load(saved)
        said = []
        for number, rows in enumerate(steps[first:], first):
            if number == half and config.learner.ranks == 4:
                saved.mkdir()
                await learner.save(saved, {})
            said.append(shown((await learner.step(rows)).metrics))
        return said, await learner.weights()
    finally:
        await learner.close()


def replayed(
    config: RunConfig, start: Path, steps: Sequence[StepRows], curve: Sequence[Mapping[str, float]],
    weights: Mapping[str, torch.Tensor], folder: Path, *, ways: Sequence[tuple[str, int, bool]] = WAYS,
) -> dict[str, Any]:  # fmt: skip
    """The same steps on 2 and on 4 ranks, and on 2 and on 1 from what the 4 saved at half way."""
    found, half, saved = {}, len(steps) // 2, folder / "by-4"
    for name, ranks, halfway in ways:
        first = half if halfway else 0
        shape = config.model_copy(update={"learner": config.learner.model_copy(update={"ranks": ranks})})
        said, ours = asyncio.run(steps_of(shape, saved, steps, start, first=first, half=half))
        apart = max(float((ours[key] - value).abs().max()) for key, value in weights.items() if key in ours)
        off = {key: max(abs(a[key] - b[key]) for a, b in zip(said, curve[first:], strict=True)) for key in CURVE}
        found[name] = {"steps": len(said), "parameters_apart": apart, "curve_apart": off, "met": apart < GOAL}
        say(f"{name}: parameters {apart:.2g} apart, curve {max(off.values()):.2g}")
    return found


def commanded(folder: Path, steps: int) -> dict[str, Any]:
    """`agentrl train` on 4 ranks, then 2, then 1, stopped between; its metrics against those of one process."""
    run, stops = folder / "many", {4: steps // 3, 2: 2 * steps // 3}
    for ranks in (4, 2, 1):
        command = [sys.executable, "-m", "agentrl", "train", str(folder / "tools.yaml"), "--run-dir", str(run)]
        process = subprocess.Popen([*command, "--set", f"learner.ranks={ranks}"], stdout=sys.stderr)
        while ranks in stops and process.poll() is None and lines(run) <= stops[ranks]:
            time.sleep(0.05)
        if process.poll() is None and ranks in stops:
            process.send_signal(signal.SIGTERM)
        code = process.wait()
        say(f"{ranks} ranks: exit {code} after {lines(run) - 1} steps")
        if code and ranks not in stops:
            raise SystemExit(f"agentrl train ended with {code}")
    one, many = ([line for line in read_metrics(run) if line["step"]] for run in (folder / "one", run))
    differing = [
        a["step"]
        for a, b in zip(one, many, strict=False)
        if (a["solved"], a["sampled_tokens"]) != (b["solved"], b["sampled_tokens"])
    ]
    off = {key: max(abs(a[key] - b[key]) for a, b in zip(one, many, strict=False)) for key in CURVE}
    return {
        "steps": [line["step"] for line in many] == list(range(1, steps + 1)) and len(many),
        "steps_that_sampled_differently": differing,
        "curve_apart": off,
        "met": len(many) == steps and not differing and max(off.values()) < 1e-3,
    }


def lines(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def shown(metrics: Mapping[str, float]) -> dict[str, float]:
    return {key: metrics[key] for key in CURVE}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
