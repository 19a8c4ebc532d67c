"""The event loop never waits for the learner: episodes, timeouts and health checks go on while it computes."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from agentrl import ToolEnv, reward
from agentrl.config.run import RunConfig
from agentrl.learner.policy_rank import LocalPolicyRank
from agentrl.reporting.report import Silent
from agentrl.run_folder.store import RunStore
from agentrl.trainer import run as runs
from agentrl.types import Message, Task

TAKES_S = 1.0
SLOW = ("weights", "update", "snapshot", "export")


class Word(ToolEnv):
    """Say something."""

    def setup(self, number: int) -> str:
        return f"word {number}"

    @reward
    def solved(self, episode: Any) -> bool:
        return True

    @classmethod
    def tasks(cls, split: str, seed: int) -> list[Task]:
        return [Task(f"{split}{n}", {"number": n}) for n in range(2)]

    @classmethod
    def demonstrations(cls, seed: int, num: int) -> list[list[Message]]:
        return [[Message("system", "Say."), Message("user", "word"), Message("assistant", "yes")]] * num


def test_the_loop_is_never_silent_while_the_learner_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ticks: list[float] = []
    calls: list[tuple[str, float, float]] = []

    async def watched(setting: Any, train: Any = runs._train_run) -> Any:
        async def tick() -> None:
            while True:
                ticks.append(time.monotonic())
                await asyncio.sleep(0.005)

        task = asyncio.create_task(tick())
        try:
            return await train(setting)
        finally:
            task.cancel()

    def slow(name: str) -> Any:
        method = getattr(LocalPolicyRank, name)

        def call(self: LocalPolicyRank, *given: Any) -> Any:
            started = time.monotonic()
            time.sleep(TAKES_S if name == "weights" else TAKES_S / 2)
            calls.append((name, started, time.monotonic()))
            return method(self, *given)

        return call

    monkeypatch.setattr(runs, "_train_run", watched)
    for name in SLOW:
        monkeypatch.setattr(LocalPolicyRank, name, slow(name))
    config = RunConfig(
        name="word",
        env=f"{__name__}:Word",
        steps=1,
        model={"tiny": {"hidden": 32, "layers": 1, "heads": 2, "intermediate": 64, "vocab": 300}},
        warmup={"num": 4, "max_epochs": 1, "probe_tasks": 1, "probe_samples": 1, "at_least": 0.0},
        rollout={"max_tokens": 4, "token_budget": 200, "max_turns": 1, "groups_per_step": 1, "group_size": 2},
        eval={"tasks": 1},
    )
    with RunStore.open(config, tmp_path / "run") as store:
        runs.train_run(config, store, Silent())
    assert [name for name, _, _ in calls] == ["weights", "export", "update", "weights", "snapshot"]
    for name, started, ended in calls:
        seen = [started, *(t for t in ticks if started < t < ended), ended]
        silence = max(b - a for a, b in pairwise(seen))
        assert silence < (ended - started) / 2, f"{name}: the loop was silent for {silence:.2f} s"
