"""The quickstart by seed: greedy success before and after, as a table, a figure and the curves.

    python bench/quickstart.py [--seeds 1,2,3,4,5] [--runs runs/quickstart] [--write] [--quick]

Trains `examples/calculator/tools.yaml` once a seed, one after the other, each into RUNS/seed-N; a seed whose run
is finished there is only read. `--write` puts the table, the curves and the figure into bench/results/. With
`--quick` one seed takes three steps after a short cold start: a look at whether all of it works, not at what it
learns. The last line is JSON: the seeds that began at 0.60 or less and ended at 0.95 or more, of all.
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
from bench.shared.verdict import finish

HERE = Path(__file__).parent
EXAMPLE = HERE.parent / "examples" / "calculator" / "tools.yaml"
BEFORE, AFTER, SECONDS = 0.60, 0.95, 300
LAST = "Curves:\nquickstart.png, quickstart.json.\n"
"""The end of what is written; the text below it on the page is kept."""
QUICK = ("steps=3", "warmup.num=160", "warmup.max_epochs=2", "warmup.anneal_epochs=1", "warmup.at_least=0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1,2,3,4,5")
    parser.add_argument("--runs", type=Path, default=Path("runs/quickstart"), help="folder of the run folders")
    parser.add_argument("--quick", action="store_true", help="one seed, three steps, in a temporary folder")
    parser.add_argument("--write", action="store_true", help="replace bench/results/quickstart.*")
    parser.add_argument("--note", default="", help="a sentence on the machine, for the table")
    args = parser.parse_args()
    if args.quick:
        with tempfile.TemporaryDirectory() as folder:
            found = {1: run(1, Path(folder) / "seed-1", QUICK)}
    else:
        found = {seed: run(seed, args.runs / f"seed-{seed}") for seed in map(int, args.seeds.split(","))}
    table = as_table(found)
    print(table)
    if args.write:
        write(found, table, args.note)
    good = [r for r in found.values() if r["before"] <= BEFORE and r["after"] >= AFTER]
    finish(
        {
            "bench": "quickstart",
            "ours": len(good),
            "baseline": len(found),
            "ratio": len(good) / len(found),
            "unit": f"seeds from at most {BEFORE} to at least {AFTER}",
            "goal": "all",
            "met": None if args.quick else len(good) == len(found),
            **({"why": "three steps are not a quickstart"} if args.quick else {}),
        }
    )


def run(seed: int, folder: Path, changes: tuple[str, ...] = ()) -> dict[str, Any]:
    """Train one seed, unless it is trained; what its run folder says."""
    summary = folder / "summary.json"
    if not summary.is_file() or not json.loads(summary.read_text())["finished"]:
        settings = [part for change in (f"seed={seed}", *changes) for part in ("--set", change)]
        command = [sys.executable, "-m", "agentrl", "train", str(EXAMPLE), "--run-dir", str(folder), *settings]
        subprocess.run(command, check=True, stdout=sys.stderr)
    said = json.loads(summary.read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"] > 0]
    return {
        "before": said["held_out_before"],
        "after": said["held_out_after"],
        "warmup_seconds": round(said["warmup_seconds"]),
        "train_seconds": round(said["train_seconds"]),
        "steps": said["steps"],
        "episodes": said["episodes"],
        "malformed": said["malformed"],
        "limits": said["limits"],
        "infra_failures": said["infra_failures"],
        "largest_mean_drift": max(line.get("drift/mean_abs", 0.0) for line in steps),
        "retokenised": round(sum(line.get("tokens/retokenised", 0) for line in steps)),
        "reserialised": round(sum(line.get("tokens/reserialised", 0) for line in steps)),
        "failed_checks": round(sum(line.get("tokens/failed", 0) for line in steps)),
        "solved": [round(line["solved"], 4) for line in steps],
    }


def as_table(found: dict[int, dict[str, Any]]) -> str:
    """The runs as a Markdown table."""
    rows = [
        "| seed | before | after | cold start s | training s | malformed | limits | infra failures | failed token "
        "checks | largest mean drift |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for seed, r in found.items():
        rows.append(
            f"| {seed} | {r['before']:.3f} | {r['after']:.3f} | {r['warmup_seconds']} | {r['train_seconds']} | "
            f"{r['malformed']} | {r['limits']} | {r['infra_failures']} | {r['failed_checks']} | "
            f"{r['largest_mean_drift']:.1e} |"
        )
    return "\n".join(rows)


def write(found: dict[int, dict[str, Any]], table: str, note: str) -> None:
    """bench/results/quickstart.{md,json,png}."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    any_run = next(iter(found.values()))
    per_step = any_run["episodes"] // any_run["steps"]
    (HERE / "results" / "quickstart.json").write_text(json.dumps(found, indent=1) + "\n")
    page = HERE / "results" / "quickstart.md"
    by_hand = page.read_text().partition(LAST)[2] if page.is_file() else ""
    page.write_text(
        f"""# The quickstart, by seed

```sh
python bench/quickstart.py --write
```

`examples/calculator/tools.yaml` as it is, with `--set seed=N`: greedy success on 200 held-out tasks before and
after {any_run["steps"]} steps of {per_step} episodes, with `tokenization_check: strict`. {note}

{table}

The goal is at most {BEFORE:.2f} before, at least {AFTER:.2f} after, and at most {SECONDS} s of training. \
{LAST}{by_hand}"""
    )
    figure, axes = plt.subplots(figsize=(7, 4))
    for seed, r in found.items():
        axes.plot(range(1, len(r["solved"]) + 1), r["solved"], label=f"seed {seed}")
    axes.set(xlabel="step", ylabel="solved (sampled, training tasks)", ylim=(0, 1))
    axes.legend()
    figure.tight_layout()
    figure.savefig(HERE / "results" / "quickstart.png", dpi=110)


if __name__ == "__main__":
    main()
