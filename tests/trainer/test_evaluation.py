"""Evaluation during a run: named sets, and evaluation while training goes on."""

from __future__ import annotations

import asyncio
import io
import json
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from agentrl.config.run import AlgorithmConfig, RunConfig
from agentrl.engine.base import Engine
from agentrl.env import ToolEnv
from agentrl.errors import ConfigError
from agentrl.reporting.display import PlainDisplay
from agentrl.reporting.report import Silent
from agentrl.rollout.content import load_content
from agentrl.run_folder.records import read_metrics
from agentrl.run_folder.run_reader import RunReader
from agentrl.run_folder.store import RunStore
from agentrl.trainer import held_out
from agentrl.trainer.algorithm import Algorithm
from agentrl.trainer.evaluation import check_background
from agentrl.trainer.held_out import EvalSet, HeldOut, InBackground
from agentrl.trainer.in_step import InStep
from agentrl.trainer.run import train_run
from agentrl.types import Episode, Group, StopReason, Task
from tests.trainer.test_mixture import TINY, StopAfter, of_env, run
from tests.trainer.test_samples import group


def settings(**changes: Any) -> RunConfig:
    base: dict[str, Any] = {
        "name": "evaluated",
        "steps": 4,
        "env": {"use": "agentrl.envs.calculator:Calculator"},
        "data": {"options": {"max_operations": 1}},
        "model": TINY,
        "rollout": {"groups_per_step": 2, "group_size": 2, "max_turns": 1, "max_tokens": 6, "token_budget": 1200},
        "algorithm": {"kl": {"coef": 0}},
        "optim": {"lr": 1e-3},
        "eval": {"tasks": 3, "every": 2},
        "checkpoint": {"every": 2},
    }
    return RunConfig.model_validate(base | changes)


SETS = {
    "hard": {"options": {"max_operations": 4}, "every": 1, "tasks": 2},
    "sampled": {"attempts": 4, "temperature": 1.0, "before_training": False},
}


def raw(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.timeout(120)
def test_each_named_set_has_its_own_tasks_interval_and_sampling(tmp_path: Path):
    config = settings(eval={"tasks": 3, "every": 2, "sets": SETS})
    assert run(config, tmp_path / "r").finished
    start, *steps = read_metrics(tmp_path / "r")
    assert {"held_out", "held_out/hard"} <= start.keys()
    assert "held_out/sampled" not in start
    assert ["held_out" in s for s in steps] == [False, True, False, True]
    assert all("held_out_reward/hard" in s for s in steps)
    assert "held_out_pass/sampled" in steps[1]
    assert "held_out_pass@2/sampled" in steps[1]
    assert "held_out_pass/hard" not in steps[1]
    content = load_content(config)
    assert [len(tasks) for tasks in content.eval_sets.values()] == [2, 3]
    assert content.eval_sets["sampled"] == content.held_out_tasks[:3]
    assert content.eval_sets["hard"][0].row != content.held_out_tasks[0].row


@pytest.mark.timeout(180)
def test_an_evaluation_in_the_background_measures_the_weights_of_its_step(tmp_path: Path):
    sampled = {"attempts": 4, "temperature": 1.0, "tasks": 3, "every": 1}
    waiting = settings(eval=sampled)
    background = settings(eval=sampled | {"background": True})
    assert run(waiting, tmp_path / "waiting").finished
    said = io.StringIO()
    with PlainDisplay(Console(file=said, width=100), again="") as display:
        assert run(background, tmp_path / "background", display).finished
    assert [f"evaluation after step {step}: held_out" in said.getvalue() for step in range(1, 5)] == [True] * 4
    assert any(line.get("late") for line in raw(tmp_path / "background"))
    one, other = read_metrics(tmp_path / "waiting"), read_metrics(tmp_path / "background")
    assert [line["step"] for line in other] == [0, 1, 2, 3, 4]
    keys = ("held_out_reward", "held_out", "held_out_pass", "reward")
    assert [[line.get(k) for k in keys] for line in one] == [[line.get(k) for k in keys] for line in other]
    columns = RunReader(tmp_path / "background").metrics
    assert columns.values["held_out_reward"] == [line["held_out_reward"] for line in other]
    assert (tmp_path / "background" / "checkpoints" / "best").exists()


@pytest.mark.timeout(180)
def test_an_evaluation_that_was_cut_runs_again_on_resume(tmp_path: Path):
    config = settings(eval={"tasks": 3, "every": 2, "background": True})
    assert not run(config, tmp_path / "r", StopAfter(2)).finished
    for line in raw(tmp_path / "r"):
        assert line["step"] <= 2
    lines = [line for line in raw(tmp_path / "r") if not line.get("late")]
    (tmp_path / "r" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "held_out" not in read_metrics(tmp_path / "r")[2]
    assert run(config, tmp_path / "r").finished
    assert ["held_out" in line for line in read_metrics(tmp_path / "r")] == [True, False, True, False, True]


@pytest.mark.timeout(180)
def test_an_evaluation_that_was_cut_does_not_run_again_with_the_weights_of_a_later_step(tmp_path: Path):
    config = settings(eval={"tasks": 3, "every": 2, "background": True}, checkpoint={"every": 1})
    assert not run(config, tmp_path / "r", StopAfter(3)).finished
    lines = [line for line in raw(tmp_path / "r") if line["step"] < 3 and not line.get("late")]  # the rest is lost
    (tmp_path / "r" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run(config, tmp_path / "r").finished
    found = {line["step"]: "held_out" in line for line in read_metrics(tmp_path / "r")}
    assert found == {0: True, 1: False, 2: False, 4: True}


@pytest.mark.parametrize("lost_in", ["update", "evaluation"])
def test_a_stop_that_ends_the_servers_saves_the_step_without_its_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost_in: str
):
    async def lost(*_: object, **given: object) -> list[Group]:
        if given.get("label") == "held-out-0":
            return await play(*_, **given)
        monkeypatch.setattr(Engine, "ready", property(lambda engine: False))
        signal.raise_signal(signal.SIGTERM)
        return await asyncio.get_running_loop().create_future()

    play = held_out.collect
    config = settings(eval={"tasks": 3, "every": 1})
    name = "training_run.sent_weights" if lost_in == "update" else "held_out.collect"
    monkeypatch.setattr(f"agentrl.trainer.{name}", lost)
    assert run(config, tmp_path / "r").steps == 1
    monkeypatch.undo()
    assert ["held_out" in line for line in read_metrics(tmp_path / "r")] == [True, False]
    assert run(config, tmp_path / "r").finished
    assert ["held_out" in line for line in read_metrics(tmp_path / "r")] == [True, False, True, True, True]


def test_the_best_checkpoint_stays_until_its_evaluation_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Training goes on for two steps, each with a checkpoint, before the score of step 3 is known."""
    ended, play = asyncio.Event(), InBackground._play

    async def slowly(self: InBackground, step: int) -> None:
        if step == 3:
            await ended.wait()
        await play(self, step)

    class Ends(Silent):
        def step(self, metrics: Mapping[str, float]) -> None:
            if metrics.get("step") == 5:
                ended.set()

    monkeypatch.setattr(InBackground, "_play", slowly)
    monkeypatch.setattr("agentrl.trainer.held_out._metrics", lambda groups, attempts: {"held_out": scores.pop(0)})
    scores = [0.1, 0.9, 0.2]
    config = settings(
        steps=6, eval={"tasks": 3, "every": 3, "background": True}, checkpoint={"every": 1, "keep": 1}
    )
    with RunStore.open(config, tmp_path / "r") as store:
        train_run(config, store, Ends())
    assert (tmp_path / "r/checkpoints/best").readlink() == Path("step-3")
    assert sorted(path.name for path in (tmp_path / "r/checkpoints").iterdir()) == ["best", "step-3", "step-6"]


class Killed(Silent):
    """Fails in the step after an evaluation began."""

    def step(self, metrics: Mapping[str, float]) -> None:
        if metrics.get("step") == 3:
            raise RuntimeError("killed")


@pytest.mark.timeout(120)
def test_a_run_that_fails_ends_its_evaluation(tmp_path: Path):
    config = settings(eval={"tasks": 3, "every": 2, "background": True})
    with RunStore.open(config, tmp_path / "r") as store, pytest.raises(RuntimeError, match="killed"):
        train_run(config, store, Killed())
    assert run(config, tmp_path / "r").finished


def test_late_lines_are_kept_by_a_resumed_run_and_lost_with_their_step(tmp_path: Path):
    with RunStore.open(settings(), tmp_path / "r") as store:
        for step in range(3):
            store.log_metrics(step, {"reward": float(step)})
        store.add_metrics(1, {"held_out": 0.5})
        store.add_metrics(2, {"held_out": 0.7})
        store.add_metrics(9, {"held_out": 0.9})  # of no step: ignored
        assert [line.get("held_out") for line in store.metrics()] == [None, 0.5, 0.7]
        assert all("late" not in line for line in store.metrics())
        store.rewind(1)
        assert [line.get("held_out") for line in store.metrics()] == [None, 0.5]


@pytest.mark.parametrize(
    ("eval_", "said"),
    [
        ({"sets": {"x": {}}}, "is the same as eval"),
        ({"sets": {"x": {"tasks": 200}}}, r"eval.sets.x.tasks has no effect: it equals eval.tasks \(200\)"),
        ({"sets": {"x": {"attempts": 4}}}, "eval.sets.x: eval.attempts is 4, and greedy episodes"),
        ({"sets": {"x": {"top_p": 0.9}}}, "eval.sets.x.top_p has no effect on greedy episodes"),
        ({"sets": {"a b": {"tasks": 4}}}, "a name has up to 64 letters"),
        ({"sets": {"x": {"data": "rows.jsonl", "options": {"n": 1}}}}, "has no effect while"),
    ],
)
def test_a_set_that_says_nothing_new_is_refused(eval_: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        settings(eval=eval_)


def test_sets_that_do_not_fit_the_env_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"eval.sets.hard: .*max_operation"):
        load_content(settings(eval={"sets": {"hard": {"options": {"max_operation": 3}}}}))


class Right:
    """Solves everything."""

    make_env = ToolEnv

    async def play(self, task: Task, *, episode_id: str, seed: int, status: Any = None) -> Episode:
        return Episode(episode_id, task, (), (), (), StopReason.ANSWERED, 1.0, solved=True)


def each_env(**every: int) -> HeldOut:
    sets = []
    for env, interval in every.items():
        config = settings(eval={"tasks": 1, "every": interval, "before_training": False})
        sets.append(EvalSet(env, "", config, config.eval, [Task("t", env=env)], Right()))
    return HeldOut(sets, Silent(), InStep(Silent(), 1), shown=False)


async def test_all_envs_together_are_logged_when_all_are_due_as_after_the_last_step():
    found = [set(await each_env(a=2, b=3).after(step)) for step in range(5)]
    keys = {env: {f"env/{env}/held_out", f"env/{env}/held_out_reward"} for env in "ab"}
    assert found == [set(), set(), keys["a"], keys["b"], {*keys["a"], *keys["b"], "held_out", "held_out_reward"}]


async def test_an_evaluation_that_has_ended_is_not_done_again():
    calls: list[int] = []

    async def weights() -> dict[str, Any]:
        calls.append(0)
        raise ConfigError("begins")

    engine: Any = SimpleNamespace(update_weights=None)
    background = InBackground(each_env(a=1), engine, weights, calls.append, lambda *_: None, lambda: False)
    for metrics in ([], [{"step": 0}], [{"step": 2, "env/a/held_out_reward": 1.0}]):
        await background.catch_up(metrics)
    assert not calls
    with pytest.raises(ConfigError, match="begins"):
        await background.catch_up([{"step": 1, "env/a/held_out": 1.0}, {"step": 2}])


def test_servers_of_others_have_no_second_engine():
    engine = {"kind": "sglang", "server": {"urls": ["http://127.0.0.1:30000"]}}
    with pytest.raises(ConfigError, match=r"eval.background needs a second engine, and with engine.server.urls"):
        check_background(settings(engine=engine, eval={"background": True, "every": 1}))


def mixed(**env: Any) -> RunConfig:
    envs = {
        "a": {"use": "agentrl.envs.calculator:Calculator"},
        "b": {"use": "agentrl.envs.sqlite:Sqlite", **env},
    }
    changes = {"algorithm": {"kl": {"coef": 0.1}}, "eval": {}, "data": {}}
    data = settings().model_dump(exclude={"env", "data", "algorithm", "eval"}) | changes
    return RunConfig.model_validate(data | {"envs": envs})


def test_what_belongs_to_the_run_and_what_to_an_env():
    assert mixed(algorithm={"kl_coef": 0.5}).by_env["b"].algorithm.kl.coef == 0.5
    with pytest.raises(ValueError, match=r"it equals algorithm.kl.coef \(0.1\)"):
        mixed(algorithm={"kl_coef": 0.1})
    with pytest.raises(ValueError, match=r"envs.b.eval.background is a setting of the whole run"):
        mixed(eval={"background": True})
    data = mixed().model_dump(exclude={"eval"})
    with pytest.raises(ValueError, match=r"write it under that env \(envs.NAME.eval.sets\)"):
        RunConfig.model_validate(data | {"eval": {"sets": {"x": {"tasks": 3}}}})
    with pytest.raises(ValueError, match=r"while algorithm.kl.coef is 0"):
        RunConfig.model_validate(
            mixed(algorithm={"kl_coef": 0.5}).model_dump() | {"algorithm": {"kl": {"coef": 0}}}
        )


def test_rows_of_an_env_know_the_weight_of_their_kl_penalty():
    config = AlgorithmConfig.model_validate({"kl": {"coef": 0.1}})
    groups = [*of_env("a", group(1.0, 0.0)), *of_env("b", group(1.0, 0.0)), *of_env("c", group(1.0, 0.0))]
    rows = Algorithm(config, kl_by_env={"a": 0.5, "b": 0.0}).rows(groups)
    scales = {groups[row.group].task.env: set(row.columns["kl_scale"]) for row in rows.samples}
    assert scales == {"a": {5.0}, "b": {0.0}, "c": {1.0}}
    assert "kl_scale" not in Algorithm(config).rows(groups).samples[0].columns


def test_a_penalty_in_the_reward_has_the_weight_of_the_env():
    groups = [*of_env("a", group(1.0, 0.0)), *of_env("b", group(1.0, 0.0))]

    def advantages(coef: float, by_env: Mapping[str, float]) -> dict[str, Mapping[int, float]]:
        config = {"kl": {"coef": coef, "where": "reward"}, "advantage": "rloo"}
        algorithm = Algorithm(AlgorithmConfig.model_validate(config), kl_by_env=by_env)
        rows = algorithm.rows(groups)
        columns = {"learner_logprobs": (-0.1, -0.2, -0.3), "ref_logprobs": (-0.5, -0.1, -0.9)}
        samples = [
            replace(row, columns={**row.columns, **{k: tuple(v * (n + 1) for v in c) for k, c in columns.items()}})
            for n, row in enumerate(rows.samples)
        ]
        return dict(algorithm.advantages(replace(rows, samples=samples)).by_segment)

    own, alone_a, alone_b = advantages(0.1, {"b": 0.4}), advantages(0.1, {}), advantages(0.4, {})
    assert {k: v for k, v in own.items() if k.startswith("a/")} == {
        k: v for k, v in alone_a.items() if k.startswith("a/")
    }
    assert {k: v for k, v in own.items() if k.startswith("b/")} == {
        k: v for k, v in alone_b.items() if k.startswith("b/")
    }
    assert alone_a != alone_b
