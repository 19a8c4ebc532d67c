"""Reasoning Gym: `reasoning_gym:sudoku`, scored by the dataset's `score_answer`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.env.adapter import Adapter
from agentrl.env.play import ScriptedPolicy
from agentrl.env.read import final_answer
from agentrl.env.tasks import GeneratedTasks, Split
from agentrl.env.textenv import TextEnv
from agentrl.env.toolenv.declare import reward
from agentrl.envs.others.own_random import OwnRandom
from agentrl.errors import ConfigError
from agentrl.suggest import did_you_mean
from agentrl.types import Episode, Task

HELD_OUT = 10_000_000
"""Added to the seed of held-out tasks: an entry is seeded by the dataset's seed plus its index."""


@dataclass(frozen=True)
class ReasoningGymOptions:
    """Options of `reasoning_gym:DATASET`."""

    config: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the dataset, e.g. {min_empty: 5, max_empty: 10}."""
    datasets: tuple[Mapping[str, Any], ...] = ()
    """The parts of `reasoning_gym:composite`: {name, weight, config} each."""
    size: int = 1000
    """Tasks in each split."""
    system: str = "Answer the question. Write your final answer between <answer> and </answer>."
    """System prompt."""


class ReasoningGym(TextEnv, Adapter):
    """A question of Reasoning Gym, answered once."""

    Options = ReasoningGymOptions
    options: ReasoningGymOptions

    def system(self) -> str:
        """The configured system prompt."""
        return self.options.system

    def setup(self, index: int, dataset_seed: int) -> str:
        """Ask the question of one entry."""
        self.data, self.entry = self.dataset(dataset_seed), self.entry_at(dataset_seed, index)
        return str(self.entry["question"])

    def reply(self, text: str) -> None:
        """The first answer ends the episode."""
        return None

    @reward(solved=True)
    def score_answer(self, episode: Episode) -> float:
        """The dataset's score of the text in the last <answer>, or of the whole text if there is none; 0 if the
        dataset cannot read it."""
        from reasoning_gym.utils import extract_answer

        text = final_answer(episode)
        found = extract_answer(text)
        answer = text.strip() if found is None else found
        try:
            return float(self.data.score_answer(answer=answer, entry=self.entry))
        except Exception:  # some datasets raise at an answer of another form, e.g. a word for a number
            return 0.0

    @classmethod
    def check_name(cls) -> None:
        """Make the first entry."""
        from reasoning_gym.factory import DATASETS

        options = cls.options
        if cls.rest not in DATASETS:
            hint = did_you_mean(cls.rest, DATASETS, otherwise="see reasoning_gym.factory.DATASETS")
            raise ConfigError(f"env reasoning_gym:{cls.rest}: no such dataset; {hint}")
        if (cls.rest == "composite") != bool(options.datasets):
            raise ConfigError("env.options.datasets: give it with reasoning_gym:composite, and only there")
        if options.size < 1:
            raise ConfigError(f"env.options.size must be at least 1, got {options.size}")
        for key, instead in (("size", "set env.options.size"), ("seed", "the run's seed decides")):
            if key in options.config:
                raise ConfigError(f"env.options.config.{key} has no effect: {instead}; remove it")
        cls.made = functools.lru_cache(maxsize=8)(cls.make)
        try:
            first = cls.entry_at(0, 0)
        except (TypeError, AssertionError, ValueError, KeyError) as e:
            key = "datasets" if options.datasets else "config"
            raise ConfigError(f"env.options.{key} does not fit {cls.rest}: {e}") from e
        if first["answer"] is None:
            cls.oracle = None  # type: ignore[method-assign, assignment]
        else:
            cls.dataset(0).score_answer(answer=str(first["answer"]), entry=first)

    made: Any = None

    @classmethod
    def dataset(cls, seed: int) -> Any:
        """The dataset with a seed."""
        with OwnRandom(seed):
            return cls.made(seed)

    @classmethod
    def entry_at(cls, seed: int, index: int) -> Any:
        """An entry of the dataset with a seed. Some datasets also draw from the global random generators."""
        with OwnRandom(seed + index):
            return cls.dataset(seed)[index]

    @classmethod
    def make(cls, seed: int) -> Any:
        """Create the dataset with a seed."""
        import reasoning_gym
        from reasoning_gym.composite import DatasetSpec

        settings: dict[str, Any] = {"size": cls.options.size, **cls.options.config, "seed": seed}
        if cls.options.datasets:
            specs = [DatasetSpec(**{"weight": 1.0, "config": {}, **part}) for part in cls.options.datasets]
            settings["datasets"] = specs
        return reasoning_gym.create_dataset(cls.rest, **settings)

    @classmethod
    def tasks(cls, split: Split = "train", seed: int = 0) -> Sequence[Task]:
        """The entries of the dataset with the seed of the run; held-out ones have different seeds."""
        start = seed + (HELD_OUT if split == "held_out" else 0)

        def task(index: int) -> Task:
            row = {"index": index, "dataset_seed": start}
            return Task(f"{cls.rest}-{split}-{seed}-{index}", row, start + index)

        return GeneratedTasks(task, cls.options.size)

    @classmethod
    def oracle(cls, task: Task) -> ScriptedPolicy:
        """Answer with the dataset's own answer; datasets that only check answers have no oracle."""
        entry = cls.entry_at(task.row["dataset_seed"], task.row["index"])
        if entry["answer"] is None:
            raise ConfigError(f"task {task.id!r}: the dataset has no answer, which an oracle needs")
        return ScriptedPolicy([f"<answer>{entry['answer']}</answer>"])
