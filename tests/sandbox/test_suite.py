"""Every check of the shipped suite, on every back-end of this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from agentrl.sandbox import Sandbox
from agentrl.sandbox.pool import SandboxPool
from agentrl.testing.sandbox import Check, Stage, not_promised, sandbox_checks
from tests.sandbox.sandbox_specs import SPECS, spec_for

CHECKS = sandbox_checks()
NOT_PROMISED = {
    "namespace": 0,
    "namespace_user": 7,  # memory: no control group; quotas
    "landlock": 5,  # the disk in total
    "landlock_user": 12,  # the same, memory and quotas
    "process": 109,  # isolation
    "docker": 0,
}
"""How many checks a back-end leaves out: more would mean that it promises less than it did."""


class Theatre:
    """One open pool and its stage, with the event loop they live on."""

    def __init__(self, spec: Sandbox) -> None:
        self.runner = asyncio.Runner()
        self.stage = self.runner.run(self._open(spec))

    async def _open(self, spec: Sandbox) -> Stage:
        pool = SandboxPool(spec, min_idle=2)
        await pool.open()
        return Stage(pool)

    def close(self) -> None:
        self.stage.close()
        self.runner.run(self.stage.pool.close())
        self.runner.close()


MARKED = [pytest.param(name, marks=pytest.mark.docker) if name == "docker" else name for name in SPECS]


@pytest.fixture(scope="module", params=MARKED)
def theatre(request: pytest.FixtureRequest) -> Iterator[Theatre]:
    theatre = Theatre(spec_for(request.param))
    yield theatre
    theatre.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_check(theatre: Theatre, check: Check) -> None:
    missing = not_promised(check, theatre.stage)
    if missing is not None:
        pytest.skip(f"{theatre.stage.spec.backend} does not promise {missing!r}")
    theatre.runner.run(check.run(theatre.stage))


def test_no_promise_has_been_lost(theatre: Theatre, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["theatre"]
    left_out = [check.name for check in CHECKS if not_promised(check, theatre.stage)]
    assert len(left_out) == NOT_PROMISED[name], left_out


def test_the_suite_is_as_large_as_it_says() -> None:
    kinds = [check.kind for check in CHECKS]
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert kinds.count("hostile") >= 54
    assert kinds.count("conformance") + kinds.count("fidelity") >= 44
