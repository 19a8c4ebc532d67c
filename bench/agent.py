"""An agent written only with the `openai` client, trained through the recorder, beside the built-in loop.

Both start from one cold-started policy and see the same tasks. The built-in loop runs the env's own tool; the
agent of examples/agent/ has a while-loop and a tool of its own, and its episodes come over HTTP. The file holds
what came of it; how long it took is printed.

    python bench/agent.py --steps 25 --groups 16        # writes bench/results/agent.json
    python bench/agent.py --start runs/calculator/start # from a cold-started policy that is there
    python -m bench.agent --quick  # bench/shared/agent_box.py: mini-swe-agent in a box, untrained

The whole takes about a quarter of an hour on two cores. The last line is JSON: greedy success on the held-out
tasks after the last step, of the agent and of the built-in loop; with `--quick`, what that module measures.
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
from agentrl.reporting.report import Silent
from agentrl.run_folder.store import RunStore

EXAMPLE = Path(__file__).parent.parent / "examples" / "agent" / "tools.yaml"
sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.shared.agent_box import PACKAGES, compare  # noqa: E402
from bench.shared.verdict import finish  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "agent.json"


AGENT, LOOP = "agent through the recorder", "built-in loop"


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
    from agentrl.trainer.run import train_run

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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=Path, help="a cold-started policy; made where it is not given")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench-agent"))
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="mini-swe-agent in a box, and the built-in loop")
    parser.add_argument("--episodes", type=int, default=4, help="of each, with --quick")
    parser.add_argument("--packages", type=Path, default=PACKAGES, help="folder of mini-swe-agent, with --quick")
    args = parser.parse_args()
    if args.quick:
        finish(compare(args.episodes, args.packages), timed=True)
        return
    found = compared(args.start or made_start(args), args.folder, args)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    last = {name: list(found[name]["held_out"].values())[-1] for name in (AGENT, LOOP)}
    line = {
        "bench": "agent",
        "ours": last[AGENT],
        "baseline": last[LOOP],
        "ratio": round(last[AGENT] / last[LOOP], 3),
        "unit": f"greedy success on {args.tasks} held-out tasks after {args.steps} steps",
        "episodes": found[AGENT]["episodes"],
        "infra_failures": found[AGENT]["infra_failures"],
        "drift_mean_abs_max": found[AGENT]["drift_mean_abs_max"],
        "goal": "no infrastructure failure",
        "met": found[AGENT]["infra_failures"] == 0,
    }
    finish(line, timed=True)


def made_start(args: argparse.Namespace) -> Path:
    """The cold start of the example, and one step."""
    train(configured(None, args, agent=False, steps=1), args.folder / "made")
    return args.folder / "made" / "start"


def compared(start: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Both runs from one policy."""
    found: dict[str, Any] = {
        "settings": {"steps": args.steps, "groups_per_step": args.groups, "group_size": 8, "tasks": args.tasks},
    }
    for name, agent in ((AGENT, True), (LOOP, False)):
        config = configured(start.absolute(), args, agent=agent, steps=args.steps)
        found[name], took = train(config, folder / name.replace(" ", "-"))
        print(name, json.dumps(found[name] | took), file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    main()
