"""Trains each of CASES for two steps on the device; prints the metrics as JSON.

    python -m tests.learner.second_device_program DEVICE MODEL FOLDER

With the device of `second_device`, engine and learner are on it.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

from tests.learner import second_device

ENV = '''
from agentrl import Task, TextEnv, ToolResult, reward


class Letters(TextEnv):
    """Say letters."""

    @classmethod
    def tasks(cls, split, seed, size=20):
        return [Task(f"{split}-{n}", {"number": n}) for n in range(size)]

    def setup(self, number: int) -> str:
        self.turns = 0
        return f"Say something about {number}"

    def reply(self, text):
        self.turns += 1
        return "Go on" if self.turns < 2 else None

    @reward
    def vowels(self, episode) -> float:
        return sum(letter in "aeiou" for m in episode.messages for letter in str(m.content)) / 10.0
'''
CASES: dict[str, dict[str, Any]] = {
    # Every part of the objective, with a critic and the whole distributions of a reference.
    "whole": {
        "algorithm": {
            "advantage": "gae",
            "kl": {"coef": 0.01, "kind": "full"},
            "entropy_coef": 0.01,
            "observation_coef": 0.1,
        },
    },
    # FSDP with mixed precision, adapters, and blocks that are computed again; the engine in bfloat16.
    "adapters": {
        "engine": {"dtype": "bfloat16"},
        "learner": {"precision": "bfloat16", "lora": {"rank": 4}, "checkpoint_activations": True},
        "algorithm": {"kl": {"coef": 0.01}},
    },
}


def curve(case: str, device: str, model: Path, folder: Path) -> list[dict[str, float]]:
    """Train; returns the metrics of each step."""
    from agentrl.config.run import RunConfig
    from agentrl.reporting.report import Silent
    from agentrl.run_folder.store import RunStore
    from agentrl.trainer.run import train_run

    folder.mkdir(parents=True)
    (folder / "letters.py").write_text(ENV)
    base: dict[str, Any] = {
        "name": case,
        "steps": 2,
        "env": f"{folder}/letters.py:Letters",
        "model": {"path": str(model)},
        "rollout": {"groups_per_step": 3, "group_size": 4, "max_turns": 2, "max_tokens": 80, "token_budget": 400},
        "optim": {"lr": 1e-3, "warmup_steps": 0},
        "eval": {"tasks": 1, "before_training": False},
    }
    changes = CASES[case]
    engine = {"device": device, "dtype": "float32", **changes.get("engine", {})}
    learner = {"device": device, **changes.get("learner", {})}
    config = RunConfig.model_validate(base | changes | {"engine": engine, "learner": learner})
    with RunStore.open(config, folder / "run") as store:
        train_run(config, store, Silent())
        return [dict(line) for line in store.metrics() if line["step"] > 0]


def main(device: str, model: Path, folder: Path) -> None:
    if device == second_device.NAME:
        second_device.install()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {case: curve(case, device, model, folder / case) for case in CASES}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
