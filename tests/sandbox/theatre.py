"""The checks of the shipped suite under way on one pool, several at a time, for tests that wait for one each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from agentrl.sandbox import Sandbox, SandboxPool
from agentrl.testing.sandbox import Check, CheckRun, Stage, not_promised

AT_ONCE = 3


def selected_checks(request: pytest.FixtureRequest, theatre: str | None = None) -> list[Check]:
    """The checks that pytest runs from the file of a fixture; with `theatre`, those of that parameter."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    params = [item.callspec.params for item in items]
    return [p["check"] for p in params if "check" in p and (theatre is None or p["theatre"] == theatre)]


class Theatre:
    """One open pool, its stage and the checks under way on it, with the event loop they live on."""

    def __init__(self, spec: Sandbox, checks: Sequence[Check], runner: asyncio.Runner | None = None) -> None:
        self.runner = runner or asyncio.Runner()
        self.runner.run(self._open(spec, checks))

    async def _open(self, spec: Sandbox, checks: Sequence[Check]) -> None:
        pool = SandboxPool(spec, min_idle=2)
        await pool.open()
        self.stage = Stage(pool)
        promised = [check for check in checks if not_promised(check, self.stage) is None]
        self._checks = CheckRun(self.stage, promised, at_once=AT_ONCE)

    def result(self, check: Check) -> None:
        """Wait for a check; raises what it raised."""
        self.runner.run(self._checks.result(check))

    def close(self) -> None:
        """Stop what still runs, and end the pool; the loop stays open."""
        self.runner.run(self._checks.close())
        self.stage.close()
        self.runner.run(self.stage.pool.close())
