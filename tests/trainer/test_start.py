"""The cold start looks at prompts before it spends time on them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, cast

import pytest
from transformers import AutoConfig

from agentrl.config.compact import CompactConfig
from agentrl.config.run import AgentConfig, LearnerConfig, ModelConfig, RunConfig
from agentrl.env import ToolEnv, reward
from agentrl.errors import ConfigError
from agentrl.learner.learner import Learner
from agentrl.reporting.report import Silent
from agentrl.rollout.content import load_content
from agentrl.rollout.oracle import Demonstration
from agentrl.run_folder.store import RunStore
from agentrl.trainer.room import too_long
from agentrl.trainer.run import train_run
from agentrl.trainer.start import make_start, sent_weights
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
    await make_start(settings, load_content(settings), folder, reporter=notes, stopping=lambda: False)


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


def test_an_episode_that_may_be_larger_than_a_micro_batch_is_refused_before_anything_is_made(tmp_path: Path):
    """PL02 of `plan`; a context that is shorter than the budget bounds episodes as well."""
    small = config("drop").model_copy(update={"learner": LearnerConfig(tokens_per_micro_batch=199)})
    with RunStore.open(small, tmp_path / "run") as store, pytest.raises(ConfigError) as caught:
        train_run(small, store, Silent())
    assert "may have 200 tokens (rollout.token_budget), a micro-batch takes 199" in str(caught.value)
    assert "set learner.sequence_ranks to 2 or more" in str(caught.value)
    assert not (tmp_path / "run" / "start").exists()
    assert too_long(config("drop")) == ""
    (tmp_path / "config.json").write_text('{"text_config": {"max_position_embeddings": 190}}')
    short = ModelConfig(path=str(tmp_path))
    assert too_long(small.model_copy(update={"model": short})) == ""
    forked = short.model_copy(update={"history": "fork"})
    compact = small.rollout.model_copy(update={"compact": CompactConfig()})
    agent = {"model": short, "agent": AgentConfig(use="agent.py:run")}
    for several in (
        {"model": forked},
        {"model": short, "rollout": compact},
        agent,
    ):  # contexts, each of 190 tokens
        assert "may have 200 tokens" in too_long(small.model_copy(update=several))


@pytest.mark.parametrize("on_ray", [{"rollout.workers": 1}, {"learner.reference_ranks": 1}])
def test_a_cluster_that_is_not_there_is_refused_before_the_cold_start(tmp_path: Path, on_ray: dict[str, int]):
    pytest.importorskip("ray")
    settings = config("drop").model_dump(exclude_unset=True) | {"ray": "127.0.0.1:1"}
    for key, value in on_ray.items():
        section, _, name = key.partition(".")
        settings[section] = settings.get(section, {}) | {name: value}
    far = RunConfig.model_validate(settings)
    with RunStore.open(far, tmp_path / "run") as store, pytest.raises(ConfigError) as caught:
        train_run(far, store, Silent())
    assert "ray '127.0.0.1:1': no Ray cluster answers there" in str(caught.value)
    assert not (tmp_path / "run" / "start").exists()


ABORTED = """
import asyncio, sys, threading
from pathlib import Path
import ray
from agentrl.reporting.report import Silent
from agentrl.run_folder.store import RunStore
from agentrl.trainer.run import train_run
from agentrl.trainer.signals import StopRequest
from tests.trainer.test_start import config

stop, connect = StopRequest(), ray.init


def aborted(**options):
    stop.abort()
    return connect(**options)


ray.init = aborted
settings = config("drop").model_copy(update={"learner": config("drop").learner.model_copy(update={"ranks": 2})})
with RunStore.open(settings, Path(sys.argv[1])) as store:
    try:
        train_run(settings, store, Silent(), stop)
    except asyncio.CancelledError:
        print("aborted", ray.is_initialized())
"""


@pytest.mark.slow
def test_a_run_that_is_aborted_while_it_connects_leaves_no_ray(tmp_path: Path):
    pytest.importorskip("ray", reason="Ray is not installed (extra: ray)")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", ABORTED, tmp_path / "run"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "aborted False"


async def test_a_demonstration_that_is_larger_than_a_micro_batch_is_refused_before_the_learner_is_made(
    tmp_path: Path,
):
    small = config("drop").model_copy(update={"learner": LearnerConfig(tokens_per_micro_batch=5)})
    with pytest.raises(ConfigError, match=r"demonstration 1 has \d+ .* takes 5 \(learner\.tokens_per_micro_"):
        await make_start(small, load_content(small), tmp_path, reporter=Notes(), stopping=lambda: False)


async def test_a_demonstration_that_is_larger_than_the_context_is_refused_before_the_learner_is_made(
    tmp_path: Path,
):
    small, content = config("drop"), load_content(config("drop"))
    assert small.model.tiny is not None
    long = [Message("user", "word " * small.model.tiny.max_context), Message("assistant", "a")]
    content = replace(content, demonstrations=[*content.demonstrations, Demonstration(long)])
    with pytest.raises(ConfigError, match=r"demonstration \d+ has \d+ tokens, and the model takes \d+: "):
        await make_start(small, content, tmp_path, reporter=Notes(), stopping=lambda: False)


@pytest.mark.parametrize(
    ("family", "heads", "ranks", "said"),
    [
        ("qwen3_next", 4, 2, "learner.sequence_ranks is 2, and qwen3_next has layers of kind linear_attention"),
        (
            "jamba",
            4,
            2,
            "learner.sequence_ranks is 2, and jamba has layers of kind linear_attention, which carry a",
        ),
        ("llama", 2, 4, "the model has 2 attention heads, and learner.sequence_ranks is 4"),
    ],
)
def test_rows_that_ranks_cannot_split_are_refused_before_tasks_are_read(
    tmp_path: Path, family: str, heads: int, ranks: int, said: str
):
    more = {"num_key_value_heads": heads, "hidden_size": 32, "num_hidden_layers": 4}
    AutoConfig.for_model(family, num_attention_heads=heads, **more).save_pretrained(tmp_path / "model")
    given = RunConfig(
        name="split",
        env="no_such_module:Env",
        model={"path": str(tmp_path / "model")},
        learner={"ranks": ranks, "sequence_ranks": ranks},
    )
    with pytest.raises(ConfigError, match=said), RunStore.open(given, tmp_path / "run") as store:
        train_run(given, store, Silent())


class Called:
    """A learner that notes what it is asked to do."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def weights(self) -> dict[str, object]:
        self.calls.append("weights")
        return {}

    async def release(self) -> None:
        self.calls.append("release")


@pytest.mark.parametrize("sleep", [True, False])
async def test_the_learner_makes_room_for_servers_on_its_gpus_before_they_wake(sleep: bool):
    config = RunConfig.model_validate(
        {"env": f"{__name__}:Long", "model": {"path": "m"}, "rollout": {"max_staleness": 0}}
        | {"engine": {"kind": "vllm", "server": {"sleep": sleep}}}
    )
    learner = Called()
    await sent_weights(config, cast(Learner, learner))
    assert learner.calls == ["weights", *(["release"] if sleep else [])]
