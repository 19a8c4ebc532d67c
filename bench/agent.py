"""An agent written only with the `openai` client, trained through the recorder, beside the built-in loop.

Both start from one cold-started policy and see the same tasks. The built-in loop runs the env's own tool; the
agent of examples/agent/ has a while-loop and a tool of its own, and its episodes come over HTTP. The file holds
what came of it; how long it took is printed.

    python bench/agent.py --steps 25 --groups 16        # writes bench/results/agent.json
    python bench/agent.py --start runs/calculator/start # from a cold-started policy that is there
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from agentrl.config import load_config
from agentrl.config.run import RunConfig
from agentrl.run.report import Silent
from agentrl.run.store import RunStore

EXAMPLE = Path(__file__).parent.parent / "examples" / "agent" / "tools.yaml"
RESULTS = Path(__file__).parent / "results" / "agent.json"


def configured(start: Path | None, args: argparse.Namespace, *, agent: bool, steps: int) -> RunConfig:
    """The example, smaller; from `start` where that is given."""
    data = load_config(EXAMPLE).model_dump()
    data["steps"], data["seed"] = steps, args.seed
    data["rollout"]["groups_per_step"] = args.groups
    data["eval"] |= {"every": args.every, "tasks": args.tasks}
    if not agent:
        data["agent"] = None
    if start is not None:
        data["warmup"], data["model"] = None, data["model"] | {"tiny": None, "path": str(start)}
    return RunConfig.model_validate(data)


def train(config: RunConfig, folder: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """One run: held-out success by step and what its episodes were like; and how long it took."""
    from agentrl.train.run import train_run

    began = time.perf_counter()
    with RunStore.open(config, folder, fresh=True) as store:
        summary = train_run(config, store, Silent())
        lines = store.metrics()
    steps = [line for line in lines if line["step"] > 0]
    agent = sorted({key for line in steps for key in line if key.startswith("env/agent/")})
    took = {
        "train_s": round(summary.train_seconds, 1),
        "wall_s": round(time.perf_counter() - began, 1),
        "rollout_s_per_step": round(sum(line["rollout_seconds"] for line in steps) / len(steps), 2),
        "load_average": round(os.getloadavg()[0], 1),
    }
    return {
        "held_out": {str(line["step"]): line["held_out"] for line in lines if "held_out" in line},
        "solved_first_5": round(sum(line["solved"] for line in steps[:5]) / len(steps[:5]), 4),
        "solved_last_5": round(sum(line["solved"] for line in steps[-5:]) / len(steps[-5:]), 4),
        "episodes": summary.episodes,
        "infra_failures": summary.infra_failures,
        "drift_mean_abs_max": max(line.get("drift/mean_abs", 0.0) for line in steps),
        **{key: sum(line.get(key) or 0.0 for line in steps) for key in agent},
    }, took


def main() -> None:
    """Run both and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--start", type=Path, help="a cold-started policy; made where it is not given")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench-agent"))
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start = args.start
    if start is None:
        train(configured(None, args, agent=False, steps=1), args.folder / "made")
        start = args.folder / "made" / "start"
    found = {
        "settings": {"steps": args.steps, "groups_per_step": args.groups, "group_size": 8, "tasks": args.tasks},
    }
    for name, agent in (("agent through the recorder", True), ("built-in loop", False)):
        config = configured(start.absolute(), args, agent=agent, steps=args.steps)
        found[name], took = train(config, args.folder / name.replace(" ", "-"))
        print(name, json.dumps(found[name] | took), file=sys.stderr, flush=True)
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
