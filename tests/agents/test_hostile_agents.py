"""Programs that misbehave: what they do counts against them, and the next episode is untouched."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from agentrl.agents import program
from agentrl.agents.boxed import BoxedAgent
from agentrl.agents.player import AgentPlayer
from agentrl.agents.program import CommandAgent, FunctionAgent
from agentrl.chat.template import Renderer
from agentrl.env import reward
from agentrl.envs.calculator.env import Calculator
from agentrl.errors import EngineError
from agentrl.testing.engine import ScriptedEngine
from agentrl.testing.policy import say
from agentrl.types import Episode, StopReason, Task
from tests.agents.test_boxed import ASK, boxed
from tests.agents.test_boxed import program as boxed_program
from tests.agents.test_player import TASK, _alive, ask, engine_of, playing
from tests.agents.test_player import renderer as renderer


@contextlib.asynccontextmanager
async def agent(renderer: Renderer, what: Any, **options: Any) -> AsyncIterator[AgentPlayer]:
    engine = engine_of(renderer, lambda turn: say("11"))
    async with playing(engine, renderer, what, **({"crash": "score", "timeout_s": 60.0} | options)) as player:
        yield player


async def play(player: AgentPlayer, name: str = "e") -> Episode:
    return await player.play(TASK, episode_id=name, seed=1)


def python(code: str) -> CommandAgent:
    return CommandAgent([sys.executable, "-c", ASK + code])


def ask_plainly(access: Any) -> None:
    headers = {"Authorization": f"Bearer {access.api_key}", "Content-Type": "application/json"}
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
    request = urllib.request.Request(access.base_url + "/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.status == 200


# -- functions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threaded", [False, True], ids=["async", "thread"])
@pytest.mark.parametrize(
    ("end", "told"),
    [
        (lambda: sys.exit(3), "SystemExit: 3"),
        (lambda: sys.exit("no way"), "SystemExit: no way"),
        (lambda: sys.exit(), ""),
        (lambda: (_ for _ in ()).throw(asyncio.CancelledError()), "CancelledError: "),
        (lambda: {1: {2}, (1, 2): 3}, "TypeError: keys must be"),
    ],
    ids=["exit 3", "exit text", "exit", "cancelled", "not json"],
)
async def test_however_a_function_ends_the_run_goes_on(renderer: Renderer, threaded: bool, end: Any, told: str):
    async def plays(task: Any, access: Any) -> Any:
        await ask(access)
        return end()

    def in_thread(task: Any, access: Any) -> Any:
        ask_plainly(access)
        return end()

    async with agent(renderer, in_thread if threaded else plays) as player:
        found = await play(player)
        assert (found.error, found.metrics.get("agent/crashed", 0.0)) == (None, float(bool(told)))
        lost = await play(replace(player, crash="infra"))
        assert (told or "None") in str(lost.error)


async def test_a_callable_that_returns_an_awaitable_is_awaited(renderer: Renderer):
    async def plays(extra: str, task: Any, access: Any) -> str:
        await ask(access)
        return extra

    class Callable:
        async def __call__(self, task: Any, access: Any) -> str:
            return await plays("11", task, access)

    for what in (functools.partial(plays, "11"), Callable()):
        async with agent(renderer, what) as player:
            found = await play(player)
        assert (found.error, len(found.turns)) == (None, 1)


async def test_a_function_on_a_thread_may_run_the_client_in_a_loop_of_its_own(renderer: Renderer):
    def in_thread(task: Any, access: Any) -> str:
        return asyncio.run(ask(access)).choices[0].message.content

    numbers = iter(range(4))

    def mixed(task: Any, access: Any) -> Any:
        return ask(access) if next(numbers) % 2 else in_thread(task, access)

    async with agent(renderer, in_thread) as player:
        found = [await play(player) for _ in range(3)]
        found += [await play(replace(player, agent=FunctionAgent(mixed))) for _ in range(4)]
    assert [(one.error, one.metrics.get("agent/crashed")) for one in found] == [(None, None)] * 7


async def test_time_that_runs_out_does_not_hide_what_the_policy_is_not_to_blame_for(renderer: Renderer):
    async def silent(task: Any, access: Any) -> None:
        await asyncio.sleep(60)

    async def patient(task: Any, access: Any) -> None:
        await ask(access)
        with contextlib.suppress(openai.APIStatusError):
            await ask(access)
        await asyncio.sleep(60)

    async def slow(task: Any, access: Any) -> None:
        await ask(access)

    class Away(ScriptedEngine):
        outage_s = 0.0

        async def generate(self, *given: Any, **options: Any) -> Any:
            self.outage_s += 1.0
            return await super().generate(*given, **options)

    lines = iter([say("11"), EngineError("the server is gone")])
    away = Away(renderer, lambda turn: say("11"), delay_s=60.0)
    waits = engine_of(renderer, lambda turn: say("11"), delay_s=60.0)
    told = []
    for engine, plays, timeout_s in (
        (engine_of(renderer, [say("11")]), silent, 1.0),
        (engine_of(renderer, lambda turn: next(lines)), patient, 6.0),  # two requests, also on a busy machine
        (away, slow, 3.0),
        (waits, slow, 3.0),
    ):
        async with playing(engine, renderer, plays, crash="score", timeout_s=timeout_s) as player:
            found = await play(player)
        told.append((found.stop_reason, found.error))
    infra, unasked = StopReason.INFRA, "the agent ended without a completion of the policy"
    assert told == [
        (infra, f"InfraError: {unasked}: does it use the base URL it is given?"),
        (infra, "EngineError: the server is gone"),
        (infra, "InfraError: an episode during which no server could answer took longer than 3 s"),
        (StopReason.TIMEOUT, None),
    ]


async def test_an_agent_whose_requests_are_all_refused_is_told_why(renderer: Renderer):
    async def choosy(task: Any, access: Any) -> None:
        with contextlib.suppress(openai.APIStatusError):
            await ask(access, n=2)

    async with agent(renderer, choosy) as player:
        found = await play(player)
    assert "its request was refused (400): n: an episode continues from a single choice" in str(found.error)


async def test_a_function_that_ignores_its_end_is_left_behind(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(program, "GRACE_S", 0.2)
    over, refused = asyncio.Event(), []

    async def stubborn(task: Any, access: Any) -> None:
        await ask(access)
        while not over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await over.wait()
        try:
            await ask(access)
        except openai.APIStatusError as e:
            refused.append(e.status_code)

    async with agent(renderer, stubborn, timeout_s=1.0) as player:
        found = await asyncio.wait_for(play(player), 20)
        over.set()
        async with asyncio.timeout(20):
            while not refused:  # noqa: ASYNC110 - the agent is nobody's any more
                await asyncio.sleep(0.01)
    assert (found.error, found.stop_reason, len(found.turns)) == (None, StopReason.TIMEOUT, 1)
    assert refused[0] in (401, 410)
    assert "ignores that its episode is over" in caplog.text


async def test_plain_functions_hold_up_neither_each_other_nor_the_run(renderer: Renderer):
    count = (os.cpu_count() or 1) + 24  # more than asyncio has threads for
    all_there, freed = threading.Event(), threading.Event()
    together = threading.Barrier(count, all_there.set)

    def waits(task: Any, access: Any) -> None:
        ask_plainly(access)
        together.wait(30)
        freed.wait(30)

    async with agent(renderer, waits) as player:
        playing = [asyncio.ensure_future(play(player, f"e{n}")) for n in range(count)]
        async with asyncio.timeout(30):
            while not all_there.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert await asyncio.to_thread(int, "5") == 5, "others have their threads"
        freed.set()
        found = await asyncio.gather(*playing)
    assert [episode.error for episode in found] == [None] * count
    assert [len(episode.turns) for episode in found] == [1] * count


async def test_a_plain_function_does_not_outlive_its_episode(renderer: Renderer):
    ended = threading.Event()

    def works(task: Any, access: Any) -> None:
        ask_plainly(access)
        try:
            while True:
                time.sleep(0.01)
        finally:
            ended.set()

    async with agent(renderer, works, timeout_s=1.5) as player:
        found = await play(player)
        assert await asyncio.to_thread(ended.wait, 20)
    assert (found.error, found.stop_reason) == (None, StopReason.TIMEOUT)


async def test_our_own_bug_is_no_failure_of_the_agent(renderer: Renderer):
    async def shrugs(task: Any, access: Any) -> str:
        with contextlib.suppress(openai.APIError):
            await ask(access)
        return "never mind"

    async with playing(engine_of(renderer, [RuntimeError("ours")]), renderer, shrugs) as player:
        with pytest.raises(RuntimeError, match="ours"):
            await play(player)


async def test_an_agent_that_only_counts_tokens_never_asked_the_policy(renderer: Renderer):
    async def counts(task: Any, access: Any) -> str:
        headers = {"x-api-key": access.api_key, "anthropic-version": "2023-06-01"}
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        async with httpx.AsyncClient(base_url=access.base_url, headers=headers) as http:
            answers = [await http.post("/messages/count_tokens", json=body) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200] * 3
        return "11"

    async with agent(renderer, counts) as player:
        found = await play(player)
    assert "without a completion of the policy" in str(found.error)
    assert (found.reward, found.segments) == (None, ())


# -- commands --------------------------------------------------------------------------------------------------

DAEMON = """
import subprocess
ask()
env = {} if "hidden" in sys.argv else None
code = "import os, sys, time; print(os.getpid(), file=open(sys.argv[1], 'w'), flush=True); time.sleep(60)"
own = sys.argv[2] == "own"
subprocess.Popen([sys.executable, "-c", code, sys.argv[1]], start_new_session=own, env=env)
import time
while not (os.path.exists(sys.argv[1]) and open(sys.argv[1]).read()):
    time.sleep(0.01)
print("done")
"""


@pytest.mark.parametrize("kind", [["same"], ["own"], ["own", "hidden"]], ids=" ".join)
async def test_a_process_that_holds_the_outputs_does_not_hold_up_the_episode(
    renderer: Renderer, kind: list[str], tmp_path: Path
):
    outcomes: list[object] = []

    class Seen(Calculator):
        @reward
        def seen(self) -> bool:
            outcomes.append(self.outcome)
            return True

    command = CommandAgent([*python(DAEMON).command, str(tmp_path / "pid"), *kind])
    async with agent(renderer, command, make_env=Seen) as player:
        found = await asyncio.wait_for(play(player), 40)
    assert (found.error, found.stop_reason) == (None, StopReason.ANSWERED)
    assert outcomes == ["done\n"]
    pid = int((tmp_path / "pid").read_text())
    if "hidden" in kind:  # nothing tells whose it is
        os.kill(pid, signal.SIGKILL)
        return
    for _ in range(200):
        if not _alive(pid):
            break
        await asyncio.sleep(0.01)
    assert not _alive(pid)


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("os.kill(os.getpid(), 15)", "killed by SIGTERM"),
        ("os.kill(0, 10)", "killed by SIGUSR1"),
        ("os._exit(255)", "exit code 255"),
        ("sys.exit(130)", "exit code 130"),
        ("os.abort()", "killed by SIGABRT"),
    ],
)
@pytest.mark.parametrize("answered", [True, False], ids=["after", "before"])
async def test_how_a_command_ends_is_told_and_counts_once_the_policy_has_answered(
    renderer: Renderer, end: str, told: str, answered: bool
):
    async with agent(renderer, python(("ask()\n" if answered else "") + end)) as player:
        found = await play(player)
    if answered:
        assert (found.error, found.metrics["agent/crashed"], len(found.turns)) == (None, 1.0, 1)
    else:
        assert found.error == f"InfraError: the agent crashed after 0 turns: {told}"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
async def test_a_command_that_writes_without_end_is_ended(
    renderer: Renderer, stream: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(program, "OUTPUT_BYTES", 8 << 20)
    endless = python(f"ask()\nwhile True: sys.{stream}.write('x' * 65536)")
    async with agent(renderer, endless) as player:
        playing = asyncio.ensure_future(play(player))
        found = await asyncio.wait_for(playing, 40)
        lost = await play(replace(player, crash="infra"))
    assert (found.error, found.metrics["agent/crashed"]) == (None, 1.0)
    assert "it wrote more than 8 MiB to its output" in str(lost.error)


async def test_an_argument_that_no_command_line_can_hold_is_told(renderer: Renderer):
    command = CommandAgent([sys.executable, "-c", "pass", "{id}"])
    async with agent(renderer, command) as player:
        found = await player.play(replace(TASK, id="a\0b"), episode_id="e", seed=1)
    assert "cannot start" in str(found.error)
    assert "null byte" in str(found.error)


async def test_what_an_episode_leaves_running_gets_nothing_from_the_next(renderer: Renderer, tmp_path: Path):
    code = f"""
import time, urllib.error
ask()
if os.fork() == 0:
    os.setsid()
    for number in (0, 1, 2):
        os.close(number)
    for name in list(os.environ):
        del os.environ[name]
    if os.fork() == 0:
        os.execve(sys.executable, [sys.executable, "-c", '''
import json, sys, time, urllib.error, urllib.request
headers = {{"Authorization": "Bearer " + sys.argv[2], "Content-Type": "application/json"}}
while True:
    body = json.dumps({{"model": "m", "messages": [{{"role": "user", "content": "mine"}}]}}).encode()
    request = urllib.request.Request(sys.argv[1] + "/chat/completions", body, headers)
    try:
        urllib.request.urlopen(request, timeout=20)
        said = "200"
    except urllib.error.HTTPError as e:
        said = str(e.code)
    except OSError:
        break
    print(said, file=open({str(tmp_path / "codes")!r}, "a"), flush=True)
    time.sleep(0.02)
''', base, key], {{}})
    os._exit(0)
while not os.path.exists({str(tmp_path / "codes")!r}):
    time.sleep(0.01)
"""
    code = code.replace(
        "ask()\nif", "ask()\nbase, key = os.environ['OPENAI_BASE_URL'], os.environ['OPENAI_API_KEY']\nif"
    )
    codes = tmp_path / "codes"
    async with agent(renderer, python(code), max_turns=1000) as player:
        await play(player, "first")
        async with asyncio.timeout(20):
            while not codes.exists() or "401" not in codes.read_text():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        codes.unlink()
        found = await play(replace(player, agent=python("ask()")), "second")
        async with asyncio.timeout(20):
            while not codes.exists() or len(codes.read_text().split()) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    assert (found.error, len(found.turns)) == (None, 1)
    assert set(codes.read_text().split()) == {"401"}


# -- in a sandbox ----------------------------------------------------------------------------------------------


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    "code",
    [
        "ask()\nwhile True: sys.stdout.write('x' * 65536)",
        "ask()\nos.kill(os.getpid(), 9)",
        "ask()\nimport subprocess\nsubprocess.Popen(['sleep', '60'], start_new_session=True)\nos._exit(3)",
    ],
    ids=["output", "signal", "daemon"],
)
async def test_a_program_in_a_sandbox_that_ends_badly_is_scored(renderer: Renderer, code: str):
    before = 'open("note.txt", "w").write("from the env: 11")\n'
    engine = engine_of(renderer, lambda turn: say("11"))
    async with boxed(engine, renderer, boxed_program(before + code), output_total_mb=8) as player:
        found = await player.play(Task("t"), episode_id="first", seed=1)
        honest = boxed_program('open("note.txt", "w").write("from the env: " + ask())')
        assert isinstance(player.agent, BoxedAgent)
        player = replace(player, agent=replace(player.agent, command=honest))
        after = await player.play(Task("t"), episode_id="second", seed=1)
    assert (found.error, found.metrics["agent/crashed"], found.reward) == (None, 1.0, 1.0)
    assert (after.error, after.reward, len(after.turns)) == (None, 1.0, 1)


def test_the_word_for_an_exit():
    assert [program.how_ended(code) for code in (0, 3, -9, -15, -40)] == [
        "exit code 0",
        "exit code 3",
        "killed by SIGKILL",
        "killed by SIGTERM",
        "killed by signal 40",
    ]
