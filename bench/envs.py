"""How many episodes a second each shipped env plays by itself, without a model.

    python bench/envs.py [--quick] [--num 200] [--concurrency 32] [--env Calculator ...] [--json FILE]

The oracle plays held-out tasks. "per core" divides by the CPU seconds of this process and of what it waited for;
the programs that run inside of sandboxes are not in it. The random policy's score stands beside the oracle's.
`--quick` plays 16 tasks each: under a minute for all, to see that it works; its rates are rough.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import agentrl.envs
from agentrl.env.load import load_env
from agentrl.sandbox import close_pools
from agentrl.testing.policy import RandomPolicy, play
from agentrl.types import Episode, Task

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.shared.verdict import finish

GOAL = 20


def cpu_seconds() -> float:
    """CPU time of this process and its finished children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


async def play_all(env: Any, tasks: Sequence[Task], policy: Any, concurrency: int) -> list[Episode]:
    """All tasks, at most `concurrency` at a time, each on an env of its own."""
    places = asyncio.Semaphore(concurrency)

    async def one(number: int, task: Task) -> Episode:
        async with places:
            made = env()
            return await play(made, task, policy(made, number, task), max_turns=60)

    return await asyncio.gather(*[one(number, task) for number, task in enumerate(tasks)])


async def measure(name: str, num: int, concurrency: int) -> dict[str, Any]:
    """Figures of one env."""
    env: Any = load_env(agentrl.envs.SHIPPED[name])
    tasks = [env.tasks("held_out", 0)[i] for i in range(num)]
    await play_all(env, tasks[:8], lambda made, number, task: env.oracle(task), concurrency)  # warm: caches, pools
    # The oracles are made beforehand: some search for their way, and that is not the env's work.
    oracles = [env.oracle(task) for task in tasks]
    wall, cpu = time.perf_counter(), cpu_seconds()
    episodes = await play_all(env, tasks, lambda made, number, task: oracles[number], concurrency)
    wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
    rng = await play_all(env, tasks, lambda made, number, task: RandomPolicy(made.tools, number), concurrency)
    await close_pools()
    calls = sum(len(turn.calls) for e in episodes for turn in e.turns)
    return {
        "env": name,
        "episodes": num,
        "concurrency": concurrency,
        "episodes_per_s": num / wall,
        "episodes_per_cpu_s": num / cpu,
        "calls_per_episode": calls / num,
        "calls_per_s": calls / wall,
        "load": os.getloadavg()[0],
        "oracle": sum(e.rewards["solved"] for e in episodes) / num,
        "random": sum(e.rewards["solved"] for e in rng) / num,
    }


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--num", type=int)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument(
        "--env", nargs="*", choices=sorted(agentrl.envs.SHIPPED), default=sorted(agentrl.envs.SHIPPED)
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    num = options.num or (16 if options.quick else 200)
    print(f"{'env':14} {'episodes/s':>11} {'per core':>9} {'calls/s':>9} {'oracle':>7} {'random':>7}")
    rows = []
    for name in options.env:
        row = asyncio.run(measure(name, num, options.concurrency))
        rows.append(row)
        print(
            f"{name:14} {row['episodes_per_s']:11.0f} {row['episodes_per_cpu_s']:9.0f} {row['calls_per_s']:9.0f} "
            f"{row['oracle']:7.2f} {row['random']:7.3f}",
            flush=True,
        )
    slowest = min(rows, key=lambda row: row["episodes_per_cpu_s"])
    scores = all(row["oracle"] == 1.0 and row["random"] < 0.5 for row in rows)
    line = {
        "bench": "envs",
        "ours": round(slowest["episodes_per_cpu_s"], 1),
        "baseline": GOAL,
        "ratio": round(slowest["episodes_per_cpu_s"] / GOAL, 2),
        "unit": f"episodes of {slowest['env']}, the slowest env, per CPU second; baseline: the goal",
        "goal": f">= {GOAL} episodes per CPU second, oracle 1.0, random < 0.5",
        "met": slowest["episodes_per_cpu_s"] >= GOAL and scores,
        "load": os.getloadavg()[0],
    }
    finish(line, timed=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
