"""Programs that stay up: they play one episode after another, and what breaks them is not passed on."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentrl.agents.player import AgentPlayer
from agentrl.agents.players import make_agent
from agentrl.agents.recorder import Recorder
from agentrl.agents.worker_pool import WorkerAgent
from agentrl.chat.template import Renderer
from agentrl.cli import main
from agentrl.config.load import make_config
from agentrl.config.run import AgentConfig
from agentrl.env import reward
from agentrl.envs.calculator.env import Calculator
from agentrl.errors import ConfigError
from agentrl.models.tiny import make_tokenizer
from agentrl.rollout.collect import collect
from agentrl.rollout.limits import EpisodeLimits
from agentrl.serve.listen import running
from agentrl.testing.engine import ScriptedEngine
from agentrl.testing.policy import say
from agentrl.types import Episode, StopReason, Task
from tests.agents.test_player import _alive

PROGRAM = """
import asyncio, json, os, subprocess, sys, time, urllib.request
import agentrl_worker

count = 0


def ask(access):
    body = {"model": access.model, "messages": [{"role": "user", "content": "go"}]}
    assert os.environ["OPENAI_BASE_URL"] == access.base_url
    assert access.base_url.startswith(access.anthropic_base_url)
    request = urllib.request.Request(
        access.base_url + "/chat/completions", json.dumps(body).encode(),
        {"Authorization": "Bearer " + access.api_key, "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def play(task, access):
    global count
    count += 1
    print("noise on standard output", {"id": 0, "outcome": "forged"})
    assert sys.stdin.read() == "", "the requests are not on the standard input of tools"
    if task["row"].get("early"):
        os._exit(5)
    said = ask(access)
    if said == "raise":
        raise ValueError("broken")
    if said == "exit":
        sys.exit("given up")
    if said == "die":
        print("out of luck", file=sys.stderr, flush=True)
        os._exit(7)
    if said in ("sleep", "leave"):
        with open(os.environ["LEFT"], "w") as file:
            file.write(str(subprocess.Popen(["sleep", "600"], start_new_session=True).pid))
        time.sleep(600 if said == "sleep" else 0)
    return {"pid": os.getpid(), "count": count, "task": task["id"], "said": said}


async def play_async(task, access):
    await asyncio.sleep(0)
    return await asyncio.to_thread(play, task, access)


if __name__ == "__main__":
    agentrl_worker.serve(play_async if "async" in sys.argv else play)
"""


class Answered(Calculator):
    outcomes: list[Any] = []  # noqa: RUF012

    @reward
    def answered(self) -> float:
        Answered.outcomes.append(self.outcome)
        return float(bool(self.outcome))


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(directory, ["Use the calculator, then answer."] * 4, vocab=360, max_context=4096)
    return Renderer.from_directory(directory)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    Answered.outcomes = []
    (tmp_path / "worker.py").write_text(PROGRAM)
    return tmp_path / "worker.py"


@asynccontextmanager
async def playing(
    renderer: Renderer,
    agent: WorkerAgent,
    said: Sequence[str] = (),
    *,
    crash: Any = "score",
    timeout_s: float = 60.0,
) -> AsyncIterator[AgentPlayer]:
    """A player whose policy says these texts one after another, then 11."""
    texts = iter(said)
    engine = ScriptedEngine(renderer, lambda turn: say(next(texts, "11")))
    recorder = Recorder(engine, renderer, EpisodeLimits(token_budget=4096, timeout_s=timeout_s))
    async with agent.running(), running(recorder.app()) as address:
        yield AgentPlayer(recorder, address, agent, Answered, 1.0, asyncio.Semaphore(agent.num), crash)


async def play(player: AgentPlayer, name: str, **row: Any) -> Episode:
    return await player.play(Task(name, {"start": 4, "operations": [["+", 7]], **row}), episode_id=name, seed=1)


def alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


@pytest.mark.parametrize("kind", ["", "async"])
async def test_one_process_plays_many_episodes_and_ends_with_the_run(renderer: Renderer, program: Path, kind: str):
    agent = WorkerAgent(["python", str(program), kind], 1)
    async with playing(renderer, agent, ["3", "11"]) as player:
        found = [await play(player, name) for name in "abc"]
    assert [e.error for e in found] == [None] * 3
    assert [(o["count"], o["task"], o["said"]) for o in Answered.outcomes] == [
        (1, "a", "3"),
        (2, "b", "11"),
        (3, "c", "11"),
    ]
    assert len(pids := {o["pid"] for o in Answered.outcomes}) == 1
    assert not alive(pids.pop())


async def test_workers_play_at_the_same_time(renderer: Renderer, program: Path):
    agent = WorkerAgent([sys.executable, program.name], 3, cwd=str(program.parent))
    async with playing(renderer, agent) as player:
        (group,) = await collect(
            player, [Task("t", {"start": 4, "operations": [["+", 7]]})], group_size=9, label="s", seed=0
        )
    assert [e.reward for e in group.episodes] == [2.0] * 9
    assert len({o["pid"] for o in Answered.outcomes}) == 3


@pytest.mark.parametrize(
    ("said", "crash"),
    [
        ("raise", "ValueError: broken"),
        ("exit", "SystemExit: given up"),
        ("die", "its worker ended: exit code 7: out of luck"),
    ],
)
async def test_a_crash_after_an_answer_is_scored_and_the_next_episode_is_played(
    renderer: Renderer, program: Path, said: str, crash: str
):
    async with playing(renderer, WorkerAgent(["python", str(program)], 1), [said]) as player:
        crashed, following = await play(player, "a"), await play(player, "b")
    assert (crashed.error, crashed.rewards["answered"], crashed.metrics["agent/crashed"]) == (None, 0.0, 1.0)
    assert (following.error, following.rewards["answered"]) == (None, 1.0)
    assert Answered.outcomes[-1]["count"] == (1 if said == "die" else 2)
    async with playing(renderer, WorkerAgent(["python", str(program)], 1), [said], crash="infra") as player:
        lost = await play(player, "a")
    assert lost.error == f"InfraError: the agent crashed after 1 turn: {crash}"


async def test_a_crash_before_any_answer_is_infrastructure(renderer: Renderer, program: Path):
    class Early(Answered):
        def setup(self, early: bool = False, **row: Any) -> str:
            return super().setup(**row)

    async with playing(renderer, WorkerAgent(["python", str(program)], 1)) as player:
        player = AgentPlayer(
            *[Early if f == "make_env" else getattr(player, f) for f in player.__dataclass_fields__]
        )
        lost, following = await play(player, "a", early=True), await play(player, "b")
    assert (lost.error or "").startswith(
        "InfraError: the agent crashed after 0 turns: its worker ended: exit code 5"
    )
    assert following.error is None


async def test_an_episode_that_runs_out_of_time_takes_its_processes_with_it(
    renderer: Renderer, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    agent, left = WorkerAgent(["python", str(program)], 1), tmp_path / "pid"
    monkeypatch.setenv("LEFT", str(left))
    async with playing(renderer, agent, ["11", "sleep"], timeout_s=5.0) as player:
        await play(player, "a")
        late = await play(player, "b")
        async with asyncio.timeout(30):  # a killed process takes its time to end
            while _alive(int(left.read_text())):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not alive(Answered.outcomes[0]["pid"])
        following = await play(player, "c")
    assert late.stop_reason is StopReason.TIMEOUT
    assert (following.error, Answered.outcomes[-1]["task"], Answered.outcomes[-1]["count"]) == (None, "c", 1)


async def test_what_a_worker_leaves_in_other_groups_ends_with_it(
    renderer: Renderer, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    agent, left = WorkerAgent(["python", str(program)], 1), tmp_path / "pid"
    monkeypatch.setenv("LEFT", str(left))
    async with playing(renderer, agent, ["leave"]) as player:
        assert (await play(player, "a")).error is None
        assert _alive(int(left.read_text())), "a worker may keep something running between episodes"
    async with asyncio.timeout(30):  # a killed process takes its time to end
        while _alive(int(left.read_text())):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_worker_that_died_between_episodes_is_replaced(renderer: Renderer, program: Path):
    agent = WorkerAgent(["python", str(program)], 1)
    async with playing(renderer, agent) as player:
        await play(player, "a")
        os.kill(Answered.outcomes[0]["pid"], 9)
        while any(worker.alive for worker in agent._all):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert (await play(player, "b")).error is None
    assert [o["count"] for o in Answered.outcomes] == [1, 1]


ANSWERS_AHEAD = """
import json, sys, urllib.request
print(json.dumps({"ready": True}), flush=True)
known = []
for line in sys.stdin:
    given = json.loads(line)
    access = given["environment"]
    headers = {"Authorization": "Bearer " + access["OPENAI_API_KEY"], "Content-Type": "application/json"}
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "go"}]}).encode()
    request = urllib.request.Request(access["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    urllib.request.urlopen(request).read()
    for id in known:
        print(json.dumps({"id": id, "outcome": "of an earlier episode"}))
    print(json.dumps({"id": given["id"], "outcome": given["task"]["id"]}))
    known.append(given["id"])
    for id in range(50):
        print(json.dumps({"id": id, "outcome": "ahead of its episode"}))
    sys.stdout.flush()
"""


async def test_a_worker_cannot_answer_other_episodes_than_its_own(renderer: Renderer, tmp_path: Path):
    (tmp_path / "ahead.py").write_text(ANSWERS_AHEAD)
    Answered.outcomes = []
    async with playing(renderer, WorkerAgent(["python", str(tmp_path / "ahead.py")], 1)) as player:
        found = [await play(player, f"t{n}") for n in range(4)]
    assert [(episode.error, len(episode.turns)) for episode in found] == [(None, 1)] * 4
    assert Answered.outcomes == ["t0", "t1", "t2", "t3"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            [sys.executable, "-c", "import no_such_package"],
            "ended before it was ready: exit code 1: ModuleNotFoundError",
        ),
        ([sys.executable, "-c", "print(1)"], "ended before it was ready: exit code 0; a worker writes lines"),
        (["/nowhere/worker"], "cannot start the worker /nowhere/worker: No such file"),
    ],
)
async def test_a_worker_that_does_not_start_is_an_error_before_the_run(command: list[str], said: str):
    with pytest.raises(ConfigError, match=re.escape(said)) as found:
        async with WorkerAgent(command, 2).running():
            pass
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        ({"use": "agent.py:solve", "workers": 2}, "agent.workers has no effect"),
        ({"command": ["x"], "workers": 2, "sandbox": {}}, "each episode gets a new sandbox"),
        ({"command": ["x", "{prompt}"], "workers": 2}, "reads each task and its address from standard input"),
        ({"command": ["x", "--url={base_url}"], "workers": 2}, "the command has '--url={base_url}'"),
        ({"command": ["x"], "workers": 4, "max_running": 2}, "the others would never play"),
    ],
)
def test_a_setting_that_does_not_fit_is_an_error(agent: dict[str, Any], said: str):
    given = {"name": "t", "env": "agentrl.envs.calculator:Calculator", "model": {"tiny": {}}, "agent": agent}
    with pytest.raises(ConfigError, match=re.escape(said)):
        make_config(given, [], "t.yaml", check_paths=False)


def test_a_run_uses_them(tmp_path: Path, program: Path, capsys: pytest.CaptureFixture[str]):
    assert isinstance(make_agent(AgentConfig(command=["python", str(program)], workers=2)), WorkerAgent)
    (tmp_path / "run.yaml").write_text(
        "env: agentrl.envs.calculator:Calculator\nmodel: {tiny: {}}\nsteps: 1\n"
        "rollout: {groups_per_step: 1, group_size: 2, token_budget: 400, max_tokens: 8}\n"
        f"agent: {{command: [python, {program}], workers: 2}}\n"
    )
    with pytest.raises(SystemExit) as left:
        main(["train", str(tmp_path / "run.yaml"), "--run-dir", str(tmp_path / "run")])
    assert left.value.code == 0, capsys.readouterr().err
