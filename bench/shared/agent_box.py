"""mini-swe-agent from PyPI, unmodified and in a box, beside the built-in loop: what a program in a box costs.

Both play tasks of the shipped `files` env with the same policy, which replays three turns: two shell commands, and
the end. The agent runs in a namespace sandbox that reaches only its episode; its packages are installed once.

    python -m bench.agent --quick                       # both, two episodes at a time
    python -m bench.agent --quick --packages FOLDER     # pip install --target FOLDER mini-swe-agent mcp

The goal ("met"): every episode is scored, every turn is recognized, and no sampled token is lost.
"""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from agentrl.agents.boxed import BoxedAgent, box_spec
from agentrl.agents.player import AgentPlayer
from agentrl.agents.recorder import Recorder
from agentrl.chat.template import Renderer
from agentrl.envs.files.env import Files
from agentrl.models.tiny import make_tokenizer
from agentrl.rollout.episode import Player, run_episode
from agentrl.rollout.limits import EpisodeLimits
from agentrl.sandbox import close_pools
from agentrl.serve.listen import running
from agentrl.testing.engine import ScriptedEngine
from agentrl.testing.policy import call, say
from agentrl.types import Completion, Episode, Message, Sampling, Task

PACKAGES = Path(tempfile.gettempdir()) / f"agentrl-mini-swe-agent-{os.getuid()}"
COMMAND = ["python", "-m", "minisweagent.run.mini", "-y", "-t", "{prompt}", "-m", "openai/policy", "-l", "0"]
COMMAND += ["--exit-immediately", "-o", "/tmp/run.json"]
WORDS = ['{"name": "bash", "arguments": {"command": "ls -la; cat settings.json"}} the files of the folder '] * 40
LOOK, READ = "ls -la", "cat settings.json"
LIMITS = EpisodeLimits(max_turns=8, token_budget=100_000, timeout_s=600.0)
AT_ONCE = 2


class Counting(ScriptedEngine):
    """Counts the tokens that it was asked for to the end."""

    drawn = 0

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, session: str | None = None) -> Completion:
        completion = await super().generate(ids, sampling, session=session)
        self.drawn += len(completion.ids)
        return completion


def packages(folder: Path) -> Path:
    """The folder with mini-swe-agent, installed if it is not there."""
    if not (folder / "minisweagent").is_dir():
        command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), "mini-swe-agent", "mcp"]
        subprocess.run(command, check=True)
    return folder


def compare(episodes: int, folder: Path) -> dict[str, Any]:
    """Both ways, and whether the goal is met."""
    with tempfile.TemporaryDirectory() as name:
        make_tokenizer(Path(name), WORDS, vocab=600, max_context=100_000)
        renderer = Renderer.from_directory(name)
        agent = asyncio.run(_boxed(renderer, episodes, packages(folder)))
        loop = asyncio.run(_built_in(renderer, episodes))
    met = agent["lost_tokens"] == loop["lost_tokens"] == 0 and agent["scored"] == episodes and agent["forks"] == 0
    return {
        "bench": "agent",
        "ours": agent["episodes_per_s"],
        "baseline": loop["episodes_per_s"],
        "ratio": round(agent["episodes_per_s"] / loop["episodes_per_s"], 4),
        "unit": "episodes/s of mini-swe-agent in a box, and of the built-in loop",
        "goal": "every episode scored, 0 lost tokens, 0 forks",
        "met": met,
        "agent": agent,
        "built_in_loop": loop,
        "load_average": round(os.getloadavg()[0], 1),
    }


async def _boxed(renderer: Renderer, episodes: int, folder: Path) -> dict[str, Any]:
    """The agent, through the recorder."""
    finish = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    script = [call("bash", command=text) for text in (LOOK, READ, finish)]
    engine = Counting(renderer, script, max_context=100_000)
    recorder = Recorder(engine, renderer, LIMITS)
    options: dict[str, object] = {
        "readonly": [str(folder)],
        "python_path": [str(folder)],
        "memory_mb": 2048,
        "env": {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"},
    }
    agent = BoxedAgent(COMMAND, box_spec(options, LIMITS.timeout_s), recorder.app())
    async with running(recorder.app()) as address:
        player = AgentPlayer(recorder, address, agent, Files, 1.0, asyncio.Semaphore(AT_ONCE))

        async def play(number: int) -> Episode:
            return await player.play(_task(number), episode_id=f"a{number}", seed=number)

        return await _measured(engine, episodes, play)


async def _built_in(renderer: Renderer, episodes: int) -> dict[str, Any]:
    """The built-in loop, with the env's own shell."""
    script: list[Message] = [call("shell", command=LOOK), call("shell", command=READ), say("Done.")]
    engine = Counting(renderer, script, tools=Files().tools, max_context=100_000)
    player = Player(engine, renderer, Files, LIMITS, Sampling(max_tokens=512, stop_ids=renderer.stop_ids))
    places = asyncio.Semaphore(AT_ONCE)

    async def play(number: int) -> Episode:
        async with places:
            return await run_episode(player, _task(number), episode_id=f"b{number}", seed=number)

    return await _measured(engine, episodes, play)


def _task(number: int) -> Task:
    return Task(f"t{number}", {"project": number})


async def _measured(engine: Counting, episodes: int, play: Callable[[int], Awaitable[Episode]]) -> dict[str, Any]:
    started, own, below = time.perf_counter(), time.process_time(), _children()
    played = await asyncio.gather(*(play(number) for number in range(episodes)))
    seconds, own = time.perf_counter() - started, time.process_time() - own
    await close_pools()
    turns = sum(len(episode.turns) for episode in played)
    kept = sum(len(s.ids) for episode in played for s in episode.segments if s.origin == "sampled")
    for episode in played:
        if episode.error is not None:
            print(f"{episode.id}: {episode.error}", file=sys.stderr)
    return {
        "episodes": episodes,
        "scored": sum(episode.reward is not None for episode in played),
        "turns": turns,
        "episodes_per_s": round(episodes / seconds, 3),
        "cpu_ms_per_turn": round(1000 * own / max(1, turns), 1),
        "sandbox_cpu_s_per_episode": round((_children() - below) / episodes, 2),
        "lost_tokens": engine.drawn - kept,
        "forks": int(sum(episode.metrics.get("agent/forks", 0) for episode in played)),
        "crashed": int(sum(episode.metrics.get("agent/crashed", 0) for episode in played)),
    }


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
