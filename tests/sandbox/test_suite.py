"""Every check of the shipped suite, on every back-end of this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from agentrl.sandbox import Sandbox
from agentrl.sandbox.pool import SandboxPool
from agentrl.testing.sandbox import (
    SMALL_LIMITS,
    Check,
    CheckRun,
    Stage,
    not_promised,
    sandbox_checks,
)
from tests.sandbox.sandbox_specs import SPECS, spec_for

CHECKS = sandbox_checks()
ATTACKS = ("hostile", "sabotage")
"""Kinds of checks that a back-end is put through as an ordinary user too."""
NOT_PROMISED = {
    "namespace": 0,
    "namespace_user": 7,  # memory: no control group; quotas
    "landlock": 5,  # the disk in total
    "landlock_user": 12,  # the same, memory and quotas
    "process": 109,  # isolation
    "docker": 0,
}
"""How many checks a back-end leaves out: more would mean that it promises less than it did."""
AT_ONCE = 3


class Theatre:
    """One open pool, its stage and the checks under way on it, with the event loop they live on."""

    def __init__(self, spec: Sandbox, checks: Sequence[Check]) -> None:
        self.runner = asyncio.Runner()
        self.stage, self.checks = self.runner.run(self._open(spec, checks))

    async def _open(self, spec: Sandbox, checks: Sequence[Check]) -> tuple[Stage, CheckRun]:
        pool = SandboxPool(spec, min_idle=2)
        await pool.open()
        stage = Stage(pool)
        promised = [check for check in checks if not_promised(check, stage) is None]
        return stage, CheckRun(stage, promised, at_once=AT_ONCE)

    def close(self) -> None:
        self.runner.run(self.checks.close())
        self.stage.close()
        self.runner.run(self.stage.pool.close())
        self.runner.close()


MARKED = [pytest.param(name, marks=pytest.mark.docker) if name == "docker" else name for name in SPECS]


def is_repeated(name: str, check: Check) -> bool:
    """Whether the same back-end proves it as root already; an ordinary user is put through the attacks."""
    return name.endswith("_user") and check.kind not in ATTACKS


@pytest.fixture(scope="module", params=MARKED)
def theatre(request: pytest.FixtureRequest) -> Iterator[Theatre]:
    name = request.param
    params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    checks = [p["check"] for p in params if p.get("theatre") == name and "check" in p]
    wanted = [check for check in checks if not is_repeated(name, check)]
    theatre = Theatre(replace(spec_for(name), **SMALL_LIMITS), wanted)
    yield theatre
    theatre.close()


@pytest.mark.timeout(600)  # the first one that must be alone waits for all others
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_check(theatre: Theatre, check: Check, request: pytest.FixtureRequest) -> None:
    if is_repeated(request.node.callspec.params["theatre"], check):
        pytest.skip("proven as root")
    missing = not_promised(check, theatre.stage)
    if missing is not None:
        pytest.skip(f"{theatre.stage.spec.backend} does not promise {missing!r}")
    theatre.runner.run(theatre.checks.result(check))


def test_no_promise_has_been_lost(theatre: Theatre, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["theatre"]
    left_out = [check.name for check in CHECKS if not_promised(check, theatre.stage)]
    assert len(left_out) == NOT_PROMISED[name], left_out


def test_the_suite_is_as_large_as_it_says() -> None:
    kinds = [check.kind for check in CHECKS]
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert kinds.count("hostile") >= 54
    assert kinds.count("conformance") + kinds.count("fidelity") >= 44
