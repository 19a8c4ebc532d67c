"""NeMo Gym's protocol: a loopback server that follows it, and the real package where a Python has it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentrl.env.load import load_env
from agentrl.env.play import Policy, RandomPolicy, ScriptedPolicy, call, play, say
from agentrl.envs.others.nemo_gym import NemoGym, read_input, read_rewards, responses_object
from agentrl.errors import ConfigError, InfraError, RewardError
from agentrl.ports import reserved_port
from agentrl.serve.listen import running
from agentrl.testing import check_env
from agentrl.types import Episode, Message, Task, ToolCall

PYTHON = Path(os.environ.get("AGENTRL_NEMO_GYM_PYTHON", f"{sys.prefix}/nemo_gym/bin/python"))
needs_nemo_gym = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"no Python with nemo-gym at {PYTHON}: make {PYTHON.parents[1]}/.done"
)


def nemo_gym(url: str) -> Any:
    """The class for `nemo_gym:URL`, loaded as a run does."""
    return load_env(f"nemo_gym:{url}")


def function(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "name": name, "description": "", "strict": True, "parameters": parameters}


def counter_row(number: int) -> dict[str, Any]:
    """A row of NeMo Gym's example of session state."""
    first, added = number % 7, number % 5 + 1
    tools = [function("increment_counter", count={"type": "integer"}), function("get_counter_value")]
    asked = [{"role": "user", "content": f"add {added}"}]
    return {
        "responses_create_params": {"input": asked, "tools": tools},
        "initial_count": first,
        "expected_count": first + added,
    }


def counter_tasks(num: int) -> list[Task]:
    return [Task(f"counter-{i}", counter_row(i), seed=i) for i in range(num)]


def counter_oracle(task: Task) -> Policy:
    added = task.row["expected_count"] - task.row["initial_count"]
    return ScriptedPolicy([call("increment_counter", count=added), call("get_counter_value")])


def counter_policy(task: Task, number: int) -> Policy:
    if number % 3 == 0:
        return counter_oracle(task)
    tools = [{"type": "function", "function": tool} for tool in task.row["responses_create_params"]["tools"]]
    if number % 3 == 1:
        return RandomPolicy(tools, number)
    rng = random.Random(number)
    counts: Sequence[Any] = [rng.choice([1, 2, "two", 3.5]) for _ in range(3)]
    return ScriptedPolicy([call("increment_counter", count=count) for count in counts])


def counter_reward(episode: Episode) -> float:
    """What the example's scorer says, from the calls that its schema accepts."""
    records = [record for turn in episode.turns for record in turn.calls]
    added = [r.call.arguments.get("count") for r in records if r.call.name == "increment_counter"]
    total = episode.task.row["initial_count"] + sum(count for count in added if isinstance(count, int))
    return float(total == episode.task.row["expected_count"])


def loopback() -> Starlette:
    """The session-state example by its protocol, with faults on request."""
    counters: dict[str, int] = {}
    busy = {"busy": 1, "gone": 1000}

    async def seed(request: Request) -> Response:
        row = await request.json()
        if row.get("fault") == "seed":
            return JSONResponse({"detail": "out of memory"}, 500)
        if row.get("fault") == "moved":
            return Response(status_code=307, headers={"location": "/elsewhere/seed_session"})
        session = uuid4().hex
        counters[session] = row["initial_count"]
        answer = JSONResponse({"mcp": {"url_path": "/mcp"}} if row.get("fault") == "mcp" else {})
        answer.set_cookie("session", session)
        return answer

    async def increment(request: Request) -> Response:
        count = (await request.json()).get("count")
        if not isinstance(count, int):
            return JSONResponse({"detail": [{"loc": ["body", "count"], "msg": "not an integer"}]}, 422)
        counters[request.cookies["session"]] += count
        return JSONResponse({"success": True})

    async def value(request: Request) -> Response:
        return JSONResponse({"count": counters[request.cookies["session"]]})

    async def verify(request: Request) -> Response:
        body = await request.json()
        output = body["response"]["output"]
        for item in output:
            if item["type"] == "function_call":
                json.loads(item["arguments"])
            if item["type"] == "function_call_output" and not isinstance(item["call_id"], str):
                return JSONResponse({"detail": "call_id"}, 422)
            if item["type"] == "message" and item["role"] == "user" and not isinstance(item["content"], str):
                return JSONResponse({"detail": "content"}, 422)
        if busy.get(body.get("fault"), 0):
            busy[body["fault"]] -= 1
            return Response("later", 503)
        if body.get("fault") == "verify":
            return JSONResponse("KeyError('answer')", 500)
        reward = float(counters[request.cookies["session"]] == body["expected_count"])
        parts = {"right": reward, "brief": 0.5 * (len(output) < 4)}
        more = {"reward_components": parts, "reward": sum(parts.values())} if body.get("parts") else {}
        return JSONResponse({**body, "reward": reward, "mask_sample": body.get("fault") == "mask", **more})

    paths = {
        "get-counter-value": value,
        "seed_session": seed,
        "increment_counter": increment,
        "get_counter_value": value,
        "verify": verify,
    }
    return Starlette(routes=[Route(f"/{name}", serve, methods=["POST"]) for name, serve in paths.items()])


@pytest.fixture
async def server() -> AsyncIterator[str]:
    async with running(loopback(), host="127.0.0.1", port=0) as url:
        yield url


async def episodes(url: str, tasks: Sequence[Task], width: int = 64) -> list[Episode]:
    turns = asyncio.Semaphore(width)

    async def one(number: int, task: Task) -> Episode:
        async with turns:
            return await play(nemo_gym(url)(), task, counter_policy(task, number), max_turns=6)

    return await asyncio.gather(*[one(i, task) for i, task in enumerate(tasks)])


async def test_200_episodes_keep_their_sessions_apart(server: str):
    played = await episodes(server, counter_tasks(200))
    assert [e.reward for e in played] == [counter_reward(e) for e in played]
    assert [e.reward for e in played[::3]] == [1.0] * 67
    assert {e.reward for e in played} == {0.0, 1.0}


async def test_the_checker_accepts_it(server: str):
    await check_env(lambda: nemo_gym(server)(), counter_tasks(8), oracle=counter_oracle)


async def test_the_server_checks_arguments_and_its_answer_is_the_observation(server: str):
    script = [call("increment_counter", count="two"), call("verify"), call("../verify")]
    episode = await play(nemo_gym(server)(), counter_tasks(1)[0], ScriptedPolicy(script))
    seen = [str(m.content) for m in episode.messages if m.role == "tool"]
    assert "not an integer" in seen[0]
    assert all("unknown tool" in text for text in seen[1:]), "only the row's tools can be called"


async def test_parts_that_add_up_are_the_rewards(server: str):
    task = Task("t", {**counter_row(3), "parts": True})
    episode = await play(nemo_gym(server)(), task, ScriptedPolicy([call("increment_counter", count=4)]))
    assert sorted(episode.rewards.values()) == [0.5, 1.0] or episode.reward == 1.5
    assert any("brief" in name for name in episode.rewards)


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        ("seed", InfraError, "out of memory"),
        ("mask", InfraError, "mask_sample"),
        ("verify", RewardError, "KeyError"),
        ("mcp", ConfigError, "over MCP"),
        ("gone", InfraError, "/verify: 503: later"),
        ("moved", ConfigError, "/seed_session: 307, a redirect to /elsewhere/seed_session"),
    ],
)
async def test_faults_of_the_server(
    server: str, fault: str, error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("agentrl.envs.others.nemo_gym.WAITS_S", (0.0, 0.0))
    with pytest.raises(error, match=text):
        await play(nemo_gym(server)(), Task("t", {**counter_row(3), "fault": fault}), ScriptedPolicy([]))


async def test_a_busy_verifier_is_asked_again(server: str):
    task = Task("t", {**counter_row(3), "fault": "busy"})
    assert (await play(nemo_gym(server)(), task, counter_oracle(task))).reward == 1.0


def recovered(row: Mapping[str, Any]) -> Policy:
    """An oracle whose first call cannot be parsed."""
    added = row["expected_count"] - row["initial_count"]
    unread = Message("assistant", parse_errors=("tool call 0: the arguments are not JSON",))
    return ScriptedPolicy([unread, call("increment_counter", count=added), "done"])


async def test_an_episode_with_a_call_that_cannot_be_parsed_earns_the_servers_reward(server: str):
    (task,) = counter_tasks(1)
    assert (await play(nemo_gym(server)(), task, recovered(task.row))).reward == 1.0


async def test_names_of_tools(server: str):
    def named(name: str) -> Task:
        row = counter_row(0)
        row["responses_create_params"]["tools"].append(function(name))
        return Task("t", row)

    script = ScriptedPolicy([call("get-counter-value")])
    episode = await play(nemo_gym(server)(), named("get-counter-value"), script)
    assert [m.content for m in episode.messages if m.role == "tool"] == ['{"count":0}']
    for name, why in (("fs.read", "only letters, digits, _ and -"), ("verify", "a path of NeMo Gym's protocol")):
        with pytest.raises(ConfigError, match=f"tool '{name}': .*{why}"):
            await play(nemo_gym(server)(), named(name), ScriptedPolicy([]))


async def test_a_connection_that_the_server_may_be_closing_is_not_used_again():
    """Servers close connections that were idle for some seconds, which a policy needs for one turn."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        await reader.readexactly(int(length.group(1)) if length else 0)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await reader.read(1)  # another request on this connection, which is lost, or its end
        writer.close()

    started = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with started:
        env = nemo_gym(f"http://127.0.0.1:{started.sockets[0].getsockname()[1]}")()
        await env.reset(counter_tasks(1)[0])
        await asyncio.sleep(2.6)
        observation, *_ = await env.step(
            Message("assistant", tool_calls=(ToolCall("a", "get_counter_value", {}),))
        )
        assert observation[0].content == "{}"
        await env.close()


async def unsteady(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server that loses the connection where a path or a row says so, hangs, or is busy."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head.lower())
            body = await reader.readexactly(int(length.group(1)) if length else 0)
            path = head.split()[1]
            if path == b"/crash" or (path == b"/verify" and b"crash!" in body):
                break
            if path == b"/hang":
                await reader.read(1)  # until the client gives up
                break
            status = {b"/busy": b"503 Busy", b"/proxy": b"502 Bad Gateway"}.get(path, b"200 OK")
            answer = {b"/verify": b'{"reward": 1.0}', b"/seed_session": b"{}"}.get(path, b"later")
            writer.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(answer), answer))
    writer.close()


@pytest.fixture
async def shaky(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    monkeypatch.setattr("agentrl.envs.others.nemo_gym.WAITS_S", (0.0, 0.0))
    async with await asyncio.start_server(unsteady, "127.0.0.1", 0) as started:
        yield f"http://127.0.0.1:{started.sockets[0].getsockname()[1]}"


def row_of(*tools: str) -> Task:
    params = {"input": "Go.", "tools": [function(name) for name in tools]}
    return Task("t", {"responses_create_params": params})


@pytest.mark.parametrize(
    ("tool", "seen"),
    [
        ("crash", "the connection to the tool server was lost during the call"),
        ("hang", "hang timed out: no result after 0.5 s"),
        ("proxy", "later"),
    ],
)
async def test_a_call_that_the_server_does_not_survive_is_an_observation(shaky: str, tool: str, seen: str):
    env = nemo_gym(shaky)
    env.settings = replace(env.settings, tool_timeout_s=0.5)
    episode = await play(env(), row_of(tool, "other"), ScriptedPolicy([call(tool), call("other")]))
    assert next(str(m.content) for m in episode.messages if m.role == "tool").endswith(seen)
    assert episode.reward == 1.0


async def test_a_server_that_stays_busy_is_infrastructure(shaky: str):
    with pytest.raises(InfraError, match="/busy: 503: later"):
        await play(nemo_gym(shaky)(), row_of("busy"), ScriptedPolicy([call("busy")]))


async def test_an_episode_that_its_verifier_does_not_survive_earns_nothing(shaky: str):
    with pytest.raises(RewardError, match="/verify: RemoteProtocolError"):
        await play(nemo_gym(shaky)(), row_of("other"), ScriptedPolicy([say("crash!")]))


@pytest.mark.parametrize("tool", ["other", ""])
async def test_a_request_that_nobody_took_is_not_the_policys_doing(tool: str, monkeypatch: pytest.MonkeyPatch):
    """The server goes down before the request, and is up again when it is looked for."""
    monkeypatch.setattr("agentrl.envs.others.nemo_gym.WAITS_S", (0.0, 0.0))

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        await reader.readexactly(int(length.group(1)) if length else 0)
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}")
        writer.close()

    started = await asyncio.start_server(once, "127.0.0.1", 0)
    port = started.sockets[0].getsockname()[1]
    check_up = NemoGym._check_up

    async def up_again(env: NemoGym, problem: str) -> None:
        async with await asyncio.start_server(once, "127.0.0.1", port):
            await check_up(env, problem)

    def act(messages: Sequence[Message]) -> Message:
        started.close()
        return call(tool) if tool else say("done")

    monkeypatch.setattr(NemoGym, "_check_up", up_again)
    with pytest.raises(InfraError, match=f"/{tool or 'verify'}: ConnectError"):
        await play(nemo_gym(f"http://127.0.0.1:{port}")(), row_of("other"), act)


async def test_a_server_that_is_gone_is_infrastructure():
    async with running(loopback(), host="127.0.0.1", port=0) as url:
        env = nemo_gym(url)()
        await env.reset(counter_tasks(1)[0])
    with pytest.raises(InfraError, match="get_counter_value"):
        await env.step(Message("assistant", tool_calls=(ToolCall("a", "get_counter_value", {}),)))
    await env.close()
    with pytest.raises(InfraError, match="seed_session"):
        await env.reset(counter_tasks(1)[0])
    await env.close()


def test_messages_and_the_responses_object():
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"role": "user", "content": "Hi"},
        {"type": "function_call", "call_id": "c0", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "c0", "output": "2"},
    ]
    opening = read_input({"instructions": "Help.", "input": items}, "t")
    assert [m.role for m in opening] == ["system", "system", "user", "assistant", "tool"]
    assert opening[3].tool_calls[0].arguments == {"x": 1}
    said = [
        Message("assistant", "Well.", (ToolCall("c1", "f", {"x": 2}),)),
        Message("tool", "3", tool_call_id="c1"),
    ]
    output: Any = responses_object(said, {}, "e")["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "function_call_output"]
    assert json.loads(output[1]["arguments"]) == {"x": 2}
    for bad, text in (({"input": []}, "empty"), ({"input": [{"type": "image"}]}, "cannot read")):
        with pytest.raises(ConfigError, match=text):
            read_input(bad, "t")


def test_rewards_and_addresses_are_checked():
    assert read_rewards({"reward": 1.0, "reward_components": {"a": 0.2}}) == {"reward": 1.0}
    for bad in ({}, {"reward": "1"}, {"reward": float("nan")}):
        with pytest.raises(ValueError, match="returned the reward"):
            read_rewards(dict[str, object](bad))
    with pytest.raises(ConfigError, match="not an http or https URL"):
        nemo_gym("localhost:80")()


def serving(kind: str) -> Iterator[str]:
    with reserved_port() as port:
        command = [PYTHON, Path(__file__).parent / "nemo_gym_server.py", kind, str(port)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            for _ in range(1200):
                try:
                    httpx.get(f"http://127.0.0.1:{port}/docs")
                    break
                except httpx.HTTPError:
                    time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


@needs_nemo_gym
@pytest.mark.slow
async def test_200_episodes_of_the_packages_own_example():
    for url in serving("counter"):
        (task,) = counter_tasks(1)
        assert (await play(nemo_gym(url)(), task, recovered(task.row))).reward == 1.0
        played = await episodes(url, counter_tasks(200))
        assert [e.reward for e in played] == [counter_reward(e) for e in played]
        assert [e.reward for e in played[::3]] == [1.0] * 67


@needs_nemo_gym
@pytest.mark.slow
async def test_parts_of_the_packages_own_example():
    row: Mapping[str, Any] = {
        "responses_create_params": {
            "input": "Weather in Rome?",
            "tools": [function("weather", city={"type": "string"})],
        },
        "expected_call": {"name": "weather", "arguments": {"city": "Rome"}},
    }
    for url in serving("parts"):
        right = await play(
            nemo_gym(url)(), Task("t", row), ScriptedPolicy([call("weather", city="Rome")], otherwise="")
        )
        assert (right.reward, len(right.rewards)) == (3.0, 3)
        wrong = await play(
            nemo_gym(url)(), Task("t", row), ScriptedPolicy([call("weather", city="Oslo"), say("Rain.")])
        )
        assert wrong.reward == 1.0


def test_its_timeout_is_not_cut_by_those_of_other_envs():
    env = load_env("nemo_gym:http://127.0.0.1:1", {"verify_timeout_s": 900.0})
    assert env.settings.setup_timeout_s > 900
    (verify,) = env.spec().rewards
    assert verify.mark.timeout_s > 5 * 900
    assert nemo_gym("http://127.0.0.1:1").settings.setup_timeout_s > 300
