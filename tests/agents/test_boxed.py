"""Programs in sandboxes: they play like others, and reach nothing but their episode."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from agentrl import ToolEnv, reward
from agentrl.agents.boxed import BoxedAgent, EpisodeGate, box_spec, episode_socket
from agentrl.agents.player import AgentPlayer
from agentrl.agents.recorder import Recorder
from agentrl.chat.template import Renderer
from agentrl.config.run import AgentConfig
from agentrl.envs import files
from agentrl.envs.calculator.env import Calculator
from agentrl.errors import ConfigError
from agentrl.rollout.limits import EpisodeLimits
from agentrl.sandbox import Sandbox, close_pools
from agentrl.serve.listen import running
from agentrl.testing.engine import ScriptedEngine
from agentrl.testing.policy import call, say
from agentrl.types import StopReason, Task
from tests.agents.test_player import EXAMPLE, SCRIPT, TASK, engine_of
from tests.agents.test_player import renderer as renderer
from tests.sandbox.sandbox_specs import docker_answers

ASK = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
def ask(base=os.environ["OPENAI_BASE_URL"], key=os.environ["OPENAI_API_KEY"]):
    body = {"model": "m", "messages": task["messages"]}
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    request = urllib.request.Request(base + "/chat/completions", json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request, timeout=20))["choices"][0]["message"]["content"]
"""


class Notes(ToolEnv):
    """Write a note."""

    sandbox = Sandbox(memory_mb=256)

    async def setup(self) -> str:
        assert self.box is not None
        await self.box.write_file("given.txt", b"from the env")
        return "Write a note."

    @reward
    async def noted(self) -> bool:
        assert self.box is not None
        try:
            return (await self.box.read_file("note.txt")) == b"from the env: 11"
        except OSError:
            return False


@asynccontextmanager
async def boxed(
    engine: ScriptedEngine,
    renderer: Renderer,
    command: list[str],
    make_env: Any = Notes,
    timeout_s: float = 60.0,
    **sandbox: Any,
) -> AsyncIterator[AgentPlayer]:
    limits = EpisodeLimits(token_budget=4096, timeout_s=timeout_s)
    recorder = Recorder(engine, renderer, limits)
    app = recorder.app()
    agent = BoxedAgent(command, box_spec(sandbox, timeout_s), app)
    try:
        async with running(app) as address:
            player = AgentPlayer(recorder, address, agent, make_env, 1.0, asyncio.Semaphore(8))
            yield player
            await player.clients.close()
    finally:
        await close_pools()


def program(code: str) -> list[str]:
    return ["python", "-c", ASK + code]


async def test_a_program_works_on_the_files_of_the_env(renderer: Renderer):
    code = """
note = open("given.txt").read() + ": " + ask()
open("note.txt", "w").write(note)
print(json.dumps({"note": note}))
"""
    outcomes: list[object] = []

    class Seen(Notes):
        @reward
        def seen(self) -> bool:
            outcomes.append(self.outcome)
            return True

    async with boxed(engine_of(renderer, [say("11")]), renderer, program(code), Seen) as player:
        found = await player.play(Task("t"), episode_id="e", seed=1)
    assert found.error is None
    assert found.rewards == {"noted": 1.0, "seen": 1.0}
    assert found.stop_reason is StopReason.ANSWERED
    assert outcomes == [{"note": "from the env: 11"}]


async def test_only_the_words_of_the_command_have_placeholders(renderer: Renderer):
    outcomes: list[str] = []

    class Braces(Notes):
        async def setup(self) -> str:
            return "write {id}, {base_url} and {root}"

        @reward
        def seen(self) -> bool:
            outcomes.append(self.outcome)
            return True

    code = "ask(base=sys.argv[2]); print(sys.argv[1], sys.argv[2] == os.environ['OPENAI_BASE_URL'])"
    command = [*program(code), "{id}: {prompt}", "{base_url}"]
    async with boxed(engine_of(renderer, [say("11")]), renderer, command, Braces) as player:
        found = await player.play(Task("t"), episode_id="e", seed=1)
    assert (found.error, outcomes) == (None, ["t: write {id}, {base_url} and {root} True\n"])


async def test_the_official_client_with_tools_gives_the_tokens_of_the_built_in_loop(renderer: Renderer):
    packages = str(Path(openai.__file__).parents[1])
    command = ["python", str(EXAMPLE / "agent.py"), "{prompt}"]
    engine = engine_of(renderer)
    box = {"readonly": (packages, str(EXAMPLE)), "python_path": (packages,), "memory_mb": 1024}
    async with boxed(engine, renderer, command, Calculator, 200.0, **box) as player:
        found = await player.play(TASK, episode_id="e", seed=1)
    assert found.error is None
    assert found.reward == 1.0
    assert [len(turn.message.tool_calls) for turn in found.turns] == [1, 0]


async def test_several_programs_at_once_each_reach_their_episode(renderer: Renderer):
    code = 'open("note.txt", "w").write("from the env: " + ask())'
    async with boxed(engine_of(renderer, [say("11")]), renderer, program(code)) as player:
        played = [player.play(Task(f"t{n}"), episode_id=f"e{n}", seed=n) for n in range(4)]
        found = await asyncio.gather(*played)
    assert [episode.reward for episode in found] == [1.0] * 4


async def test_a_program_may_close_its_sending_side_or_leave_before_its_answer(renderer: Renderer):
    code = """
import socket
host, port = os.environ["OPENAI_BASE_URL"].split("/")[2].split(":")
body = json.dumps({"model": "m", "messages": task["messages"]})
head = "POST /v1/chat/completions HTTP/1.1\\r\\nHost: a\\r\\nConnection: close\\r\\n"
head += "Authorization: Bearer %s\\r\\nContent-Length: %d\\r\\n\\r\\n" % (os.environ["OPENAI_API_KEY"], len(body))
for leaves in (True, False):
    with socket.create_connection((host, int(port))) as there:
        there.sendall((head + body).encode())
        if not leaves:
            there.shutdown(socket.SHUT_WR)
            print(b"11" in b"".join(iter(lambda: there.recv(4096), b"")))
"""
    outcomes: list[object] = []

    class Seen(Notes):
        @reward
        def seen(self) -> bool:
            outcomes.append(self.outcome)
            return True

    engine = engine_of(renderer, lambda turn: say("11"))
    engine._delay_s = 1.0
    async with boxed(engine, renderer, program(code), Seen) as player:
        found = await player.play(Task("t"), episode_id="e", seed=1)
    assert (found.error, outcomes) == (None, ["True\n"])
    assert len(found.turns) == 1, "the answer that nobody waited for left no trace"


NODE = """
const task = JSON.parse(require("fs").readFileSync(0))
const headers = {"Content-Type": "application/json", Authorization: "Bearer " + process.env.OPENAI_API_KEY}
const body = JSON.stringify({model: "m", messages: task.messages})
fetch(process.env.OPENAI_BASE_URL + "/chat/completions", {method: "POST", headers, body}).then(async (answer) => {
  const said = (await answer.json()).choices[0].message.content
  require("fs").writeFileSync("note.txt", require("fs").readFileSync("given.txt") + ": " + said)
})
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
async def test_a_node_program_is_an_agent(renderer: Renderer):
    command = ["node", "-e", NODE]
    async with boxed(engine_of(renderer, [say("11")]), renderer, command, memory_mb=4096) as player:
        found = await player.play(Task("t"), episode_id="e", seed=1)
    assert found.error is None
    assert found.reward == 1.0


@pytest.mark.docker
@pytest.mark.timeout(120)
async def test_a_program_in_a_container(renderer: Renderer):
    if not docker_answers():
        pytest.skip("no Docker engine answers (scripts/ci-docker starts one)")
    code = """
import socket
try:
    socket.create_connection(("8.8.8.8", 53), 2)
except OSError:
    open("note.txt", "w").write("from the env: " + ask())
"""
    async with boxed(engine_of(renderer, [say("11")]), renderer, program(code), backend="docker") as player:
        found = await player.play(Task("t"), episode_id="e", seed=1)
    assert found.error is None
    assert found.reward == 1.0


ATTACKS = {
    "the host's loopback": """
import socket
ask()
try:
    socket.create_connection(("127.0.0.1", {port}), 3)
    open("note.txt", "w").write("from the env: 11")
except OSError:
    pass
""",
    "another address": """
import socket
ask()
for host in ("8.8.8.8", "192.168.0.1", "169.254.169.254"):
    try:
        socket.create_connection((host, 53), 2)
        open("note.txt", "w").write("from the env: 11")
    except OSError:
        pass
""",
    "another episode's path": """
ask()
import urllib.error
root = os.environ["OPENAI_BASE_URL"].split("/v1")[0].rsplit("/", 1)[0]
for base, key in [(root + "{other}", "{key}"), (root + "/{key}/v1", "{key}"), (root + "/v1", "{key}")]:
    try:
        ask(base, key)
        open("note.txt", "w").write("from the env: 11")
    except urllib.error.HTTPError as error:
        assert error.code in (401, 404), error.code
""",
    "other sockets of the recorder": """
import glob, socket
ask()
found = glob.glob("/tmp/agentrl-*/s") + ["{socket}"]
print(len(found))
for path in found:
    try:
        with socket.socket(socket.AF_UNIX) as there:
            there.connect(path)
            there.sendall(b"GET /v1/models HTTP/1.1\\r\\nHost: a\\r\\nAuthorization: Bearer {key}\\r\\n\\r\\n")
            if there.recv(64).split()[1] == b"200":
                open("note.txt", "w").write("from the env: 11")
    except OSError:
        pass
""",
    "odd paths": """
ask()
import http.client
for path in ("/../episodes", "/%2e%2e/episodes", "//episodes", "{other}/models", "/v1/../..{other}/models"):
    there = http.client.HTTPConnection(os.environ["OPENAI_BASE_URL"].split("/")[2])
    there.request("GET", path, headers={"Authorization": "Bearer {key}"})
    if there.getresponse().status == 200:
        open("note.txt", "w").write("from the env: 11")
""",
    "requests within requests": """
import socket
ask()
host, port = os.environ["OPENAI_BASE_URL"].split("/")[2].split(":")
key = "Authorization: Bearer {key}\\r\\n"
inner = "GET {other}/models HTTP/1.1\\r\\nHost: a\\r\\n" + key + "\\r\\n"
post = "POST /v1/chat/completions HTTP/1.1\\r\\nHost: a\\r\\n"
for raw in (
    post + "Content-Length: 5\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n0\\r\\n\\r\\n" + inner,
    post + "Content-Length: 0\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(inner) + inner,
    post + "Transfer-Encoding: chunked, identity\\r\\n\\r\\n0\\r\\n\\r\\n" + inner,
    "GET http://127.0.0.1{other}/models HTTP/1.1\\r\\nHost: a\\r\\n" + key + "\\r\\n",
    "CONNECT 127.0.0.1:{port} HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n" + inner,
    "GET /v1/models HTTP/1.1\\r\\nHost: a\\r\\nX-Original-URL: {other}/models\\r\\n" + key + "\\r\\n",
    "GET /v1/models HTTP/1.1\\r\\nHost: a\\r\\nUpgrade: websocket\\r\\nConnection: Upgrade\\r\\n\\r\\n" + inner,
    "\\x16\\x03\\x01\\x02\\x00",
):
    with socket.create_connection((host, int(port)), 5) as there:
        there.sendall(raw.encode("latin1"))
        there.settimeout(0.5)
        try:
            if b'"policy"' in b"".join(iter(lambda: there.recv(4096), b"")):
                open("note.txt", "w").write("from the env: 11")
        except OSError:
            pass
""",
    "other privileges": """
import ctypes, shutil, subprocess
ask()
c = ctypes.CDLL(None)
won = [c.mount(b"none", b"/tmp", b"tmpfs", 0, None), c.unshare(0x10000000), c.chroot(b"/"), c.ptrace(16, 1, 0, 0)]
won += [c.ptrace(16, os.getppid(), 0, 0), c.sethostname(b"x", 1)]
shutil.copy("/bin/sh", "sh")
os.chmod("sh", 0o4755)
mine = subprocess.run(["./sh", "-c", "id -u"], capture_output=True, text=True).stdout.strip()
for act in (lambda: os.setuid(0), lambda: os.mknod("device", 0o020666, os.makedev(1, 3))):
    try:
        act()
        won.append(0)
    except OSError:
        pass
if 0 in won or mine not in ("", str(os.getuid())):
    open("note.txt", "w").write("from the env: 11")
""",
    "a full disk and files without end": """
import socket
ask()
os.symlink("/dev/zero", "note.txt")
for name in ("a" * 255, "new\\nline", "-rf", "*"):
    open(name, "w").close()
socket.socket(socket.AF_UNIX).bind("socket")
fill = lambda: [open(f"f{n}", "wb").write(bytes(4 << 20)) for n in range(999)]
for act in (lambda: os.truncate("*", 1 << 33), fill):
    try:
        act()
    except OSError:
        pass
""",
    "the host's files": """
ask()
for path in ("{file}", "{env}", "/root/.bashrc", "/proc/1/environ"):
    try:
        if b"PYTEST" in open(path, "rb").read() or "/proc" not in path:
            open("note.txt", "w").write("from the env: 11")
    except OSError:
        pass
""",
    "a link to what the reward wants to read": """
ask()
os.symlink("{planted}", "note.txt")
for name in ("hard", "given.txt"):
    try:
        os.link("{planted}", name + ".link")
        os.replace(name + ".link", "note.txt")
    except OSError:
        pass
""",
    "a pipe where the reward reads": """
ask()
os.mkfifo("note.txt")
""",
    "abstract sockets of the host": """
import socket
ask()
try:
    with socket.socket(socket.AF_UNIX) as there:
        there.connect("\\0{abstract}")
        open("note.txt", "w").write("from the env: 11")
except OSError:
    pass
""",
    "other processes and their files": """
import glob, signal
ask()
for path in glob.glob("/proc/[0-9]*"):
    for name in ("environ", "root/{planted}"):
        try:
            text = open(f"{path}/{name}", "rb").read()
            if b"PYTEST_CURRENT_TEST" in text or name == "root/{planted}":
                open("note.txt", "w").write("from the env: 11")
        except OSError:
            pass
for name in ("/dev/shm", "/run", "/var/tmp", "/tmp"):
    for path in glob.glob(name + "/**", recursive=True):
        try:
            if open(path, "rb").read(64) == b"from the env: 11" and not path.startswith(os.getcwd()):
                open("note.txt", "w").write("from the env: 11")
        except OSError:
            pass
""",
    "a process that outlives the episode": """
import subprocess
ask()
subprocess.Popen(["sleep", "98765.4"], start_new_session=True, stdout=subprocess.DEVNULL)
""",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("attack", ATTACKS)
async def test_a_hostile_program_reaches_nothing_else(renderer: Renderer, attack: str, tmp_path: Path):
    said: list[str] = []
    planted = tmp_path / "planted.txt"
    planted.write_text("from the env: 11")
    for folder in (planted, *tmp_path.parents[:2], tmp_path):
        folder.chmod(0o755)
    abstract = f"agentrl-test-{os.getpid()}"

    class Heard(Notes):
        @reward(weight=0.0)
        def heard(self) -> bool:
            said.append(str(self.outcome))
            return True

    with socket.socket() as listener, socket.socket(socket.AF_UNIX) as hidden:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        hidden.bind(f"\0{abstract}")
        hidden.listen()
        async with boxed(engine_of(renderer, [say("11")]), renderer, [], Heard) as player:
            agent, other = player.agent, player.recorder.open(temperature=1.0, seed=0)
            assert isinstance(agent, BoxedAgent)
            async with episode_socket(EpisodeGate(agent.app, other.path, other.key)) as folder:
                values = {"port": listener.getsockname()[1], "other": other.path, "key": other.key}
                values |= {"file": __file__, "env": files.__file__, "socket": f"{folder}/s"}
                values |= {"planted": planted, "abstract": abstract}
                code = ATTACKS[attack]
                for name, value in values.items():
                    code = code.replace("{" + name + "}", str(value))
                hostile = replace(agent, command=program(code + "\nprint('to the end')"))
                found = await replace(player, agent=hostile).play(Task("t"), episode_id="e", seed=1)
            assert other.num_turns == 0
            await player.recorder.close(other)
    assert found.error is None, "nothing that the program does is our failure"
    assert found.reward == 0.0
    assert "to the end" in said[0], "it made its attack"
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # others end meanwhile
            assert b"98765.4" not in path.read_bytes()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "code",
    ["os.kill(1, 9)", "os.kill(os.getppid(), 9)", "os.chmod('.', 0)", "sys.exit(3)", "bytearray(1 << 40)"],
)
async def test_a_program_that_breaks_its_sandbox_is_scored(renderer: Renderer, code: str):
    async with boxed(engine_of(renderer, [say("11")]), renderer, program("ask()\n" + code)) as player:
        found = await player.play(Task("t"), episode_id="e", seed=1)
    assert found.error is None
    assert found.reward is not None
    assert found.reward <= 0.0
    assert len(found.turns) == 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize("crash", ["score", "infra"])
async def test_a_sandbox_that_ends_with_its_program_is_a_crash(renderer: Renderer, crash: Any):
    class Untouched(Notes):
        @reward
        def noted(self) -> float:
            return -1.0

    async with boxed(
        engine_of(renderer, [say("11")]), renderer, program("ask(); import time; time.sleep(60)"), Untouched
    ) as player:
        agent = player.agent
        assert isinstance(agent, BoxedAgent)
        short = replace(agent, spec=replace(agent.spec, ttl_s=12.0))
        found = await replace(player, agent=short, crash=crash).play(Task("t"), episode_id="e", seed=1)
    assert found.crash.startswith("its sandbox has ended: ")
    if crash == "infra":
        assert (found.stop_reason, found.reward) == (StopReason.INFRA, None)
    else:
        assert (found.stop_reason, found.reward, found.metrics["agent/crashed"]) == (
            StopReason.ANSWERED,
            -1.0,
            1.0,
        )


def test_a_sandbox_lasts_as_long_as_its_episode():
    spec = box_spec({}, 7200.0)
    assert (spec.wall_s, spec.ttl_s) == (6480.0, 7200.0)


@pytest.mark.timeout(60)
async def test_files_that_do_not_fit_into_the_sandbox_of_the_env_are_not_its_files(renderer: Renderer):
    twins = "open('a', 'wb').write(b'x' * (30 << 20)); [os.link('a', f'a{n}') for n in range(4)]"
    code = f"ask(); open('note.txt', 'w').write('from the env: 11'); {twins}"
    async with boxed(engine_of(renderer, [say("11")]), renderer, program(code)) as player:
        found = await player.play(Task("t"), episode_id="e", seed=1)
    assert found.error is None
    assert (found.reward, found.metrics["agent/crashed"]) == (0.0, 1.0)


@pytest.mark.timeout(60)
async def test_a_program_that_does_not_end_is_scored_by_what_it_left(renderer: Renderer):
    code = """
open("note.txt", "w").write("from the env: " + ask())
import time
time.sleep(60)
"""
    async with boxed(engine_of(renderer, [say("11")]), renderer, program(code), wall_s=4.0) as player:
        found = await player.play(Task("t"), episode_id="e", seed=1)
    assert found.error is None
    assert found.metrics["agent/crashed"] == 1.0


async def test_a_turn_with_tools_is_recorded_as_sampled(renderer: Renderer):
    engine = engine_of(renderer, [call("calculator", expression="4+7"), *SCRIPT[1:]])
    async with boxed(engine, renderer, program("print(ask())"), Calculator) as player:
        found = await player.play(TASK, episode_id="e", seed=1)
    assert found.error is None
    assert [turn.tokens > 0 for turn in found.turns] == [True]
    assert sum(segment.origin == "sampled" for segment in found.segments) == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"memory": 1}, "agent.sandbox.memory: unknown key; did you mean 'memory_mb'"),
        ({"backend": "process"}, "cannot keep a program from other addresses; use 'namespace' or 'docker'"),
        ({"network": True}, "agent.sandbox.network: the only address"),
        ({"death_reward": -1.0}, "agent.sandbox.death_reward: has no effect here"),
        ({"readonly": ["/no/such/folder"]}, "/no/such/folder: no such file or folder"),
    ],
)
def test_a_sandbox_that_could_not_hold_is_refused(options: dict[str, Any], text: str):
    with pytest.raises(ConfigError, match=text):
        box_spec(options, 60.0)


def test_a_sandbox_needs_a_command():
    with pytest.raises(ValueError, match="sandbox"):
        AgentConfig.model_validate({"use": "agent.py:solve", "sandbox": {}})
    with pytest.raises(ValueError, match="cwd"):
        AgentConfig.model_validate({"command": ["python"], "sandbox": {}, "cwd": "."})
    assert AgentConfig.model_validate({"command": ["python"], "sandbox": {}}).sandbox == {}
