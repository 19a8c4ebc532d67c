"""OpenEnv servers, made with the `openenv` package in a Python of its own (its pins exclude ours)."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.env.load import load_env
from agentrl.env.play import Policy, RandomPolicy, ScriptedPolicy, call, play
from agentrl.envs.others.openenv import _actions_of, read_step
from agentrl.errors import ConfigError, InfraError
from agentrl.ports import reserved_port
from agentrl.testing import check_env
from agentrl.trainer.rewardless import no_reward
from agentrl.types import Episode, Message, Task

HERE = Path(__file__).parent
PYTHON = Path(os.environ.get("AGENTRL_OPENENV_PYTHON", f"{sys.prefix}/openenv/bin/python"))
needs_openenv = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"no Python with openenv at {PYTHON}: make {PYTHON.parents[1]}/.done"
)


def openenv(url: str, **options: Any) -> Any:
    """The class for `openenv:URL`, loaded as a run does."""
    return load_env(f"openenv:{url}", options)


def start(kind: str, sessions: int = 64) -> tuple[subprocess.Popen[bytes], str]:
    with reserved_port() as port:
        command = [PYTHON, HERE / "openenv_server.py", kind, str(port), str(sessions)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):
            try:
                httpx.get(f"{url}/health")
                return process, url
            except httpx.HTTPError:
                time.sleep(0.1)
    process.kill()
    raise TimeoutError("the server does not start")


def serving(kind: str, sessions: int = 64) -> Iterator[str]:
    process, url = start(kind, sessions)
    yield url
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def guess() -> Iterator[str]:
    yield from serving("guess")


@pytest.fixture(scope="module")
def ledger() -> Iterator[str]:
    yield from serving("ledger")


def bisect(messages: Sequence[Message]) -> Message:
    low, high = 0, 20
    guessed = [m.tool_calls[0].arguments.get("number") for m in messages if m.tool_calls]
    for number, answer in zip(guessed, [m.content for m in messages if m.role == "tool"], strict=False):
        if answer in ("Too low.", "Too high."):
            low, high = (number + 1, high) if answer == "Too low." else (low, number - 1)
    return call("act", number=(low + high) // 2)


def balance(messages: Sequence[Message]) -> Message:
    opening = json.loads(str(messages[1].content))
    return call("add", amount=opening["target"] - opening["balance"])


def mixed(tools: Sequence[Any], oracle: Policy, seed: int) -> Policy:
    """An oracle, a random policy, or one that errs now and then."""
    if seed % 3 == 0:
        return oracle
    at_random = RandomPolicy(tools, seed, answer_share=0.05)
    rng = random.Random(seed)
    return at_random if seed % 3 == 1 else lambda m: oracle(m) if rng.random() < 0.7 else call("act", number="x")


async def episodes(
    url: str, tasks: Sequence[Task], policy: Callable[[Sequence[Any], int], Policy], width: int = 64
) -> list[Episode]:
    turns = asyncio.Semaphore(width)

    async def one(number: int, task: Task) -> Episode:
        async with turns:
            env = openenv(url)()
            tools: list[Any] = []

            def act(messages: Sequence[Message]) -> Any:
                if not tools:
                    tools.extend(env.tools)
                    act.policy = policy(tools, number)  # type: ignore[attr-defined]
                return act.policy(messages)  # type: ignore[attr-defined]

            return await play(env, task, act, max_turns=12)

    return await asyncio.gather(*[one(i, task) for i, task in enumerate(tasks)])


def as_actions(episode: Episode, *, mcp: bool) -> tuple[dict[str, Any], list[Any]]:
    records = [record for turn in episode.turns for record in turn.calls]
    actions = [dict(r.call.arguments) for r in records if r.outcome not in ("invalid_args", "unknown_tool")]
    if mcp:
        names = [r.call.name for r in records if r.outcome not in ("invalid_args", "unknown_tool")]
        actions = [
            {"type": "call_tool", "tool_name": name, "arguments": arguments}
            for name, arguments in zip(names, actions, strict=True)
        ]
    return {"seed": episode.task.seed, **episode.task.row}, actions


def own_rewards(url: str, played: Sequence[Episode], *, mcp: bool = False) -> list[float]:
    asked = json.dumps([as_actions(episode, mcp=mcp) for episode in played])
    answer = subprocess.run(
        [PYTHON, HERE / "openenv_client.py", url], input=asked, capture_output=True, text=True, check=True
    )
    return [reward for reward, _ in json.loads(answer.stdout)]


@needs_openenv
async def test_a_typed_action_is_a_tool_with_the_fields_of_the_schema(guess: str):
    (tool,) = openenv(guess)().tools
    assert tool["function"]["name"] == "act"
    assert tool["function"]["description"] == "Guess the number."
    assert list(tool["function"]["parameters"]["properties"]) == ["number", "crash"]
    assert tool["function"]["parameters"]["required"] == ["number"]


@needs_openenv
@pytest.mark.slow
async def test_200_episodes_earn_what_the_own_client_reads(guess: str):
    tasks = [Task(f"t{i}", {}, seed=i) for i in range(200)]
    played = await episodes(guess, tasks, lambda tools, i: mixed(tools, bisect, i))
    assert [e.reward for e in played] == pytest.approx(own_rewards(guess, played))
    assert all(e.reward > 0.5 for e in played[::3]), "the oracle finds every number"
    assert len({e.reward for e in played}) > 5


@needs_openenv
@pytest.mark.slow
async def test_64_episodes_of_an_mcp_environment_earn_what_the_own_client_reads(ledger: str):
    tasks = [Task(f"t{i}", {}, seed=i) for i in range(64)]
    played = await episodes(ledger, tasks, lambda tools, i: mixed(tools, balance, i))
    assert [e.reward for e in played] == pytest.approx(own_rewards(ledger, played, mcp=True))
    assert [e.reward for e in played[::3]] == [1.0] * 22
    assert {tool["function"]["name"] for tool in played[0].tools} == {"add", "fail"}
    assert 0.0 in {e.reward for e in played}


@needs_openenv
@pytest.mark.slow
async def test_the_checker_accepts_both_kinds(guess: str, ledger: str):
    tasks = openenv(guess).tasks("train")
    await check_env(lambda: openenv(guess)(), tasks, reward_range=(-0.8, 1.0))
    seeds = openenv(ledger).tasks("train")
    await check_env(lambda: openenv(ledger)(), seeds, oracle=lambda task: balance)


@needs_openenv
async def test_tasks_come_from_the_task_api(guess: str, ledger: str):
    train, held_out = openenv(guess).tasks("train"), openenv(guess).tasks("held_out")
    assert (len(train), len(held_out)) == (40, 7)
    assert held_out[6].row == {"split": "test", "index": 6}
    episode = await play(openenv(guess)(), train[30], ScriptedPolicy([call("act", number=9)]))
    assert episode.reward == 1.0, "task 30 has the number 30 % 21"
    assert len(openenv(ledger).tasks("train", size=5)) == 5, "seeds, without the Task API"


@needs_openenv
async def test_bad_actions_are_observations(guess: str, ledger: str):
    script = [
        call("act", number="three"),
        call("act", number=99),
        call("act", number=3, crash="error"),
        call("guess", number=3),
    ]
    episode = await play(openenv(guess)(), Task("t", {}, seed=1), ScriptedPolicy(script))
    seen = [str(m.content) for m in episode.messages if m.role == "tool"]
    assert "invalid arguments" in seen[0]
    assert "at most 20" in seen[1]
    assert seen[2] == "Error: the dice fell off the table"
    assert "unknown tool" in seen[3]
    assert episode.error is None

    failed = await play(openenv(ledger)(), Task("t", {}, seed=1), ScriptedPolicy([call("fail")]))
    assert "no such account" in str(failed.messages[3].content)


@needs_openenv
async def test_a_task_that_is_done_after_reset_is_infrastructure(guess: str):
    env = openenv(guess)()
    with pytest.raises(InfraError, match=r"task 't' is already done after reset"):
        await play(env, Task("t", {"over": True}), ScriptedPolicy([]))
    await env.close()


@needs_openenv
async def test_an_action_that_ends_the_session_is_an_observation(guess: str):
    policy = ScriptedPolicy([call("act", number=1, crash="x" * 17_000_000), call("act", number=9)])
    episode = await play(openenv(guess)(), Task("t", {"split": "train", "index": 9}), policy)
    seen = [str(m.content) for m in episode.messages if m.role == "tool"]
    assert seen == ["Error: the server ended the session during an action and takes no more actions"] * 2
    assert (episode.reward, episode.error) == (0.0, None)


@needs_openenv
async def test_a_server_that_goes_down_is_infrastructure():
    process, url = start("guess")
    try:
        with pytest.raises(InfraError, match="the connection was lost in step"):
            await play(openenv(url)(), Task("t"), ScriptedPolicy([call("act", number=1, crash="exit")]))
        with pytest.raises(InfraError, match="openenv: ws://"):
            await play(openenv(url)(), Task("t"), ScriptedPolicy([]))
    finally:
        process.kill()
        process.wait()


@needs_openenv
async def test_a_server_that_hangs_is_infrastructure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("agentrl.envs.others.openenv_session.PROBE_S", 0.5)
    process, url = start("guess")
    try:
        env = openenv(url)
        env.settings = replace(env.settings, tool_timeout_s=0.5)

        def act(messages: Sequence[Message]) -> Message:
            process.send_signal(signal.SIGSTOP)
            return call("act", number=1)

        with pytest.raises(InfraError, match=r"step: no result after 0\.5 s, and the server is down"):
            await play(env(), Task("t"), act)
    finally:
        process.kill()
        process.wait()


@needs_openenv
async def test_sessions_wait_for_a_free_one():
    process, url = start("guess", sessions=2)
    try:
        tasks = [Task(f"t{i}", {}, seed=i) for i in range(12)]
        played = await episodes(url, tasks, lambda tools, i: bisect, width=12)
        assert all(e.reward > 0.5 for e in played)
        held = [openenv(url)() for _ in range(2)]
        for env in held:
            await env.reset(Task("t"))
        with pytest.raises(InfraError, match="no free session after"):
            await openenv(url, connect_timeout_s=0.3)().reset(Task("t"))
        for env in held:
            await env.close()
    finally:
        process.kill()
        process.wait()


def test_no_server_is_one_clear_line():
    with pytest.raises(ConfigError, match="is an OpenEnv server running there"), reserved_port() as silent:
        _ = openenv(f"http://127.0.0.1:{silent}")().tools
    with pytest.raises(ConfigError, match="not an http or https URL"):
        openenv("localhost")()
    with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
        openenv("http://127.0.0.1:1", api_key_env="NO_SUCH_KEY")()


def test_a_union_of_actions_is_one_tool_for_each():
    def shape(title: str, kind: str | None, field: str) -> dict[str, Any]:
        fields = {field: {"type": "integer"}, "metadata": {"type": "object"}}
        constant = {"kind": {"const": kind}} if kind else {}
        return {"title": title, "type": "object", "properties": {**constant, **fields}, "required": [field]}

    schema: Any = {
        "$defs": {"A": shape("MoveAction", "move", "x"), "B": shape("SendMailAction", None, "y")},
        "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
    }
    move, mail = _actions_of(schema) or ()
    assert (move.name, mail.name) == ("move", "send_mail")
    assert move.action({"x": 1}) == {"kind": "move", "x": 1}
    assert list(mail.parameters["properties"]) == ["y"]


def test_a_failed_tool_that_ends_the_episode_keeps_its_reward():
    ended = read_step(
        {"observation": {"tool_name": "a", "error": {"message": "boom"}}, "reward": -1, "done": True}
    )
    assert (ended.content, ended.reward, ended.stop) == ("Error: boom", -1.0, True)
    with pytest.raises(InfraError, match="not a number"):
        read_step({"observation": {}, "reward": "much", "done": False})


def test_the_wait_for_a_session_is_not_cut_by_the_limit_of_setup():
    assert openenv("http://127.0.0.1:1", connect_timeout_s=600.0).settings.setup_timeout_s > 600
    assert openenv("http://127.0.0.1:1").settings.setup_timeout_s == 120


def test_rewards_of_the_server_are_not_declared_and_may_be_rare(monkeypatch):
    monkeypatch.setattr("agentrl.envs.others.openenv._typed_actions", lambda server: ())
    env = openenv("http://127.0.0.1:1")()
    assert env.declared_rewards() is None
    assert "gave every episode the reward 0" in no_reward(env, [])
