"""Faults planted into a running system: each short run leaves files in which the doctor names the fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doctor.planted import FAULTS, Planted, cold_start


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that has learned to press buttons, for all runs."""
    return cold_start(tmp_path_factory.mktemp("cold") / "run")


def test_the_list_is_complete():
    assert {fault.number for fault in FAULTS} == set(range(1, 25))


@pytest.mark.parametrize("fault", [f for f in FAULTS if not f.ray], ids=lambda f: f.title.replace(" ", "-"))
def test_a_planted_fault_is_named(fault: Planted, policy: Path, tmp_path: Path):
    found = fault.play(policy, tmp_path)
    assert fault.named(found), [finding.line() for finding in found]
    for finding in found:
        assert finding.setting
        assert finding.step or finding.series or finding.why
