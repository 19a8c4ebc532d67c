"""Does the scheduler keep its servers full, and what does a turn cost? And what does asynchronous training buy?

    python bench/rollout.py [--quick]           (a) simulated servers: throughput, CPU and memory; a soak
    python bench/rollout.py --learning FOLDER   (c) synchronous, one step ahead, asynchronous, end to end (long)
    python bench/rollout.py --staleness FOLDER  (d) staleness 4 over seeds, corrected and not (very long)

(a) Eight simulated servers (bench/shared/simulated.py) decode 256 sequences each, 30 ms per token and sequence.
The rest is real: groups, admission, transcripts, templates, parsing, tool dispatch, the pool of servers, weight
updates. 16,384 episodes are in flight; calls of lognormal length and one very long; tools of lognormal time that
sometimes hang or fail; servers die, connections are cut, sandboxes break. No schedule can be faster than the
decoding and prefilling in the slots that were up; throughput is given as a share of that bound. The clock is the
CPU time of this thread plus the waits, which are skipped, so other work has little influence. CPU time per turn
is that of the thread without what the simulation takes. The soak plays a day of simulated time with more
failures, and looks for growth: of memory, open files, tasks, and of what the pool keeps.

(b), the real local engine against padded `generate` and continuous batching, is bench/engine.py.

(c) The calculator example with tools of 200 ms (median, lognormal), three times from the same start policy.

(d) A task that is learnt in seconds (or the calculator), synchronous and at staleness 4, corrected and not.

Runs of (c) and (d) are kept under FOLDER and not run again. The last line is JSON; all but `--quick` write their
part of bench/results/rollout.json, which rollout.md explains.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from agentrl import ToolEnv, reward, tool
from agentrl.chat.demonstrate import completion_of
from agentrl.chat.template import Renderer
from agentrl.engine.servers.replica_pool import ServedLimits
from agentrl.engine.servers.server_engine import ServedEngine
from agentrl.engine.servers.weight_sync import TensorSync
from agentrl.env.curriculum import TaskSampler
from agentrl.errors import SandboxError
from agentrl.learner.memory import long_lived
from agentrl.models.tiny import make_tokenizer
from agentrl.rollout.admission import Admission
from agentrl.rollout.episode import Player
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.limits import EpisodeLimits
from agentrl.rollout.scheduler import Scheduler
from agentrl.testing.policy import call, say
from agentrl.types import Completion, Episode, Sampling, Task
from bench.shared.simulated import Failures, Load, SimulatedHost, run_skipping
from bench.shared.verdict import finish

SERVERS, STEP_S, MAX_TURNS, GROUP, STALENESS = 8, 0.03, 16, 8, 15
VOCABULARY = 600
TOOL_MEDIAN_S, TOOL_SIGMA, TOOL_MOST_S = 0.5, 1.2, 60.0
TOOL_HANGS, TOOL_FAILS, SANDBOX_BREAKS = 0.01, 0.01, 0.001
RELIABLE = Failures()
DEATH_EVERY_S, CUT = 300.0, 0.002
GOAL_SHARE, GOAL_CPU_MS, GOAL_SPEEDUP = 0.95, 1.0, 2.0
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Workload:
    """What is played: `concurrent` episodes in flight, `steps` steps of a quarter of them."""

    concurrent: int
    steps: int
    env: type[Slow]
    slots: int
    step_s: float
    failures: Failures = RELIABLE
    until_s: float = math.inf
    tasks: int = 1024
    """Different ones; what is kept for each counts as growth until all have been played."""


@dataclass
class Played:
    """What came of it. Episodes in flight and bytes that the process gained are the most of any batch."""

    wall_s: float
    cpu_s: float
    load: Load
    episodes: int = 0
    lost: int = 0
    turns: int = 0
    peak: int = 0
    peak_bytes: int = 0

    @property
    def bound_s(self) -> float:
        """Seconds below which no schedule can be."""
        return self.load.bound_s(self.wall_s, SERVERS)

    @property
    def cpu_ms(self) -> float:
        """CPU time of agentrl for one turn."""
        return 1000 * self.cpu_s / self.turns


class Slow(ToolEnv):
    """Look things up with the tool, then answer."""

    median_s = TOOL_MEDIAN_S

    def setup(self, number: int) -> str:
        self.rng = random.Random(next(_SEEDS))
        if self.rng.random() < SANDBOX_BREAKS:
            raise SandboxError("the simulated sandbox is gone")
        return f"Question {number}: " + "what is known about the matter at hand, and how sure can we be? " * 4

    @tool
    async def look_up(self, query: str) -> str:
        """Look something up."""
        seconds = self.median_s * self.rng.lognormvariate(0, TOOL_SIGMA)
        if seconds:
            await asyncio.sleep(min(TOOL_MOST_S, seconds * (10 if self.rng.random() < TOOL_HANGS else 1)))
        if self.rng.random() < TOOL_FAILS:
            raise RuntimeError("the index is being rebuilt")
        return "Found: " + query[:40]

    @reward
    def solved(self) -> float:
        return self.rng.random()


class Quick(Slow):
    """Look things up with the tool, then answer."""

    median_s = 0.0


_SEEDS = itertools.count()


def make_renderer(folder: Path) -> Renderer:
    words = "Look things up with the tool, then answer. Question what is known about the matter Found: call one "
    corpus = [words + '{"name": "look_up", "arguments": {"query": "a"}}'] * 4
    make_tokenizer(folder, corpus, vocab=VOCABULARY, max_context=4096)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": VOCABULARY}))
    return Renderer.from_directory(folder)


def make_completions(renderer: Renderer, tools: Sequence[Mapping[str, Any]]) -> list[Completion]:
    """Calls of lognormal length, one of them very long, and one answer in four."""
    rng = random.Random(0)
    words = ["matter", "known", "things", "tool", "answer", "question"]
    lengths = [max(1, min(600, int(rng.lognormvariate(4.9, 0.7)))) for _ in range(95)] + [2000]
    calls = [call("look_up", query=" ".join(rng.choice(words) for _ in range(n))) for n in lengths]
    return [completion_of(renderer, message, tools) for message in [*calls, *[say("It is known.")] * 32]]


def play(work: Workload, watch: Callable[[ServedEngine, GroupPlayer], None] | None = None) -> Played:
    """Play as a run does: also with the thresholds of its garbage collector."""
    with long_lived(), tempfile.TemporaryDirectory() as folder:
        return run_skipping(_play(work, watch, Path(folder)))


async def _play(work: Workload, watch: Callable[[ServedEngine, GroupPlayer], None] | None, model: Path) -> Played:
    """Play with the scheduler, players, tools and servers' pool of a run; new weights after each step."""
    load, loop = Load(slots=SERVERS * work.slots), asyncio.get_running_loop()
    before = resident()
    renderer = make_renderer(model)
    completions = make_completions(renderer, work.env().tools)
    make = partial(SimulatedHost, completions, work.slots, work.step_s, load, work.failures)
    hosts = [make(number) for number in range(SERVERS)]
    engine = ServedEngine(
        hosts,
        TensorSync(bucket_bytes=1 << 20),
        model=model,
        limits=ServedLimits(capacity=work.slots, restarts=1000),
        tell=lambda said: None,
    )
    await engine.start()
    limits = EpisodeLimits(max_turns=MAX_TURNS, timeout_s=36_000, token_budget=16_384)
    player = Player(engine, renderer, work.env, limits, Sampling(max_tokens=4096, stop_ids=renderer.stop_ids))
    played = Played(0.0, 0.0, load)

    def note(episode: Episode) -> None:
        played.lost += episode.error is not None

    groups = GroupPlayer(player, GROUP, seed=0, on_episode=note)
    per_step = work.concurrent // GROUP // 4
    tasks = [Task(f"t{n}", {"number": n}) for n in range(work.tasks)]
    admission = Admission(
        TaskSampler(tasks),
        groups_per_step=per_step,
        last_step=10**9,  # the end of a run, when slots run dry, is not what is measured
        max_staleness=STALENESS,
        groups_ahead=3 * per_step,
    )
    wall, cpu = loop.time(), time.thread_time()
    async with Scheduler(groups, admission, version=lambda: engine.policy_version) as scheduler:
        async for batch in scheduler.batches():
            played.episodes += sum(len(group.episodes) for group in batch.groups)
            played.peak = max(played.peak, len(groups.playing))
            played.peak_bytes = max(played.peak_bytes, resident() - before)
            await engine.update_weights({"w": torch.zeros(16)}, batch.step)
            if watch is not None:
                watch(engine, groups)
            if batch.step == work.steps or loop.time() - wall > work.until_s:
                played.wall_s, played.cpu_s = loop.time() - wall, time.thread_time() - cpu - load.cpu_s
                played.turns = load.answers
                for host in hosts:
                    host.count_under_way()
                break
    await engine.close()
    return played


def simulate(quick: bool) -> dict[str, Any]:
    """Part (a)."""
    costs = {}
    dying = Failures(death_every_s=DEATH_EVERY_S, cut=CUT)
    # First, while no memory that was freed can be used again.
    concurrent, slots, steps = (1024, 16, 8) if quick else (16_384, 256, 8)
    full = play(Workload(concurrent, steps, Slow, slots, STEP_S, dying))
    for playing in (64, 1024) if quick else (64, 256, 1024, 4096, 16_384):
        steps = 4 if playing >= 1024 else 4096 // playing
        cost = play(Workload(playing, steps, Quick, slots=playing // SERVERS, step_s=0.0))
        costs[playing] = cost.cpu_ms
        print(f"{playing:6} episodes in flight: {cost.cpu_ms:.3f} ms of CPU per turn", flush=True)
    share, kib = full.bound_s / full.wall_s, full.peak_bytes / full.peak / 1024
    print(
        f"{full.episodes} episodes, {concurrent} in flight, {full.turns} turns, {full.load.sampled} tokens: "
        f"{full.wall_s:.0f} s, bound {full.bound_s:.0f} s; {full.cpu_ms:.3f} ms of CPU per turn; {kib:.0f} KiB "
        f"per episode; {full.load.deaths} deaths, {full.load.cuts} cut requests, {full.lost} episodes replayed",
        flush=True,
    )
    soaked = soak(0.75, tasks=32) if quick else soak(24.0, tasks=1024)
    dearest = max(costs.values())
    return {
        "bench": "rollout",
        "ours": round(share, 3),
        "baseline": 1.0,
        "ratio": round(share, 3),
        "unit": "throughput as a share of what no schedule can exceed",
        "goal": GOAL_SHARE,
        "met": share >= GOAL_SHARE and dearest <= GOAL_CPU_MS and not soaked["grown"],
        "wall_s": round(full.wall_s, 1),
        "bound_s": round(full.bound_s, 1),
        "servers": SERVERS,
        "slots": slots,
        "step_s": STEP_S,
        "in_flight": concurrent,
        "episodes": full.episodes,
        "turns": full.turns,
        "sampled_tokens": full.load.sampled,
        "deaths": full.load.deaths,
        "cut_requests": full.load.cuts,
        "replayed_episodes": full.lost,
        "kib_per_episode": round(kib, 1),
        "cpu_ms_per_turn": {str(n): round(ms, 3) for n, ms in costs.items()} | {"full": round(full.cpu_ms, 3)},
        "goal_cpu_ms": GOAL_CPU_MS,
        "soak": soaked,
    }


def soak(hours: float, tasks: int) -> dict[str, Any]:
    """Play for hours of simulated time; which figures were higher in the last quarter than in the second?

    All tasks must have been played in the first quarter.
    """
    seen: list[dict[str, float]] = []

    def look(engine: ServedEngine, groups: GroupPlayer) -> None:
        now, pool = time.monotonic(), engine._pool
        if seen and now - seen[-1]["at"] < 3600 * hours / 48:
            return
        gc.collect()
        seen.append(
            {
                "at": now,
                "resident_mib": resident() / 2**20,
                "objects": len(gc.get_objects()),
                "open_files": len(os.listdir("/proc/self/fd")),
                "tasks": len(asyncio.all_tasks()),
                "playing": len(groups.playing),
                "waiting_requests": len(pool._waiting),
                "sessions": len(pool._homes),
            }
        )

    failures = Failures(death_every_s=1800.0, cut=CUT)
    work = Workload(128, 10**9, Slow, 8, 0.2, failures, until_s=3600 * hours, tasks=tasks)
    played = play(work, look)
    quarter = len(seen) // 4

    def mean(name: str, part: int) -> float:
        return statistics.fmean(one[name] for one in seen[part * quarter : (part + 1) * quarter])

    figures = {name: [round(mean(name, part), 1) for part in range(4)] for name in seen[0] if name != "at"}
    # Counts fluctuate with the episodes that are in flight; a leak of one per episode would be thousands.
    grown = [name for name, (_, second, _, last) in figures.items() if last > 1.05 * second + 8]
    print(
        f"{hours:g} simulated hours, {played.episodes} episodes, {played.load.deaths} deaths of servers: "
        + (f"these grew: {', '.join(grown)}" if grown else "nothing grew"),
        flush=True,
    )
    return {
        "hours": hours,
        "episodes": played.episodes,
        "turns": played.turns,
        "deaths": played.load.deaths,
        "cut_requests": played.load.cuts,
        "replayed_episodes": played.lost,
        "by_quarter": figures,
        "grown": grown,
    }


def resident() -> int:
    """Bytes of memory that the process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def learning(folder: Path, steps: int) -> dict[str, Any]:
    """Part (c)."""
    from bench.shared.asynchronous import compare

    modes = ["synchronous", "one step ahead", "asynchronous"]
    runs = {mode: found[0] for mode, found in compare(folder, modes, 1, steps, "slow calculator").items()}
    speedup = runs["synchronous"]["train_s"] / runs["asynchronous"]["train_s"]
    return {
        "bench": "rollout",
        "ours": runs["asynchronous"]["train_s"],
        "baseline": runs["synchronous"]["train_s"],
        "ratio": round(speedup, 2),
        "unit": "seconds of training",
        "goal": GOAL_SPEEDUP,
        "met": speedup >= GOAL_SPEEDUP,
        "runs": runs,
    }


def staleness(folder: Path, seeds: int, steps: int, task: Any, lr: float | None) -> dict[str, Any]:
    """Part (d)."""
    from bench.shared.asynchronous import MODES, compare

    modes = [mode for mode in MODES if mode != "one step ahead"]
    runs = compare(folder, modes, seeds, steps, task, lr)
    after = {mode: [run["held_out_after"] for run in found] for mode, found in runs.items()}
    during = {mode: round(statistics.fmean(run["solved_all"] for run in found), 3) for mode, found in runs.items()}
    means = {mode: round(statistics.fmean(values), 3) for mode, values in after.items()}
    spread = {mode: round(statistics.stdev(values), 3) if seeds > 1 else None for mode, values in after.items()}
    ratio = means["asynchronous"] / max(1e-9, means["synchronous"])
    return {
        "bench": "rollout",
        "ours": means["asynchronous"],
        "baseline": means["synchronous"],
        "ratio": round(ratio, 3),
        "unit": "held-out tasks solved",
        "goal": GOAL_SHARE,
        "met": ratio >= GOAL_SHARE,
        "means": means,
        "means_while_training": during,
        "standard_deviations": spread,
        "task": task,
        "lr": lr,
        "steps": steps,
        "runs": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="(a) with fewer episodes and slots; writes no results"
    )
    parser.add_argument("--learning", metavar="FOLDER", type=Path, help="(c) instead of (a); runs are kept here")
    parser.add_argument("--staleness", metavar="FOLDER", type=Path, help="(d) instead of (a); runs are kept here")
    parser.add_argument("--seeds", type=int, default=5, help="of (d)")
    parser.add_argument("--task", choices=("colours", "calculator"), default="colours", help="of (d)")
    parser.add_argument("--lr", type=float, help="of (d), in place of the task's")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of each run of (c) and (d)")
    arguments = parser.parse_args()
    if arguments.learning:
        part, result = "learning", learning(arguments.learning, arguments.steps)
    elif arguments.staleness:
        part, result = (
            "staleness",
            staleness(arguments.staleness, arguments.seeds, arguments.steps, arguments.task, arguments.lr),
        )
    else:
        part, result = "simulated", simulate(arguments.quick)
    if not arguments.quick:
        file = RESULTS / "rollout.json"
        before = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(before | {part: result}, indent=1) + "\n")
    finish(result, timed=part == "simulated")


if __name__ == "__main__":
    main()
