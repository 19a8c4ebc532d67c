"""Several envs in one run: who is compared with whom, what is logged, and what a resumed run continues."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentrl.algo.metrics import mean_of, metric_values
from agentrl.config.load import load_config
from agentrl.config.run import AlgorithmConfig, RunConfig
from agentrl.errors import ConfigError
from agentrl.reporting.report import Silent, Summary
from agentrl.run_folder.records import read_episodes
from agentrl.run_folder.store import RunStore
from agentrl.trainer.algorithm import Algorithm
from agentrl.trainer.run import train_run
from agentrl.trainer.samples import with_constant
from agentrl.types import Group, Task
from tests.trainer.test_samples import group

TINY = {"tiny": {"hidden": 32, "layers": 1, "heads": 2, "intermediate": 64, "vocab": 400, "max_context": 2048}}


def config(**changes: Any) -> RunConfig:
    settings: dict[str, Any] = {
        "name": "mixed",
        "steps": 4,
        "seed": 3,
        "envs": {
            "math": {
                "use": "agentrl.envs.calculator:Calculator",
                "share": 2,
                "data": {"options": {"max_operations": 1}, "sampler": {"order": "shuffled"}},
            },
            "sql": {
                "use": "agentrl.envs.sqlite:Sqlite",
                "rollout": {"group_size": 3, "max_turns": 1},
                "algorithm": {"advantage": "rloo"},
                "eval": {"every": 2, "tasks": 2, "attempts": 2, "temperature": 1.0},
            },
        },
        "model": TINY,
        "rollout": {"groups_per_step": 3, "group_size": 2, "max_turns": 2, "max_tokens": 8, "token_budget": 1600},
        "algorithm": {"entropy_coef": 0.01, "kl": {"coef": 0}},
        "optim": {"lr": 1e-3},
        "eval": {"tasks": 2, "every": 1, "before_training": False},
        "checkpoint": {"every": 2},
    }
    return RunConfig.model_validate(settings | changes)


class StopAfter(Silent):
    """Asks the run to stop after a step, as a user would."""

    def __init__(self, step: int) -> None:
        self._step = step

    def step(self, metrics: Mapping[str, float]) -> None:
        if metrics.get("step") == self._step:
            signal.raise_signal(signal.SIGTERM)


def run(config: RunConfig, folder: Path, reporter: Silent | None = None) -> Summary:
    with RunStore.open(config, folder) as store:
        return train_run(config, store, reporter or Silent())


def lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder: Path) -> dict[str, list[float]]:
    found = load_file(next((folder / "checkpoints" / "step-4").glob("*.safetensors")))
    return {name: tensor.flatten().tolist() for name, tensor in found.items()}


def played(folder: Path) -> list[list[tuple[str, str, str, object]]]:
    return [
        sorted(
            (e.id, e.task.env, e.task.id, tuple(s.ids for s in e.segments)) for e in read_episodes(folder, step)
        )
        for step in range(1, 5)
    ]


def test_a_run_of_two_envs_resumes_with_the_envs_in_another_order(tmp_path: Path):
    settings = config(steps=1, eval={"tasks": 2, "before_training": False})
    envs = dict(settings.model_dump(exclude_unset=True)["envs"])
    run(settings, tmp_path)
    longer = {"steps": 2, "eval": {"tasks": 2, "before_training": False}}
    swapped = config(envs={name: envs[name] for name in ("sql", "math")}, **longer)
    assert run(swapped, tmp_path).finished


@pytest.mark.timeout(120)
def test_a_run_of_two_envs_resumes_bit_for_bit_and_logs_each(tmp_path: Path):
    settings = config(rollout=dict(config().rollout.model_dump(), env_shares="solve_rate", refill_zero_signal=1))
    assert run(settings, tmp_path / "whole").finished
    assert not run(settings, tmp_path / "broken", StopAfter(2)).finished
    assert not run(settings, tmp_path / "broken", StopAfter(3)).finished
    summary = run(settings, tmp_path / "broken")
    assert summary.finished
    assert summary.env == "agentrl.envs.calculator:Calculator, agentrl.envs.sqlite:Sqlite"
    assert played(tmp_path / "whole") == played(tmp_path / "broken")
    assert weights(tmp_path / "whole") == weights(tmp_path / "broken")

    _, *steps = lines(tmp_path / "whole")
    assert [s["env/math/groups"] + s["env/sql/groups"] for s in steps] == [3.0] * 4
    assert steps[0]["env/sql/episodes"] == 3 * (steps[0]["env/sql/groups"] + steps[0]["env/sql/refilled_groups"])
    assert all("env/math/held_out_reward" in s for s in steps)
    assert ["env/sql/held_out_reward" in s for s in steps] == [False, True, False, True]
    assert "env/sql/held_out_pass" in steps[1]
    assert "env/math/held_out_pass" not in steps[1]
    assert ["held_out" in s for s in steps] == [False, True, False, True], "the total needs every env"
    for step in steps:
        assert step["episodes"] == step["env/math/episodes"] + step["env/sql/episodes"]


CANCEL = """
from itertools import count

from agentrl import reward
from agentrl.envs.calculator import Calculator

NUMBERS = count(1)


class Cancel(Calculator):
    def setup(self, **row):
        self.number = next(NUMBERS)
        return super().setup(**row)

    @reward()
    def up(self) -> float:
        return self.number

    @reward()
    def down(self) -> float:
        return -self.number
"""
"""Rewards that differ in each part and never in their sum."""


def test_groups_with_signal_of_the_envs_add_up(tmp_path: Path):
    file = tmp_path / "cancel.py"
    file.write_text(CANCEL)
    envs: dict[str, Any] = {
        "cancel": {"use": f"{file}:Cancel", "algorithm": {"advantage": "gdpo"}},
        "math": {"use": "agentrl.envs.calculator:Calculator"},
    }
    settings = config(steps=1, envs=envs, eval={"before_training": False, "every": 0, "tasks": 1})
    run(settings, tmp_path / "run")
    step = lines(tmp_path / "run")[-1]
    of_envs = [step[f"env/{name}/groups_with_signal"] for name in envs]
    assert of_envs[0] == step["env/cancel/groups"] > 0
    assert sum(of_envs) == step["groups_with_signal"]


def test_asynchronous_steps_keep_the_shares(tmp_path: Path):
    rollout = dict(config().rollout.model_dump(), max_staleness=2)
    assert run(config(rollout=rollout, eval={"before_training": False, "tasks": 1}), tmp_path / "r").finished
    steps = lines(tmp_path / "r")[1:]
    assert sum(s["env/math/groups"] for s in steps) == 8
    assert max(s["staleness/max"] for s in steps) > 0


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_env_workers_play_the_same_episodes(tmp_path: Path):
    pytest.importorskip("ray")
    rollout = config().rollout.model_dump()
    assert run(config(), tmp_path / "here").finished
    assert run(config(rollout=dict(rollout, workers=1)), tmp_path / "there").finished
    assert played(tmp_path / "here") == played(tmp_path / "there")
    assert weights(tmp_path / "here") == weights(tmp_path / "there")


def of_env(env: str, *groups: Group) -> list[Group]:
    def named(episode: Any) -> Any:
        return replace(episode, id=f"{env}/{episode.id}", task=Task("t", env=env))

    return [Group(Task("t", env=env), tuple(map(named, g.episodes))) for g in groups]


def test_explained_variance_is_over_all_envs_and_needs_returns_that_vary():
    algorithm = Algorithm(AlgorithmConfig.model_validate({"advantage": "gae"}))
    alike, others = of_env("a", group(0.0, 0.0)), of_env("b", group(1.0, 0.0))

    def explained(groups: list[Group], *values: float) -> float | None:
        rows = algorithm.rows(groups)
        samples = [with_constant(row, "values", v) for row, v in zip(rows.samples, values, strict=True)]
        found = metric_values(algorithm.advantages(replace(rows, samples=samples)).metrics)
        return found.get("critic/explained_variance")

    assert explained([*alike, *others], 0.5, 0.5, 0.5, 0.5) == pytest.approx(0)
    assert explained([*alike, *others], 0.25, 0.25, 1.25, 0.25) == pytest.approx(1)
    assert explained(alike, 0.5, 0.25) is None


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_advantages_are_those_of_each_env_alone(name: str):
    """Estimators that normalize over the batch see only the episodes of one env."""
    algorithm = Algorithm(
        AlgorithmConfig.model_validate({"advantage": name}),
        by_env={"b": AlgorithmConfig.model_validate({"advantage": {"name": "grpo", "std": "batch"}}).advantage},
    )
    a = of_env("a", group(1.0, 0.0, 0.5, name="x"), group(0.0, 0.25, 0.0, name="y"))
    b = of_env("b", group(100.0, 0.0, name="x"), group(7.0, -3.0, name="y"))
    together = algorithm.advantages(algorithm.rows([a[0], b[0], a[1], b[1]])).by_segment
    alone: dict[str, Mapping[int, float]] = {}
    for groups in (a, b):
        alone |= algorithm.advantages(algorithm.rows(groups)).by_segment
    assert together == alone
    scale = AlgorithmConfig.model_validate({"advantage": name})
    unnamed = [replace(g, task=Task("t")) for g in a]
    assert Algorithm(scale).advantages(Algorithm(scale).rows(unnamed)).by_segment == {
        key: value for key, value in alone.items() if key.startswith("a/")
    }


def test_an_env_has_the_advantages_of_its_own_estimator():
    settings = [AlgorithmConfig.model_validate({"advantage": name}) for name in ("rloo", "dr_grpo")]
    algorithm = Algorithm(settings[0], by_env={"b": settings[1].advantage})
    rows = algorithm.rows([*of_env("b", group(3.0, 1.0)), *of_env("a", group(3.0, 1.0))])
    found = {row.episode_id: row.advantages[-1] for row in algorithm.advantages(rows).samples}
    assert found == {"b/e0": 1.0, "b/e1": -1.0, "a/e0": 2.0, "a/e1": -2.0}


@pytest.mark.parametrize("where", ["reward", "loss"])
def test_an_env_has_its_own_weight_of_the_penalty(where: str):
    settings = AlgorithmConfig.model_validate({"advantage": "dr_grpo", "kl": {"where": where, "coef": 0.1}})
    algorithm = Algorithm(settings, kl_by_env={"b": 0.3}, taught={"b"})
    rows = algorithm.rows([*of_env("a", group(0.0, 0.0)), *of_env("b", group(0.0, 0.0))])
    assert [set(row.columns["taught"]) for row in rows.samples] == [{0.0}, {0.0}, {1.0}, {1.0}]
    assert [row.env for row in rows.samples] == ["a", "a", "b", "b"]
    if where == "loss":
        scales = [row.columns["kl_scale"] for row in rows.samples]
        assert scales == [(1.0,) * 3] * 2 + [pytest.approx((3.0,) * 3)] * 2
        return
    assert not any("kl_scale" in row.columns for row in rows.samples)
    samples = [  # the first episode of each is 1 above the reference at each of its three tokens
        replace(row, columns={**row.columns, "ref_logprobs": tuple(p - first for p in row.logprobs[2:])})
        for row, first in zip(rows.samples, (1.0, 0.0, 1.0, 0.0), strict=True)
    ]
    found = [row.advantages[-1] for row in algorithm.advantages(replace(rows, samples=samples)).samples]
    assert found == pytest.approx([-0.15, 0.15, -0.45, 0.45])


def test_what_was_measured_before_the_advantages_stays():
    algorithm = Algorithm(AlgorithmConfig.model_validate({"advantage": "grpo"}))
    rows = algorithm.rows([group(1.0, 0.0)])
    rows = replace(rows, metrics={"hints/share": mean_of(torch.ones(2))})
    assert metric_values(algorithm.advantages(rows).metrics)["hints/share"] == 1.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"env": "a.b:E"}, "give one of the two"),
        ({"envs": {"one": "a.b:E"}}, "has only one environment"),
        ({"envs": {}}, "name the environment"),
        ({"envs": {"a": {"use": "a.b:E", "share": 0}, "b": "a.b:E"}}, "greater than 0"),
        ({"envs": {"a b": "a.b:E", "b": "a.b:E"}}, "letters, digits"),
        (
            {"envs": {"a": {"use": "a.b:E", "rollout": {"group_size": 2}}, "b": "a.b:E"}},
            "equals rollout.group_size",
        ),
        (
            {"envs": {"a": {"use": "a.b:E", "algorithm": {"advantage": "grpo"}}, "b": "a.b:E"}},
            "equals algorithm.adv",
        ),
        ({"envs": {"a": {"use": "a.b:E", "algorithm": {"advantage": "gae"}}, "b": "a.b:E"}}, "the critic of gae"),
        (
            {
                "envs": {name: {"use": "a.b:E", "algorithm": {"kl_coef": 0}} for name in "ab"},
                "algorithm": {"kl": {"coef": 0.1}},
            },
            "kl_coef is 0 in every env under `envs`; remove kl_coef there and set algorithm.kl.coef to 0",
        ),
        (
            {"envs": {"a": {"use": "a.b:E", "rollout": {"group_size": 1}}, "b": "a.b:E"}},
            "envs.a: rollout.group_size",
        ),
        (
            {
                "envs": {
                    "a": {"use": "a.b:E", "algorithm": {"kl_coef": 1}},
                    "b": {"use": "a.b:F", "algorithm": {"kl_coef": 2}},
                },
                "algorithm": {"kl": {"coef": 0.1}},
            },
            "algorithm.kl.coef has no effect: every env under `envs` has its own kl_coef; remove it",
        ),
        (
            {
                "envs": {"a": {"use": "a.b:E", "algorithm": {"advantage": "reinforce_plus_plus"}}, "b": "a.b:E"},
                "rollout": {"refill_zero_signal": 2},
            },
            r"envs\.a: .* compares no siblings.*; set envs\.a\.rollout\.refill_zero_signal to 0",
        ),
        ({"data": {"train": "x.jsonl"}}, "write it under the env"),
        ({"warmup": {"options": {"a": 1}}}, "each env writes its own"),
        ({"agent": {"use": "a.b:f"}}, "plays the episodes of one env"),
    ],
)
def test_what_has_no_meaning_is_refused(changes: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        config(**changes)


def test_an_error_names_the_env(tmp_path: Path):
    envs = {
        "math": {"use": "agentrl.envs.calculator:Calculator", "reward_weights": {"sovled": 2.0}},
        "sql": "agentrl.envs.sqlite:Sqlite",
    }
    with pytest.raises(ConfigError, match=r"envs\.math: .*sovled"):
        run(config(envs=envs), tmp_path / "r")


def test_an_env_without_keys_is_one_clear_line(tmp_path: Path):
    (tmp_path / "run.yaml").write_text("envs:\n  one:\n  two: a.b:E\nmodel: {tiny: {}}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "run.yaml")
    assert (
        "envs.one must be `module:Class`, `path/to/file.py:Class` or a section (keys and values), got nothing"
        in str(caught.value)
    )
    assert "env is missing" not in str(caught.value)
