"""Runs, rollouts and rows from Python: with and without an event loop, with objects in place of names."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import pytest
import torch
from safetensors.torch import load_file

import agentrl
from agentrl import TextEnv, ToolEnv, reward, tool
from agentrl.config.loggers import LoggerConfig
from agentrl.envs.calculator import Calculator
from agentrl.importing import load_object, name_object
from agentrl.python.blocking import iterate
from agentrl.reporting.loggers.make import make_loggers
from agentrl.reporting.loggers.protocol import RunInfo, SampleEpisode
from agentrl.run_folder.records import read_metrics
from agentrl.sandbox import Sandbox
from agentrl.trainer.signals import StopRequest
from agentrl.types import Group, Task
from agentrl.view.episode_text import num_sampled
from tests.trainer.test_mixture import TINY

T = TypeVar("T")
SMALL: dict[str, Any] = {
    "steps": 2,
    "env": Calculator,
    "data": {"options": {"max_operations": 1}},
    "model": TINY,
    "rollout": {"groups_per_step": 2, "group_size": 2, "max_turns": 1, "max_tokens": 6, "token_budget": 1200},
    "algorithm": {"kl": {"coef": 0}},
    "optim": {"lr": 1e-3},
    "eval": {"tasks": 2, "before_training": False},
    "loggers": [],
}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def weights(folder: str) -> dict[str, list[float]]:
    found = load_file(next((Path(folder) / "checkpoints" / "step-2").glob("*.safetensors")))
    return {name: tensor.flatten().tolist() for name, tensor in found.items()}


@pytest.mark.timeout(120)
def test_awaited_and_blocking_train_the_same_weights_also_inside_a_loop():
    ticks: list[int] = []

    async def tick() -> None:
        while True:
            ticks.append(1)
            await asyncio.sleep(0.01)

    async def notebook() -> list[Any]:
        clock = asyncio.create_task(tick())
        awaited = await agentrl.train(SMALL | {"name": "awaited"})
        during = len(ticks)
        inside = agentrl.train_blocking(SMALL | {"name": "inside"})
        clock.cancel()
        return [awaited, inside, during]

    awaited, inside, during = asyncio.run(notebook())
    outside = agentrl.train_blocking(SMALL | {"name": "outside"})
    assert awaited.finished
    assert during > 5, "other tasks of the loop went on"
    assert weights(awaited.run) == weights(inside.run) == weights(outside.run)


@pytest.mark.timeout(60)
def test_a_cancelled_run_saves_its_step_and_the_same_call_resumes_it():
    config = SMALL | {"name": "cut", "steps": 50}

    async def cut() -> None:
        run = asyncio.create_task(agentrl.train(config))
        while not any(line["step"] for line in read_metrics(Path("runs/cut"))):  # noqa: ASYNC110 - files
            await asyncio.sleep(0.01)
        for _ in range(3):  # of a group of tasks, a timeout, an impatient user
            run.cancel()
            await asyncio.sleep(0.01)
        with pytest.raises(asyncio.CancelledError):
            await run
        assert list(Path("runs/cut/checkpoints").glob("step-*")), "it was waited for"

    asyncio.run(cut())
    done = read_metrics(Path("runs/cut"))[-1]["step"]
    assert 0 < done < 50
    assert list(Path("runs/cut/checkpoints").glob("step-*"))
    assert not [t for t in threading.enumerate() if t.name.startswith("agentrl-run")]


@pytest.mark.timeout(60)
def test_a_cancellation_that_does_not_wake_the_loop_is_seen():
    """As an interrupt in Jupyter: its signal handler calls the idle loop without waking it."""

    async def cut() -> None:
        run = asyncio.create_task(agentrl.train(SMALL | {"name": "cut", "steps": 500}))

        def cancel() -> None:
            while not any(line["step"] for line in read_metrics(Path("runs/cut"))):
                time.sleep(0.01)
            run.cancel()

        threading.Thread(target=cancel).start()
        with pytest.raises(asyncio.CancelledError):
            await run

    asyncio.run(cut())
    assert 0 < read_metrics(Path("runs/cut"))[-1]["step"] < 500


class Interrupting:
    """A logger that interrupts the process after the first step, `times` times."""

    def __init__(self, times: int) -> None:
        self.times = times

    def start(self, run: RunInfo) -> None: ...

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        for number in range(self.times if step == 1 else 0):
            if number:
                ASKED.wait(30)  # two that are pending at once would be one
            ASKED.clear()
            os.kill(os.getpid(), signal.SIGINT)

    def episodes(self, step: int, rows: Sequence[SampleEpisode]) -> None: ...

    def finish(self, summary: Mapping[str, object]) -> None: ...


ASKED = threading.Event()
"""Set once an interrupt has been handled."""


@pytest.mark.timeout(60)
def test_an_interrupt_inside_a_loop_saves_and_returns_and_a_second_one_aborts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    before, ask = signal.getsignal(signal.SIGINT), StopRequest.ask

    def asked(self: StopRequest, *given: Any) -> None:
        ASKED.set()
        ask(self, *given)

    monkeypatch.setattr(StopRequest, "ask", asked)

    async def cell(times: int) -> Any:
        config = SMALL | {"name": f"cell-{times}", "steps": 500, "loggers": [Interrupting(times)]}
        return agentrl.train_blocking(config)

    assert not asyncio.run(cell(1)).finished
    assert list(Path("runs/cell-1/checkpoints").glob("step-*"))
    monkeypatch.setattr(StopRequest, "__bool__", lambda self: False)  # a step so long that only an abort ends it
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(cell(2))
    assert not [t for t in threading.enumerate() if t.name == "agentrl-run"], "the folder is free again"
    assert read_metrics(Path("runs/cell-2"))[-1]["step"] < 500
    assert "note: aborted; the same call " in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.timeout(90)
def test_runs_without_a_name_get_new_ones_and_fresh_moves_only_its_own_folder():
    first = agentrl.train_blocking(SMALL)
    second = agentrl.train_blocking(SMALL, fresh=True)
    assert [Path(run.run).name for run in (first, second)] == ["calculator-1", "calculator-2"]
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("years of work")
    with pytest.raises(
        agentrl.ConfigError, match=r"is not a run folder \(it holds thesis.txt\).* in Python run_dir="
    ):
        agentrl.train_blocking(SMALL, run_dir="mine", fresh=True)
    with pytest.raises(agentrl.ConfigError, match="is not a run folder"):
        agentrl.train_blocking(SMALL, run_dir="runs", fresh=True)
    assert sorted(path.name for path in Path("runs").iterdir()) == ["calculator-1", "calculator-2"]
    assert Path("mine/thesis.txt").read_text() == "years of work"


@pytest.mark.timeout(90)
def test_two_runs_without_a_name_start_at_once():
    async def both() -> list[Any]:
        return list(await asyncio.gather(agentrl.train(SMALL), agentrl.train(SMALL)))

    assert sorted(Path(run.run).name for run in asyncio.run(both())) == ["calculator-1", "calculator-2"]


class Scaled:
    """An advantage with state."""

    def __call__(self, step: Any) -> torch.Tensor:
        """Rewards."""
        found: torch.Tensor = step.rewards_E[step.sequence_N]
        return found

    def half(self, step: Any) -> torch.Tensor:
        """Half of that."""
        return self(step) / 2


def times(step: Any, factor: float) -> torch.Tensor:
    """A multiple of that."""
    return Scaled()(step) * factor


@pytest.mark.timeout(120)
@pytest.mark.parametrize("advantage", [Scaled(), Scaled().half, partial(times, factor=2.0), lambda s: Scaled()(s)])
def test_every_callable_is_an_advantage(advantage: Any):
    config = SMALL | {"name": "own", "steps": 1, "algorithm": {"advantage": advantage, "kl": {"coef": 0}}}
    assert agentrl.train_blocking(config).finished
    assert agentrl.train_blocking(config | {"steps": 2}).finished
    assert not Path("runs/own/history.jsonl").exists(), "the same object has the same name"


def test_objects_of_one_definition_do_not_replace_each_other():
    def scaled(factor: float) -> Any:
        def advantage(step: Any) -> Any:
            return times(step, factor)

        return advantage

    class Loud: ...

    def derived(*mixins: type) -> type:
        class Derived(Scaled, *mixins): ...

        return Derived

    for one, same, other in (
        (partial(times, factor=1.0), partial(times, factor=1.0), partial(times, factor=2.0)),
        (scaled(1.0), scaled(1.0), scaled(2.0)),
        (derived(), derived(), derived(Loud)),
    ):
        name = name_object(one)
        assert name_object(same) == name
        assert name_object(other) != name
        assert load_object(name) is same


@pytest.mark.timeout(60)
def test_objects_stand_in_place_of_names():
    seen: dict[str, Any] = {"steps": []}

    class Echo(TextEnv):
        """Say the number."""

        @classmethod
        def tasks(cls, split: str, seed: int) -> list[Task]:
            return [Task(f"{split}-{n}", row={"number": n}) for n in range(4)]

        def setup(self, number: int) -> str:
            self.number = number
            return f"Say {number}"

        @reward(solved=True)
        def said(self) -> float:
            return float(str(self.number) in self.transcript.final)

    def centered(rewards_E: torch.Tensor, group_E: torch.Tensor, **_: object) -> torch.Tensor:
        seen["advantage"] = True
        return rewards_E - rewards_E.mean()

    def loss(
        logprobs_T: torch.Tensor, old_T: torch.Tensor, advantages_T: torch.Tensor, weights_T: torch.Tensor, *_: Any
    ) -> torch.Tensor:
        seen["loss"] = True
        return -(weights_T * advantages_T * (logprobs_T - old_T).exp()).sum()

    class Ledger:
        def start(self, run: RunInfo) -> None: ...

        def metrics(self, step: int, values: Mapping[str, float]) -> None:
            seen["steps"].append(step)

        def episodes(self, step: int, rows: Sequence[SampleEpisode]) -> None: ...

        def finish(self, summary: Mapping[str, object]) -> None:
            seen["finished"] = summary["finished"]

    config = SMALL | {
        "name": "objects",
        "env": Calculator,
        "algorithm": {"loss": loss, "kl": {"coef": 0}},
        "loggers": [Ledger()],
    }
    assert agentrl.train_blocking(config).finished
    assert seen["loss"]
    assert seen["steps"] == [1, 2]
    assert seen["finished"] is True
    dumped = Path("runs/objects/config.yaml").read_text()
    assert "tests.python.test_python:loss" in dumped
    assert name_object(Calculator) == "agentrl.envs.calculator.env:Calculator"
    assert load_object(name_object(centered)) is centered
    assert load_object(name_object(Echo)) is Echo


def test_an_object_that_lacks_methods_of_a_logger_is_told_which():
    class Partial:
        def start(self, run: RunInfo) -> None: ...

        def metrics(self, step: int, values: Mapping[str, float]) -> None: ...

    config = agentrl.configure(SMALL | {"env": Calculator, "loggers": [Partial(), "tensorboard"]})
    with pytest.raises(agentrl.ConfigError, match=r"Partial is not a logger: it lacks episodes, finish"):
        make_loggers(config.loggers)
    with pytest.raises(agentrl.ConfigError, match=r"loggers\[0\] must be the name of a logger or a section"):
        agentrl.configure(SMALL | {"loggers": [3]})


def test_a_finished_section_of_a_logger_and_a_path_stay_what_they_are(tmp_path: Path):
    file = tmp_path / "own.py"
    file.write_text("class Own: ...")
    loggers = [LoggerConfig(use="tensorboard"), Path(f"{file}:Own")]
    config = agentrl.configure(SMALL | {"env": Calculator, "loggers": loggers})
    assert [each.use for each in config.loggers] == ["tensorboard", f"{file}:Own"]


def test_a_generic_class_with_parameters_has_the_name_of_the_class():
    class Boxed(Calculator, Generic[T]): ...

    assert load_object(name_object(Boxed[int])) is Boxed


def test_two_lambdas_have_two_names():
    one, other = (lambda: 1), (lambda: 2)
    assert load_object(name_object(one)) is one
    assert load_object(name_object(other)) is other
    assert name_object(one) == name_object(one) != name_object(other)


class Halving:
    def __call__(self, value: float) -> float:
        return value / 2


def test_an_instance_and_a_nested_function_do_not_take_the_name_of_what_can_be_imported():
    def scaled_by_two(value: float) -> float:
        return value * 2

    scaled_by_two.__qualname__ = "made.<locals>.Halving"
    for given in (Halving(), scaled_by_two, Halving):
        assert load_object(name_object(given)) is given
        assert load_object(f"{__name__}:Halving") is Halving


@pytest.mark.parametrize(
    ("given", "key", "kind"),
    [
        ({"env": 0}, "env must be `module:Class`, `path/to/file.py:Class` or a section", "class"),
        ({"data": {"sampler": {"order": 0}}}, "data.sampler.order must be text", "class"),
        ({"agent": {"use": 0}}, "agent.use must be text or null", "function"),
    ],
)
def test_an_instance_that_cannot_be_called_is_refused_with_what_to_pass(
    given: dict[str, Any], key: str, kind: str
):
    class Instance:
        def __repr__(self) -> str:
            return "<mine>"

    def put(value: Any) -> Any:
        return {name: put(inner) for name, inner in value.items()} if isinstance(value, dict) else Instance()

    with pytest.raises(agentrl.ConfigError) as caught:
        agentrl.configure({"env": Calculator, "model": TINY, "steps": 1} | put(given))
    assert key in str(caught.value)
    name = "Class" if kind == "class" else "function"
    assert f"got <mine>; pass the {kind} itself, or its name as `module:{name}`" in str(caught.value)


def test_an_object_of_a_notebook_is_named_in_another_process():
    with pytest.raises(agentrl.ConfigError, match="was defined in another process"):
        load_object("__main__:never_defined_here")


@pytest.mark.timeout(60)
def test_another_event_loop_than_asyncio_s_is_refused_with_what_works_under_it():
    """As trio does, step the coroutine without asyncio's loop."""
    with pytest.raises(RuntimeError, match=r"asyncio; under another one, call agentrl.train_blocking in a thread"):
        agentrl.train(SMALL).send(None)
    with pytest.raises(RuntimeError, match=r"asyncio; under another one, use `for` in a thread"):
        aiter(agentrl.rollouts(SMALL, 1))


def test_rollouts_need_no_trainer():
    asked = agentrl.rollouts(SMALL, 3)

    async def awaited() -> list[Any]:
        return [group async for group in asked]

    groups = list(asked)
    again = asyncio.run(awaited())
    assert len(groups) == 3
    assert {len(group.episodes) for group in groups} == {2}

    def ids(found: Sequence[Any]) -> Any:
        return sorted((e.id, tuple(s.ids for s in e.segments)) for g in found for e in g.episodes)

    assert ids(groups) == ids(again)
    rows = agentrl.training_rows(groups, SMALL)
    assert len(rows) == 6
    for row in rows:
        assert len(row.ids) == len(row.loss_mask) == len(row.logprobs) == len(row.advantages)
        assert any(row.loss_mask)
    with pytest.raises(agentrl.ConfigError, match="needs values of a learner"):
        agentrl.training_rows(groups, SMALL | {"algorithm": {"advantage": "gae"}})
    own = {"use": Calculator, "algorithm": {"advantage": "optimal_token_baseline"}}
    several = {"model": TINY, "envs": {"one": {"use": Calculator}, "other": own}}
    with pytest.raises(agentrl.ConfigError, match="the configuration needs learner_logprobs, sum_pi_squared of"):
        agentrl.training_rows(groups, several)


class Again:
    """Chooses a task again once its last group was reported."""

    def __init__(self, tasks: Sequence[Any], seed: int) -> None:
        self.queue = [0, 1]

    def choose(self, number: int) -> int:
        return self.queue.pop(0)

    def report(self, position: int, group: Any) -> None:
        self.queue.append(position)

    def state(self) -> list[int]:
        return self.queue

    def restore(self, state: list[int]) -> None:
        self.queue = list(state)


class Unrepeatable(Again):
    def restore(self, state: list[int]) -> None:
        """Forgets what was chosen."""


def test_an_order_gets_the_groups_of_rollouts():
    config = SMALL | {"data": {"sampler": {"order": Again}}, "rollout": SMALL["rollout"] | {"groups_per_step": 2}}
    groups = list(agentrl.rollouts(config, 6))
    assert len(groups) == 6
    assert len({group.task.id for group in groups}) == 2
    config["data"] = {"sampler": {"order": Unrepeatable}}
    with pytest.raises(agentrl.ConfigError, match=r"choose\(1\) returned 1, and 0 after restore"):
        list(agentrl.rollouts(config, 2))


@pytest.mark.timeout(60)
def test_an_iteration_that_ends_early_stops_the_episodes():
    for group in agentrl.rollouts(SMALL, 50):
        assert group.episodes
        break
    assert not [t for t in threading.enumerate() if t.name == "agentrl-rollouts"]


@pytest.mark.timeout(60)
def test_an_iteration_that_is_canceled_leaves_no_task():
    async def canceled() -> set[asyncio.Task[Any]]:
        waits = asyncio.Event()

        class Waiting(TextEnv):
            """Say something."""

            @classmethod
            def tasks(cls, split: str, seed: int) -> list[Task]:
                return [Task("t", {})]

            def setup(self) -> str:
                return "Say something."

            def reply(self, text: str) -> None:
                return None

            @reward
            async def endless(self) -> float:
                waits.set()
                return await asyncio.Future()

        async def play() -> None:
            async for _ in agentrl.rollouts(SMALL | {"env": Waiting, "data": {}}, 2):
                pass

        before = asyncio.all_tasks()
        playing = asyncio.create_task(play())
        await waits.wait()
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        await asyncio.sleep(0)  # a cancellation takes effect in the next round of the loop
        return asyncio.all_tasks() - before

    assert asyncio.run(canceled()) == set()


@pytest.mark.timeout(120)
def test_rollouts_do_not_play_far_ahead_of_a_slow_reader():
    played, too_many = list[int](), threading.Event()

    class Counted(TextEnv):
        """Say something."""

        @classmethod
        def tasks(cls, split: str, seed: int) -> list[Task]:
            return [Task(f"{split}-{n}", {"number": n}) for n in range(40)]

        def setup(self, number: int) -> str:
            played.append(number)
            if len(set(played)) > 10:
                too_many.set()
            return "Say something."

        def reply(self, text: str) -> None:
            return None

        @reward
        def nothing(self) -> float:
            return 0.0

    for number, _ in enumerate(agentrl.rollouts(SMALL | {"env": Counted, "data": {}}, 40)):
        if number == 0:
            assert not too_many.wait(2), "groups wait in memory until they are read"
    assert (number + 1, len(set(played))) == (40, 40)


@pytest.mark.timeout(60)
def test_rollouts_side_by_side_leave_each_other_their_sandboxes():
    first_ended = asyncio.Event()

    class Boxed(TextEnv):
        """Say something."""

        sandbox = Sandbox()

        @classmethod
        def tasks(cls, split: str, seed: int) -> list[Task]:
            return [Task(f"{split}-{n}", {"first": split == "train"}) for n in range(2)]

        async def setup(self, first: bool) -> str:
            self.first = first
            await self.box.write_file("mine", "text")
            return "Say something."

        def reply(self, text: str) -> None:
            return None

        @reward
        async def kept(self) -> float:
            if not self.first:
                await first_ended.wait()
            return float(len(await self.box.list_dir()) == 1)

    async def rewards(split: Literal["train", "held_out"], num_groups: int) -> list[float | None]:
        played = agentrl.rollouts(
            SMALL | {"env": Boxed, "data": {}, "rollout": {**SMALL["rollout"], "infra_retries": 0}},
            num_groups,
            split=split,
        )
        return [episode.reward async for group in played for episode in group.episodes]

    async def both() -> list[float | None]:
        longer = asyncio.create_task(rewards("held_out", 2))
        assert await rewards("train", 1) == [1.0, 1.0]
        first_ended.set()
        return await longer

    assert asyncio.run(both()) == [1.0] * 4


@pytest.mark.timeout(60)
class Scorer(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        answer = json.dumps({"scores": [0.25] * len(asked["messages"])}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *words: object) -> None:
        pass


def test_rollouts_get_all_rewards_of_a_training_step():
    rollout = SMALL["rollout"] | {"overlong": "penalise", "overlong_penalty": 0.5}
    with HTTPServer(("127.0.0.1", 0), Scorer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        model = {"kind": "http", "url": f"http://127.0.0.1:{server.server_port}"}
        config = SMALL | {"rollout": rollout, "reward_model": model, "algorithm": {"advantage": "remax"}}
        (group,) = agentrl.rollouts(config, 1)
        server.shutdown()
    for episode in (*group.episodes, group.greedy):
        assert episode.rewards == {"solved": 0.0, "reward_model": 0.25, "overlong": -0.5}
        assert episode.reward == -0.25
    assert all(row.advantages[-1] == 0 for row in agentrl.training_rows([group], config))


def test_rows_of_several_envs_have_the_advantages_of_each():
    config = {key: value for key, value in SMALL.items() if key not in ("env", "data", "eval")}
    (group,) = agentrl.rollouts(SMALL, 1)

    def scored(env: str) -> Group:
        task = replace(group.task, env=env)
        episodes = [
            replace(episode, id=f"{env}{number}", task=task, reward=float(number))
            for number, episode in enumerate(group.episodes)
        ]
        return replace(group, task=task, episodes=tuple(episodes))

    envs = {"a": {"use": Calculator}, "b": {"use": Calculator, "algorithm": {"advantage": "dr_grpo"}}}
    rows = agentrl.training_rows([scored("a"), scored("b")], config | {"envs": envs})
    found = {row.episode_id: row.advantages[-1] for row in rows}
    assert found == pytest.approx({"a0": -(0.5**0.5), "a1": 0.5**0.5, "b0": -0.5, "b1": 0.5}, abs=1e-5)


class Longer(Calculator):
    """Work it out."""


@pytest.mark.timeout(90)
def test_rollouts_and_evaluations_of_a_run_play_its_newest_checkpoint():
    summary = agentrl.train_blocking(SMALL | {"name": "trained"})
    assert {len(agentrl.read_episodes(summary.run, step)) for step in (1, 2)} == {4}
    (group,) = agentrl.rollouts(SMALL, 1, model=summary.run, split="held_out")
    assert group.task.id.startswith("held_out") or "held" in group.task.id
    with pytest.raises(agentrl.AgentRLError, match="no such folder"):
        list(agentrl.rollouts(SMALL, 1, model="nowhere"))
    own = agentrl.evaluate(summary.run, {"env": Longer, "rollout": {"max_tokens": 3, "max_turns": 1}}, tasks=1)
    assert (own.step, own.folder.parent) == (2, Path(summary.run) / "eval")
    assert own.result.spec.env.endswith(":Longer")
    assert [num_sampled(episode) for episode in own.episodes()] == [3]
    assert agentrl.load_config(own.folder / "config.yaml").model.tiny is not None, "that of the policy's run"
    run = agentrl.evaluate(env=summary.run, tasks=1)
    same = agentrl.evaluate(f"{summary.run}@2", tasks=1)
    assert (same.folder, len(same.notes)) == (run.folder, 1), "a run has a policy and an env"


class Broken(ToolEnv):
    """Cannot be set up."""

    @classmethod
    def tasks(cls, split: str, seed: int) -> list[Task]:
        return [Task("t", row={})]

    async def setup(self) -> str:
        raise agentrl.InfraError("the service is down")

    @tool
    async def nothing(self) -> str:
        """Do nothing."""
        return ""

    @reward
    def never(self) -> float:
        return 0.0


@pytest.mark.timeout(60)
def test_what_ends_the_episodes_is_raised_by_the_iteration():
    with pytest.raises(agentrl.AgentRLError, match="the service is down"):
        list(agentrl.rollouts(SMALL | {"env": Broken, "data": {}}, 2))


@pytest.mark.timeout(60)
def test_a_run_folder_may_be_text():
    config = agentrl.configure(SMALL | {"name": "named", "steps": 1})
    summary = agentrl.start_run(config, run_dir="mine")
    assert summary.finished
    assert Path(summary.run) == Path("mine").absolute()


def test_a_run_folder_that_ray_deletes_with_its_job_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refuse(*_: object, **__: object) -> None:
        raise agentrl.ConfigError("enough")

    monkeypatch.setattr("agentrl.trainer.run.train_run", refuse)
    (tmp_path / "working_dir_files" / "_ray_pkg_1a2b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "working_dir_files" / "_ray_pkg_1a2b")
    config = agentrl.configure(SMALL | {"name": "named"})
    for folder, said in ((None, True), (tmp_path / "kept", False)):
        with pytest.raises(agentrl.ConfigError, match="enough"):
            agentrl.start_run(config, run_dir=folder)
        assert ("--run-dir" in " ".join(capsys.readouterr().out.split())) == said


def test_mistakes_are_those_of_a_yaml_file():
    with pytest.raises(agentrl.ConfigError, match=r"rollout.group_sise.*group_size"):
        agentrl.configure(SMALL | {"rollout": {"group_sise": 4}})
    with pytest.raises(agentrl.ConfigError, match="ask for at least one group"):
        agentrl.rollouts(SMALL, 0)
    with pytest.raises(agentrl.ConfigError, match="takes no overrides"):
        agentrl.configure(agentrl.configure(SMALL), ["steps=3"])
    assert agentrl.configure(SMALL, ["steps=7"]).steps == 7
    assert json.loads(agentrl.configure(SMALL).model_dump_json())["env"]["use"].endswith(":Calculator")


@pytest.mark.parametrize(
    ("short", "override"),
    [
        ({"env": "agentrl.envs.calculator:Calculator"}, "env.solved_at=2"),
        ({"algorithm": {"loss": "gspo"}}, "algorithm.loss.clip_low=0.1"),
        ({"warmup": "oracle"}, "warmup.num=5"),
    ],
)
def test_an_override_reaches_into_what_a_mapping_writes_in_short(short: dict[str, Any], override: str):
    key, _, value = override.partition("=")
    assert attrgetter(key)(agentrl.configure(SMALL | short, [override])) == float(value)


FORKED = """
import asyncio, os, sys
import agentrl
from tests.python.test_python import SMALL


async def play():
    return [group.task.id async for group in agentrl.rollouts(SMALL, 2)]


def forked(work):
    child = os.fork()
    if not child:
        code = 1
        try:
            print(work())
            sys.stdout.flush()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


agentrl.train_blocking(SMALL | {"name": "parent"})
sys.stdout.flush()
train = forked(lambda: agentrl.train_blocking(SMALL | {"name": "child"}).finished)
rollouts = forked(lambda: len(asyncio.run(play())))
print("exit codes", train, rollouts)
"""


@pytest.mark.timeout(180)
def test_a_process_forked_after_a_run_trains_and_plays():
    """OpenMP's threads do not survive a fork: with several, the child crashed in its first operation."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.splitlines()[-1] == "exit codes 0 0", done.stdout + done.stderr
    assert "torch computes with one thread" in done.stdout


def test_leaving_an_iteration_does_not_wait_for_the_next_item():
    closed = []

    async def items() -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            closed.append(True)

    found = iterate(items)
    assert next(found) == 1
    found.close()
    assert closed == [True]
