"""What it costs to play an episode with a program in a sandbox, apart from the program: start, calls, teardown.

A small Python program asks the policy and runs a shell command, a few times; the policy replays its turns at once.
The same turns are played by a function through the recorder, and by the built-in loop, so that the recorder's own
share is seen.

    python -m bench.agent_costs          # writes bench/results/agent_costs.json
    python -m bench.agent_costs --quick  # fewer episodes; the results stay as they are

The goals, for one episode at a time: less than 1.5 s pass before the program's first line and after its last one
together, and the recorder adds less than 10 ms of CPU to a request. `met` is `inconclusive` where they are missed
while other work wanted this machine's cores. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from agentrl import ToolEnv, reward, tool
from agentrl.agents.boxed import BoxedAgent, box_spec
from agentrl.agents.player import AgentPlayer
from agentrl.agents.program import Agent, FunctionAgent
from agentrl.agents.recorder import Recorder
from agentrl.chat.template import Renderer
from agentrl.models.tiny import make_tokenizer
from agentrl.rollout.episode import Player, run_episode
from agentrl.rollout.limits import EpisodeLimits
from agentrl.sandbox import Sandbox, close_pools
from agentrl.serve.listen import running
from agentrl.testing.engine import ScriptedEngine
from agentrl.testing.policy import call, say
from agentrl.types import Episode, Message, Sampling, Task

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.shared.verdict import finish

RESULTS = Path(__file__).parent / "results" / "agent_costs.json"
GOAL_S, GOAL_CPU_MS = 1.5, 10.0
CALLS = 8
LIMITS = EpisodeLimits(max_turns=CALLS + 1, token_budget=30_000, timeout_s=120.0)
WORDS = ['{"name": "bash", "arguments": {"command": "true"}} look at the files of the folder '] * 40
SCRIPT: list[Message] = [*(call("bash", command="true") for _ in range(CALLS)), say("It is done.")]
PROGRAM = """
import json, os, subprocess, sys, time, urllib.request
marks = {"begun": time.time(), "asked": [], "called": []}
task = json.load(sys.stdin)
messages = task["messages"]
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
while True:
    began = time.time()
    body = json.dumps({"model": "m", "messages": messages, "tools": task["tools"]}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    said = json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]
    marks["asked"].append(time.time() - began)
    messages.append(said)
    if not said.get("tool_calls"):
        break
    for one in said["tool_calls"]:
        began = time.time()
        subprocess.run(json.loads(one["function"]["arguments"])["command"], shell=True)
        marks["called"].append(time.time() - began)
        messages.append({"role": "tool", "tool_call_id": one["id"], "content": ""})
marks["ended"] = time.time()
print(json.dumps(marks))
"""


class Folder(ToolEnv):
    """Look at the files."""

    sandbox = Sandbox(memory_mb=256)

    async def setup(self) -> str:
        await self.box.put_tree({f"src/{n}.py": "print(1)\n" * 50 for n in range(20)})
        return "Look at them."

    @tool
    async def bash(self, command: str) -> str:
        """Run a command."""
        return (await self.box.run(command)).text()

    @reward
    async def done(self) -> bool:
        """The files are there; in a box, the outcome holds what the program measured."""
        marks.append(self.outcome if isinstance(self.outcome, dict) else {})
        return len(await self.box.get_tree()) == 20


class Nowhere(Folder):
    """Look at nothing."""

    sandbox = None  # type: ignore[assignment] # the recorder alone: no sandbox on either side

    async def setup(self) -> str:
        return "Look at them."

    @tool
    async def bash(self, command: str) -> str:
        """Run a command."""
        return ""

    @reward
    async def done(self) -> bool:
        """Nothing to see."""
        return True


marks: list[dict[str, Any]] = []


async def loop(task: dict[str, Any], access: Any) -> str:
    """The same turns as a function."""
    messages: list[Any] = list(task["messages"])
    client = access.client()
    while True:
        answer = await client.chat.completions.create(model="m", messages=messages, tools=task["tools"])
        said = answer.choices[0].message
        messages.append(said)
        if not said.tool_calls:
            return ""
        messages += [{"role": "tool", "tool_call_id": one.id, "content": ""} for one in said.tool_calls]


async def boxed(renderer: Renderer, episodes: int) -> dict[str, Any]:
    """Episodes in a sandbox, one at a time: milliseconds of each part, the median."""
    marks.clear()
    recorder = Recorder(_engine(renderer), renderer, LIMITS)
    app = recorder.app()
    agent = BoxedAgent(["python", "-c", PROGRAM], box_spec({}, LIMITS.timeout_s), app)
    start, end, whole = [], [], []
    async with running(app) as address:
        player = _player(recorder, address, agent, Folder)
        for number in range(episodes + 2):
            began = time.time()
            episode = await player.play(Task(f"t{number}"), episode_id=f"b{number}", seed=number)
            over = time.time()
            _check(episode)
            if number >= 2:  # the first ones fill caches
                start.append(marks[-1]["begun"] - began)
                end.append(over - marks[-1]["ended"])
                whole.append(over - began)
        await player.clients.close()
    await close_pools()
    kept = marks[2:]
    return {
        "start_ms": _ms(start),
        "request_ms": _ms([s for one in kept for s in one["asked"]]),
        "tool_call_ms": _ms([s for one in kept for s in one["called"]]),
        "teardown_ms": _ms(end),
        "episode_ms": _ms(whole),
        "slowest_start_ms": round(1000 * max(start), 1),
        "slowest_teardown_ms": round(1000 * max(end), 1),
    }


async def apart(renderer: Renderer, episodes: int) -> dict[str, Any]:
    """What the recorder adds to a request: a function through it, and the built-in loop, without sandboxes."""
    recorder = Recorder(_engine(renderer), renderer, LIMITS)
    sampling = Sampling(max_tokens=512, stop_ids=renderer.stop_ids)
    builtin = Player(_engine(renderer), renderer, Nowhere, LIMITS, sampling)
    async with running(recorder.app()) as address:
        player = _player(recorder, address, FunctionAgent(loop), Nowhere)

        async def through(number: int) -> Episode:
            return await player.play(Task(f"t{number}"), episode_id=f"r{number}", seed=number)

        async def within(number: int) -> Episode:
            return await run_episode(builtin, Task(f"t{number}"), episode_id=f"l{number}", seed=number)

        found = {
            "recorder": await _per_turn(through, episodes),
            "built_in_loop": await _per_turn(within, episodes),
        }
        await player.clients.close()
    added = found["recorder"]["cpu_ms"] - found["built_in_loop"]["cpu_ms"]
    return {**found, "added_cpu_ms": round(added, 2), "note": "with the official client, in the same process"}


async def _per_turn(play: Callable[[int], Awaitable[Episode]], episodes: int) -> dict[str, float]:
    for number in range(2):
        _check(await play(number))
    wall, cpu = time.perf_counter(), time.process_time()
    for number in range(episodes):
        _check(await play(number + 2))
    turns = episodes * len(SCRIPT)
    return {
        "ms": round(1000 * (time.perf_counter() - wall) / turns, 2),
        "cpu_ms": round(1000 * (time.process_time() - cpu) / turns, 2),
    }


def _engine(renderer: Renderer) -> ScriptedEngine:
    return ScriptedEngine(renderer, SCRIPT, tools=Folder().tools, max_context=30_000)


def _player(recorder: Recorder, address: str, agent: Agent, env: type[ToolEnv]) -> AgentPlayer:
    return AgentPlayer(recorder, address, agent, env, 1.0, asyncio.Semaphore(8))


def _check(episode: Episode) -> None:
    assert episode.error is None, episode.error
    assert (len(episode.turns), episode.reward) == (len(SCRIPT), 1.0), episode


def _ms(seconds: list[float]) -> float:
    return round(1000 * statistics.median(seconds), 1)


def measured(quick: bool) -> dict[str, Any]:
    """Both parts, the goals, and whether they are met."""
    with tempfile.TemporaryDirectory() as name:
        make_tokenizer(Path(name), WORDS, vocab=600, max_context=30_000)
        renderer = Renderer.from_directory(name)
        box = asyncio.run(boxed(renderer, 4 if quick else 20))
        requests = asyncio.run(apart(renderer, 10 if quick else 60))
    met: bool | str = (
        box["start_ms"] + box["teardown_ms"] < 1000 * GOAL_S and requests["added_cpu_ms"] < GOAL_CPU_MS
    )
    if not met and os.getloadavg()[0] > (os.cpu_count() or 1):
        met = "inconclusive"
    return {
        "goal": f"start and teardown below {GOAL_S} s together, and {GOAL_CPU_MS:g} ms of CPU more for a request",
        "met": met,
        "box": box,
        "requests": requests,
        "turns_per_episode": len(SCRIPT),
        "cpus": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    """Measure, and write the results unless --quick."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    found = measured(parser.parse_args().quick)
    if not parser.parse_args().quick:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    ours = round(found["box"]["start_ms"] + found["box"]["teardown_ms"], 1)
    line = {"bench": "agent_costs", "ours": ours, "unit": "ms of start and teardown of a sandbox for an episode"}
    finish(line | {"goal": 1000 * GOAL_S, "met": found["met"]}, timed=True)


if __name__ == "__main__":
    main()
