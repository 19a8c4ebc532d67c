"""mini-swe-agent from PyPI, in a sandbox, trained end to end: the curve of examples/mini_swe_agent.

Its loop and its shell are unmodified. The prompts are short and the policy is a model of 0.7 M parameters, so the
curve says that an agent of others trains through the recorder, not that such a model can program.

    python bench/mini_swe_agent.py --seed 0              # writes bench/results/mini_swe_agent.json
    python bench/mini_swe_agent.py --steps 2 --folder X  # a part of a run; the results stay as they are
    python bench/mini_swe_agent.py --quick               # two small steps, which show that it runs and is exact

Only renames among the tasks of the `files` env are played, and seven of ten demonstrations of the cold start make
one mistake (examples/mini_swe_agent/tools.yaml): what is left to learn comes from the reward alone.

The goal ("met"): held-out success, sampled as in training, rises by at least 0.2, no episode is lost to
infrastructure, every turn is recognized, and the log-probabilities that it trains with are those that were
sampled. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from agentrl.config import load_config
from agentrl.config.run import RunConfig
from agentrl.reporting.report import Silent
from agentrl.run_folder.store import RunStore

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.shared.short_run import TOO_SHORT, short_run
from bench.shared.verdict import finish

EXAMPLE = Path(__file__).parents[1] / "examples" / "mini_swe_agent"
RESULTS = Path(__file__).parent / "results" / "mini_swe_agent.json"
AGENTS = "/opt/agents"
"""Where the example expects the agent."""
VERSION = "2.4.6"
NEEDED = ("jinja2", "platformdirs", "pydantic", "python-dotenv", "rich")
"""What its loop and its shell import; all of its requirements are half a gigabyte."""
GAIN = 0.2


def installed(folder: Path) -> Path:
    """The folder with the agent and the program that plays it; installed if it is not there.

    Raises:
        subprocess.CalledProcessError: pip failed.
    """
    if not (folder / "minisweagent").is_dir():
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "install",
            "-q",
            "--target",
            str(folder),
        ]
        subprocess.run([*pip, *NEEDED], check=True)
        subprocess.run([*pip, "--no-deps", f"mini-swe-agent=={VERSION}"], check=True)
    shutil.copy(EXAMPLE / "play.py", folder)
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode | 0o444 | (0o111 if path.is_dir() else 0))
    return folder


def configured(folder: Path, **changes: Any) -> RunConfig:
    """The example, with the agent in `folder`."""
    data = load_config(EXAMPLE / "tools.yaml").model_dump()
    agent = data["agent"]
    agent["command"] = [word.replace(AGENTS, str(folder)) for word in agent["command"]]
    for key in ("readonly", "python_path"):
        agent["sandbox"][key] = [str(folder)]
    for key, value in changes.items():
        data[key] = data[key] | value if isinstance(value, dict) and isinstance(data[key], dict) else value
    return RunConfig.model_validate(data)


def train(config: RunConfig, folder: Path) -> dict[str, Any]:
    """One run, and what its episodes were like."""
    from agentrl.trainer.run import train_run

    began = time.perf_counter()
    with RunStore.open(config, folder, fresh=True) as store:
        summary = train_run(config, store, Silent())
        lines = store.metrics()
    steps = [line for line in lines if line["step"] > 0]
    agent = sorted({key for line in steps for key in line if key.startswith("env/agent/")})
    return {
        "agent": f"mini-swe-agent {VERSION}",
        "held_out_tasks": config.eval.tasks,
        "held_out": {str(line["step"]): line["held_out"] for line in lines if "held_out" in line},
        "solved": [round(line["solved"], 4) for line in steps],
        "episodes": summary.episodes,
        "episodes_per_step": config.rollout.groups_per_step * config.rollout.group_size,
        "turns_per_episode": round(sum(line["turns"] for line in steps) / len(steps), 2),
        "infra_failures": summary.infra_failures,
        "drift_mean_abs_max": max(line.get("drift/mean_abs") or 0.0 for line in steps),
        **{key: sum(line.get(key) or 0.0 for line in steps) for key in agent},
        "training_s": round(summary.train_seconds),
        "all_s": round(time.perf_counter() - began),
        "cpus": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    """Train, and write the results of a whole run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="by default runs/bench-mini-swe-agent, which is emptied")
    parser.add_argument("--seed", type=int, default=0, help="the results of other seeds stay in the file")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--quick", action="store_true", help="two small steps in a temporary folder")
    parser.add_argument(
        "--packages",
        type=Path,
        default=Path(tempfile.gettempdir()) / f"agentrl-mini-swe-agent-light-{os.getuid()}",
    )
    args = parser.parse_args()
    steps = args.steps or (2 if args.quick else None)
    changes: dict[str, Any] = {"seed": args.seed} | ({} if steps is None else {"steps": steps})
    config = configured(installed(args.packages), **changes | (short_run(2) if args.quick else {}))
    with tempfile.TemporaryDirectory() as temporary:
        usual = Path(temporary, "run") if args.quick else Path("runs/bench-mini-swe-agent")
        found = train(config, args.folder or usual)
    first, last = (list(found["held_out"].values())[n] for n in (0, -1))
    exact = found["drift_mean_abs_max"] < 1e-4 and not found.get("env/agent/forks")
    found["goal"] = (
        f"held-out success rises by {GAIN}; no infrastructure failure, no fork, exact log-probabilities"
    )
    found["met"] = last - first >= GAIN and found["infra_failures"] == 0 and exact
    if steps is None:
        kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps(dict(sorted((kept | {str(args.seed): found}).items())), indent=1) + "\n")
    line = {
        "bench": "mini_swe_agent",
        "ours": last,
        "baseline": first,
        "unit": "held-out success",
        "goal": found["goal"],
        "met": found["met"],
    }
    finish(line | {"met": None, "why": TOO_SHORT} if args.quick and exact else line)


if __name__ == "__main__":
    main()
