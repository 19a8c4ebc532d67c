"""Every check of the shipped suite, on every back-end of this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from agentrl.testing.sandbox import (
    SMALL_LIMITS,
    Check,
    not_promised,
    sandbox_checks,
)
from tests.sandbox.sandbox_specs import SPECS, spec_for
from tests.sandbox.theatre import Theatre, selected_checks

CHECKS = sandbox_checks()
ATTACKS = ("hostile", "sabotage")
"""Kinds of checks that a back-end is put through as an ordinary user too."""
NOT_PROMISED = {
    "namespace": 0,
    "namespace_user": 7,  # memory: no control group; quotas
    "landlock": 5,  # the disk in total
    "landlock_user": 12,  # the same, memory and quotas
    "process": 117,  # isolation
    "docker": 0,
}
"""How many checks a back-end leaves out: more would mean that it promises less than it did."""

MARKED = [pytest.param(name, marks=pytest.mark.docker) if name == "docker" else name for name in SPECS]


def is_repeated(name: str, check: Check) -> bool:
    """Whether the same back-end proves it as root already; an ordinary user is put through the attacks."""
    return name.endswith("_user") and check.kind not in ATTACKS


@pytest.fixture(scope="module", params=MARKED)
def theatre(request: pytest.FixtureRequest) -> Iterator[Theatre]:
    name = request.param
    checks = [check for check in selected_checks(request, name) if not is_repeated(name, check)]
    theatre = Theatre(replace(spec_for(name), **SMALL_LIMITS), checks)
    yield theatre
    theatre.close()
    theatre.runner.close()


@pytest.mark.timeout(600)  # the first one that must be alone waits for all others
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_check(theatre: Theatre, check: Check, request: pytest.FixtureRequest) -> None:
    if is_repeated(request.node.callspec.params["theatre"], check):
        pytest.skip("proven as root")
    missing = not_promised(check, theatre.stage)
    if missing is not None:
        pytest.skip(f"{theatre.stage.spec.backend} does not promise {missing!r}")
    theatre.result(check)


def test_no_promise_has_been_lost(theatre: Theatre, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["theatre"]
    if os.getuid() != 0 and f"{name}_user" in NOT_PROMISED:
        name += "_user"
    left_out = [check.name for check in CHECKS if not_promised(check, theatre.stage)]
    assert len(left_out) == NOT_PROMISED[name], left_out


def test_the_suite_is_as_large_as_it_says() -> None:
    kinds = [check.kind for check in CHECKS]
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert kinds.count("hostile") >= 54
    assert kinds.count("conformance") + kinds.count("fidelity") >= 44
