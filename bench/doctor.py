"""How many planted faults `agentrl doctor` names, and how often it is wrong about healthy runs.

    python bench/doctor.py [--quick] [--write] [--keep FOLDER] [--runs RUN ...]

Plants each fault of `tests/doctor/planted.py` into a short run on the CPU and lets the doctor read the run folder.
A fault counts as named if a finding above a hint names it and recommends the right setting, in all of its runs.
Healthy runs of other seeds, envs and algorithms (and those of `--runs`) must have no finding above a hint.
`doctor_seconds` is the processor time of the command `agentrl doctor` on a run of 300 steps. The full form also
plays variants that the list of faults does not mention. `--quick` takes less than a minute on two cores: it leaves
out the fault that needs Ray, which then counts as missed, plays one run of each fault and four healthy runs.
`--write` replaces bench/results/doctor.json. The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from agentrl.doctor.examine import findings
from agentrl.doctor.finding import Finding
from bench.shared.verdict import finish
from tests.doctor.healthy import HEALTHY, Healthy
from tests.doctor.planted import FAULTS, Planted, cold_start
from tests.doctor.variants import VARIANTS

RESULTS = Path(__file__).parent / "results" / "doctor.json"
GOAL, STEPS, BUDGET_S = 22, 300, 10.0
QUICK_HEALTHY = slice(3, 7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="without Ray, and fewer runs")
    parser.add_argument("--write", action="store_true", help=f"replace bench/results/{RESULTS.name}")
    parser.add_argument("--keep", type=Path, help="keep the run folders here")
    parser.add_argument("--runs", type=Path, nargs="*", default=[], help="more healthy runs")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    signal.signal(signal.SIGTERM, _stop)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(args.keep or Path(folder), args.runs, quick=args.quick)
    if args.write:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    named, alarms = found["named"], found["false_alarms"]
    result = {
        "bench": "doctor",
        "ours": named,
        "baseline": found["faults"],
        "ratio": named / found["faults"],
        "unit": f"faults named, with {alarms} false alarms on {found['healthy']} healthy runs",
        "goal": f">= {GOAL} and 0 false alarms, doctor_seconds < {BUDGET_S:g}",
        "doctor_seconds": found["doctor_seconds"],
        "seconds": found["seconds"],
        "met": named >= GOAL and alarms == 0 and found["doctor_seconds"] < BUDGET_S,
    }
    finish(result, timed=True)


def measure(folder: Path, more: Sequence[Path], *, quick: bool) -> dict[str, Any]:
    """Plays all runs in folders under `folder`, two at a time."""
    began = time.monotonic()
    faults = _one_each(FAULTS) if quick else list(FAULTS)
    healthy = HEALTHY[QUICK_HEALTHY] if quick else HEALTHY
    variants = () if quick else VARIANTS
    runs: list[Planted | Healthy] = [*faults, *healthy, *variants]
    runs.sort(key=lambda run: -run.changes.get("steps", 0))  # a long one at the end would run alone
    # Forked before torch has started threads here, so that no process imports it again.
    with ProcessPoolExecutor(2, get_context("fork"), signal.signal, (signal.SIGTERM, signal.SIG_DFL)) as pool:
        policy = pool.submit(cold_start, _fresh(folder / "cold") / "run").result()
        folders = [_fresh(folder / _name(run.title)) for run in runs]
        said = list(pool.map(_played, runs, [policy] * len(runs), folders))
    planted = dict(zip([run.title for run in runs], said, strict=True))
    played = {f.number for f in faults}
    missed = {f.number for f in faults if not f.named(planted[f.title])}
    alarms = {h.title: planted[h.title] for h in healthy}
    alarms |= {run.name: [f for f in findings(run) if f.severity != "hint"] for run in more}
    for title, found in alarms.items():
        print(f"healthy: {title}  {_names(found)}")
    result: dict[str, Any] = {
        "faults": len({fault.number for fault in FAULTS}),
        "named": len(played - missed),
        "runs": {f.title: _result(f, planted[f.title]) for f in faults},
        "healthy": len(alarms),
        "false_alarms": sum(map(bool, alarms.values())),
        "alarms": {title: _names(found) for title, found in alarms.items()},
    }
    if not quick:
        result["variants"] = {v.title: _result(v, planted[v.title]) for v in VARIANTS}
    result["doctor_seconds"] = _seconds(
        folder / _name(HEALTHY[-1 if not quick else QUICK_HEALTHY.stop - 1].title) / "run", folder / "long"
    )
    return result | {"seconds": round(time.monotonic() - began)}


def _stop(*_: object) -> None:
    """End with the runs that are being played."""
    for child in active_children():
        child.kill()
    sys.exit(128 + signal.SIGTERM)


def _one_each(faults: Sequence[Planted]) -> list[Planted]:
    """The first run of each fault, without those that need Ray."""
    first = {fault.number: fault for fault in reversed(faults) if not fault.ray}
    return [first[number] for number in sorted(first)]


def _played(run: Planted | Healthy, policy: Path, folder: Path) -> list[Finding]:
    logging.disable(logging.WARNING)
    return run.play(policy, folder)


def _result(fault: Planted, found: list[Finding]) -> dict[str, Any]:
    named = fault.named(found)
    print(f"{fault.number:>2} {fault.title}: {'named' if named else 'MISSED'}  {_names(found)}")
    return {"number": fault.number, "named": named, "said": _names(found)}


def _names(found: Sequence[Finding]) -> list[str]:
    return [f"{finding.severity} {finding.name}" for finding in found]


def _seconds(run: Path, long: Path) -> float:
    """Processor time of `agentrl doctor` on a run that repeats the steps of `run` until there are 300."""
    shutil.rmtree(long, ignore_errors=True)
    shutil.copytree(run, long)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"] > 0]
    with (long / "metrics.jsonl").open("w") as file:
        for step in range(1, STEPS + 1):
            file.write(json.dumps({**steps[(step - 1) % len(steps)], "step": step}) + "\n")
    for kind, end in (("episodes", "jsonl.zst"), ("tokens", "tok.zst")):
        for step in range(len(steps) + 1, STEPS + 1):
            source = run / kind / f"step-{(step - 1) % len(steps) + 1:06d}.{end}"
            shutil.copyfile(source, long / kind / f"step-{step:06d}.{end}")
    began = _of_children()
    subprocess.run([sys.executable, "-m", "agentrl", "doctor", str(long)], check=True, stdout=subprocess.DEVNULL)
    return round(_of_children() - began, 2)


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _name(title: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in title).split())


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


if __name__ == "__main__":
    main()
