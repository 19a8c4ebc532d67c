"""Programs that play episodes: they leave what the built-in loop leaves, and what they break is not scored."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from rich.console import Console

from agentrl.agents.player import AgentPlayer
from agentrl.agents.players import make_agent, players
from agentrl.agents.program import Agent, CommandAgent, FunctionAgent, without_proxy
from agentrl.agents.recorder import Recorder
from agentrl.chat.template import Renderer
from agentrl.chat.token_check import TokenCheckBudget
from agentrl.chat.transcript import rows_of
from agentrl.config import load_config
from agentrl.config.run import AgentConfig, RunConfig
from agentrl.env import Env, ToolEnv, reward
from agentrl.envs.calculator.env import Calculator
from agentrl.errors import ConfigError, EngineError
from agentrl.models.tiny import make_tokenizer
from agentrl.preflight.dry_run import rehearse
from agentrl.rollout.collect import collect
from agentrl.rollout.episode import Player, TokenCheck, run_episode
from agentrl.rollout.limits import EpisodeLimits
from agentrl.run_folder.records import EpisodeRecord, decode, encode
from agentrl.serve.listen import running
from agentrl.testing.engine import ScriptedEngine
from agentrl.testing.policy import call, say
from agentrl.types import Episode, Message, Sampling, StopReason, Task
from agentrl.view.episode_text import episode_text

EXAMPLE = Path(__file__).parents[2] / "examples" / "agent"
TASK = Task("t", {"start": 4, "operations": [["+", 7]]})
SCRIPT = [call("calculator", expression="4+7"), say("11")]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    directory = tmp_path_factory.mktemp("tokenizer")
    text = '{"name": "calculator", "arguments": {"expression": "4+7"}} Use the calculator, then answer. '
    make_tokenizer(directory, [text] * 4, vocab=360, max_context=4096)
    return Renderer.from_directory(directory)


def example() -> Any:
    """The module of the example's agent."""
    spec = importlib.util.spec_from_file_location("example_agent", EXAMPLE / "agent.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def engine_of(renderer: Renderer, script: Any = SCRIPT, **options: Any) -> ScriptedEngine:
    return ScriptedEngine(renderer, script, tools=Calculator().tools, **options)


@asynccontextmanager
async def playing(
    engine: ScriptedEngine,
    renderer: Renderer,
    agent: Agent | Callable[..., Any],
    *,
    make_env: Any = Calculator,
    crash: Any = "infra",
    **limits: Any,
) -> AsyncIterator[AgentPlayer]:
    recorder = Recorder(engine, renderer, EpisodeLimits(**({"token_budget": 4096, "timeout_s": 30.0} | limits)))
    program = agent if isinstance(agent, CommandAgent) else FunctionAgent(agent)  # type: ignore[arg-type]
    check = TokenCheck("strict", TokenCheckBudget(None))
    async with running(recorder.app()) as address:
        player = AgentPlayer(recorder, address, program, make_env, 1.0, asyncio.Semaphore(64), crash, check)
        yield player
        await player.clients.close()


async def test_the_episode_is_that_of_the_built_in_loop_to_the_token(renderer: Renderer):
    sampling = Sampling(max_tokens=256, stop_ids=renderer.stop_ids)
    builtin = Player(engine_of(renderer), renderer, Calculator, EpisodeLimits(token_budget=4096), sampling)
    expected = await run_episode(builtin, TASK, episode_id="e", seed=1)
    engine = engine_of(renderer)
    async with playing(engine, renderer, example().solve) as player:
        found = await player.play(TASK, episode_id="e", seed=1)
    assert found.error is None
    assert found.segments == expected.segments
    assert found.messages == tuple(map(unnamed, expected.messages)), "on the wire a result has no tool's name"
    assert (found.reward, found.rewards, found.stop_reason) == (1.0, {"solved": 1.0}, StopReason.ANSWERED)
    assert found.tools == expected.tools
    assert [t.message for t in found.turns] == [t.message for t in expected.turns]
    observed = [tuple(map(unnamed, t.observation)) for t in expected.turns]
    assert [t.observation for t in found.turns] == observed
    assert [t.tokens for t in found.turns] == [t.tokens for t in expected.turns]
    assert found.metrics == {"tokens/identical": 1.0}
    assert len(engine.released) == 1
    first, last = found.turns
    assert 0 < first.start_s < first.start_s + first.engine_seconds < last.start_s < found.seconds


def unnamed(message: Message) -> Message:
    return replace(message, name=None)


async def test_tools_that_are_offered_are_counted(renderer: Renderer):
    async def counts(task: Any, access: Any) -> str:
        body = {"model": "m", "messages": task["messages"][1:], "system": task["messages"][0]["content"]}
        async with httpx.AsyncClient(base_url=access.base_url, headers={"x-api-key": access.api_key}) as http:
            counted = (await http.post("/messages/count_tokens", json=body)).json()["input_tokens"]
            answer = (await http.post("/messages", json={**body, "max_tokens": 99})).json()
        return str(counted == answer["usage"]["input_tokens"])

    outcomes: list[object] = []

    class Seen(Calculator):
        @reward
        def seen(self) -> bool:
            outcomes.append(self.outcome)
            return True

    async with playing(engine_of(renderer), renderer, counts, make_env=Seen) as player:
        for offered in (True, False):
            await replace(player, offer_tools=offered).play(TASK, episode_id="e", seed=1)
    assert outcomes == ["True"] * 2


async def test_the_tools_of_the_env_are_offered_to_a_client_that_sends_none(renderer: Renderer):
    async def bare(task: Any, access: Any) -> str:
        tools = {"calculator": Calculator().calculator}
        messages, said = list(task["messages"]), None
        while said is None or said.tool_calls:
            answer = await access.client().chat.completions.create(model="m", messages=messages)
            said = answer.choices[0].message
            messages.append(said)
            for one in said.tool_calls or ():
                result = str(tools[one.function.name](**json.loads(one.function.arguments)))
                messages.append({"role": "tool", "tool_call_id": one.id, "content": result})
        return said.content or ""

    sampling = Sampling(max_tokens=256, stop_ids=renderer.stop_ids)
    builtin = Player(engine_of(renderer), renderer, Calculator, EpisodeLimits(token_budget=4096), sampling)
    expected = await run_episode(builtin, TASK, episode_id="e", seed=1)
    for offered in (True, False):
        async with playing(engine_of(renderer), renderer, bare) as player:
            found = await replace(player, offer_tools=offered).play(TASK, episode_id="e", seed=1)
        assert found.error is None
        assert (found.segments == expected.segments, found.tools == expected.tools) == (offered, offered)


async def test_a_command_may_get_the_address_with_the_key(renderer: Renderer):
    code = """
import json, sys, urllib.request
body = json.dumps({"model": "m", "messages": json.load(sys.stdin)["messages"]}).encode()
head = {"Content-Type": "application/json"}
request = urllib.request.Request(sys.argv[1] + "/chat/completions", body, head)
print(json.load(urllib.request.urlopen(request, timeout=20))["choices"][0]["message"]["content"])
"""
    command = CommandAgent([sys.executable, "-c", code, "{base_url}"])
    async with playing(engine_of(renderer, [say("11")]), renderer, command, timeout_s=200.0) as player:
        found = await player.play(TASK, episode_id="e", seed=1)
    assert found.error is None
    assert [turn.message.content for turn in found.turns] == ["11"]


ASK_ONCE = """
import sys, openai
openai.OpenAI().chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
print(sys.argv)
"""


async def test_only_the_words_of_the_command_have_placeholders(renderer: Renderer):
    class Braces(Calculator):
        def setup(self, start: int, operations: Any) -> str:
            return "write {id}, {base_url} and {prompt}"

    command, outcomes = CommandAgent([sys.executable, "-c", ASK_ONCE, "{id}: {prompt}"]), []

    class Seen(Braces):
        @reward
        def seen(self) -> bool:
            outcomes.append(self.outcome)
            return True

    async with playing(
        engine_of(renderer, [say("11")]), renderer, command, make_env=Seen, timeout_s=200.0
    ) as player:
        found = await player.play(TASK, episode_id="e", seed=1)
    assert found.error is None
    assert outcomes == ["['-c', 't: write {id}, {base_url} and {prompt}']\n"]


async def test_a_proxy_of_the_machine_does_not_get_the_requests(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
):
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "intranet")
    command = CommandAgent([sys.executable, "-c", ASK_ONCE])
    async with playing(engine_of(renderer, [say("11")]), renderer, command, timeout_s=200.0) as player:
        found = await player.play(TASK, episode_id="e", seed=1)
    assert found.error is None
    assert without_proxy() == {"no_proxy": "intranet,127.0.0.1", "NO_PROXY": "intranet,127.0.0.1"}
    monkeypatch.setenv("NO_PROXY", "*")
    assert without_proxy() == {}, "nothing goes through a proxy"


@pytest.mark.parametrize("stream", [False, True])
async def test_turns_that_a_stop_text_of_the_client_cuts_train(renderer: Renderer, stream: bool):
    said = ["Thought: add\nAction: 4+7\nObservation: 12, I guess", "Thought: 11\nObservation: no", "11"]
    stop, heard = "\nObservation:", []

    async def reasons_and_acts(task: Any, access: Any) -> None:
        messages: list[Any] = [{"role": "user", "content": "4+7?"}]
        for _ in said:
            answer = await access.client().chat.completions.create(
                model="m", messages=messages, stop=[stop], stream=stream
            )
            if stream:
                text = "".join([c.choices[0].delta.content or "" async for c in answer if c.choices])
            else:
                text = answer.choices[0].message.content
            heard.append(text)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Observation: 11"}]

    async with playing(engine_of(renderer, lambda turn: say(said[turn])), renderer, reasons_and_acts) as player:
        found = await player.play(TASK, episode_id="e", seed=1)
    assert (found.error, heard) == (None, [text.split(stop)[0] for text in said])
    assert found.metrics == {"tokens/reserialised": 2.0}
    sampled = [renderer.decode(s.ids) for s in found.segments if s.origin == "sampled"]
    assert [text.replace("<|im_end|>", "") for text in sampled] == [heard[0] + stop, heard[1] + stop, "11"]
    assert len(rows_of(found.segments)) == 1


async def test_a_command_is_an_agent(renderer: Renderer):
    command = CommandAgent(["python", "agent.py", "{prompt}"], cwd=str(EXAMPLE))
    outcomes = []

    class Env(Calculator):
        @reward
        def said(self) -> bool:
            outcomes.append(self.outcome)
            return True

    async with playing(engine_of(renderer), renderer, command, make_env=Env, timeout_s=200.0) as player:
        found = await player.play(TASK, episode_id="e", seed=1)
    assert found.error is None
    assert found.rewards == {"solved": 1.0, "said": 1.0}
    assert outcomes == ["11\n"]


async def ask(access: Any, **options: Any) -> Any:
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    client = access.client().with_options(max_retries=0)
    return await client.chat.completions.create(model="m", messages=messages, **options)


async def test_a_plain_env_reads_the_outcome_and_counts_tokens(renderer: Renderer):
    class Plain(Env):
        async def reset(self, task: Task) -> Any:
            return [Message("user", "go")], {}

        async def step(self, message: Message) -> Any:
            raise AssertionError("the program plays")

        async def score(self, episode: Episode) -> dict[str, float]:
            return {"said": float(self.outcome == "out"), "tokens": float(self.count_tokens("good"))}

    async def agent(task: Any, access: Any) -> str:
        await ask(access)
        return "out"

    async with playing(engine_of(renderer), renderer, agent, make_env=Plain) as player:
        found = await player.play(TASK, episode_id="e", seed=1)
    assert (found.error, found.faults) == (None, {})
    assert found.rewards == {"said": 1.0, "tokens": float(len(renderer.encode_text("good")))}


class AsksPlain(Env):
    async def reset(self, task: Task) -> Any:
        answer = await self.model.chat([Message("user", "?")])  # type: ignore[union-attr]
        return [answer], {}

    async def step(self, message: Message) -> Any:
        raise AssertionError("the program plays")


class AsksInSetup(ToolEnv):
    async def setup(self, **row: Any) -> str:
        return str(await self.model.chat([Message("user", "?")]))  # type: ignore[union-attr]


class AsksInReward(Calculator):
    @reward
    async def liked(self) -> float:
        return float(bool(await self.model.chat([Message("user", "?")])))  # type: ignore[union-attr]


class Silent(Exception):
    def __str__(self) -> str:
        raise ValueError("no words for it")


class TestTrouble:
    @pytest.mark.parametrize("make_env", [AsksPlain, AsksInSetup, AsksInReward])
    async def test_who_asks_the_policy_is_told_that_a_program_has_it(self, renderer: Renderer, make_env: Any):
        async with playing(engine_of(renderer), renderer, example().solve, make_env=make_env) as player:
            found = await player.play(TASK, episode_id="e", seed=1)
        said = found.faults.get("liked") if make_env is AsksInReward else found.error
        assert said is not None
        assert (
            "has no attribute 'chat'; `self.model` is None while a program plays the episodes (`agent`): " in said
        )

    async def test_a_crash_is_no_score(self, renderer: Renderer):
        async def agent(task: Any, access: Any) -> None:
            await ask(access)
            raise KeyError("oops")

        async with playing(engine_of(renderer), renderer, agent) as player:
            lost = await player.play(TASK, episode_id="e", seed=1)
            assert lost.error == "InfraError: the agent crashed after 1 turn: KeyError: 'oops'"
            assert (lost.reward, lost.stop_reason) == (None, StopReason.INFRA)
            assert len(lost.turns) == 1, "kept for the record"
            scored = await replace(player, crash="score").play(TASK, episode_id="f", seed=1)
            assert AgentConfig(use="a:b").crash == "score", "the policy may have crashed it"
        assert (scored.error, scored.reward) == (None, 0.0)
        assert (scored.metrics["agent/crashed"], scored.crash) == (1.0, "KeyError: 'oops'")
        shown = Console(file=io.StringIO(), width=200)
        shown.print(episode_text(decode(encode(EpisodeRecord.of(1, 0, scored, None)))))
        assert "the agent crashed: KeyError: 'oops'" in shown.file.getvalue()

    @pytest.mark.parametrize("error", [Silent(), RuntimeError("x" * 5_000_000)], ids=["silent", "long"])
    async def test_a_crash_is_told_in_few_words(self, renderer: Renderer, error: Exception):
        async def agent(task: Any, access: Any) -> None:
            await ask(access)
            raise error

        async with playing(engine_of(renderer), renderer, agent) as player:
            found = await replace(player, crash="score").play(TASK, episode_id="e", seed=1)
        assert found.error is None
        assert found.crash.startswith(type(error).__name__)
        assert len(found.crash) <= 1000

    async def test_a_limit_that_the_agent_does_not_catch_is_a_limit(self, renderer: Renderer):
        async def agent(task: Any, access: Any) -> None:
            for _ in range(3):
                await ask(access)

        script = [say("11"), say("11"), say("11")]
        async with playing(engine_of(renderer, script), renderer, agent, max_turns=2) as player:
            found = await player.play(TASK, episode_id="e", seed=1)
        assert (found.error, found.stop_reason, found.reward) == (None, StopReason.MAX_TURNS, 1.0)
        assert (len(found.turns), found.crash) == (2, "")

    async def test_an_agent_that_runs_out_of_time_is_scored_as_it_stands(self, renderer: Renderer):
        async def agent(task: Any, access: Any) -> None:
            await ask(access)
            await asyncio.sleep(60)

        async with playing(engine_of(renderer, [say("11")]), renderer, agent, timeout_s=1.0) as player:
            found = await player.play(TASK, episode_id="e", seed=1)
        assert (found.error, found.stop_reason, found.reward) == (None, StopReason.TIMEOUT, 1.0)

    async def test_an_engine_that_is_lost_is_not_the_agents_fault_whatever_it_makes_of_it(
        self, renderer: Renderer
    ):
        async def agent(task: Any, access: Any) -> str:
            try:
                await ask(access)
            except openai.APIError:
                return "never mind"
            return ""

        async with playing(engine_of(renderer, [EngineError("gone")]), renderer, agent) as player:
            found = await player.play(TASK, episode_id="e", seed=1)
        assert found.error == "EngineError: gone"

    async def test_an_agent_that_never_asks_is_told_apart(self, renderer: Renderer):
        async with playing(engine_of(renderer), renderer, lambda task, access: "11") as player:
            found = await player.play(TASK, episode_id="e", seed=1)
        assert "ended without a completion of the policy: does it use the base URL it is given?" in (
            found.error or ""
        )

    async def test_a_lost_place_in_a_group_is_played_again_alone(self, renderer: Renderer):
        tries = []

        async def agent(task: Any, access: Any) -> None:
            tries.append(task["id"])
            if len(tries) == 2:
                raise RuntimeError("once")
            await ask(access)

        engine = engine_of(renderer, lambda turn: say("11"))
        async with playing(engine, renderer, agent) as player:
            (group,) = await collect(player, [TASK], group_size=3, label="s1", seed=0)
        assert [e.reward for e in group.episodes] == [1.0] * 3
        assert len(group.failed) == 1
        assert len(tries) == 4


class TestCommands:
    async def test_what_a_command_is_given_and_how_it_fails(self, renderer: Renderer, tmp_path: Path):
        program = (
            "import json, os, sys; data = json.load(sys.stdin); "
            "print(data['prompt'], os.environ['OPENAI_BASE_URL'][:7], file=sys.stderr); sys.exit(3)"
        )
        command = CommandAgent([sys.executable, "-c", program])
        async with playing(engine_of(renderer), renderer, command) as player:
            found = await replace(player, crash="score").play(TASK, episode_id="e", seed=1)
        assert found.error == (
            "InfraError: the agent crashed after 0 turns: exit code 3: Start with 4. Add 7. http://"
        )
        missing = CommandAgent(["/nowhere/agent"])
        async with playing(engine_of(renderer), renderer, missing) as player:
            found = await player.play(TASK, episode_id="e", seed=1)
        assert "cannot start /nowhere/agent: No such file or directory" in (found.error or "")

    async def test_a_command_that_runs_out_of_time_leaves_no_process(self, renderer: Renderer, tmp_path: Path):
        pids = tmp_path / "pids"
        command = CommandAgent(["sh", "-c", f"sleep 60 & echo $! $$ > {pids}; wait"])
        async with playing(engine_of(renderer), renderer, command, timeout_s=1.0) as player:
            found = await player.play(TASK, episode_id="e", seed=1)
        assert found.stop_reason is StopReason.INFRA, "it never asked the policy"
        for pid in map(int, pids.read_text().split()):
            for _ in range(200):
                if not _alive(pid):
                    break
                await asyncio.sleep(0.01)
            assert not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()


def test_the_example_is_a_good_configuration():
    config = load_config(EXAMPLE / "tools.yaml")
    assert config.agent is not None
    assert isinstance(make_agent(config.agent), FunctionAgent)


@pytest.mark.parametrize(
    ("agent", "text"),
    [
        ({}, "exactly one of `use`"),
        ({"use": "m:f", "command": ["x"]}, "exactly one of `use`"),
        ({"use": "m:f", "cwd": "/"}, "cwd has no effect without command"),
    ],
)
def test_settings_that_do_not_fit(agent: dict[str, Any], text: str):
    with pytest.raises(ValueError, match=text):
        AgentConfig(**agent)


def test_a_missing_file_is_told_with_its_place(tmp_path: Path):
    (tmp_path / "tools.yaml").write_text("env: a:B\nmodel: {tiny: {}}\nagent: {use: nope.py:solve}\n")
    with pytest.raises(ConfigError, match=r"tools.yaml:3:14: agent.use: there is no file .*nope.py"):
        load_config(tmp_path / "tools.yaml")


async def test_rewards_for_each_turn_are_refused(renderer: Renderer):
    class Turns(ToolEnv):
        @reward(per="turn")
        def short(self) -> float:
            return 1.0

    config = RunConfig.model_validate(
        {"env": "a:B", "model": {"tiny": {}}, "agent": {"use": "agentrl.testing.policy:say"}}
    )
    with pytest.raises(ConfigError, match="reward 'short' of Turns is computed per turn"):
        async with players(config, None, engine_of(renderer), renderer, Turns):
            pass


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        ({"use": "no_such_module:play"}, "no_such_module"),
        ({"command": ["no-such-program", "x"]}, "agent.command 'no-such-program': no such program"),
        ({"command": ["./no/program"]}, "agent.command './no/program': no such program"),
        ({"command": ["python"], "cwd": "/no/such/folder"}, "agent.cwd /no/such/folder: no such folder"),
    ],
)
def test_an_agent_that_cannot_be_started_is_refused_by_check(agent: dict[str, Any], said: str):
    config = RunConfig(env="agentrl.envs.calculator:Calculator", model={"tiny": {}}, agent=agent)
    with pytest.raises(ConfigError, match=said):
        rehearse(config)


def test_programs_that_can_be_started_are_not_refused(tmp_path: Path):
    program = tmp_path / "play"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    for agent in ({"command": ["sh"]}, {"command": ["./play"], "cwd": str(tmp_path)}, {"command": [str(program)]}):
        make_agent(AgentConfig(**agent))
