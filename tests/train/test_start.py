"""The cold start looks at prompts before it spends time on them."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest

from agentrl.config.run import RunConfig
from agentrl.env import ToolEnv, reward
from agentrl.errors import ConfigError
from agentrl.rollout.setup import load_content
from agentrl.run.report import Silent
from agentrl.train.start import make_start
from agentrl.types import Message, Task


class Long(ToolEnv):
    """Say something."""

    played: ClassVar[list[int]] = []

    def setup(self, number: int) -> str:
        return "word " * number

    @reward
    def solved(self, episode) -> bool:
        Long.played.append(episode.task.row["number"])
        return True

    @classmethod
    def tasks(cls, split: str, seed: int) -> list[Task]:
        return [Task(f"n{n}", {"number": n}) for n in (400, 1, 500, 2, 3)]

    @classmethod
    def demonstrations(cls, seed: int, num: int) -> list[list[Message]]:
        return [[Message("system", "Say."), Message("user", "word"), Message("assistant", "yes")]] * num


class Notes(Silent):
    def __init__(self) -> None:
        self.steps: list[Mapping[str, float]] = []

    def step(self, metrics: Mapping[str, float]) -> None:
        self.steps.append(metrics)


def config(policy: str | None) -> RunConfig:
    return RunConfig(
        name="long",
        env=f"{__name__}:Long",
        data={"overlong_prompts": policy},
        model={"tiny": {"hidden": 32, "layers": 1, "heads": 2, "intermediate": 64, "vocab": 300}},
        warmup={"num": 8, "max_epochs": 2, "probe_tasks": 2, "probe_samples": 1, "at_least": 0.0},
        rollout={"max_tokens": 4, "token_budget": 200, "max_turns": 1},
    )


@pytest.fixture(autouse=True)
def nothing_played():
    Long.played.clear()


async def start(policy: str | None, folder: Path, notes: Notes) -> None:
    settings = config(policy)
    with ThreadPoolExecutor(1) as thread:
        await make_start(
            settings, load_content(settings), folder, learner_thread=thread, reporter=notes, stopping=lambda: False
        )


async def test_probes_play_only_what_fits(tmp_path: Path):
    await start("drop", tmp_path, Notes())
    assert set(Long.played) == {1, 2}


async def test_a_prompt_that_is_refused_costs_no_step(tmp_path: Path):
    notes = Notes()
    with pytest.raises(ConfigError, match=r"task 'n400': its prompt has \d+ tokens, more than 199"):
        await start("refuse", tmp_path, notes)
    assert (notes.steps, Long.played) == ([], [])


async def test_without_the_key_a_probe_counts_what_does_not_fit_as_not_solved(tmp_path: Path):
    await start(None, tmp_path, Notes())
    assert set(Long.played) == {400, 1}
