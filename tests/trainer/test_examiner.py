"""The doctor during training: its findings are reported, and its failures never end the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.doctor.examine import findings
from agentrl.trainer import examiner
from agentrl.trainer.examiner import FEW_EPISODES, Examiner, Found

Reports = list[tuple[int, Found]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder whose second rank is slow, which one finding says."""
    ranks = {f"rank/{n}/tokens": 1000.0 for n in (0, 1)}
    ranks |= {"rank/0/forward_seconds": 1.0, "rank/1/forward_seconds": 2.0}
    lines = [json.dumps({"step": step, "seconds": 1.0, **ranks}) for step in range(1, 21)]
    (tmp_path / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    (tmp_path / "config.yaml").write_text("{}")
    assert [f.name for f in findings(tmp_path)] == ["slow-rank"]
    return tmp_path


def looked(run: Path, *steps: int, episodes: int = FEW_EPISODES) -> Reports:
    reports: Reports = []
    with Examiner(run, episodes) as doctor:
        for step in steps:
            doctor.after(step, lambda step, found: reports.append((step, found)))
    return reports


@pytest.mark.parametrize("episodes", [FEW_EPISODES - 1, FEW_EPISODES])
def test_it_finds_the_same_in_a_thread_and_in_a_process(run: Path, episodes: int):
    assert looked(run, 10, episodes=episodes) == [(10, findings(run, 10))]


def test_it_looks_after_some_steps_only(run: Path):
    assert looked(run, 2, 4, 9, 11, 19, 21) == []
    for step in (1, 3, 10, 20, 40):
        assert [at for at, _ in looked(run, step, episodes=1)] == [step]


def test_a_look_that_has_not_begun_gives_way_to_the_next(run: Path, monkeypatch: pytest.MonkeyPatch):
    began, go = threading.Event(), threading.Event()

    def look(run: Path, upto: int) -> Found:
        began.set()
        go.wait()
        return []

    monkeypatch.setattr(examiner, "findings", look)
    reports: Reports = []
    with Examiner(run, 1) as doctor:
        doctor.after(1, lambda *report: reports.append(report))
        began.wait()
        for step in (3, 10, 20):
            doctor.after(step, lambda *report: reports.append(report))
        go.set()
    assert reports == [(1, []), (20, [])], "the one under way and the last"


def test_a_fault_of_the_doctor_is_reported_with_its_reason(run: Path, monkeypatch: pytest.MonkeyPatch):
    ((_, found),) = looked(Path("a\0b"), 3, episodes=1)
    assert found.startswith("ValueError: ")
    assert "embedded null" in found
    monkeypatch.setattr(sys, "path", [str(broken_doctor(run)), *sys.path])
    assert looked(run, 3) == [(3, "its process ended with exit code 1: OSError: no disk")]


def broken_doctor(folder: Path, doing: str = "raise OSError('no disk')") -> Path:
    """A package `agentrl` whose doctor does this and nothing else."""
    (folder / "other" / "agentrl" / "doctor").mkdir(parents=True)
    (folder / "other" / "agentrl" / "doctor" / "__main__.py").write_text(doing)
    for package in ("agentrl", "agentrl/doctor"):
        (folder / "other" / package / "__init__.py").touch()
    return folder / "other"


ENDLESS = """
import os, time
with open(os.environ["SEEN"], "w") as file:
    file.write(str(os.getpid()))
time.sleep(1000)
"""


@pytest.fixture
def endless(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Makes looks endless; waits for the next one and returns its process."""
    seen = tmp_path / "seen"
    monkeypatch.setenv("SEEN", str(seen))
    monkeypatch.setattr(sys, "path", [str(broken_doctor(run, ENDLESS)), *sys.path])

    def pid() -> int:
        while not (seen.is_file() and seen.read_text()):
            time.sleep(0.01)
        return int(seen.read_text())

    return pid


def test_a_process_that_is_killed_is_reported(run: Path, endless: Callable[[], int]):
    reports: Reports = []
    with Examiner(run, FEW_EPISODES) as doctor:
        doctor.after(1, lambda *report: reports.append(report))
        pid = endless()
        assert os.getpgid(pid) != os.getpgid(0), "Ctrl-C would reach it"
        assert os.getsid(pid) == os.getsid(0), "Linux ignores priorities between sessions"
        os.kill(pid, signal.SIGKILL)
    assert reports == [(1, "its process ended with exit code -9")]


@pytest.mark.parametrize("stopped", [False, True])
def test_a_run_that_fails_does_not_wait_for_a_look(run: Path, endless: Callable[[], int], stopped: bool):
    reports: Reports = []
    pids: list[int] = []

    def fails() -> None:
        with Examiner(run, FEW_EPISODES) as doctor:
            doctor.after(1, lambda *report: reports.append(report))
            pids.append(endless())
            doctor.after(3, lambda *report: reports.append(report))
            if stopped:
                os.kill(pids[0], signal.SIGSTOP)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert reports == [(1, "the run ended first")]
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_a_run_that_ends_waits_for_a_look_only_so_long(
    run: Path, endless: Callable[[], int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(examiner, "LAST_WAIT_S", 0.2)
    reports: Reports = []
    with Examiner(run, FEW_EPISODES) as doctor:
        doctor.after(1, lambda *report: reports.append(report))
        pid = endless()
    assert reports == [(1, "the run ended first")]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_its_process_lets_others_go_first(run: Path):
    code = (
        "import os, runpy; runpy.run_module('agentrl.doctor', run_name='__main__'); "
        "print('', os.nice(0), sep='\\n')"
    )
    words = [sys.executable, "-c", code, str(run), "10"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [finding["name"] for finding in json.loads(said[0])] == ["slow-rank"]
    assert int(said[1]) == 19
