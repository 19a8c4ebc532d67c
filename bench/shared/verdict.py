"""The last line of every bench, and whether the machine was quiet enough to judge by it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KEYS = ("bench", "ours", "baseline", "ratio", "unit", "goal", "met")
NEEDED = ("bench", "ours", "unit", "goal", "met")
BUSY = 0.25
"""Share of the machine's cores that other work may take (or the host may steal) before times mean nothing."""


class Machine:
    """Watches from its creation how much of the machine's CPU time went elsewhere."""

    def __init__(self) -> None:
        self._wall, self._ours, self._all, self._stolen = time.monotonic(), _ours(), *_machine()

    def elsewhere(self) -> float:
        """Share of the cores' time that other processes used or the host stole; 0 where that cannot be read."""
        wall, (used, stolen) = time.monotonic() - self._wall, _machine()
        others = (used - self._all) - (_ours() - self._ours) + (stolen - self._stolen)
        return max(0.0, others) / max(1e-9, wall * (os.cpu_count() or 1))

    def busy(self) -> str | None:
        """Why times of this run mean nothing, if they do."""
        share = self.elsewhere()
        return f"{share:.0%} of the machine's CPU time went to other work" if share > BUSY else None


def finish(line: Mapping[str, Any], *, timed: bool = False) -> None:
    """Print a bench's last line, `last_line`, as JSON."""
    print(json.dumps(last_line(line, timed=timed)))


def last_line(line: Mapping[str, Any], *, timed: bool = False) -> dict[str, Any]:
    """The contract of a bench's last line.

    `met` becomes "inconclusive", with the reason in `why`, where the goal cannot be judged here (None), and where
    a goal that depends on the clock is missed on a busy machine.

    Args:
        line: `bench`, `ours`, `unit`, `goal` and `met`; `baseline` and `ratio`, if there is something to compare
            with in the same run; and further figures.
        timed: whether other work on the machine may be why the goal is missed.

    Raises:
        ValueError: a key is missing.
    """
    if missing := [key for key in NEEDED if key not in line]:
        raise ValueError(f"the last line lacks {', '.join(missing)}")
    whole = dict.fromkeys(KEYS) | dict(line)
    if whole["met"] is None:
        whole = whole | {
            "met": "inconclusive",
            "why": line.get("why", "the goal cannot be judged on this machine"),
        }
    elif whole["met"] is False and timed and (why := MACHINE.busy()):
        whole = whole | {"met": "inconclusive", "why": why}
    return whole


def no_gpu(bench: str, *, unit: str, goal: Any) -> int:
    """Say that there is nothing to measure on; returns the exit status, 2."""
    print(f"{bench}: PyTorch sees no GPU here; --smoke runs the same code on the CPU", file=sys.stderr)
    why = "PyTorch sees no GPU on this machine"
    finish({"bench": bench, "ours": None, "unit": unit, "goal": goal, "met": None, "why": why})
    return 2


def in_a_line(error: Exception) -> str:
    """What failed, for a cell of a table: the kind of the error and the first line of its text."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"


def _machine() -> tuple[float, float]:
    """CPU seconds that all processes used so far, and that the host stole."""
    try:
        user, nice, system, _, _, irq, softirq, steal, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
    except (OSError, ValueError):
        return 0.0, 0.0
    tick = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq) / tick, steal / tick


def _ours() -> float:
    """CPU seconds of this process and of all it started."""
    times, tick = os.times(), os.sysconf("SC_CLK_TCK")
    total = times.user + times.system + times.children_user + times.children_system
    parents: dict[int, tuple[int, float]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents[int(file.parent.name)] = int(fields[1]), sum(map(int, fields[11:15])) / tick
    found = {os.getpid()}
    while new := {pid for pid, (parent, _) in parents.items() if parent in found} - found:
        found |= new
    return total + sum(parents[pid][1] for pid in found - {os.getpid()} if pid in parents)


MACHINE = Machine()
