import asyncio
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentrl.env import ToolEnv, ToolSettings, tool
from agentrl.env.compose import ComposedEnv
from agentrl.env.load import load_env
from agentrl.env.mcp import McpConnection, McpServer
from agentrl.env.rows import load_rows
from agentrl.errors import ConfigError, InfraError, RewardError
from agentrl.ports import reserved_port
from agentrl.sandbox import Sandbox, close_pools
from agentrl.testing.policy import ScriptedPolicy, call, calls, play
from agentrl.types import Episode, Message, Task

VERL_TOOL = '''
from uuid import uuid4
import numpy as np
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.tools.function_tool import function_tool
from verl.utils.rollout_trace import rollout_trace_op

LOG = []

class Counter(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.counts = {}

    async def create(self, instance_id=None, **kwargs):
        LOG.append("create")
        self.counts[instance_id] = kwargs["create_kwargs"].get("start", 0)
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id, parameters, **kwargs):
        self.counts[instance_id] += parameters["by"]
        return ToolResponse(text=f"count={self.counts[instance_id]}"), 0.1, {"by": np.float32(parameters["by"])}

    async def calc_reward(self, instance_id, **kwargs):
        return float(self.counts[instance_id] == self.config["target"])

    async def release(self, instance_id, **kwargs):
        LOG.append("release")
        del self.counts[instance_id]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert extra_info["tool_rewards"] == [0.1] * 3
    return {"score": float(ground_truth in solution_str), "data_source": data_source}

def tuned(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    return float(ground_truth in solution_str) + bonus

def gsm8k(solution_str, ground_truth, method="strict"):
    return float(ground_truth in solution_str and method == "strict")

def batched(completions, **kwargs):
    return [1.0 for _ in completions]

def asks_tokenizer(data_source, solution_str, ground_truth, *, tokenizer):
    return 0.0

def half(episode):
    return 0.5

async def parts(episode):
    return {"a": 1, "b": True}

def wrong(x, y):
    return 0

def lookup(key: str) -> str:
    """Look up."""
    return key.upper()

@function_tool
def doubled(text: str) -> str:
    """Twice."""
    return text * 2

def broken(episode):
    return "high"
'''
SCHEMA = {
    "type": "function",
    "function": {
        "name": "count",
        "description": "Count on.",
        "parameters": {
            "type": "object",
            "properties": {"by": {"type": "integer", "minimum": 1, "default": 1}},
            "required": ["by"],
        },
    },
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(VERL_TOOL)
    return path


def verl_env(file: Path, **options) -> ComposedEnv:
    entry = {"class_name": f"{file}:Counter", "config": {"target": 6, "type": "native"}, "tool_schema": SCHEMA}
    return ComposedEnv(tools=[entry], **options)


ROW = {
    "data_source": "mine/count",
    "prompt": [{"role": "system", "content": "Count."}, {"role": "user", "content": "Count to six."}],
    "ability": "counting",
    "reward_model": {"style": "rule", "ground_truth": "six"},
    "extra_info": {"index": 3, "tools_kwargs": {"count": {"create_kwargs": {"start": 0}}}},
}


async def test_a_verl_tool_lives_as_long_as_the_episode(file):
    env = verl_env(file, system="not used: the row has its own")
    assert list(env.tools) == [SCHEMA]
    script = [call("count", by=1), call("count", by=2), call("count", by=3), "done"]
    episode = await play(env, Task("t", ROW), ScriptedPolicy(script))
    assert [t.calls[0].result for t in episode.turns[:3]] == ["count=1", "count=3", "count=6"]
    assert [m.role for m in episode.messages[:2]] == ["system", "user"]
    assert episode.rewards == {"count": 1.0}
    assert episode.reward == pytest.approx(1.3)
    assert episode.metrics == {"count/by": 6.0, "reward/tools": pytest.approx(0.3)}
    module = sys.modules[type(env._entries[0].make().tool).__module__]
    assert module.LOG == ["create", "release"]
    assert "verl" not in sys.modules


async def test_bad_arguments_of_a_verl_tool_are_observations(file):
    env = verl_env(file)
    await env.reset(Task("t", ROW))
    observation, *_ = await env.step(calls(("count", {"by": 0}), ("count", {"by": "x"}), ("count", {"on": 1})))
    assert [m.content for m in observation] == [
        "Error: invalid arguments: args.by: must be at least 1, got 0",
        "Error: invalid arguments: args.by: expected integer, got 'x'",
        "Error: invalid arguments: args.by: required; args.on: unknown argument (known: by)",
    ]
    await env.close()


async def test_compute_score_sees_what_the_policy_wrote_and_nothing_else(file):
    env = verl_env(file, reward=f"{file}:compute_score")
    script = [call("count", by=1), call("count", by=2), call("count", by=3)]
    assert (await play(env, Task("t", ROW), ScriptedPolicy([*script, "I say six"]))).rewards == {
        "compute_score": 1.0
    }
    assert (await play(env, Task("t", ROW), ScriptedPolicy([*script, "seven"]))).rewards == {"compute_score": 0.0}
    printed = dict(ROW, reward_model={"ground_truth": "count=6"})
    assert (await play(env, Task("t", printed), ScriptedPolicy([*script, "?"]))).rewards == {"compute_score": 0.0}


async def test_a_reward_is_given_its_options(file):
    env = verl_env(file, reward={"use": f"{file}:tuned", "options": {"bonus": 2.0}})
    assert (await play(env, Task("t", ROW), ScriptedPolicy(["six"]))).rewards == {"tuned": 3.0}
    with pytest.raises(ConfigError, match="has no argument 'bones'"):
        verl_env(file, reward=[{"use": f"{file}:tuned", "options": {"bones": 2.0}}])


async def test_the_score_of_one_dataset_takes_what_it_names(file):
    env = verl_env(file, reward=f"{file}:gsm8k")
    assert (await play(env, Task("t", ROW), ScriptedPolicy(["six"]))).rewards == {"gsm8k": 1.0}


class Notebook:
    """A toolbox: made anew for each episode."""

    def __init__(self, title: str) -> None:
        self.title, self.lines, self.open = title, [], False

    def setup(self) -> None:
        self.open = True

    @tool
    def note(self, text: str) -> str:
        """Write a line."""
        assert self.open
        self.lines.append(text)
        return f"{self.title}: {len(self.lines)}"


def shout(text: str) -> str:
    """Shout."""
    return text.upper()


async def test_functions_toolboxes_and_rewards_make_an_env(file):
    env = ComposedEnv(
        tools=[shout, {"use": Notebook, "options": {"title": "N"}}, f"{file}:lookup", f"{file}:doubled"],
        reward={"half": f"{file}:half", "more": f"{file}:parts"},
        system="Write.",
    )
    env.settings = ToolSettings(reward_weights={"half": 2.0, "more/b": 0.0})
    assert [t["function"]["name"] for t in env.tools] == ["shout", "note", "lookup", "doubled"]
    for _ in range(2):
        script = [calls(("note", {"text": "a"}), ("note", {"text": "b"}), ("lookup", {"key": "k"})), "end"]
        episode = await play(env, Task("t", {"prompt": "Go.", "anything": 1}), ScriptedPolicy(script))
        assert [c.result for c in episode.turns[0].calls] == ["N: 1", "N: 2", "K"]
        assert episode.messages[0] == Message("system", "Write.")
        assert episode.rewards == {"half": 1.0, "more/a": 1.0, "more/b": 0.0}


async def test_shipped_toolboxes_share_one_sandbox():
    tools = ["agentrl.tools.files:Files", "agentrl.tools.python:PythonProgram"]
    env = ComposedEnv(tools=tools, sandbox={"memory_mb": 128})
    script = [
        call("create", path="a.txt", text="hello"),
        call("python", code="print(open('a.txt').read())"),
        "end",
    ]
    for _ in range(2):
        episode = await play(env, Task("t", {"prompt": "x"}), ScriptedPolicy(script))
        assert [t.calls[0].result for t in episode.turns[:2]] == ["wrote a.txt: 1 line", "hello"]
    await env.reset(Task("t", {"prompt": "x"}))
    observation, *_ = await env.step(call("view"))
    assert observation[0].content == "[empty directory]"
    await env.close()
    await close_pools()


async def test_rows_in_verls_shape_load_and_select_their_tools(file, tmp_path):
    data = tmp_path / "rows.jsonl"
    row = dict(ROW, extra_info={"tool_selection": ["shout"]})
    data.write_text(json.dumps(row) + "\n")
    (task,) = load_rows(data, load_env("agentrl.env.compose:ComposedEnv"))
    env = ComposedEnv(tools=[shout, f"{file}:lookup"])
    await env.reset(task)
    assert [t["function"]["name"] for t in env.tools] == ["shout"]
    await env.close()
    await env.reset(Task("t", dict(ROW, extra_info={"tool_selection": []})))
    assert list(env.tools) == []
    await env.close()
    with pytest.raises(ConfigError, match="tool_selection names 'sing', which is not a tool"):
        await env.reset(Task("t", dict(ROW, extra_info={"tool_selection": ["sing"]})))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tools": [{"class_name": "FILE:Counter", "configs": {}}]}, "unknown key 'configs' next to class_name"),
        ({"tools": [{"class_name": "FILE:Missing"}]}, "has no 'Missing'"),
        ({"tools": [{"class_name": "FILE:Counter"}]}, "raised ValueError: the tool has no schema"),
        ({"tools": [{"uses": "x"}]}, "one of `use`, `mcp` and `class_name` is needed"),
        ({"tools": [{"mcp": {"command": ["x"], "url": "y"}}]}, "exactly one of"),
        ({"tools": [{"mcp": {"commands": ["x"]}}]}, "unknown key 'commands'"),
        ({"tools": [{"mcp": {"command": "python x"}}]}, "write a list"),
        ({"tools": [{"use": Notebook}]}, "Notebook: options: missing a required argument: 'title'"),
        ({"sandbox": {"memory": 1}}, "sandbox: unknown key 'memory'"),
        ({"tools": [int]}, "class int has no @tool method"),
        ({"tools": [shout, shout]}, "two tools are named 'shout'"),
        ({"reward": "FILE:wrong"}, "write f(episode), or verl's compute_score"),
        ({"reward": "FILE:batched"}, "extra_info); got (completions, kwargs)"),
        ({"reward": "FILE:asks_tokenizer"}, "got (data_source, solution_str, ground_truth, tokenizer)"),
        ({"reward": ["FILE:half", "FILE:half"]}, "two are named 'half'"),
        ({"reward": "FILE:LOG"}, "is not a function"),
    ],
)
def test_a_composition_that_cannot_be_is_refused(file, options, text):
    def named(value):
        if isinstance(value, str):
            return value.replace("FILE", str(file))
        if isinstance(value, dict):
            return {k: named(v) for k, v in value.items()}
        return [named(v) for v in value] if isinstance(value, list) else value

    with pytest.raises(ConfigError) as caught:
        _ = ComposedEnv(**named(options)).tools
    assert text in str(caught.value)


async def test_broken_rewards_and_unknown_weights_are_refused(file):
    env = ComposedEnv(reward=f"{file}:broken")
    with pytest.raises(RewardError, match="reward 'broken' of ComposedEnv returned 'high', not a number"):
        await play(env, Task("t", {"prompt": "x"}), ScriptedPolicy(["a"]))
    env.settings = ToolSettings(reward_weights={"brokn": 1.0})
    with pytest.raises(ConfigError, match="has no such reward; did you mean 'broken'"):
        await env.reset(Task("t", {"prompt": "x"}))


async def test_a_score_that_only_takes_the_solution_is_not_given_the_row():
    def mentions(solution_str, **kwargs):
        return "42" in solution_str

    row = {"prompt": "What is 6 * 7?", "answer": "42"}
    for said, value in (("41", 0.0), ("42", 1.0)):
        episode = await play(ComposedEnv(reward=mentions), Task("t", row), ScriptedPolicy([said]))
        assert episode.rewards == {"mentions": value}


@pytest.mark.parametrize("column", ["reward_model", "extra_info"])
async def test_a_column_of_verls_that_is_no_mapping_is_the_users(file, column):
    env = ComposedEnv(reward=f"{file}:compute_score")
    with pytest.raises(ConfigError, match=f"task 't': the column '{column}' must be a mapping.* got 'rule'"):
        await env.reset(Task("t", {"prompt": "x", column: "rule"}))
    await env.close()


@pytest.mark.parametrize("more", [{"answer": "6"}, {"ground_truth": "6"}, {"reward_model": {"style": "rule"}}])
async def test_a_row_without_the_ground_truth_that_a_score_takes_is_the_users(file, more):
    env = ComposedEnv(reward=f"{file}:compute_score")
    with pytest.raises(
        ConfigError, match="task 't': the reward 'compute_score' takes `ground_truth`, and the row"
    ):
        await env.reset(Task("t", {"prompt": "x", **more}))
    await env.close()

    def length(solution_str, ground_truth=None):
        return float(len(solution_str) if ground_truth is None else 0)

    episode = await play(ComposedEnv(reward=length), Task("t", {"prompt": "x", **more}), ScriptedPolicy(["six"]))
    assert episode.rewards == {"length": 3.0}


async def test_two_rewards_of_a_composition_never_share_a_name(file):
    with pytest.raises(ConfigError, match="reward 'a/b': a name must not contain `/`"):
        ComposedEnv(reward={"a": f"{file}:parts", "a/b": f"{file}:half"})
    env = verl_env(file, reward={"count": f"{file}:half"})
    assert (await play(env, Task("t", ROW), ScriptedPolicy(["done"]))).rewards == {"count": 0.5}
    with pytest.raises(ConfigError, match=r"env\.reward_weights\.count: a reward and a tool with `calc_reward`"):
        env.configure({}, {"count": 0.5})


def test_a_partial_reward_has_the_name_of_its_function():
    def bonus(episode, by):
        return by

    assert ComposedEnv(reward=functools.partial(bonus, by=2)).rewards_of_record() == ["bonus"]


SERVER = Path(__file__).with_name("mcp_server.py")


def mcp_env(**options) -> ComposedEnv:
    return ComposedEnv(tools=[{"mcp": {"command": [sys.executable, str(SERVER)], **options}}])


async def test_an_mcp_server_lends_its_tools_for_one_episode():
    pytest.importorskip("mcp")
    env = mcp_env(include=["add", "fail", "hang"], prefix="my_", call_timeout_s=30.0)
    assert [t["function"]["name"] for t in env.tools] == ["my_add", "my_fail", "my_hang"]
    assert env.tools[0]["function"]["parameters"]["properties"]["amount"]["default"] == 1
    for _ in range(2):
        script = [
            calls(("my_add", {}), ("my_add", {"amount": 2}), ("my_add", {"amount": "x"}), ("my_fail", {})),
            "end",
        ]
        episode = await play(env, Task("t", {"prompt": "x"}), ScriptedPolicy(script))
        records = episode.turns[0].calls
        assert [r.result for r in records[:2]] == ["1", "3"]
        assert [r.outcome for r in records] == ["ok", "ok", "invalid_args", "tool_exception"]
        assert records[3].result == "Error executing tool fail"
    env = mcp_env(include=["hang"], prefix="my_", call_timeout_s=0.5)
    await env.reset(Task("t", {"prompt": "x"}))
    observation, *_ = await env.step(call("my_hang"))
    assert observation[0].content == "Error: my_hang timed out: no result after 0.5 s"
    await env.close()


async def test_a_class_may_name_mcp_servers_beside_its_tools():
    pytest.importorskip("mcp")

    class Both(ToolEnv):
        mcp = (McpServer(command=(sys.executable, str(SERVER)), include=("add",)),)

        def setup(self) -> str:
            return "Count."

        @tool
        def mine(self) -> str:
            """Mine."""
            return "mine"

    env = Both()
    assert [t["function"]["name"] for t in env.tools] == ["mine", "add"]
    for _ in range(2):
        episode = await play(env, Task("t"), ScriptedPolicy([calls(("mine", {}), ("add", {})), "end"]))
        assert [c.result for c in episode.turns[0].calls] == ["mine", "1"]


async def test_few_mcp_servers_start_at_once(monkeypatch):
    pytest.importorskip("mcp")
    starting, most = 0, 0

    async def hold(self, client, ready):
        nonlocal starting, most
        starting += 1
        most = max(most, starting)
        await asyncio.sleep(0.01)
        starting -= 1
        ready.set_result(None)
        await self._done.wait()

    monkeypatch.setattr(McpConnection, "_hold", hold)
    # Without a limit, the last of them would have to start within the time of all.
    server = McpServer(command=("server",), connect_timeout_s=5)
    connections = [McpConnection(server) for _ in range(8 * (os.cpu_count() or 1) + 16)]
    await asyncio.gather(*[connection.open() for connection in connections])
    await asyncio.gather(*[connection.close() for connection in connections])
    assert 1 < most <= max(4, os.cpu_count() or 1)


async def test_an_mcp_server_that_dies_of_a_call_is_an_observation():
    pytest.importorskip("mcp")
    env = mcp_env()
    await env.reset(Task("t", {"prompt": "x"}))
    for name in ("die", "add"):
        (said,), *_ = await env.step(call(name))
        assert "the tool server's session ended during the call of die" in said.content
    await env.close()
    await env.reset(Task("t", {"prompt": "x"}))
    (said,), *_ = await env.step(call("add"))
    assert said.content == "1"
    await env.close()


async def test_an_mcp_server_that_dies_and_cannot_be_started_again_is_infrastructure(tmp_path):
    pytest.importorskip("mcp")
    script = tmp_path / "server.py"
    script.write_text(SERVER.read_text())
    env = ComposedEnv(tools=[{"mcp": {"command": [sys.executable, str(script)]}}])
    await env.reset(Task("t", {"prompt": "x"}))
    script.write_text("raise SystemExit(1)")
    with pytest.raises(InfraError, match="the server died during die, and is down"):
        await env.step(call("die"))
    await env.close()


def test_an_mcp_server_that_does_not_start_is_named():
    pytest.importorskip("mcp")
    with pytest.raises(ConfigError, match=r"^mcp: /no/such/program: FileNotFoundError"):
        _ = ComposedEnv(tools=[{"mcp": {"command": ["/no/such/program"]}}]).tools
    with pytest.raises(ConfigError, match=r"^mcp: sleep 60: no answer after 0.5 s$"):
        _ = ComposedEnv(tools=[{"mcp": {"command": ["sleep", "60"], "connect_timeout_s": 0.5}}]).tools
    with pytest.raises(ConfigError, match=r"^mcp: url localhost:80: not an http or https URL with a host$"):
        _ = ComposedEnv(tools=[{"mcp": {"url": "localhost:80"}}])
    same = {"mcp": {"command": [sys.executable, str(SERVER)]}}
    with pytest.raises(ConfigError, match=r"two tools are named 'add'; .* `prefix`"):
        _ = ComposedEnv(tools=[same, same]).tools
    with pytest.raises(ConfigError, match="has no tool 'subtract'; it has: add, fail, die, hang"):
        _ = mcp_env(include=["subtract"]).tools


async def test_mcp_over_http():
    pytest.importorskip("mcp")
    async with http_server() as (url, _):
        env = ComposedEnv(tools=[{"mcp": {"url": url, "include": ["add"]}}])
        episode: Episode = await play(
            env, Task("t", {"prompt": "x"}), ScriptedPolicy([call("add", amount=5), "end"])
        )
        assert episode.turns[0].calls[0].result == "5"


async def test_an_mcp_server_that_hangs_for_everyone_is_infrastructure():
    pytest.importorskip("mcp")
    async with http_server() as (url, server):
        slow, hung = (
            ComposedEnv(tools=[{"mcp": {"url": url, "call_timeout_s": 1.0, "connect_timeout_s": seconds}}])
            for seconds in (60.0, 5.0)
        )
        for env in (slow, hung):
            await env.reset(Task("t", {"prompt": "x"}))
        (said,), *_ = await slow.step(call("hang"))
        assert "hang timed out" in said.content, "the server answers other requests: the policy's call is slow"
        await slow.close()
        server.send_signal(signal.SIGSTOP)
        with pytest.raises(InfraError, match="the server hung during add, and is down: no answer after 5 s"):
            await hung.step(call("add"))
        server.send_signal(signal.SIGCONT)
        await hung.close()


async def test_what_an_mcp_server_prints_ends_no_session_and_is_one_line(tmp_path, caplog):
    pytest.importorskip("mcp")
    script = tmp_path / "server.py"
    before = "count += amount"
    printing = f"{before}\n    import os\n    os.write(out, b'adding \\xff\\n')"
    text = SERVER.read_text().replace(before, printing).replace("import os", "import os\nout = os.dup(1)", 1)
    script.write_text(text)
    env = ComposedEnv(tools=[{"mcp": {"command": [sys.executable, str(script)], "call_timeout_s": 20.0}}])
    await env.reset(Task("t", {"prompt": "x"}))
    for count in ("1", "2"):
        (said,), *_ = await env.step(call("add"))
        assert said.content == count
    await env.close()
    records = [r for r in caplog.records if r.name == "mcp.client.stdio"]
    assert len(records) == 2
    for record in records:
        assert "input_value='adding \ufffd'" in record.getMessage()
        assert record.exc_info is None


@contextlib.asynccontextmanager
async def http_server():
    with reserved_port() as port:
        server = await asyncio.create_subprocess_exec(
            sys.executable, str(SERVER), str(port), stderr=subprocess.DEVNULL
        )
        try:
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                try:
                    socket.create_connection(("127.0.0.1", port), 0.2).close()
                    break
                except OSError:
                    await asyncio.sleep(0.05)
            yield f"http://127.0.0.1:{port}/mcp", server
        finally:
            server.kill()
            await server.wait()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tool_timeout_s": "3"}, "settings.tool_timeout_s must be a number, got '3'"),
        ({"observation_tokens": True}, "settings.observation_tokens must be a whole number, got True"),
        ({"mistake_penalty": "a"}, "settings.mistake_penalty must be a number, got 'a'"),
        ({"mistakes": 3}, "settings.mistakes must be a section"),
        ({"mistakes": {"parse_error": "x"}}, "settings.mistakes.parse_error must be 'observe', 'penalise' or"),
    ],
)
def test_a_setting_of_the_wrong_type_is_named(settings: dict, said: str):
    with pytest.raises(ConfigError) as refused:
        ToolEnv.settings.changed(settings)
    assert said in str(refused.value)


def test_a_key_of_an_mcp_server_of_the_wrong_type_is_named():
    with pytest.raises(ConfigError, match=r"mcp\.connect_timeout_s must be a number, got 'x'"):
        McpServer.from_mapping({"command": ["python"], "connect_timeout_s": "x"})


def test_a_limit_of_a_sandbox_that_is_text_is_named():
    with pytest.raises(ConfigError, match="sandbox limit memory_mb must be a number, got '3'"):
        Sandbox(memory_mb="3")  # type: ignore[arg-type]
