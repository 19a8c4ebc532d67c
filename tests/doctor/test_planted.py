"""Faults planted into a running system: each short run leaves files in which the doctor names the fault."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pytest

from agentrl.doctor.sampler_checks import SMALL
from tests.doctor.healthy import HEALTHY, Healthy
from tests.doctor.planted import FAULTS, Planted, cold_start
from tests.doctor.variants import EVERY_OTHER, ON_SQLITE, OTHERS, VARIANTS

LIVE = {"wrong parser": "no tool was called", "tool answers are one error": "are the same error"}
"""Faults that a run notes after its first step."""
ODD = ("solved from the first step", "one of two envs without tools", "one step off", "LoRA")
"""Healthy runs that are played here; bench/doctor.py plays all."""
CLOTHES = (
    *("two of three answers are an error text", "judge is always 0", "learning rate x30", "temperature 1.3"),
    *("a query in reach of a tool", "errors as JSON", "leaked with other numbers"),
    *("the sampler's temperature only", "gradients clipped to nothing", "weight decay"),
)
"""The same of the variants."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that has learned to press buttons, for all runs."""
    return cold_start(tmp_path_factory.mktemp("cold") / "run")


@pytest.fixture(autouse=True)
def examined_in_the_run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the faults of `LIVE` need the separate process in which a run of this size is examined meanwhile."""
    fault = getattr(request.node, "callspec", None)
    if fault is not None and next(iter(fault.params.values())).title not in LIVE:
        monkeypatch.setattr("agentrl.trainer.examiner.FEW_EPISODES", 1_000)


def test_the_list_is_complete():
    assert {fault.number for fault in FAULTS} == set(range(1, 25))


@pytest.mark.parametrize("fault", [f for f in FAULTS if not f.ray], ids=lambda f: f.title.replace(" ", "-"))
def test_a_planted_fault_is_named(fault: Planted, policy: Path, tmp_path: Path):
    found = fault.play(policy, tmp_path)
    assert fault.named(found), [finding.line() for finding in found]
    for finding in found:
        assert finding.setting
        assert finding.step or finding.series or finding.why
    if fault.title in LIVE:
        noted = (tmp_path / "run" / "events.log").read_text().splitlines()
        assert any(" step 1: error: " in line and LIVE[fault.title] in line for line in noted)


@pytest.mark.parametrize(
    "fault",
    [v for v in VARIANTS if not v.ray and (v.title in CLOTHES or v in ON_SQLITE or v in OTHERS)],
    ids=lambda f: f.title.replace(" ", "-"),
)
def test_a_fault_in_other_clothes_is_named(fault: Planted, policy: Path, tmp_path: Path):
    found = fault.play(policy, tmp_path)
    assert fault.named(found), [finding.line() for finding in found]


def test_drift_that_comes_and_goes_is_told_by_its_mean(policy: Path, tmp_path: Path):
    found = EVERY_OTHER.play(policy, tmp_path)
    assert EVERY_OTHER.named(found)
    told = re.search(r"differ later \((\S+) in the second half", found[0].text)
    assert told is not None
    assert float(told[1]) > SMALL


def test_every_finding_has_a_planted_run():
    """Hints apart, and files that were damaged after the run."""
    sources = "".join(path.read_text() for path in Path(str(files("agentrl.doctor"))).glob("*_checks.py"))
    names = set(re.findall(r'Finding\(\s*"([a-z-]+)"', sources)) | {"context-full", "completions-cut", "timeouts"}
    names |= {"turns-run-out"}
    planted = {name for fault in (*FAULTS, *VARIANTS) for name in fault.expects}
    assert names - planted == {"all-solved", "episodes-damaged"}
    documented = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    assert [name for name in names if f"`{name}`" not in documented] == []


@pytest.mark.parametrize("run", [h for h in HEALTHY if h.title in ODD], ids=lambda h: h.title.replace(" ", "-"))
def test_an_odd_but_healthy_run_has_no_finding_above_a_hint(run: Healthy, policy: Path, tmp_path: Path):
    assert [finding.line() for finding in run.play(policy, tmp_path)] == []
    assert len(list((tmp_path / "run" / "episodes").iterdir())) == run.changes["steps"]


def test_many_healthy_runs_are_listed():
    assert len({run.title for run in HEALTHY}) == 27
