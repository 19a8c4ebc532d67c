"""A taskset of verifiers, played by a Python that has it, against verifiers' own episodes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl.env.load import load_env
from agentrl.env.play import Policy, ScriptedPolicy, call, calls, play, say
from agentrl.envs.others.outside import PLAYERS
from agentrl.errors import ConfigError
from agentrl.testing import check_env
from agentrl.types import Message

PYTHON = Path(os.environ.get("AGENTRL_VERIFIERS_PYTHON", f"{sys.prefix}/verifiers/bin/python"))
FILE = Path(__file__).parent / "verifiers_sums.py"
needs_verifiers = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"no Python with verifiers at {PYTHON}: make {PYTHON.parents[1]}/.done"
)


def sums(**options: Any) -> Any:
    """The class for `verifiers:verifiers_sums`, loaded as a run does."""
    given = {"python": str(PYTHON), "path": str(FILE.parent), "held_out": "all", **options}
    return load_env("verifiers:verifiers_sums", given)


def policy(kind: str, tools: bool) -> Policy:
    """The policy of `verifiers_sums.said`."""
    found: dict[str, Any] = {}
    exec("def said" + FILE.read_text().split("def said")[1].split("async def own")[0], found)

    def speak(messages: Sequence[Message]) -> Message:
        question = next(str(m.content) for m in messages if m.role == "user")
        text, arguments = found["said"](kind, question, sum(m.role == "assistant" for m in messages), tools)
        return Message("assistant", text, call("calc_add", **arguments).tool_calls) if arguments else say(text)

    return speak


def own_rewards(num_tasks: int = 70) -> dict[str, Any]:
    """What verifiers alone says, by policy and task; it starts a process for each episode."""
    command = [str(PYTHON), str(FILE), str(PLAYERS), str(num_tasks)]
    return dict(json.loads(subprocess.run(command, capture_output=True, check=True).stdout))


@needs_verifiers
@pytest.mark.slow
async def test_rewards_equal_those_of_verifiers() -> None:
    env = sums(args={"tooled": True, "num_tasks": 8})  # bench/reach.py plays 210 episodes
    own = await asyncio.to_thread(own_rewards, 8)
    for kind in ("oracle", "random", "scripted"):
        episodes = await asyncio.gather(*[play(env(), t, policy(kind, True)) for t in env.tasks()])
        assert len(own[kind]) == len(episodes) == 8
        assert {e.task.id: dict(e.rewards) for e in episodes} == own[kind]
        if kind == "oracle":
            assert all(e.rewards["right"] == 1.0 and e.solved for e in episodes)


@needs_verifiers
async def test_check_env_passes_and_a_cut_off_episode_is_scored() -> None:
    env = sums(args={"tooled": True})
    await check_env(env, env.tasks()[:4], reward_range=(0.0, 2.0))
    episode = await play(env(), env.tasks()[1], ScriptedPolicy([call("calc_add", a=1, b=2)] * 9), max_turns=3)
    assert [t.observation[0].content for t in episode.turns] == ["3", "3", "3"]
    assert episode.rewards["sums"] == pytest.approx(0.075)
    stopped = await play(env(), env.tasks()[1], ScriptedPolicy([call("calc_add", a=1, b=2)] * 9))
    assert len(stopped.turns) == 5
    mistaken = [call("nothing"), Message("assistant", parse_errors=("not JSON",)), "4"]
    said = [str(m.content) for m in (await play(env(), env.tasks()[1], ScriptedPolicy(mistaken))).messages]
    assert any("unknown tool 'nothing'" in text for text in said)
    assert any("not JSON" in text for text in said)


@needs_verifiers
async def test_calls_are_denied_and_long_results_cut_as_by_the_null_harness() -> None:
    env = load_env("verifiers:verifiers_guarded", {"python": str(PYTHON), "path": str(FILE.parent)})
    script = [calls(("desk_erase", {}), ("desk_read", {})), "finished"]
    episode = await play(env(), env.tasks()[0], ScriptedPolicy(script))
    denied, read = (str(m.content) for m in episode.turns[0].observation)
    assert denied == "denied"
    assert episode.rewards == {"finished": 1.0}
    assert read.startswith("Warning: truncated output")
    assert 20_000 < len(read) < 21_000


@needs_verifiers
def test_servers_that_do_not_start_are_one_line() -> None:
    options = {"python": str(PYTHON), "path": str(FILE.parent), "args": {"desks": 2}}
    with pytest.raises(ConfigError, match=r"start its servers: ToolsetError: .*desk") as found:
        load_env("verifiers:verifiers_guarded", options)
    assert "\n" not in str(found.value)


@needs_verifiers
async def test_a_reward_that_raises_is_a_fault() -> None:
    env = sums()
    with pytest.raises(RuntimeError, match="no ruler"):
        await play(env(), env.tasks()[0], ScriptedPolicy(["crash"]))
    for said, fault in (("exit", "SystemExit"), ("bolt", "BaseException")):
        with pytest.raises(RuntimeError, match=f"{fault}: the end"):
            await play(env(), env.tasks()[0], ScriptedPolicy([said]))
    assert (await play(env(), env.tasks()[0], ScriptedPolicy(["0"]))).rewards["right"] == 1.0


@needs_verifiers
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"path": ""}, "taskset 'verifiers_sums' not found"),
        ({"path": "/nowhere"}, "no such folder: /nowhere"),
        ({"args": {"size": 3}}, "size"),
        ({"limit": 0}, "at least 1"),
        ({"harness": "null", "env": "best_of_n"}, "no effect with `env`"),
        ({"python": sys.executable}, "pip install 'verifiers>=0.4'"),
    ],
)
def test_a_wrong_name_or_option_is_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as found:
        sums(**options)
    assert "\n" not in str(found.value)
