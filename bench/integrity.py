"""Attacks on the sandboxes of this machine: how many succeed.

    python -m bench.integrity [--quick] [--rows namespace,user,landlock,docker] [--only NAME] [--out FOLDER]

There are two kinds, both from `agentrl.testing.sandbox`. Hostile programs try to get out of the sandbox, at
others, or at more than their share. Sabotage breaks the sandbox it runs in, so that the episode looks like an
infrastructure failure and is played again. An attack succeeds when its check fails. Attacks on a promise that a
back-end does not make here (see `agentrl doctor`) are listed and not counted.

Rows: every back-end that works here; `user` is `namespace` as an ordinary user, tried when this runs as root. The
baseline runs the hostile programs that harm nobody as plain subprocesses. With `--quick`, all back-ends run at the
same time, `namespace` meets every attack and each other one meets a sample of each class: one attack in EVERY, and
at least one. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from agentrl.sandbox import Sandbox, SandboxPool
from agentrl.sandbox.errors import PromiseNotEnforceable, SandboxUnavailable
from agentrl.testing.sandbox import SMALL_LIMITS, Check, CheckRun, Stage, not_promised, sandbox_checks
from agentrl.testing.sandbox_suite.hostile import PROGRAMS
from agentrl.testing.sandbox_suite.stage import Unseen

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.shared.names import names_of
from bench.shared.verdict import finish

ORDINARY_USER, SYSTEM_PYTHON = 23456, "/usr/bin/python3"
AT_ONCE = 3
EVERY = 5
"""In the sample of --quick, one attack in so many of each class."""
KINDS = ("hostile", "sabotage")
WHOLE = "namespace"
"""The back-end that meets every attack in --quick as well."""


@dataclass
class Row:
    """What became of the attacks on one back-end."""

    name: str
    stopped: list[str] = field(default_factory=list)
    succeeded: dict[str, str] = field(default_factory=dict)
    not_promised: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


ROWS = ("namespace", "user", "landlock", "docker")


def specs() -> dict[str, Sandbox]:
    """The sandbox of each row by name."""
    found = {"namespace": Sandbox(), "landlock": Sandbox(backend="landlock"), "docker": Sandbox(backend="docker")}
    if os.getuid() == 0 and shutil.which(SYSTEM_PYTHON):
        found["user"] = Sandbox(run_as=ORDINARY_USER, python=SYSTEM_PYTHON)
    return found


def sample(checks: Sequence[Check]) -> list[Check]:
    """One attack in EVERY of each class, the first one included."""
    seen: dict[str, int] = {}
    found = []
    for check in checks:
        if seen.setdefault(check.group, 0) % EVERY == 0:
            found.append(check)
        seen[check.group] += 1
    return found


async def attack(name: str, spec: Sandbox, checks: Sequence[Check]) -> Row:
    """Play attacks on one back-end.

    Raises:
        SandboxUnavailable, PromiseNotEnforceable: it does not work here.
    """
    row, began = Row(name), time.monotonic()
    async with SandboxPool(replace(spec, **SMALL_LIMITS), min_idle=2) as pool:
        stage = Stage(pool)
        missing = {check.name: not_promised(check, stage) for check in checks}
        row.not_promised = {check: promise for check, promise in missing.items() if promise is not None}
        wanted = [check for check in checks if check.name not in row.not_promised]
        run = CheckRun(stage, wanted, at_once=AT_ONCE)
        try:
            for check in wanted:
                try:
                    await run.result(check)
                    row.stopped.append(check.name)
                except Unseen:
                    row.not_promised[check.name] = "not visible from outside"
                except Exception as error:  # whatever a check meets is a finding
                    row.succeeded[check.name] = f"{type(error).__name__}: {error}"
        finally:
            await run.close()
            stage.close()
    row.seconds = time.monotonic() - began
    return row


async def without_sandbox(checks: Sequence[Check]) -> tuple[int, int]:
    """(hostile programs that get through as plain subprocesses, how many were tried)."""
    harmless = {f"hostile_{program.name}" for program in PROGRAMS if program.escapes_outside}
    wanted = [check for check in checks if check.name in harmless]
    through = 0
    async with SandboxPool(Sandbox(backend="process", trusted=True, **SMALL_LIMITS), min_idle=0) as pool:
        stage = Stage(pool)
        run = CheckRun(stage, wanted, at_once=AT_ONCE)
        try:
            for check in wanted:
                try:
                    await run.result(check)
                except AssertionError:
                    through += 1
        finally:
            await run.close()
            stage.close()
    return through, len(wanted)


def show(row: Row) -> None:
    """A line for the back-end and one for each finding."""
    print(
        f"{row.name:<10} {len(row.stopped):>4} stopped {len(row.succeeded):>3} succeeded "
        f"{len(row.not_promised):>3} not promised {row.seconds:>6.0f} s",
        flush=True,
    )
    for name, text in row.succeeded.items():
        print(f"    SUCCEEDED {name}: {text[:300]}")
    for name, promise in row.not_promised.items():
        print(f"    not promised ({promise}): {name}")


async def main() -> int:
    """Run what was asked for; the exit status is 0 when no attack succeeded."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rows", type=names_of(ROWS), default=",".join(ROWS))
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    checks = [c for c in sandbox_checks() if c.kind in KINDS and asked.only in c.name]
    if not checks:
        parser.error(f"--only: no attack has {asked.only!r} in its name")
    rows: list[Row] = []
    missing: dict[str, str] = {}
    names = asked.rows.split(",")
    whole = WHOLE if WHOLE in names else names[0]
    few = sample(checks) if asked.quick else checks
    if asked.quick:
        print(
            f"quick: {whole} meets all {len(checks)} attacks, each other back-end {len(few)} of them "
            f"(one in {EVERY} of each of {len({check.group for check in checks})} classes)",
            flush=True,
        )

    async def row(name: str) -> None:
        try:
            rows.append(await attack(name, specs()[name], checks if name == whole else few))
        except (KeyError, SandboxUnavailable, PromiseNotEnforceable) as error:
            missing[name] = "only root can try it" if isinstance(error, KeyError) else str(error)
            print(f"{name:<10} not available: {missing[name][:200]}", flush=True)
        else:
            show(rows[-1])

    if asked.quick:
        both = asyncio.gather(*(row(name) for name in names))
        through, tried = await without_sandbox(checks)
        await both
    else:
        for name in names:
            await row(name)
        through, tried = await without_sandbox(checks)
    print(f"subprocess {through} of {tried} hostile programs that harm nobody get through")
    ours = sum(len(row.succeeded) for row in rows)
    attacks = sum(len(row.succeeded) + len(row.stopped) for row in rows)
    line = {
        "bench": "integrity", "ours": ours, "baseline": through, "ratio": ours / max(1, through),
        "unit": "attacks that succeeded", "goal": 0, "met": ours == 0 and bool(rows), "attacks": attacks,
        "rows": {row.name: len(row.stopped) + len(row.succeeded) for row in rows}, "not_available": missing,
    }  # fmt: skip
    if asked.out is not None:
        asked.out.mkdir(parents=True, exist_ok=True)
        told = {**line, "kernel": platform.release(), "machine": platform.machine(),
                "stopped": {row.name: sorted(row.stopped) for row in rows},
                "succeeded": {row.name: row.succeeded for row in rows},
                "not_promised": {row.name: row.not_promised for row in rows}}  # fmt: skip
        (asked.out / "integrity.json").write_text(json.dumps(told, indent=1) + "\n")
    finish(line)
    return 0 if line["met"] else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
