"""A run whose episodes outgrow their context: it trains the summaries, and replays."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.run_folder.records import read_episodes, read_metrics
from agentrl.trainer.replay import replay
from tests.trainer.test_changed_runs import own_folder, run, settings  # noqa: F401 - a fixture

ENV = '''
from agentrl import Task, TextEnv, reward
from agentrl.testing.policy import ScriptedPolicy


class Letters(TextEnv):
    """Say letters."""

    @classmethod
    def tasks(cls, split, seed, size=20):
        return [Task(f"{split}-{n}", {"number": n}) for n in range(size)]

    @classmethod
    def oracle(cls, task):
        return ScriptedPolicy(["a"] * 4, otherwise="a")

    def setup(self, number: int) -> str:
        return f"Say something about {number}"

    def reply(self, text):
        return "Go on. " * 4

    @reward(solved=0.2)
    def vowels(self, episode) -> float:
        said = "".join(str(turn.message.content) for turn in episode.turns)
        return sum(letter in "aeiou" for letter in said) / 10.0
'''

WARMUP = {"num": 96, "max_epochs": 16, "lr": 1e-2, "at_least": 0.0, "probe_tasks": 2, "probe_samples": 4}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("train", [True, False])
def test_a_run_trains_on_branches(train: bool):
    Path("letters.py").write_text(ENV)
    compact = {"at": 0.7, "context": 110, "keep_turns": 0, "prompt": "Sum up.", "max_tokens": 8, "train": train}
    rollout = {
        "groups_per_step": 2,
        "group_size": 3,
        "max_turns": 5,
        "max_tokens": 6,
        "token_budget": 600,
        "temperature": 1.4,
    }
    run(settings(rollout={**rollout, "compact": compact}, warmup=WARMUP), "r")
    lines = [line for line in read_metrics(Path("r")) if line["step"] > 0]
    assert sum(line.get("env/compact/times", 0) for line in lines) >= 6
    assert sum(line["grad_norm"] for line in lines) > 0
    for episode in read_episodes(Path("r"), 1):
        if episode.stop_reason != "max_turns":  # a completion was cut
            continue
        sampled = sum(segment.origin == "sampled" for segment in episode.segments)
        summaries = episode.metrics["compact/times"] if train else 0
        assert sampled == 5 + summaries
    assert replay(Path("r"), 2).equal
