"""Served envs, played by OpenEnv's own clients, an MCP client, and our adapter."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx
import mcp
import pytest
from websockets.asyncio.client import connect

from agentrl.chat.messages import write_message
from agentrl.cli import main
from agentrl.env import StepInfo, ToolEnv, reward, tool
from agentrl.env.load import load_env
from agentrl.env.play import RandomPolicy, ScriptedPolicy, call, calls, play
from agentrl.env.textenv import TextEnv
from agentrl.env_server.open_sessions import Sessions
from agentrl.env_server.serve import env_name, serving_env
from agentrl.env_server.served import EnvSource
from agentrl.env_server.session import EnvSession
from agentrl.errors import InfraError
from agentrl.types import Episode, Image, Message, Task
from tests.envs.test_openenv import PYTHON, needs_openenv

HERE = __file__.rpartition("/")[0]
NAMES = {
    "calculator": "agentrl.envs.calculator:Calculator",
    "sqlite": "agentrl.envs.sqlite:Sqlite",
    "retail": "agentrl.envs.retail:Retail",
}
TURNS = 12


def source_of(name: str, **more: Any) -> EnvSource:
    env: Any = load_env(NAMES[name])
    splits = {"train": env.tasks("train", 0), "test": env.tasks("held_out", 0)}
    return EnvSource(name, env, splits, TURNS, **more)


async def run(script: str, *arguments: object, text: str = "") -> Any:
    """The JSON that a script prints, run by the Python with `openenv`."""
    pipe = asyncio.subprocess.PIPE
    command = [str(PYTHON), f"{HERE}/{script}", *map(str, arguments)]
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    out, err = await process.communicate(text.encode())
    assert process.returncode == 0, err.decode()[-2000:]
    return json.loads(out)


async def played(name: str, num: int) -> Sequence[Episode]:
    """Episodes of the env itself: oracle, random policy, and an oracle that gives up half-way."""
    env_class: Any = load_env(NAMES[name])
    tasks, found = env_class.tasks("train", 0), []
    for i in range(num):
        env = env_class()
        oracle = env_class.oracle(tasks[i])
        policy = RandomPolicy(lambda env=env: env.tools, i, answer_share=0.1) if i % 3 == 1 else oracle
        found.append(await play(env, tasks[i], policy, max_turns=1 if i % 3 == 2 else TURNS))
    return found


def as_actions(episode: Episode) -> list[dict[str, Any]]:
    """The episode's messages as actions: a call, a message, or the end."""
    actions: list[dict[str, Any]] = []
    for number, turn in enumerate(episode.turns):
        wanted = turn.message.tool_calls
        if len(wanted) == 1 and number % 2 == 0:
            actions.append({"type": "call_tool", "tool_name": wanted[0].name, "arguments": wanted[0].arguments})
        else:
            sent = write_message(turn.message)
            actions.append({"type": "message", "content": sent["content"], "tool_calls": sent.get("tool_calls")})
    return [*actions, {"type": "finish"}]


@needs_openenv
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
async def test_openenvs_client_earns_the_same_on_100_seeds_64_at_once(name: str):
    episodes = await played(name, 100)
    asked = json.dumps([({"seed": i}, as_actions(episode)) for i, episode in enumerate(episodes)])
    async with serving_env(Sessions(source_of(name))) as url:
        answers = await run("openenv_player.py", url, 64, text=asked)
    assert [total for total, _ in answers] == [episode.reward for episode in episodes]
    assert [about["rewards"] for _, about in answers] == [dict(episode.rewards) for episode in episodes]
    assert [about.get("solved") for _, about in answers] == [episode.solved for episode in episodes]
    assert {1.0, 0.0} <= {episode.reward for episode in episodes}, "both kinds occur"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
async def test_an_mcp_client_earns_the_same(name: str):
    episodes = await played(name, 12)
    async with serving_env(Sessions(source_of(name))) as url:

        async def one(index: int, episode: Episode) -> float:
            total = 0.0
            async with mcp.Client(f"{url}/mcp?split=train&index={index}") as client:
                assert str(episode.messages[1].content) in (client.instructions or "")
                for turn in episode.turns:
                    text = str(turn.message.content)
                    for wanted in turn.message.tool_calls:
                        answer = await client.call_tool(wanted.name, dict(wanted.arguments))
                        total += (answer.meta or {})["reward"]
                    if not turn.message.tool_calls:
                        answer = await client.call_tool("send_message", {"text": text})
                        total += (answer.meta or {})["reward"]
            return total

        whole = [(i, e) for i, e in enumerate(episodes) if i % 3 != 2]
        assert await asyncio.gather(*[one(i, e) for i, e in whole]) == [e.reward for _, e in whole]


@needs_openenv
async def test_openenvs_tool_client_shares_a_session_between_socket_and_mcp():
    source = source_of("calculator")
    task = source.splits["train"][3]
    script = load_env(NAMES["calculator"]).oracle(task)._script  # type: ignore[attr-defined]
    sessions = Sessions(source, max_sessions=1)
    async with serving_env(sessions) as url:
        expression = script[0].tool_calls[0].arguments["expression"]
        found = await run("mcp_tool_player.py", url, 3, expression, script[1].content)
        assert not len(sessions), "closed with the client"
    prompt, tools, shown, ended, steps = found
    assert prompt.startswith("Start with ")
    assert tools == ["calculator", "send_message"]
    assert shown["content"][0]["text"] == script[1].content
    assert (ended["_meta"]["reward"], ended["_meta"]["done"], ended["_meta"]["solved"]) == (1.0, True, True)
    assert steps == 2


async def test_our_adapter_plays_what_we_serve():
    env_class: Any = load_env(NAMES["calculator"])
    async with serving_env(Sessions(source_of("calculator"))) as url:
        remote: Any = await asyncio.to_thread(load_env, f"openenv:{url}")
        tasks = await asyncio.to_thread(remote.tasks, "train")
        assert len(tasks) == 1_000_000
        assert len(await asyncio.to_thread(remote.tasks, "held_out")) == 1000
        task = tasks[7]
        script = env_class.oracle(env_class.tasks("train", 0)[7])._script
        policy = ScriptedPolicy([script[0], call("send_message", text=script[1].content)])
        episode = await asyncio.to_thread(lambda: asyncio.run(play(remote(), task, policy)))
        assert episode.reward == 1.0


class Counted(ToolEnv):
    """Count."""

    alive = 0

    def setup(self, start: int = 0, broken: bool = False) -> str:
        if broken:
            raise InfraError("no room")
        Counted.alive += 1
        self.number, self.open = start, True
        return f"At {start}."

    @tool
    def add(self, n: int) -> str:
        """Add n."""
        if n > 100:
            raise ValueError("too many")
        self.number += n
        return str(self.number)

    @reward
    def number_now(self) -> int:
        return self.number

    async def close(self) -> None:
        if getattr(self, "open", False):
            Counted.alive -= 1
            self.open = False
        await super().close()


COUNTED = EnvSource("counted", Counted, {"train": [Task("a", {"start": 1}), Task("b", {"broken": True})]}, 4)


class Wire:
    """One WebSocket of OpenEnv."""

    def __init__(self, url: str, path: str = "/ws", **options: Any) -> None:
        self.connecting = connect("ws" + url.removeprefix("http") + path, proxy=None, **options)

    async def __aenter__(self) -> Wire:
        self.socket = await self.connecting.__aenter__()
        return self

    async def __aexit__(self, *problem: Any) -> None:
        await self.connecting.__aexit__(*problem)

    async def ask(self, kind: object, data: object = None) -> Any:
        return await self.send(json.dumps({"type": kind, "data": data}))

    async def send(self, text: str) -> Any:
        await self.socket.send(text)
        answer = json.loads(await self.socket.recv())
        return answer["data"]


async def gone(sessions: Sessions) -> None:
    async with asyncio.timeout(20):
        while len(sessions) or Counted.alive:  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(0.01)


async def test_each_error_is_one_clear_line():
    async with serving_env(Sessions(COUNTED)) as url, Wire(url) as wire:
        seen = {
            "not JSON": await wire.send("{"),
            "a list": await wire.send("[]"),
            "unknown": await wire.ask("jump"),
            "early": await wire.ask("step", {"tool_name": "add", "arguments": {"n": 1}}),
            "split": await wire.ask("reset", {"split": "dev"}),
            "index": await wire.ask("reset", {"index": 2}),
            "seed": await wire.ask("reset", {"seed": -1}),
            "data": await wire.ask("reset", "now"),
            "infra": await wire.ask("reset", {"index": 1}),
        }
        opening = await wire.ask("reset", {"index": 0})
        assert (opening["observation"]["prompt"], opening["observation"]["system"]) == ("At 1.", "Count.")
        seen |= {
            "type": await wire.ask("step", {"type": "fly"}),
            "name": await wire.ask("step", {"type": "call_tool"}),
            "arguments": await wire.ask("step", {"tool_name": "add", "arguments": [1]}),
            "message": await wire.ask("step", {"type": "message", "content": 7}),
        }
        assert {name: data["code"] for name, data in seen.items()} == {
            **dict.fromkeys(seen, "VALIDATION_ERROR"),
            "not JSON": "INVALID_JSON",
            "a list": "INVALID_JSON",
            "unknown": "UNKNOWN_TYPE",
            "infra": "SESSION_ERROR",
        }
        assert all(data["message"] and "\n" not in data["message"] for data in seen.values())
        assert seen["split"]["message"] == "split 'dev': unknown; the splits are: train"
        assert "no room" in seen["infra"]["message"]
        after = await wire.ask("step", {"tool_name": "add", "arguments": {"n": 2}})
        assert after["observation"]["result"] == "3", "none of them took a turn"


async def test_binary_messages_and_text_that_is_no_utf8_are_answered():
    async with serving_env(Sessions(COUNTED)) as url:
        async with connect(f"{url.replace('http', 'ws', 1)}/ws") as socket:
            await socket.send(b"\x00\xff")
            assert json.loads(await socket.recv())["data"]["code"] == "INVALID_JSON"
            await socket.send(b'{"type": "reset", "data": {"index": 0}}')
            assert json.loads(await socket.recv())["data"]["observation"]["prompt"] == "At 1."
            await socket.send(r'{"type": "step", "data": {"tool_name": "\ud800", "arguments": {}}}')
            answer = json.loads(await socket.recv())["data"]["observation"]
            assert (answer["tool_name"], answer["error"]["error_type"]) == ("\ud800", "tool_not_found")
        async with httpx.AsyncClient(base_url=url) as client:

            async def code(body: str, query: str = "") -> int:
                answer = await client.post(f"/mcp{query}", content=body)
                assert answer.status_code == 200
                return int(answer.json()["error"]["code"])

            assert await code(r'{"jsonrpc": "2.0", "id": "\ud800", "method": "\ud800"}') == -32601
            assert await code('{"jsonrpc": "2.0", "id": NaN, "method": "ping"}') == -32600
            assert (
                await code('{"jsonrpc": "2.0", "id": 1, "method": "initialize"}', f"?index={'9' * 5000}") == -32602
            )


async def test_mistakes_of_the_policy_are_observations_and_the_last_turn_is_scored():
    async with serving_env(Sessions(COUNTED)) as url, Wire(url) as wire:
        await wire.ask("reset", {"index": 0})
        wrong = [
            await wire.ask("step", {"tool_name": n, "arguments": a}) for n, a in (("add", {"n": "x"}), ("sub", {}))
        ]
        raised = await wire.ask("step", {"tool_name": "add", "arguments": {"n": 101}})
        kinds = [answer["observation"]["error"]["error_type"] for answer in (*wrong, raised)]
        assert kinds == ["invalid_args", "tool_not_found", "execution_error"]
        assert "too many" in raised["observation"]["error"]["message"]
        last = await wire.ask("step", {"tool_name": "add", "arguments": {"n": 4}})
        assert (last["done"], last["reward"], last["metadata"]["stop_reason"]) == (True, 5.0, "max_turns")
        assert last["observation"]["result"] == "5"
        assert "reset" in (await wire.ask("step", {"type": "finish"}))["message"]
        again = await wire.ask("reset", {"index": 0})
        assert again["done"] is False
        both = {
            "type": "message",
            "tool_calls": write_message(calls(("add", {"n": 1}), ("add", {"n": 2})))["tool_calls"],
        }
        assert [m["content"] for m in (await wire.ask("step", both))["observation"]["messages"]] == ["2", "4"]


@pytest.mark.parametrize("arguments", ['{"n": 1', "[1]", '{"n": 1}}', "7"])
async def test_arguments_that_are_no_object_are_observations(arguments: str):
    bad = {"id": "b", "type": "function", "function": {"name": "add", "arguments": arguments}}
    good = {"id": "g", "type": "function", "function": {"name": "add", "arguments": '{"n": 2}'}}
    async with serving_env(Sessions(COUNTED)) as url, Wire(url) as wire:
        await wire.ask("reset", {"index": 0})
        one = await wire.ask("step", {"type": "message", "tool_calls": [bad]})
        [said] = one["observation"]["messages"]
        assert (said["role"], said["tool_call_id"], one["done"]) == ("tool", "b", False)
        assert said["content"].startswith("Error: tool call 0: the arguments")
        both = (await wire.ask("step", {"type": "message", "tool_calls": [bad, good]}))["observation"]["messages"]
        assert {m["tool_call_id"]: m["content"][:8] for m in both} == {"g": "3", "b": "Error: t"}


async def test_sessions_are_bounded_and_released():
    sessions = Sessions(COUNTED, max_sessions=2)
    async with serving_env(sessions) as url:
        async with Wire(url) as one, Wire(url) as two:
            for wire in (one, two):
                await wire.ask("reset", {"index": 0})
            assert Counted.alive == 2
            async with connect("ws" + url.removeprefix("http") + "/ws", proxy=None) as third:
                refused = json.loads(await third.recv())["data"]
            assert (refused["code"], refused["active_sessions"]) == ("CAPACITY_REACHED", 2)
            assert "--max-sessions" in refused["message"]
            with pytest.raises(BaseException) as caught:
                async with mcp.Client(f"{url}/mcp"):
                    pass
            assert "all 2 sessions are taken" in "".join(map(str, leaves(caught.value)))
            one.socket.transport.abort()
        await gone(sessions)


def leaves(error: BaseException) -> list[BaseException]:
    return [x for e in error.exceptions for x in leaves(e)] if isinstance(error, BaseExceptionGroup) else [error]


async def test_an_idle_mcp_session_is_closed():
    sessions = Sessions(COUNTED, idle_s=0.2)
    async with serving_env(sessions) as url, httpx.AsyncClient(trust_env=False) as http:
        opening = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}
        opened = await http.post(f"{url}/mcp?index=0", json=opening)
        assert opened.json()["result"]["instructions"] == "Count.\n\nAt 1."
        await gone(sessions)
        ping = {"jsonrpc": "2.0", "id": 2, "method": "ping"}
        late = await http.post(
            f"{url}/mcp", json=ping, headers={"Mcp-Session-Id": opened.headers["mcp-session-id"]}
        )
        assert late.status_code == 404
        assert "idle for too long" in late.json()["error"]["message"]


async def test_a_dropped_server_closes_every_env():
    sessions = Sessions(COUNTED)
    async with serving_env(sessions) as url:
        wire = Wire(url)
        async with wire:
            await wire.ask("reset", {"index": 0})
            assert Counted.alive == 1
    await gone(sessions)


class Endless(Counted):
    """Call wait."""

    @tool
    async def wait(self) -> str:
        """Wait for what never comes."""
        await asyncio.Event().wait()
        return ""


WAIT = {"type": "step", "data": {"type": "call_tool", "tool_name": "wait", "arguments": {}}}


async def waiting(wire: Wire, sessions: Sessions) -> None:
    """Begin a call that has no end."""
    await wire.ask("reset", {"index": 0})
    await wire.socket.send(json.dumps(WAIT))
    async with asyncio.timeout(20):
        while not any(slot.session.busy for slot in sessions._open.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("last", [[], [{"type": "close"}], [WAIT, WAIT, {"type": "close"}]])
async def test_a_client_that_leaves_during_a_call_frees_its_session(last: Sequence[object]):
    sessions = Sessions(replace(COUNTED, make_env=Endless), max_sessions=1)
    async with serving_env(sessions) as url:
        async with Wire(url) as wire:
            await waiting(wire, sessions)
            for message in last:
                await wire.socket.send(json.dumps(message))
            wire.socket.transport.close()
            await gone(sessions)
        async with Wire(url) as wire:
            await wire.ask("reset", {"index": 0})


@pytest.mark.parametrize("left_behind", ["its cancellation", "one of a group of tasks"])
async def test_an_env_that_leaves_a_cancellation_behind_ends(left_behind: str):
    begun = asyncio.Event()

    class Odd(Counted):
        """Count."""

        async def step(self, message: Message) -> tuple[Sequence[Message], float, bool, bool, StepInfo]:
            if left_behind == "its cancellation":
                with contextlib.suppress(asyncio.CancelledError):
                    begun.set()
                    await asyncio.Event().wait()
            else:
                current = asyncio.current_task()
                assert current is not None
                with contextlib.suppress(asyncio.CancelledError):
                    current.cancel()  # as a TaskGroup that fails does before Python 3.13
                    await asyncio.sleep(0)
                begun.set()
            return await super().step(message)

    session = EnvSession(replace(COUNTED, make_env=Odd), "s")
    await session.reset({"index": 0})
    acting = asyncio.create_task(session.act(calls(("add", {"n": 1}))))
    async with asyncio.timeout(60):
        await begun.wait()
        await session.close()
        await asyncio.gather(acting, return_exceptions=True)
    assert Counted.alive == 0


class Lingering(Counted):
    """Count."""

    may_close: asyncio.Event

    async def close(self) -> None:
        await self.may_close.wait()
        await super().close()


async def test_a_session_that_closes_takes_no_place_and_holds_no_other_up():
    Lingering.may_close = asyncio.Event()
    sessions = Sessions(replace(COUNTED, make_env=Lingering), max_sessions=1, idle_s=0.2)
    async with asyncio.timeout(60), contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(serving_env(sessions))
        async with Wire(url) as wire:
            await wire.ask("reset", {"index": 0})
        async with httpx.AsyncClient(trust_env=False) as http:
            for _ in range(2):
                while len(sessions):  # noqa: ASYNC110 - the server has no event for it
                    await asyncio.sleep(0.01)
                opening = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}
                assert "result" in (await http.post(f"{url}/mcp?index=0", json=opening)).json()
        ending = asyncio.create_task(stack.aclose())
        while len(sessions):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert (Counted.alive, ending.done()) == (3, False)
        Lingering.may_close.set()
        await ending
    assert Counted.alive == 0


async def test_the_end_of_a_server_answers_calls_in_progress(capfd: pytest.CaptureFixture[str]):
    sessions = Sessions(replace(COUNTED, make_env=Endless))
    async with asyncio.timeout(60), contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(serving_env(sessions))
        async with Wire(url) as wire, httpx.AsyncClient(trust_env=False, timeout=60) as http:
            await waiting(wire, sessions)
            opening = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}
            opened = await http.post(f"{url}/mcp?index=0", json=opening)
            call = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "wait", "arguments": {}}}
            headers = {"Mcp-Session-Id": opened.headers["mcp-session-id"]}
            called = asyncio.create_task(http.post(f"{url}/mcp", json=call, headers=headers))
            while sum(slot.session.busy for slot in sessions._open.values()) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await stack.aclose()
            answer = json.loads(await wire.socket.recv())["data"]
            assert answer == {"message": "InfraError: the session was closed", "code": "SESSION_ERROR"}
            assert "the session was closed" in (await called).text
    assert capfd.readouterr().err == ""


async def test_the_command_says_that_it_closes_sessions_and_how_to_end_it_now():
    command = [sys.executable, "-m", "agentrl", "env", "serve", NAMES["calculator"], "--port", "0"]
    pipe = asyncio.subprocess.PIPE
    server = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    try:
        assert server.stdout is not None
        found = re.search("http://[^,]+", (await server.stdout.readline()).decode())
        assert found
        async with Wire(found[0]) as wire:
            await wire.ask("reset", {"index": 0})
            server.send_signal(signal.SIGTERM)
            err = (await server.communicate())[1].decode()
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.kill()
    assert (server.returncode, err) == (0, "closing sessions; Ctrl-C again ends now\n")


async def test_a_token_guards_everything_but_health():
    async with serving_env(Sessions(COUNTED), token="secret") as url, httpx.AsyncClient(trust_env=False) as http:
        assert (await http.get(f"{url}/health")).json() == {"status": "healthy"}
        assert (await http.get(f"{url}/schema")).status_code == 401
        assert (await http.get(f"{url}/schema", headers={"Authorization": "Bearer wrong"})).status_code == 401
        good = {"Authorization": "Bearer secret"}
        assert (await http.get(f"{url}/schema", headers=good)).status_code == 200
        with pytest.raises(Exception, match="403"):
            await Wire(url).__aenter__()
        async with Wire(url, additional_headers=good) as wire:
            assert (await wire.ask("reset", {"index": 0}))["observation"]["prompt"] == "At 1."
        foreign = good | {"Origin": "http://evil.example"}
        assert (await http.get(f"{url}/schema", headers=foreign)).status_code == 401


@pytest.mark.parametrize(("host", "status"), [("evil.example", 401), ("localhost", 200), ("127.0.0.1", 200)])
async def test_without_a_token_only_names_of_this_machine_are_answered(host, status):
    """By DNS rebinding, the page of http://evil.example is of the same origin as this server."""
    async with serving_env(Sessions(COUNTED)) as url, httpx.AsyncClient(trust_env=False) as http:
        place = f"{host}:{url.rpartition(':')[2]}"
        page = {"Host": place, "Origin": f"http://{place}"}
        assert (await http.get(f"{url}/schema", headers=page)).status_code == status
        assert (await http.get(f"{url}/schema", headers={"Origin": f"http://[{host}"})).status_code == 401


async def test_the_task_api_names_tasks_without_their_rows():
    async with serving_env(Sessions(source_of("calculator"))) as url, httpx.AsyncClient(trust_env=False) as http:
        base = f"{url}/{(await http.get(f'{url}/list_environments')).json()[0]}"
        assert [s["name"] for s in (await http.get(f"{base}/splits")).json()] == ["train", "test"]
        assert (await http.post(f"{base}/num_tasks", json={"split": "test"})).json() == {"num_tasks": 1000}
        two = (await http.post(f"{base}/task_range", json={"split": "test", "start": 3, "stop": 5})).json()[
            "tasks"
        ]
        assert [task["index"] for task in two] == [3, 4]
        assert set(two[0]) == {"id", "split", "index"}
        for path, body in (("tasks", {"split": "train"}), ("num_tasks", {"split": "x"}), ("task", {"index": -1})):
            refused = await http.post(f"{base}/{path}", json=body)
            assert (refused.status_code, "\n" in refused.json()["detail"]) == (400, False)
        assert (await http.get(f"{url}/other/splits")).status_code == 404


class Echo(TextEnv):
    """Repeat."""

    def setup(self) -> str:
        return "Say hello."

    def reply(self, text: str) -> str | None:
        return None if text == "hello" else f"You said {text}."


async def test_a_text_env_is_played_through_send_message():
    async with serving_env(Sessions(EnvSource("echo", Echo, {"train": [Task("t")]}))) as url, Wire(url) as wire:
        await wire.ask("reset")
        listed = await wire.ask("step", {"type": "list_tools"})
        assert [t["name"] for t in listed["observation"]["tools"]] == ["send_message"]
        said = await wire.ask("step", {"tool_name": "send_message", "arguments": {"text": "hi"}})
        assert (said["observation"]["result"], said["done"]) == ("You said hi.", False)
        assert (await wire.ask("step", {"type": "message", "content": "hello"}))["done"] is True


class Camera(ToolEnv):
    """Look."""

    @tool
    def look(self) -> tuple[str, Image]:
        """Take a picture."""
        return "a door", Image(b"door", "image/jpeg")


async def test_images_reach_mcp_clients_and_clients_of_openenv():
    async with serving_env(Sessions(EnvSource("camera", Camera, {"train": [Task("t")]}))) as url:
        async with mcp.Client(f"{url}/mcp") as client:
            text, image = (await client.call_tool("look", {})).content
        assert (text.text, image.data, image.mime_type) == ("a door", "ZG9vcg==", "image/jpeg")
        remote: Any = await asyncio.to_thread(load_env, f"openenv:{url}")
        policy = ScriptedPolicy([call("look"), call("send_message", text="a door")])
        episode = await asyncio.to_thread(lambda: asyncio.run(play(remote(), Task("t"), policy)))
        assert episode.turns[0].observation[0].content == ("a door", Image(b"door", "image/jpeg"))


def test_names_fit_into_a_url():
    assert env_name("agentrl.envs.calculator:Calculator") == "calculator"
    assert env_name("textarena:2048-v0") == "textarena-2048-v0"
    assert env_name("some/file.py:My_Env") == "my_env"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["agentrl.envs.calculator:Calculator", "--host", "0.0.0.0"], "--token-env"),
        (
            ["agentrl.envs.calculator:Calculator", "--token-env", "NO_SUCH_TOKEN"],
            "NO_SUCH_TOKEN: this environment",
        ),
        (["agentrl.envs.calculator:Calc"], "Calc"),
        (["missing.yaml"], "missing.yaml"),
        (["agentrl.envs.calculator:Calculator", "--env", "math"], "--env math"),
        (["agentrl.envs.calculator:Calculator", "--set", "data.options.sizes=3"], "sizes"),
        (
            ["agentrl.envs.calculator:Calculator", "--set", "optim.lr=1"],
            "optim.lr=1: has no effect on serving an env",
        ),
        (["agentrl.envs.calculator:Calculator", "--set", "rollout={max_tokens: 9}"], "has no effect on serving"),
    ],
)
def test_a_wrong_command_is_one_clear_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as left:
        main(["env", "serve", *arguments])
    assert left.value.code == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert "Traceback" not in shown
