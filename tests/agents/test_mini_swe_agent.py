"""The example with mini-swe-agent from PyPI, in its sandbox: it solves tasks of the `files` env, and it trains."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from agentrl.agents.boxed import BoxedAgent, box_spec
from agentrl.agents.player import AgentPlayer
from agentrl.agents.recorder import Recorder
from agentrl.chat.template import Renderer
from agentrl.env.load import load_env
from agentrl.envs.files.project import build
from agentrl.models.tiny import make_tokenizer
from agentrl.reporting.report import Silent
from agentrl.rollout.limits import EpisodeLimits
from agentrl.run_folder.records import read_episodes
from agentrl.run_folder.store import RunStore
from agentrl.sandbox import close_pools
from agentrl.serve.listen import running
from agentrl.testing.engine import ScriptedEngine
from agentrl.testing.policy import say
from agentrl.trainer.run import train_run
from agentrl.types import Episode, Message, StopReason, Task
from bench.mini_swe_agent import EXAMPLE, configured, installed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with mini-swe-agent."""
    folder = tmp_path_factory.mktemp("agents")
    for place in folder.parents[:2]:
        place.chmod(0o755)
    try:
        return installed(folder)
    except subprocess.CalledProcessError as e:
        pytest.skip(f"mini-swe-agent could not be installed: {e}")


async def play(agents: Path, folder: Path, task: Task, script: Sequence[Message]) -> Episode:
    """One episode of the agent in its sandbox, with a policy that says what is in `script`."""
    env = load_env(f"{EXAMPLE}/env.py:Chores")
    make_tokenizer(folder, ["sed -i s/compute_price/adjust_stock/g app/*.py"] * 20, vocab=400, max_context=4096)
    renderer, limits = Renderer.from_directory(folder), EpisodeLimits(token_budget=4096, timeout_s=200.0)
    options = configured(agents).agent
    assert options is not None
    recorder = Recorder(ScriptedEngine(renderer, script, tools=env().tools), renderer, limits)
    agent = BoxedAgent(options.command, box_spec(options.sandbox or {}, 200.0), recorder.app())
    async with running(recorder.app()) as address:
        player = AgentPlayer(recorder, address, agent, env, 1.0, asyncio.Semaphore(1))
        found = await player.play(task, episode_id="e", seed=1)
    await close_pools()
    return found


async def test_it_solves_what_the_oracle_solves_with_the_tokens_of_the_built_in_loop(agents: Path, tmp_path: Path):
    env = load_env(f"{EXAMPLE}/env.py:Chores")
    task = env.tasks("held_out", size=1)[0]
    policy = env.oracle(task)
    found = await play(agents, tmp_path, task, [policy([]), policy([])])
    assert (found.error, found.reward, found.solved) == (None, 1.0, True)
    assert found.stop_reason is StopReason.TERMINATED
    assert found.tools == tuple(env().tools), "what the cold start shows is what the agent sends"
    assert found.metrics.get("agent/crashed") is None


@pytest.mark.parametrize(("careful", "right"), [(1.0, True), (0.0, False)])
async def test_it_plays_like_the_demonstrations(agents: Path, tmp_path: Path, careful: float, right: bool):
    env = load_env(f"{EXAMPLE}/env.py:Chores")
    (shown,) = env.demonstrations(7, 1, careful=careful)
    (task,) = env.tasks("train", 7, size=1)
    found = await play(agents, tmp_path, task, [shown[2], shown[4]])
    assert (found.error, found.reward, found.solved) == (None, float(right), right)
    assert [(m.role, m.content) for m in found.messages[:4]] == [(m.role, m.content) for m in shown[:4]]


def test_a_share_of_the_demonstrations_is_right():
    env = load_env(f"{EXAMPLE}/env.py:Chores")
    shown = env.demonstrations(0, 300, careful=0.3)
    right = [episode[2].tool_calls[0].arguments["command"].endswith("/g app/*.py") for episode in shown]
    assert len(shown) == 300
    assert 60 < sum(right) < 120
    assert {build(task.row["project"]).kind for task in env.tasks("held_out", size=64)} == {"rename"}


async def test_an_agent_that_does_not_submit_has_not_solved_it(agents: Path, tmp_path: Path):
    env = load_env(f"{EXAMPLE}/env.py:Chores")
    task = env.tasks("held_out", size=1)[0]
    found = await play(agents, tmp_path, task, [env.oracle(task)([]), say("Done."), say("Done.")])
    assert (found.error, found.reward, found.solved, len(found.turns)) == (None, 0.0, False, 3)
    assert found.metrics.get("agent/crashed") is None


def test_it_trains(agents: Path, tmp_path: Path):
    warmup = {"num": 24, "max_epochs": 2, "anneal_epochs": 0, "probe_tasks": 1, "probe_samples": 2}
    warmup |= {"at_least": 0.0}
    rollout = {"groups_per_step": 2, "group_size": 2}
    config = configured(
        agents,
        steps=2,
        warmup=warmup,
        rollout=rollout,
        eval={"tasks": 1, "before_training": False},
        model={"tiny": {"hidden": 64, "heads": 2}},
    )
    with RunStore.open(config, tmp_path / "run") as store:
        summary = train_run(config, store, Silent())
        lines = store.metrics()[1:]
    assert (summary.episodes, summary.infra_failures) == (8, 0)
    assert sum(line.get("env/agent/forks") or 0.0 for line in lines) == 0
    assert max(line["drift/mean_abs"] for line in lines if line["trained_tokens"]) < 1e-4
    episodes = [episode for step in (1, 2) for episode in read_episodes(tmp_path / "run", step)]
    for episode in episodes:  # the agent leaves a turn without a call out of its history, which begins a branch
        begun = [turn.branch for turn in episode.turns if turn.branch is not None]
        assert set(begun) <= {"opening", "rewind"}
        assert len([s for s in episode.segments if s.parent == -1]) == 1 + begun.count("opening")
