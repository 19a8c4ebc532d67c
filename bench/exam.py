"""How many planted faults the exam of an env finds: `python bench/exam.py [--quick]`.

The envs are those of the public suite in tests/exam. A fault counts as found if one of its checks reports an
error. Anything reported about a healthy env, or (without --quick) about a shipped one, is a false alarm.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from agentrl.config.load import make_config
from agentrl.envs import SHIPPED
from agentrl.exam.marks import ExamResult, Level
from agentrl.exam.sitting import examine
from bench.shared.verdict import finish
from tests.exam.healthy import HEALTHY
from tests.exam.planted import FAULTS, BlockingTool, SlowTool
from tests.exam.planted_more import FAULTS as MORE

GOAL = 20
"""Faults that should be found."""
SLOW = (BlockingTool, SlowTool)


def exam(use: str) -> ExamResult:
    """The exam of one env."""
    base = {"name": "exam", "model": {"path": "."}}
    [result] = examine(make_config(base, [f"env.use={use}"], use, check_paths=False))
    return result


def main() -> None:
    """Examine every planted and healthy env and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under a minute: 20 faults, 2 healthy envs")
    args = parser.parse_args()
    faults = {c: checks for c, checks in FAULTS.items() if c not in SLOW} if args.quick else FAULTS | MORE
    found, start = 0, time.perf_counter()
    chosen = list(faults.items())[: GOAL if args.quick else None]
    for env, checks in chosen:
        errors = exam(f"{env.__module__}:{env.__name__}").at_least(Level.ERROR)
        hit = any(finding.check in checks for finding in errors)
        found += hit
        print(f"{env.__name__:<18} {'found' if hit else 'MISSED'} ({', '.join(checks)})", flush=True)
    healthy = [f"{c.__module__}:{c.__name__}" for c in HEALTHY]
    alarms = 0
    for use in healthy[:2] if args.quick else [*healthy, *SHIPPED.values()]:
        said = exam(use).at_least(Level.WARNING)
        alarms += bool(said)
        print(f"{use:<50} {'clean' if not said else 'FALSE ALARM: ' + said[0].text}", flush=True)
    print(f"{found} of {len(chosen)} faults, {alarms} false alarms, {time.perf_counter() - start:.0f} s")
    line = {
        "bench": "exam",
        "ours": found,
        "baseline": len(chosen),
        "ratio": found / len(chosen),
        "unit": "planted faults found",
    }
    finish(line | {"goal": GOAL, "met": found == len(chosen) and not alarms})


if __name__ == "__main__":
    main()
