"""One suite for every sandbox back-end: conformance, confinement, exit fidelity, and failures.

    report = asyncio.run(check_sandbox(Sandbox(backend="my_package.boxes:Backend")))
    print(report)
    assert report.ok

With pytest: parametrize over `sandbox_checks(...)` and await `check.run(stage)`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.sandbox import PROMISES, Sandbox
from agentrl.sandbox.pool import SandboxPool
from agentrl.testing.sandbox_suite import chaos, conformance, fidelity, hostile, sabotage
from agentrl.testing.sandbox_suite.stage import Check, Stage, Unseen

__all__ = ["SMALL_LIMITS", "Check", "CheckRun", "Stage", "SuiteReport", "check_sandbox", "sandbox_checks"]

SMALL_LIMITS: dict[str, Any] = {"memory_mb": 160, "workspace_mb": 48, "inodes": 4000}
"""Limits for a `Sandbox` under test: programs that use up memory or the disk get there sooner."""


def sandbox_checks() -> list[Check]:
    """Every check, in reading order."""
    return [*conformance.checks(), *fidelity.checks(), *hostile.checks(), *sabotage.checks(), *chaos.checks()]


@dataclass(frozen=True)
class SuiteReport:
    """The result of each check: None, or the error; `skipped` gives the missing promise."""

    backend: str
    results: dict[str, str | None]
    skipped: dict[str, str]
    seconds: float

    @property
    def ok(self) -> bool:
        """Nothing went wrong."""
        return not any(self.results.values())

    def __str__(self) -> str:
        bad = {name: text for name, text in self.results.items() if text}
        head = (
            f"{self.backend}: {len(self.results) - len(bad)} held, {len(bad)} failed, "
            f"{len(self.skipped)} not promised, {self.seconds:.0f} s"
        )
        lines = [f"  FAILED {name}: {text}" for name, text in bad.items()]
        lines += [f"  not promised ({why}): {name}" for name, why in self.skipped.items()]
        return "\n".join([head, *lines])


def not_promised(check: Check, stage: Stage) -> str | None:
    """The promise that a check tests and that the pool's back-end does not make; None when it can run."""
    capabilities = stage.pool.capabilities
    kept = capabilities.kept if capabilities is not None else frozenset(PROMISES)
    if check.promise is not None and check.promise not in kept:
        return check.promise
    return "files" if check.isolating and "files" not in kept else None


class CheckRun:
    """Checks running on one stage: several at a time, then those that must run alone, one by one."""

    def __init__(self, stage: Stage, checks: Sequence[Check], *, at_once: int) -> None:
        self._stage = stage
        self._places = asyncio.Semaphore(at_once)
        self._turn = asyncio.Lock()
        self._together = [self._start(self._play(check), check) for check in checks if not check.alone]
        tasks = [
            *self._together,
            *(self._start(self._play_alone(check), check) for check in checks if check.alone),
        ]
        self._tasks = {task.get_name(): task for task in tasks}

    async def result(self, check: Check) -> None:
        """Wait for a check; raises what it raised: AssertionError where it failed, Unseen if it cannot tell."""
        await self._tasks[check.name]

    async def close(self) -> None:
        """Stop the checks that still run."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _start(self, work: Coroutine[None, None, None], check: Check) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work, name=check.name)

    async def _play(self, check: Check) -> None:
        async with self._places:
            await check.run(self._stage)

    async def _play_alone(self, check: Check) -> None:
        if self._together:
            await asyncio.wait(self._together)
        async with self._turn:
            await check.run(self._stage)


async def check_sandbox(spec: Sandbox, *, only: Collection[str] | None = None, at_once: int = 3) -> SuiteReport:
    """Run the suite on a back-end.

    Args:
        spec: the sandbox to test; hostile programs run against its limits.
        only: names of checks; None: all.
        at_once: how many checks run at the same time.
    """
    results: dict[str, str | None] = {}
    skipped: dict[str, str] = {}
    began = time.monotonic()
    async with SandboxPool(spec, min_idle=2) as pool:
        stage = Stage(pool)
        wanted = []
        for check in sandbox_checks():
            if only is not None and check.name not in only:
                continue
            missing = not_promised(check, stage)
            if missing is not None:
                skipped[check.name] = missing
            else:
                wanted.append(check)
        run = CheckRun(stage, wanted, at_once=at_once)
        try:
            for check in wanted:
                try:
                    await run.result(check)
                    results[check.name] = None
                except Unseen:
                    skipped[check.name] = "not visible from outside"
                except Exception as error:  # everything a check meets is a finding
                    results[check.name] = f"{type(error).__name__}: {error}"
        finally:
            await run.close()
            stage.close()
    return SuiteReport(spec.backend, results, skipped, time.monotonic() - began)
