"""Where the next tasks come from survives a stop: a resumed run plays the tasks the unbroken one played."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from agentrl.config.run import RunConfig
from agentrl.reporting.report import Silent, Summary
from agentrl.run_folder.records import read_episodes
from agentrl.run_folder.store import RunStore
from agentrl.trainer.run import train_run

ENV = '''
from agentrl import Task, ToolEnv, reward
from agentrl.env.read import final_answer


class Some(ToolEnv):
    """Say something."""

    def setup(self, number: int, easy: bool) -> str:
        self.easy = easy
        return f"Number {number}."

    @reward
    def solved(self, episode) -> bool:
        return self.easy or "e" in final_answer(episode)

    @classmethod
    def tasks(cls, split, seed):
        return [Task(f"{split}-{n}", {"number": n, "easy": n % 3 == 0}, n) for n in range(12)]
'''


ORDER = """
import random


class Unsolved:
    def __init__(self, tasks, seed, until):
        self.seed, self.until, self.solved = seed, until, {task.id: 0 for task in tasks}
        self.ids = [task.id for task in tasks]

    def choose(self, number):
        left = [n for n, name in enumerate(self.ids) if self.solved[name] < self.until]
        return random.Random(f"{self.seed}/{number}").choice(left)

    def report(self, position, group):
        assert group.task.id == self.ids[position]
        self.solved[group.task.id] += all(e.solved for e in group.episodes)

    def state(self):
        return self.solved

    def restore(self, state):
        self.solved = dict(state)
"""


class StopAfter(Silent):
    """Asks the run to stop after a step, as a user would."""

    def __init__(self, step: int) -> None:
        self._step = step

    def step(self, metrics: Mapping[str, float]) -> None:
        if metrics.get("step") == self._step:
            signal.raise_signal(signal.SIGTERM)


def config(folder: Path, order: str) -> RunConfig:
    (folder / "some.py").write_text(ENV)
    (folder / "order.py").write_text(ORDER)
    options: dict[str, object] = {"window": 2, "floor": 0.05} if order == "weighted" else {}
    if order == "own":
        order, options = f"{folder}/order.py:Unsolved", {"options": {"until": 1}}
    return RunConfig(
        name="some",
        steps=6,
        seed=3,
        env=f"{folder}/some.py:Some",
        data={"sampler": {"order": order, **options}},
        model={"tiny": {"hidden": 32, "layers": 1, "heads": 2, "intermediate": 64, "vocab": 300}},
        rollout={"groups_per_step": 3, "group_size": 3, "max_turns": 1, "max_tokens": 6, "token_budget": 300},
        eval={"tasks": 1, "every": 6},
        checkpoint={"every": 2},
    )


def run(config: RunConfig, folder: Path, reporter: Silent) -> Summary:
    with RunStore.open(config, folder) as store:
        return train_run(config, store, reporter)


def played(folder: Path) -> list[list[tuple[str, float | None]]]:
    """(task, reward) of all episodes, step by step."""
    return [sorted((e.task.id, e.reward) for e in read_episodes(folder, step)) for step in range(1, 7)]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("order", ["shuffled", "weighted", "own"])
def test_a_stopped_run_goes_on_with_the_tasks_that_were_next(tmp_path: Path, order: str):
    settings = config(tmp_path, order)
    assert run(settings, tmp_path / "whole", Silent()).finished
    for step in (2, 3):  # at a checkpoint, and between two
        assert not run(settings, tmp_path / "broken", StopAfter(step)).finished
    assert run(settings, tmp_path / "broken", Silent()).finished
    whole, broken = played(tmp_path / "whole"), played(tmp_path / "broken")
    assert whole == broken
    drawn = [task for step in whole for task, _ in step]
    assert drawn != sorted(drawn, key=lambda t: int(t.rpartition("-")[2])), "another order than the tasks'"
    if order == "own":
        easy = [{task for task, _ in step if int(task.rpartition("-")[2]) % 3 == 0} for step in whole]
        assert any(easy), "these are always solved, and a solved task is never chosen again"
        assert sum(map(len, easy)) == len(set.union(*easy))
    if order == "shuffled":
        assert len({t for step in whole[:4] for t, _ in step}) == 12, "each task once before any twice"
