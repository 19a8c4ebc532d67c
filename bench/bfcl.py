"""BFCL's simulated file system and its checker, trained end to end: the curve of examples/bfcl.

The requests are generated in BFCL's format (examples/bfcl/env.py): the 200 entries of a category are too few to
train a model of 0.6 M parameters from scratch. So the curve says that BFCL's tools and verdicts train a policy,
not that such a model solves BFCL. Held-out requests pair files with folders that are never paired in training.

    python bench/bfcl.py --seed 0              # writes bench/results/bfcl.json
    python bench/bfcl.py --steps 2 --folder X  # a part of a run; the results stay as they are
    python bench/bfcl.py --quick               # two small steps, which show that it runs and nothing else

Seven of ten demonstrations of the cold start make one mistake: what is left to learn comes from the reward alone.

The goal ("met"): held-out success, sampled as in training, rises by at least 0.2, and no episode is lost to
infrastructure. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from agentrl.config import load_config
from agentrl.config.run import RunConfig
from agentrl.reporting.report import Silent
from agentrl.run_folder.store import RunStore

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.shared.short_run import TOO_SHORT, short_run
from bench.shared.verdict import finish

EXAMPLE = Path(__file__).parents[1] / "examples" / "bfcl" / "tools.yaml"
RESULTS = Path(__file__).parent / "results" / "bfcl.json"
GAIN = 0.2


def configured(quick: bool, **changes: Any) -> RunConfig:
    """The example, or a run as small as it gets."""
    data = load_config(EXAMPLE).model_dump() | changes
    for key, values in short_run(4).items() if quick else ():
        data[key] |= values
    return RunConfig.model_validate(data)


def train(config: RunConfig, folder: Path) -> dict[str, Any]:
    """One run, resumed if the folder has a part of it, and its curve."""
    from agentrl.trainer.run import train_run

    with RunStore.open(config, folder) as store:
        train_run(config, store, Silent())
        lines = store.metrics()
    steps = [line for line in lines if line["step"] > 0]
    held_out = {str(line["step"]): line["held_out"] for line in lines if "held_out" in line}
    first, last = (list(held_out.values())[n] for n in (0, -1))
    infra_failures = sum(line.get("infra_failures") or 0 for line in steps)
    return {
        "env": "examples/bfcl/env.py:FileChores (bfcl-eval 2026.3.23, GorillaFileSystem)",
        "held_out_tasks": config.eval.tasks,
        "held_out": held_out,
        "solved": [round(line["solved"], 4) for line in steps],
        "episodes_per_step": config.rollout.groups_per_step * config.rollout.group_size,
        "infra_failures": infra_failures,
        "goal": f"held-out success rises by {GAIN}; no infrastructure failure",
        "met": last - first >= GAIN and not infra_failures,
    }


def main() -> None:
    """Train, and write the results of a whole run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="by default runs/bench-bfcl-SEED; a finished run is only read")
    parser.add_argument("--seed", type=int, default=0, help="the results of other seeds stay in the file")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--quick", action="store_true", help="two small steps in a temporary folder")
    args = parser.parse_args()
    steps = args.steps or (2 if args.quick else None)
    config = configured(args.quick, seed=args.seed, **({} if steps is None else {"steps": steps}))
    with tempfile.TemporaryDirectory() as temporary:
        usual = Path(temporary) if args.quick else Path("runs") / f"bench-bfcl-{args.seed}"
        found = train(config, args.folder or usual)
    if steps is None:
        kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps(dict(sorted((kept | {str(args.seed): found}).items())), indent=1) + "\n")
    curve = list(found["held_out"].values())
    line = {
        "bench": "bfcl",
        "ours": curve[-1],
        "baseline": curve[0],
        "unit": "held-out success",
        "goal": f"held-out success rises by {GAIN}; no infrastructure failure",
        "met": found["met"],
    }
    finish(line | {"met": None, "why": TOO_SHORT} if args.quick else line)


if __name__ == "__main__":
    main()
