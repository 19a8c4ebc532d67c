"""Packages of served envs, played by the command of verifiers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
import tomllib
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from agentrl.chat.messages import write_message
from agentrl.cli import main
from agentrl.env.load import load_env
from agentrl.env.play import RandomPolicy, play
from agentrl.env_server.open_sessions import Sessions
from agentrl.env_server.serve import serving_env
from agentrl.env_server.served import EnvSource
from agentrl.serve.listen import running
from agentrl.types import Episode, Task
from tests.env_server.test_env_server import NAMES, TURNS, Counted, source_of
from tests.envs.others.test_verifiers import PYTHON, needs_verifiers

JsonObject = dict[str, Any]


def package(folder: Path, target: str, *options: str) -> Path:
    with pytest.raises(SystemExit) as left:
        main(["env", "package", target, "--as", "verifiers", "--name", "served", "-o", str(folder), *options])
    assert left.value.code == 0
    return folder


async def played(name: str, num: int, max_turns: int = TURNS) -> list[Episode]:
    """Episodes of the env itself, by its oracle and at random."""
    env_class: Any = load_env(NAMES[name])
    tasks, found = env_class.tasks("train", 0), []
    for i in range(num):
        env = env_class()
        chance = RandomPolicy(lambda env=env: env.tools, i, answer_share=0.1)
        found.append(
            await play(env, tasks[i], chance if i % 2 else env_class.oracle(tasks[i]), max_turns=max_turns)
        )
    return found


def replaying(episodes: Sequence[Episode]) -> contextlib.AbstractAsyncContextManager[str]:
    """An endpoint for one conversation after another, which says what the policy said in these episodes."""
    return saying([[write_message(turn.message) for turn in episode.turns] for episode in episodes])


@contextlib.asynccontextmanager
async def saying(conversations: Sequence[Sequence[JsonObject]]) -> AsyncIterator[str]:
    """An endpoint for one conversation after another, each with these messages."""
    begun = itertools.count()
    told: Sequence[JsonObject] = ()

    async def complete(request: Request) -> JSONResponse:
        nonlocal told
        body = await request.json()
        turn = sum(m["role"] == "assistant" for m in body["messages"])
        if turn == 0:
            told = conversations[next(begun)]
        message = told[turn]
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        head = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"], "usage": usage}
        return JSONResponse(head | {"choices": [choice]})

    app = Starlette(routes=[Route("/v1/chat/completions", complete, methods=["POST"])])
    async with running(app) as url:
        yield f"{url}/v1"


class VfEval:
    """The command of verifiers: started, or as a fork of a process that has imported it, which takes seconds."""

    def __init__(self) -> None:
        self.process: asyncio.subprocess.Process | None = None

    async def run(
        self,
        folder: Path,
        endpoint: str,
        *options: str,
        env: Mapping[str, str] | None = None,
        code: int = 0,
        forked: bool = True,
    ) -> tuple[list[JsonObject], str]:
        """The traces and the log."""
        arguments = ["served", "-m", "policy", "--client.base-url", endpoint, "--client.api-key-var", "NO_KEY"]
        arguments += ["--no-push", "--no-rich", "-c", "1", "-o", str(folder / "out"), *options]
        environ = {**os.environ, "PYTHONPATH": str(folder), "NO_KEY": "none", **(env or {})}
        if forked:
            status, log = await self._fork(arguments, environ, folder / "log")
        else:
            process = await asyncio.create_subprocess_exec(
                str(PYTHON.parent / "vf-eval"), *arguments, env=environ, stdout=DEVNULL, stderr=PIPE
            )
            log, status = (await process.communicate())[1].decode(), process.returncode
        assert status == code, log[-2000:]
        found = (folder / "out").glob("*/traces.jsonl")
        lines = [line for file in found for line in file.read_text().splitlines()]
        return [trace for line in lines for trace in json.loads(line)["traces"]], log

    async def _fork(self, arguments: Sequence[str], environ: Mapping[str, str], log: Path) -> tuple[int, str]:
        if self.process is None:
            forks = Path(__file__).with_name("vf_eval_forks.py")
            self.process = await asyncio.create_subprocess_exec(str(PYTHON), str(forks), stdin=PIPE, stdout=PIPE)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        asked = {"arguments": arguments, "env": environ, "log": str(log)}
        self.process.stdin.write(json.dumps(asked).encode() + b"\n")
        return int(await self.process.stdout.readline()), log.read_text()

    async def end(self) -> None:
        """End the process that forks."""
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            await self.process.wait()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def vf_eval() -> AsyncIterator[VfEval]:
    started = VfEval()
    yield started
    await started.end()


def rewards_by_index(traces: Sequence[JsonObject]) -> dict[int, dict[str, float]]:
    assert not [error for trace in traces for error in trace["errors"]]
    return {
        trace["task"]["data"]["index"]: {name: r["score"] * r["weight"] for name, r in trace["rewards"].items()}
        for trace in traces
    }


@needs_verifiers
@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", NAMES)
async def test_vf_eval_earns_the_same_on_100_seeds(name: str, tmp_path: Path, vf_eval: VfEval):
    episodes = await played(name, 100)
    folder = package(tmp_path / "served", NAMES[name], "--max-turns", str(TURNS))
    async with replaying(episodes) as endpoint:
        traces, _ = await vf_eval.run(folder, endpoint, "-n", "100", forked=name != "calculator")
    earned = rewards_by_index(traces)
    assert [earned[i] for i in range(100)] == [dict(episode.rewards) for episode in episodes]
    assert [sum(earned[i].values()) for i in range(100)] == [episode.reward for episode in episodes]
    solved = {trace["task"]["data"]["index"]: trace["metrics"].get("solved") for trace in traces}
    assert [solved[i] for i in range(100)] == [None if e.solved is None else float(e.solved) for e in episodes]
    assert {1.0, 0.0} <= {episode.reward for episode in episodes}, "both kinds occur"


@needs_verifiers
@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_a_limit_of_verifiers_scores_the_episode_as_it_stands(tmp_path: Path, vf_eval: VfEval):
    episodes = await played("sqlite", 4)
    folder = package(tmp_path / "served", NAMES["sqlite"])
    cut = await played("sqlite", 4, max_turns=1)
    async with replaying(episodes) as endpoint:
        traces, _ = await vf_eval.run(folder, endpoint, "-n", "4", "--env.agent.max-turns", "1")
    earned = rewards_by_index(traces)
    assert [earned[i] for i in range(4)] == [dict(episode.rewards) for episode in cut]


@needs_verifiers
@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_a_package_connects_to_a_running_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vf_eval: VfEval
):
    episodes = await played("calculator", 6)
    sessions = Sessions(source_of("calculator"))
    monkeypatch.setenv("AGENTRL_TOKEN", "t0ken-1")
    async with serving_env(sessions, token="t0ken-1") as url, replaying(episodes) as endpoint:
        folder = await asyncio.to_thread(package, tmp_path / "served", url)
        traces, _ = await vf_eval.run(folder, endpoint, "-n", "6")
        assert not len(sessions), "every session is closed"
    assert rewards_by_index(traces) == {i: dict(episode.rewards) for i, episode in enumerate(episodes)}
    settings = json.loads((folder / "served/served.json").read_text())
    assert (settings["url"], settings["python"]) == (url, "")
    written = [p for p in folder.rglob("*.*") if p.is_file() and "out" not in p.parts]
    assert not any(b"t0ken-1" in p.read_bytes() for p in written)


@needs_verifiers
@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_malformed_calls_few_sessions_and_a_task_without_a_start(tmp_path: Path, vf_eval: VfEval):
    bad = {"id": "b", "type": "function", "function": {"name": "add", "arguments": '{"n": 1'}}
    good = {"id": "g", "type": "function", "function": {"name": "add", "arguments": '{"n": 2}'}}
    turns = [{"role": "assistant", "content": None, "tool_calls": [call]} for call in (bad, good)]
    told = [*turns, {"role": "assistant", "content": "done"}]
    tasks = [Task(f"t{i}", {"start": i, "broken": i == 1}) for i in range(6)]
    sessions = Sessions(EnvSource("counted", Counted, {"train": tasks}), max_sessions=2)
    async with serving_env(sessions) as url, saying([told] * 5) as endpoint:
        folder = await asyncio.to_thread(package, tmp_path / "served", url)
        traces, log = await vf_eval.run(folder, endpoint, "-n", "5")
    assert {i: sum(parts.values()) for i, parts in rewards_by_index(traces).items()} == {
        0: 2,
        2: 4,
        3: 5,
        4: 6,
        5: 7,
    }
    assert "task train-1 cannot be set up: SESSION_ERROR" in log


@needs_verifiers
@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_a_python_without_agentrl_and_another_harness_are_clear_errors(tmp_path: Path, vf_eval: VfEval):
    episodes = await played("calculator", 1)
    folder = package(tmp_path / "served", NAMES["calculator"])
    async with replaying(episodes) as endpoint:
        _, log = await vf_eval.run(folder, endpoint, "-n", "1", env={"AGENTRL_PYTHON": str(PYTHON)}, code=1)
        assert "set AGENTRL_PYTHON to a Python that has agentrl" in log
        traces, _ = await vf_eval.run(folder, endpoint, "-n", "1", "--env.agent.harness.id", "null")
    [error] = traces[0]["errors"]
    assert "remove --env.agent.harness.id" in error["message"]


def test_a_package_can_be_installed_and_written_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = package(tmp_path / "served", NAMES["calculator"], "--set", "data.options.size=9")
    assert "vf-eval served -n 5 -m MODEL" in capsys.readouterr().out
    about = tomllib.loads((folder / "pyproject.toml").read_text())
    assert about["project"]["name"] == "served"
    assert about["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["served"]
    settings = json.loads((folder / "served/served.json").read_text())
    assert settings["python"] == sys.executable
    assert "--set=data.options.size=9" in settings["options"]
    package(folder, NAMES["sqlite"])
    assert json.loads((folder / "served/served.json").read_text())["target"] == NAMES["sqlite"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["agentrl.envs.calculator:Calc"], "Calc"),
        (["agentrl.envs.calculator:Calculator", "--name", "3d"], "not with a digit first"),
        (["agentrl.envs.calculator:Calculator", "-o", "."], "choose another folder with --output"),
        (["http://127.0.0.1:9"], "is `agentrl env serve` running?"),
        (["http://127.0.0.1:9", "--max-turns", "3"], "--max-turns"),
    ],
)
def test_a_wrong_command_is_one_clear_line(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("mine")
    with pytest.raises(SystemExit) as left:
        main(["env", "package", *arguments, "--as", "verifiers"])
    assert left.value.code == 2
    shown = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert said in shown
    assert "Traceback" not in shown


async def test_a_server_cannot_write_code_into_the_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    async def metadata(request: Request) -> JSONResponse:
        name = 'calc"""\nraise SystemExit("ran")\n"""'
        return JSONResponse({"name": name, "description": "calc, served by agentrl"})

    command = ["env", "package", "", "--as", "verifiers", "--name", "calc", "-o", str(tmp_path / "calc")]
    async with running(Starlette(routes=[Route("/metadata", metadata)])) as command[2]:
        with pytest.raises(SystemExit) as left:
            await asyncio.to_thread(main, command)
    assert left.value.code == 2
    assert "this is not `agentrl env serve`" in capsys.readouterr().err
    assert not (tmp_path / "calc").exists()
