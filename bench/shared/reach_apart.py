"""For bench/reach.py: ecosystems whose own side is a server, a sandbox or a program in another Python."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from agentrl.env.play import Policy, ScriptedPolicy, call, play
from agentrl.types import Episode, Task
from tests.envs import test_nemo_gym as nemo
from tests.envs import test_openenv as oe
from tests.envs.others import test_harbor, test_inspect, test_verifiers
from tests.envs.others.harbor_folders import make_tasks

KINDS = ("oracle", "random", "scripted")


def agreement(pairs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> tuple[int, int]:
    """(agreed, all) of rewards by name."""
    same = sum(a.keys() == b.keys() and all(abs(a[k] - b[k]) < 1e-9 for k in a) for a, b in pairs)
    return same, len(pairs)


def inspect(num: int) -> tuple[int, int]:
    """Tasks with and without a tool, against evaluations by Inspect."""
    pairs, scores = [], test_inspect.own_scores()
    for name, kind in [("sums", "random"), *(("tools", kind) for kind in KINDS)]:
        env = test_inspect.inspect_task(name)

        async def run(env: Any = env, name: str = name, kind: str = kind) -> list[Episode]:
            policy = test_inspect.policy(kind, name == "tools")
            return list(await asyncio.gather(*[play(env(), task, policy) for task in env.tasks()]))

        own = scores[f"{name}/{kind}"]
        pairs += [(e.rewards, test_inspect.flat(own[e.task.id])) for e in asyncio.run(run())]
    return agreement(pairs)


def verifiers(num: int) -> tuple[int, int]:
    """A taskset with a tool server, against verifiers' own episodes."""
    tasks = min(num // 3, 70)
    env = test_verifiers.sums(args={"tooled": True, "num_tasks": tasks})
    own = test_verifiers.own_rewards(tasks)

    async def run(kind: str) -> list[Episode]:
        policy = test_verifiers.policy(kind, True)
        return list(await asyncio.gather(*[play(env(), task, policy) for task in env.tasks()]))

    return agreement([(e.rewards, own[kind][e.task.id]) for kind in KINDS for e in asyncio.run(run(kind))])


def harbor(num: int) -> tuple[int, int]:
    """Graded task folders, against the test script run by hand in one sandbox."""

    async def run(root: Path) -> tuple[int, int]:
        env = test_harbor.harbor(make_tasks(root, 40))
        tasks, turns = env.tasks("train"), asyncio.Semaphore(16)

        async def one(number: int) -> tuple[dict[str, float], dict[str, float]]:
            task = tasks[number % 40]
            folder = Path(task.row["folder"])
            typed = test_harbor.answers(number // 40 + number % 40, folder)
            async with turns:
                episode = await play(env(), task, ScriptedPolicy([call("shell", command=typed)]))
                own = await test_harbor.by_hand(folder, typed)
            return {name.removeprefix("tests/"): value for name, value in episode.rewards.items()}, own

        return agreement(list(await asyncio.gather(*[one(number) for number in range(min(2 * num, 200))])))

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(run(Path(folder)))


def _mixed(oracle: Policy, tools: Sequence[Any], number: int) -> Policy:
    return oe.mixed(tools, oracle, number)


def openenv(num: int) -> tuple[int, int]:
    """An environment with typed actions and one with MCP tools, made with `openenv`, against its own client."""
    found = []
    for kind, oracle in (("guess", oe.bisect), ("ledger", oe.balance)):
        for url in oe.serving(kind):
            tasks = [Task(f"t{i}", {}, seed=i) for i in range(min(2 * num, 200))]
            policy = partial(_mixed, oracle)
            played = asyncio.run(oe.episodes(url, tasks, policy))
            own = oe.own_rewards(url, played, mcp=kind == "ledger")
            found += [({"reward": e.reward or 0.0}, {"reward": r}) for e, r in zip(played, own, strict=True)]
    return agreement(found)


def nemo_gym(num: int) -> tuple[int, int]:
    """The package's example server with counters, whose verdict follows from the calls."""
    for url in nemo.serving("counter"):
        played = asyncio.run(nemo.episodes(url, nemo.counter_tasks(min(4 * num, 200))))
        found = [({"reward": e.reward or 0.0}, {"reward": nemo.counter_reward(e)}) for e in played]
    return agreement(found)


APART: Mapping[str, tuple[Path, Callable[[int], tuple[int, int]]]] = {
    "openenv": (oe.PYTHON, openenv),
    "nemo_gym": (nemo.PYTHON, nemo_gym),
    "harbor": (Path(sys.executable), harbor),
    "inspect": (test_inspect.PYTHON, inspect),
    "verifiers": (test_verifiers.PYTHON, verifiers),
}
"""Each with a program that it needs, and a function of the episodes that returns (agreed, all)."""
