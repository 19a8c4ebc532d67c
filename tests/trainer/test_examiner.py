"""The doctor beside a run: what it finds arrives, and its own faults do not end the run."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from agentrl.doctor.examine import findings
from agentrl.engine.fork_server import fork_server
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


def test_a_process_of_the_fork_server_finds_the_same(run: Path):
    fork_server()
    assert looked(run, 10) == [(10, findings(run, 10))]


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

    monkeypatch.setattr(examiner, "_found", look)
    reports: Reports = []
    with Examiner(run, 1) as doctor:
        doctor.after(1, lambda *report: reports.append(report))
        began.wait()
        for step in (3, 10, 20):
            doctor.after(step, lambda *report: reports.append(report))
        go.set()
    assert reports == [(1, []), (20, [])], "the one under way and the last"


@pytest.mark.parametrize("episodes", [FEW_EPISODES - 1, FEW_EPISODES])
def test_a_fault_of_the_doctor_is_reported_with_its_reason(episodes: int):
    assert looked(Path("a\0b"), 3, episodes=episodes) == [(3, "ValueError: embedded null byte")]


def test_a_process_that_is_killed_is_reported(run: Path, monkeypatch: pytest.MonkeyPatch):
    spawn = multiprocessing.get_context("spawn")
    monkeypatch.setattr(examiner, "light_context", lambda: spawn)  # it imports the doctor, which takes a while
    reports: Reports = []
    with Examiner(run, FEW_EPISODES) as doctor:
        doctor.after(1, lambda *report: reports.append(report))
        pid = None
        while pid is None:
            time.sleep(0.01)
            pid = next((p.pid for p in multiprocessing.active_children() if p.name == "agentrl-doctor"), None)
        os.kill(pid, signal.SIGKILL)
    assert reports == [(1, "its process ended with exit code -9")]


def in_its_process(pipe: Connection, run: Path) -> None:
    examiner._main(pipe, run, 10)
    pipe.send((os.getpriority(os.PRIO_PROCESS, 0), signal.getsignal(signal.SIGINT)))


def test_its_process_has_the_lowest_priority_and_outlasts_the_interrupt_of_the_run(run: Path):
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=in_its_process, args=(there, run))
    process.start()
    there.close()
    assert here.recv() == findings(run, 10)
    assert here.recv() == (19, signal.SIG_IGN)
    process.join()
    here.close()
