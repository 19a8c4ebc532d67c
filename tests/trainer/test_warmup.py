"""The steps of the cold start: whole demonstrations, as many in each step as the setting says."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from agentrl.config.run import WarmupConfig
from agentrl.learner.learner import Learner
from agentrl.reporting.report import Silent
from agentrl.trainer.signals import StoppedEarly
from agentrl.trainer.warmup import cold_start, demonstration_samples
from agentrl.types import Message, Sample
from tests.chat.test_check import DROPS_THINKING
from tests.chat.test_forks import build


class Listener:
    """Notes the rows of each step."""

    def __init__(self) -> None:
        self.steps: list[list[Sample]] = []

    async def imitate(self, samples: Sequence[Sample], lr: float) -> float:
        self.steps.append(list(samples))
        return 1.0


async def all_solved() -> float:
    return 1.0


async def test_a_step_takes_whole_demonstrations_also_of_several_rows(tmp_path: Path):
    renderer = build(tmp_path, DROPS_THINKING, "fork")
    turns = [Message("user", "Go."), Message("assistant", "Done.", reasoning="I see.")]
    shown = [turns * (1 + number % 2) for number in range(12)]
    rows = [row for env in ("a", "a1") for row in demonstration_samples(renderer, shown, (), env=env)]
    assert len(rows) == 36, "those of two turns have two rows"
    listener = Listener()
    settings: dict[str, Any] = {"batch_episodes": 6, "max_epochs": 2, "until_pass": 1.0}
    await cold_start(
        cast(Learner, listener),
        rows,
        WarmupConfig.model_validate(settings),
        all_solved,
        seed=0,
        reporter=Silent(),
        stopping=lambda: False,
    )
    assert [len({row.episode_id for row in step}) for step in listener.steps] == [6] * 8
    trained = Counter(row.ids for step in listener.steps for row in step)
    assert trained == Counter(row.ids for row in rows * 2)


async def test_a_probe_ends_when_the_run_is_asked_to_stop():
    asked, ended = asyncio.Event(), asyncio.Event()

    async def probe() -> float:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return 1.0

    with pytest.raises(StoppedEarly):
        await cold_start(
            cast(Learner, Listener()),
            [Sample((1, 2), (False, True), (0.0, 0.0), (0.0, 0.0), (0, 0), "a")],
            WarmupConfig(probe_every=1),
            probe,
            seed=0,
            reporter=Silent(),
            stopping=asked.is_set,
        )
    assert ended.is_set()
