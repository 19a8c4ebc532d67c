"""Evaluations from Python: what the command does, with objects for names and arguments for options."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import agentrl
from agentrl import TextEnv, reward
from agentrl.cli import main
from agentrl.cli.eval import evaluate as command
from agentrl.config.run import RunConfig
from agentrl.envs.calculator import Calculator
from agentrl.errors import ConfigError
from agentrl.eval.evaluate import EvalOptions, _claim, default_folder, make_spec
from agentrl.eval.result import EvalSpec
from agentrl.eval.target import find
from agentrl.python.evaluating import _find
from agentrl.run_folder.lock import lock_folder
from agentrl.run_folder.store import RunStore
from agentrl.types import Task
from tests.eval.eval_server import Server, guess, refusal, serving, solve


class Echo(TextEnv):
    """Say the number."""

    @classmethod
    def tasks(cls, split: str, seed: int) -> list[Task]:
        return [Task(f"{split}-{n}", row={"number": n}) for n in range(3)]

    def setup(self, number: int) -> str:
        return f"Start with {number}."

    def reply(self, text: str) -> None:
        return None

    @reward(solved=True)
    def said(self, episode: agentrl.Episode) -> float:
        return float(episode.messages[-1].content == "12345678")


class Interrupted(Echo):
    """Interrupts the process."""

    async def setup(self, number: int) -> str:  # type: ignore[override]
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(600)
        return ""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_an_evaluation_has_estimates_rows_and_episodes_and_prints_nothing(capfd: pytest.CaptureFixture[str]):
    with serving(Server(solve)) as server:
        found = agentrl.evaluate(
            env=Calculator,
            base_url=server.url,
            model="m",
            tasks=2,
            attempts=2,
            temperature=0.5,
            price_prompt=1.0,
            price_completion=10.0,
        )
        again = agentrl.evaluate(
            env=Calculator,
            base_url=server.url,
            model="m",
            tasks=np.int64(2),  # type: ignore[arg-type]
            attempts=2,
            temperature=np.float32(0.5),  # type: ignore[arg-type]
        )
        assert len(server.requests) == 8, "the second one is the first one"
    assert capfd.readouterr() == ("", "")
    assert (found.solved, found.reward, found.lost, found.notes) == (1.0, 1.0, 0, ())
    assert found.estimates["pass^2"].mean == 1.0
    assert found.cost == pytest.approx((800 * 1.0 + 80 * 10.0) / 1e6)
    rows = found.tasks()
    assert [row["attempts"] for row in rows] == [2, 2]
    assert rows[0] | {"task": ""} == {
        "task": "",
        "attempts": 2,
        "solved": 1.0,
        "reward": 1.0,
        "reward/solved": 1.0,
    }
    episodes = found.episodes()
    assert [episode.task.id for episode in episodes] == [row["task"] for row in rows for _ in range(2)]
    assert episodes[0].messages[-1].role == "assistant"
    assert "100.0 % of 2 held-out tasks, 2 attempts each" in str(found)
    assert "solved 1, reward 1" in repr(found)
    assert again.folder == found.folder == Path(found.result.folder)
    assert again.folder.parent == Path("runs/eval").absolute()
    assert ["fresh=True plays it again" in note for note in again.notes] == [True]


def test_progress_goes_to_the_console_that_is_given(capfd: pytest.CaptureFixture[str]):
    with open("progress.txt", "w+") as file, serving(Server(guess)) as server:
        console = Console(file=file)
        found = agentrl.evaluate(env=Echo, base_url=server.url, model="m", tasks=9, out="here", console=console)
        file.seek(0)
        assert "there are 3 held_out tasks" in file.read()
    assert capfd.readouterr() == ("", "")
    assert found.folder == Path("here").absolute()


def test_a_notebook_cell_evaluates_a_configuration_and_compares():
    async def cell() -> Any:
        with serving(Server(guess)) as server:
            one = agentrl.evaluate(env=Echo, base_url=server.url, model="m")
            server.model = lambda messages: {"content": "no"}
            config = {"env": Echo, "rollout": {"max_tokens": 7}}
            other = agentrl.evaluate(env=config, base_url=server.url, model="n")
            assert server.requests[-1]["max_tokens"] == 7
        return one, other

    one, other = asyncio.run(cell())
    found = agentrl.compare(one, str(other.folder))
    assert (found.tasks, found.values["solved"].difference.mean, len(found.worst)) == (3, -1.0, 3)
    assert "100.0 % -> 0.0 %" in str(found)
    assert "rollout.max_tokens" in str(found)


def test_an_interrupt_ends_it_also_inside_a_loop_and_leaves_the_folder():
    before = signal.getsignal(signal.SIGINT)

    async def cell(env: type[Echo], tasks: int) -> Any:
        return agentrl.evaluate(env=env, base_url=server.url, model="m", tasks=tasks, out="e")

    with serving(Server(guess)) as server:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(cell(Interrupted, 1))
        assert signal.getsignal(signal.SIGINT) is before
        assert asyncio.run(cell(Echo, 1)).solved == 1.0
        with pytest.raises(
            agentrl.ConfigError, match=r"tasks: 1 -> 2.*another out, or start over with fresh=True"
        ):
            asyncio.run(cell(Echo, 2))
        with pytest.raises(
            agentrl.ConfigError, match=r"max_tokens: .*(?s:.*)to resume it, give another out, or start over"
        ):
            agentrl.evaluate(env=Echo, base_url=server.url, model="m", out="e", overrides=["rollout.max_tokens=7"])
        with lock_folder(Path("e")), pytest.raises(agentrl.ConfigError, match=r"stop it, or give another out$"):
            agentrl.evaluate(env=Echo, base_url=server.url, model="m", out="e")


def test_an_env_of_several_is_chosen_by_its_view():
    several = {"envs": {"a": {"use": Echo}, "b": {"use": Echo}}, "model": {"tiny": {}}}
    with serving(Server(guess)) as server:
        with pytest.raises(agentrl.ConfigError, match=r"has several envs: give one, by_env\[NAME\] .*one of a, b"):
            agentrl.evaluate(env=several, base_url=server.url, model="m")
        found = agentrl.evaluate(env=agentrl.configure(several).by_env["b"], base_url=server.url, model="m")
    assert found.solved == 1.0


def test_options_of_the_command_are_arguments():
    options = set(inspect.signature(command).parameters) - {"context", "target", "minimum", "compare"}
    arguments = set(inspect.signature(agentrl.evaluate).parameters)
    assert arguments - options == {"policy", "console"}
    assert options <= arguments


URL: dict[str, Any] = {"base_url": "http://127.0.0.1:9/v1", "model": "m"}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "name a policy: a run folder, a checkpoint, or base_url and model"),
        ({"policy": Echo}, "policy is the class Echo: give the path of a run"),
        ({"policy": ".", "env": Echo()}, "env is an object of Echo: give an env class"),
        ({"policy": ".", **URL}, "policy and base_url: give one of them"),
        ({"policy": "nowhere"}, "nowhere: no such folder"),
        ({"policy": "x" * 5000}, "xxx': no file system has such a path"),
        ({"env": Echo, "out": "a\0b", **URL}, "out is 'a\\x00b': no file system has such a path"),
        ({"env": Echo, **URL, "model": 3}, "model is 3: give a text"),
        ({"policy": "http://x/v1"}, "is a URL, not a folder; give it with base_url, the model there with model"),
        ({"env": {"env": Echo, "model": {"tiny": {}}}}, "makes its model in training; train it first"),
        ({"env": {"env": Echo, "rollout": {"max_turn": 1}}, **URL}, "did you mean 'max_turns'?"),
        ({"env": "gone.yaml", **URL}, "gone.yaml: no such file"),
        ({"env": "env: a:B\n" * 99, **URL}, "env is a text of several lines: give the path of a YAML"),
        ({"env": "calc", **URL}, "env calc: must be `module:Class` or `path/to/file.py:Class`"),
        ({"env": Echo, "base_url": "x", "model": "m"}, "base_url x: not an http or https URL"),
        ({"env": Echo, "base_url": "http://x/v1"}, "name the model there: model NAME"),
        ({"env": Echo, "api_key_env": "NOT_SET", **URL}, "api_key_env NOT_SET: this environment variable"),
        ({"env": Echo, "request": {"n": 2}, **URL}, "request n: the evaluation sets this field itself; use temp"),
        ({"env": Echo, "request": {"n": Echo}, **URL}, "request: must be a mapping of JSON values"),
        ({"env": Echo, "price_prompt": 1, **URL}, "give both price_prompt and price_completion"),
        ({"env": Echo, "tasks": 0, **URL}, "tasks is 0: it must be a whole number of at least 1"),
        ({"env": Echo, "tasks": True, **URL}, "tasks is True"),
        ({"env": Echo, "temperature": "1", **URL}, "temperature is '1': it must be a finite number of at least 0"),
        ({"env": Echo, "temperature": 10**400, **URL}, "000...: it must be a finite number of at least 0"),
        ({"env": Echo, "tasks": np.array([1, 2]), **URL}, "tasks is array([1, 2])"),
        ({"env": Echo, "temperature": np.array([1, 2]), **URL}, "temperature is array([1, 2])"),
        ({"env": Echo, "price_prompt": 10**400, **URL}, "it must be a finite number of at least 0"),
        ({"env": Echo, "console": True, **URL}, "console is an object of bool: give a rich.console.Console"),
        ({"env": Echo, "temperature": float("nan"), **URL}, "temperature is nan"),
        ({"env": Echo, "temperature": 1e-9, **URL}, "temperature 1e-09: must be 0, which is greedy"),
        (
            {"env": Echo, "top_p": 0.5, **URL},
            "top_p, top_k and min_p have no effect on greedy episodes",
        ),
        ({"env": Echo, "attempts": 2, "temperature": 0, **URL}, "give a temperature above 0, or one attempt"),
        ({"env": Echo, "split": "test", **URL}, "split is 'test': it is 'train' or 'held_out'"),
        ({"env": Echo, "overrides": "seed=1", **URL}, "overrides is 'seed=1': give a list"),
        ({"env": Echo, "overrides": ["rollout.temperature=1"], **URL}, "overrides rollout.temperature=1: has no"),
        (
            {"env": Echo, "overrides": ["eval.top_p=1"], **URL},
            "has no effect on an evaluation; use top_p",
        ),
        ({"env": Echo, "out": 3, **URL}, "out is an object of int"),
        ({"env": Echo, **URL}, "base_url http://127.0.0.1:9/v1: nothing accepts connections there"),
    ],
)
def test_errors_name_arguments_and_leave_nothing_behind(given: dict[str, Any], text: str):
    with pytest.raises(agentrl.AgentRLError) as raised:
        agentrl.evaluate(**given)
    assert text in str(raised.value)
    assert "--" not in str(raised.value)
    assert not list(Path().glob("runs/eval/*"))


def test_a_folder_with_other_things_is_refused_with_the_argument_to_change():
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("years of work")
    with pytest.raises(agentrl.ConfigError, match=r"is not a run folder .*; give another out$"):
        agentrl.evaluate(env=Echo, out="mine", fresh=True, **URL)


class Wordy(Echo):
    """Mentions options of other programs."""

    @classmethod
    def tasks(cls, split: str, seed: int) -> list[Task]:
        raise ValueError("the generator needs --model and --tasks")


def test_what_the_code_of_an_env_says_stays_as_it_is():
    with pytest.raises(agentrl.ConfigError, match="the generator needs --model and --tasks"):
        agentrl.evaluate(env=Wordy, **URL)


def test_the_command_says_which_form_an_env_has(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["eval", "--env", "calc", "--base-url", URL["base_url"], "--model", "m"])
    assert "--env calc: must be `module:Class` or `path/to/file.py:Class`" in capsys.readouterr().err


def test_what_an_endpoint_refuses_during_play_names_arguments():
    refused = pytest.raises(agentrl.ConfigError, match=r"the variable that holds the API key: api_key_env NAME$")
    with serving(Server(guess, trouble=lambda number: refusal(401))) as server, refused:
        agentrl.evaluate(env=Echo, base_url=server.url, model="m", tasks=1)


def test_a_result_knows_that_its_folder_was_moved_or_played_again():
    with serving(Server(guess)) as server:
        given: dict[str, Any] = {"env": Echo, "base_url": server.url, "model": "m", "tasks": 1}
        agentrl.evaluate(**given, out="a")
        os.rename("a", "b")
        first = agentrl.evaluate(**given, out="b")
        assert first.folder == Path("b").absolute()
        assert first.tasks()[0]["solved"] == 1.0
        server.model = lambda messages: {"content": "no"}
        second = agentrl.evaluate(**given, out="b", fresh=True)
    assert second.solved == 0.0
    for read in (first.tasks, first.episodes, lambda: agentrl.compare(first, second)):
        with pytest.raises(agentrl.AgentRLError, match="b: was played again and holds another result now"):
            read()
    with pytest.raises(agentrl.ConfigError, match="compare got an object of NoneType"):
        agentrl.compare(first.result.cost, second)  # type: ignore[arg-type]


def test_envs_that_one_function_makes_are_several():
    def made(said: str) -> type[Echo]:
        class Made(Echo):
            @reward(solved=True)
            def said(self, episode: agentrl.Episode) -> float:
                return float(episode.messages[-1].content == said)

        class Derived(Made): ...

        return Derived

    with serving(Server(guess)) as server:
        found = [
            agentrl.evaluate(env=made(said), base_url=server.url, model="m", tasks=1)
            for said in ("12345678", "no", "no")
        ]
        assert len(server.requests) == 2, "the last one is the one before it"
    assert [result.solved for result in found] == [1.0, 0.0, 0.0]


def test_an_env_that_a_function_made_with_other_values_is_other_code_in_another_process(
    monkeypatch: pytest.MonkeyPatch,
):
    def made(said: str, start: int) -> type[Echo]:
        class Made(Echo):
            start_at = start

            @reward(solved=True)
            def said(self, episode: agentrl.Episode) -> float:
                return float(episode.messages[-1].content == said)

        return Made

    with serving(Server(guess)) as server:
        play = partial(agentrl.evaluate, base_url=server.url, model="m", tasks=1)
        assert play(env=made("12345678", 1)).solved == 1.0
        for said, start, changed in (("no", 1, "said"), ("12345678", 2, "start_at")):
            monkeypatch.setattr("agentrl.importing._given", {})  # as in a new process
            with pytest.raises(ConfigError, match=rf"<values of .*Made>: {changed} changed"):
                play(env=made(said, start))
        monkeypatch.setattr("agentrl.importing._given", {})
        assert play(env=made("12345678", 1)).solved == 1.0
        assert len(server.requests) == 1


def test_an_env_that_a_function_made_may_count_its_episodes():
    def made() -> type[Echo]:
        class Counting(Echo):
            episodes = 0

            def setup(self, number: int) -> str:
                Counting.episodes += 1
                return ""

        return Counting

    env = made()
    with serving(Server(guess)) as server:
        for _ in range(2):
            assert agentrl.evaluate(env=env, base_url=server.url, model="m", tasks=1).lost == 0
    assert env.episodes == 1  # type: ignore[attr-defined]


def test_a_policy_is_the_same_however_its_path_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "models" / "m"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "link").symlink_to(folder)

    def found(target: str) -> tuple[Path, EvalSpec, RunConfig]:
        subject, config, base = find(Path(target), "agentrl.envs.calculator:Calculator", [])
        spec = make_spec(subject, config, EvalOptions())
        return default_folder(base, subject, spec).absolute(), spec, config

    first, spec, config = found("models/m")
    for target in (str(folder), "models/../models/m", "link", f"{tmp_path}/link"):
        other, same, _ = found(target)
        assert (other, same.digest) == (first, spec.digest), target
    paths = {_find(name, {"env": Calculator}, (), None)[1].model.path for name in ("models/m", "link")}
    assert paths == {str(folder)}
    monkeypatch.chdir(folder.parent)
    assert found("m")[0].name == first.name
    with RunStore.open(config, first) as store:
        _claim(store, spec)
        _claim(store, found(str(folder))[1])
        with pytest.raises(ConfigError, match="holds another evaluation \\(tasks: "):
            _claim(store, replace(spec, tasks=7))


def test_a_checkpoint_of_a_run_takes_no_override_of_its_model():
    checkpoint = Path("run/checkpoints/step-3")
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    Path("run/config.yaml").write_text("")
    with pytest.raises(agentrl.ConfigError, match="has no effect on an evaluation of run/checkpoints/step-3"):
        agentrl.evaluate("run@3", overrides=["model.tiny.hidden=64"])


def test_a_tilde_in_a_path_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with serving(Server(guess)) as server:
        found = agentrl.evaluate(env=Echo, base_url=server.url, model="m", tasks=1, out="~/e")
    assert found.folder == tmp_path / "home" / "e"
    assert len(agentrl.read_episodes("~/e", 0)) == 1
    assert len(agentrl.read_metrics("~/e")) == 1
    assert str(agentrl.compare("~/e", found))
    assert not (tmp_path / "~").exists()
