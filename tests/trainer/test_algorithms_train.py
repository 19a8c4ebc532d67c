"""Other algorithms than GRPO lift the calculator's success from a cold start, and do not only run."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.run import RunConfig
from agentrl.envs.calculator import Calculator
from agentrl.envs.calculator.demonstrate import demonstrate
from agentrl.reporting.report import Silent
from agentrl.run_folder.records import read_metrics
from agentrl.run_folder.store import RunStore
from agentrl.trainer.run import train_run

TASKS = [
    {"start": a, "operations": [[operator, b]]}
    for a, operator, b in [(2, "+", 3), (9, "-", 4), (3, "*", 2), (8, "+", 1), (7, "-", 5), (4, "*", 2)]
]
"""Few and small, so that the cold start takes seconds: what is tested here is what comes after it."""


def run(folder: Path, config: Mapping[str, Any]) -> Path:
    parsed = RunConfig.model_validate(
        {
            "name": "calculator",
            "env": "agentrl.envs.calculator:Calculator",
            "checkpoint": {"every": 0},
            "eval": {"tasks": 1},
            **config,
        }
    )
    with RunStore.open(parsed, folder) as store:
        train_run(parsed, store, Silent())
    return folder


ROLLOUT = {"max_turns": 3, "max_tokens": 40, "token_budget": 300}


@pytest.fixture(scope="session")
def cold_start(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a model that solves about half of what it samples, the file of its tasks)."""
    folder = tmp_path_factory.mktemp("calculator")
    tasks, shown = folder / "tasks.jsonl", folder / "demonstrations.jsonl"
    tasks.write_text("".join(json.dumps(row) + "\n" for row in TASKS))
    rng = random.Random(0)
    lines = []
    for _ in range(240):
        row = rng.choice(TASKS)
        messages = demonstrate(row["start"], row["operations"], rng, quality=0.5, style="single")
        lines.append(json.dumps({"messages": [*_opening(row), *map(_plain, messages)]}) + "\n")
    shown.write_text("".join(lines))
    run(
        folder / "run",
        {
            "data": {"train": str(tasks), "held_out": str(tasks)},
            "model": {"tiny": {"hidden": 64, "layers": 2, "vocab": 400, "intermediate": 192}},
            "warmup": {
                "demonstrations": str(shown),
                "max_epochs": 12,
                "until_pass": 1.0,
                "at_least": 0.5,
                "probe_every": 45,
                "probe_tasks": 6,
                "lr": 3e-3,
            },
            "steps": 1,
            "rollout": {**ROLLOUT, "groups_per_step": 6, "group_size": 2},
            "algorithm": {"kl": {"coef": 0.0}},
            "optim": {"lr": 1e-9},
        },
    )
    return folder / "run" / "start", tasks


def _opening(row: Mapping[str, Any]) -> list[dict[str, str]]:
    env = Calculator()
    return [{"role": "system", "content": env.system()}, {"role": "user", "content": env.setup(**row)}]


def _plain(message: Any) -> dict[str, Any]:
    calls = [
        {"id": c.id, "function": {"name": c.name, "arguments": dict(c.arguments)}} for c in message.tool_calls
    ]
    found = {
        "role": message.role,
        "content": message.content,
        "tool_call_id": message.tool_call_id,
        "name": message.name,
    }
    return found | ({"tool_calls": calls} if calls else {})


ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": {
        "algorithm": {"advantage": "gae"},
        "critic": {"lr": 4e-3, "warmup_steps": 2},
        "rollout": {"groups_per_step": 48, "group_size": 1},
    },
    "gspo": {
        "algorithm": {
            "loss": {"name": "gspo", "clip_low": 0.05, "clip_high": 0.05},
            "aggregation": "seq-mean-token-mean",
            "updates_per_step": 2,
        }
    },
    "rloo": {"algorithm": {"advantage": "rloo", "loss": "reinforce"}},
    "reinforce_plus_plus": {
        "algorithm": {"advantage": "reinforce_plus_plus"},
        "rollout": {"groups_per_step": 48, "group_size": 1},
    },
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_success_rises_from_the_cold_start(cold_start: tuple[Path, Path], tmp_path: Path, name: str):
    start, tasks = cold_start
    chosen = ALGORITHMS[name]
    folder = run(
        tmp_path / "run",
        {
            "data": {"train": str(tasks), "held_out": str(tasks)},
            "model": {"path": str(start)},
            "seed": 2,
            "steps": 24,
            "optim": {"lr": 1e-3, "warmup_steps": 1},
            **chosen,
            "rollout": {**ROLLOUT, "groups_per_step": 6, "group_size": 8, **chosen.get("rollout", {})},
            "algorithm": {"kl": {"coef": 0.001}, **chosen["algorithm"]},
        },
    )
    solved = [line["solved"] for line in read_metrics(folder) if line["step"] > 0]
    before, after = statistics.mean(solved[:2]), statistics.mean(solved[-5:])
    assert 0.1 < before < 0.8, "the cold start leaves something to learn"
    assert after > before + 0.12, solved
