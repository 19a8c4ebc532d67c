"""Runs with an observation loss: the policy learns what the env answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.config.run import RunConfig
from agentrl.doctor.examine import findings
from agentrl.run_folder.records import read_metrics
from tests.trainer.test_changed_runs import Told, own_folder  # noqa: F401 - a fixture
from tests.trainer.test_changed_runs import run as train
from tests.trainer.test_changed_runs import settings as settings_of_letters

ENV = '''
from agentrl import Env, Message, StepInfo, Task, TextEnv, ToolResult, reward


class Parrot(TextEnv):
    """Says the same whatever the policy says."""

    @classmethod
    def tasks(cls, split, seed, size=20):
        return [Task(f"{split}-{n}", {"number": n}) for n in range(size)]

    def setup(self, number: int) -> str:
        return f"Say something about {number}"

    def reply(self, text):
        return ToolResult("Polly wants a cracker, and nothing else will do.", reward=0.0)
'''
PAID = """
    @reward
    def paid(self) -> float:
        return 1.0
"""
MUTE = """

class Mute(Env):
    tasks = Parrot.tasks

    async def reset(self, task):
        return [Message("user", "Say something")], {}

    async def step(self, message):
        return [], 0.0, True, False, StepInfo()
"""


@pytest.fixture(autouse=True)
def parrot(own_folder: None) -> None:  # noqa: F811
    Path("parrot.py").write_text(ENV)


def settings(**changes: Any) -> RunConfig:
    own: dict[str, Any] = {
        "name": "parrot",
        "steps": 8,
        "env": {"use": f"{Path.cwd()}/parrot.py:Parrot"},
        "rollout": {"groups_per_step": 6, "group_size": 4, "max_turns": 3, "max_tokens": 80, "token_budget": 500},
        "algorithm": {"advantage": "none", "kl": {"coef": 0}, "observation_coef": 1.0},
        "optim": {"lr": 1e-2, "warmup_steps": 0},
        "eval": {"every": 0, "tasks": 1},
        "checkpoint": {"every": 4},
    }
    return settings_of_letters(**own | changes)


def written(config: RunConfig) -> Path:
    """The settings as a file; JSON is YAML."""
    Path("run.yaml").write_text(config.model_dump_json(exclude_unset=True))
    return Path("run.yaml")


def run(config: RunConfig, folder: str, reporter: Told | None = None) -> list[dict[str, float]]:
    """Train; returns the metrics of each step."""
    train(config, folder, reporter)
    return [line for line in read_metrics(Path(folder)) if line["step"] > 0]


def test_without_rewards_the_policy_learns_what_the_env_says_and_resumes_exactly():
    lines = run(settings(), "whole")
    assert lines[-1]["observation_loss"] < 0.6 * lines[0]["observation_loss"]
    assert [line["loss"] for line in lines] == pytest.approx(
        [line["observation_loss"] for line in lines], rel=1e-5
    )
    assert not {f.name for f in findings(Path("whole"))} & {"no-signal", "never-solved"}
    run(settings(steps=4), "halves")
    again = run(settings(), "halves")
    assert [line["observation_loss"] for line in again] == [line["observation_loss"] for line in lines]


def test_groups_without_signal_still_teach_what_the_env_says():
    Path("parrot.py").write_text(ENV + PAID)
    lines = run(settings(steps=4, algorithm={"kl": {"coef": 0}, "observation_coef": 0.5}), "r")
    assert all(line["groups_with_signal"] == 0 for line in lines), "every episode earns 1"
    assert lines[-1]["observation_loss"] < 0.8 * lines[0]["observation_loss"]


def test_a_step_in_which_no_turn_reads_an_answer_says_so():
    Path("parrot.py").write_text(ENV + MUTE)
    reporter = Told()
    lines = run(settings(steps=2, env={"use": f"{Path.cwd()}/parrot.py:Mute"}), "r", reporter)
    assert [(line["loss"], line.get("observation_loss")) for line in lines] == [(0, None), (0, None)]
    said = [note for note in reporter.notes if "the observation loss trained nothing" in note]
    assert [note.partition(":")[0] for note in said] == ["step 1", "step 2"]


def test_nobody_asks_for_rewards_where_no_env_of_a_mixture_has_an_advantage():
    use = f"{Path.cwd()}/parrot.py:Parrot"
    envs = {name: {"use": use, "algorithm": {"advantage": "none"}} for name in ("a", "b")}
    reporter = Told()
    run(settings(env=None, envs=envs, algorithm={"kl": {"coef": 0}, "observation_coef": 1.0}), "r", reporter)
    assert not [note for note in reporter.notes if "no reward to learn from" in note]
    assert not {f.name for f in findings(Path("r"))} & {"no-signal", "never-solved"}


def test_an_env_of_one_turn_teaches_nothing_without_rewards():
    one, parrot = {"max_turns": 1}, f"{Path.cwd()}/parrot.py:Parrot"
    envs: dict[str, Any] = {"a": {"use": parrot, "rollout": one}, "b": {"use": parrot}}
    with pytest.raises(ValueError, match=r"envs\.a: algorithm.advantage none leaves the rewards out"):
        settings(env=None, envs=envs)
    settings(env=None, envs=envs, algorithm={"observation_coef": 0.1})


def test_without_a_penalty_the_aggregation_has_no_effect():
    algorithm = {"advantage": "none", "kl": {"coef": 0}, "observation_coef": 1.0, "aggregation": "token-sum"}
    with pytest.raises(ValueError, match=r"algorithm\.aggregation has no effect"):
        settings(algorithm=algorithm)
    settings(algorithm=algorithm | {"entropy_coef": 0.1})


def test_a_check_says_what_trains():
    shown = CliRunner().invoke(app, ["check", str(written(settings()))])
    assert "the policy learns from the answers of the env alone" in shown.output
    assert "in the observation loss" in shown.output
