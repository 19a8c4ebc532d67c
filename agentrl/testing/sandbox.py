"""One suite for every sandbox back-end: what they all do, what gets stopped, how ends are told apart, what breaks.

    report = asyncio.run(check_sandbox(Sandbox(backend="my_package.boxes:Backend")))
    print(report)
    assert report.ok

With pytest: parametrise over `sandbox_checks(...)` and await `check.run(stage)`.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

from agentrl.sandbox import PROMISES, Sandbox
from agentrl.sandbox.pool import SandboxPool
from agentrl.testing.sandbox_suite import chaos, conformance, fidelity, hostile, sabotage
from agentrl.testing.sandbox_suite.stage import Check, Stage, Unseen

__all__ = ["Check", "Report", "Stage", "check_sandbox", "sandbox_checks"]


def sandbox_checks() -> list[Check]:
    """Every check, in the order in which they are best read."""
    return [*conformance.checks(), *fidelity.checks(), *hostile.checks(), *sabotage.checks(), *chaos.checks()]


@dataclass(frozen=True)
class Report:
    """What became of each check: None, or what went wrong; `skipped` says which promise was not made."""

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


async def check_sandbox(spec: Sandbox, *, only: Collection[str] | None = None) -> Report:
    """Run the suite on a back-end.

    Args:
        spec: which; its limits are the ones that the hostile programs run against.
        only: names of checks, if not all.
    """
    results: dict[str, str | None] = {}
    skipped: dict[str, str] = {}
    began = time.monotonic()
    async with SandboxPool(spec, min_idle=2) as pool:
        stage = Stage(pool)
        try:
            for check in sandbox_checks():
                if only is not None and check.name not in only:
                    continue
                missing = not_promised(check, stage)
                if missing is not None:
                    skipped[check.name] = missing
                    continue
                try:
                    await check.run(stage)
                    results[check.name] = None
                except Unseen:
                    skipped[check.name] = "not visible from outside"
                except Exception as error:  # everything a check meets is a finding
                    results[check.name] = f"{type(error).__name__}: {error}"
        finally:
            stage.close()
    return Report(spec.backend, results, skipped, time.monotonic() - began)
