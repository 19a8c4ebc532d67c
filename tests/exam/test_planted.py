"""The public suite: every planted fault is found, and healthy envs have none."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator

import pytest

from agentrl.config.load import make_config
from agentrl.exam import floors, sitting, speed
from agentrl.exam.fresh_process import FreshProcesses
from agentrl.exam.marks import ExamResult, Level
from agentrl.exam.sitting import examine
from tests.exam import planted
from tests.exam.healthy import HEALTHY
from tests.exam.planted import FAULTS
from tests.exam.planted_more import FAULTS as MORE
from tests.exam.planted_more import AnyNumber
from tests.exam.planted_subtle import FAULTS as SUBTLE
from tests.exam.planted_subtle import OffByOne


@pytest.fixture(scope="module", autouse=True)
def folder_of_leftovers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Some faults are files that an env leaves behind."""
    with pytest.MonkeyPatch.context() as patch:
        folder = str(tmp_path_factory.mktemp("left"))
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(scope="module")
def fresh():
    """The processes in which episodes are repeated: starting them costs more than most exams."""
    with FreshProcesses() as processes:
        yield processes


def exam(use: str, *, processes: bool | FreshProcesses, tasks: int | None = None) -> ExamResult:
    config = make_config({"name": "exam", "model": {"path": "."}}, [f"env.use={use}"], use, check_paths=False)
    [result] = examine(config, tasks=tasks, processes=processes)
    return result


def examined(faulty: type, checks: tuple[str, ...], fresh: FreshProcesses) -> bool:
    """Whether one of the checks finds the fault; other processes play only for faults that need them."""
    needed = not {"process", "clock"}.isdisjoint(checks)
    result = exam(f"{faulty.__module__}:{faulty.__name__}", processes=needed and fresh)
    return bool({finding.check for finding in result.at_least(Level.ERROR)} & set(checks))


@pytest.fixture
def quicker(monkeypatch):
    """All times of the exam, and of the slow envs, divided by seven."""
    monkeypatch.setattr(planted, "SLOW_S", 0.3)
    monkeypatch.setattr(speed, "SLOW_S", 0.28)
    monkeypatch.setattr(speed, "SLOWISH_S", 0.1)
    monkeypatch.setattr(speed, "HUNG_S", 2.0)
    monkeypatch.setattr(sitting, "CRAWLING_EPISODE_S", 0.2)
    monkeypatch.setattr(sitting, "HANGING_EPISODE_S", 2.0)


def test_there_are_at_least_twenty_faults():
    assert len(FAULTS) >= 20


@pytest.mark.parametrize("faulty", FAULTS, ids=lambda c: c.__name__)
def test_the_planted_fault_is_found(faulty, quicker, fresh):
    assert examined(faulty, FAULTS[faulty], fresh)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("faulty", SUBTLE, ids=lambda c: c.__name__)
def test_a_subtle_fault_is_found(faulty, fresh):
    assert examined(faulty, SUBTLE[faulty], fresh)


@pytest.mark.slow
@pytest.mark.parametrize("faulty", MORE, ids=lambda c: c.__name__)
def test_a_fault_written_in_another_way_is_found(faulty, quicker, fresh):
    assert examined(faulty, MORE[faulty], fresh)


@pytest.mark.timeout(120)
def test_listing_hundreds_of_numbers_is_a_warning(fresh):
    result = exam(f"{AnyNumber.__module__}:{AnyNumber.__name__}", processes=fresh)
    assert "search" in {f.check for f in result.at_least(Level.WARNING)}, result.findings


def test_a_tolerance_of_one_is_a_warning():
    result = exam(f"{OffByOne.__module__}:{OffByOne.__name__}", processes=False)
    assert [f.check for f in result.at_least(Level.WARNING)] == ["search"]
    assert "453 instead of 452" in result.findings[0].text


@pytest.mark.timeout(60)
@pytest.mark.parametrize("healthy", HEALTHY, ids=lambda c: c.__name__)
def test_a_healthy_env_passes(healthy, fresh):
    result = exam(f"{healthy.__module__}:{healthy.__name__}", processes=fresh)
    assert result.at_least(Level.WARNING) == []
    assert not set(result.not_examined) & {"process", "clock", "parallel"}


SHIPPED = {
    "agentrl.envs.calculator:Calculator": False,
    "agentrl.envs.gym_text:FrozenLake": False,
    "agentrl.envs.retail:Retail": False,
    "agentrl.envs.search:Search": False,
    "agentrl.envs.sqlite:Sqlite": False,
    "agentrl.envs.gym_text:Taxi": True,
    "agentrl.envs.gym_text:CliffWalking": True,
    "agentrl.envs.files:Files": True,
    "agentrl.envs.python_code:PythonCode": True,
}
IN_SANDBOXES = {"agentrl.envs.files:Files", "agentrl.envs.python_code:PythonCode"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "use", [pytest.param(use, marks=[pytest.mark.slow] * slow) for use, slow in SHIPPED.items()]
)
def test_a_shipped_env_passes(use, monkeypatch, fresh):
    if use in IN_SANDBOXES:  # each takes tens of milliseconds to make: every text is played on one task
        for name in ("NUM_FLOOR", "NUM_FLOOR_FEW", "NUM_SEARCH", "NUM_SEARCH_FEW"):
            monkeypatch.setattr(floors, name, 1)
        monkeypatch.setattr(sitting, "SLOW_EPISODE_S", math.inf)  # all texts, however busy the machine is
    # Three and a held-out one: reward search needs four.
    result = exam(use, processes=fresh, tasks=3 if SHIPPED[use] else 12)
    assert result.at_least(Level.WARNING) == []
    assert result.oracle


@pytest.mark.timeout(120)
def test_games_with_the_same_start_may_take_many_turns():
    result = exam("agentrl.envs.gym_text:Taxi", processes=False)
    assert result.of("rows") == []


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_bad_label_of_bfcl_is_found(fresh):
    pytest.importorskip("bfcl_eval")
    errors = exam("bfcl:multi_turn_base", processes=fresh).at_least(Level.ERROR)
    assert {task for finding in errors for task in finding.tasks} == {"multi_turn_base_173"}


@pytest.mark.timeout(60)
def test_an_env_of_a_scheme_without_an_oracle_says_what_was_not_examined(fresh):
    result = exam("gymnasium:FrozenLake-v1", processes=fresh)
    assert result.at_least(Level.ERROR) == []
    assert {"oracle", "leak"} <= set(result.not_examined)
