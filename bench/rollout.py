"""Does the scheduler keep an engine full, and what does a turn cost? And what does asynchronous training buy?

    python bench/rollout.py [--quick]           (a) a simulated engine: throughput and CPU cost per turn
    python bench/rollout.py --learning FOLDER   (c) synchronous, one step ahead, asynchronous, end to end (long)
    python bench/rollout.py --staleness FOLDER  (d) staleness 4 over seeds, corrected and not (very long)

(a) The engine is simulated: it decodes up to SLOTS sequences at once, STEP_S per token and sequence, and prefills
PREFILL tokens a second, one prompt after another, the prompt of a group once; requests queue for a slot, in the
order in which they came. The rest is real: groups, admission, transcripts, templates, parsing, tool dispatch.
4,096 episodes of four turns, tools that take lognormal time. No schedule can be faster than the decoding, the
prefilling and the longest episode alone; throughput is given as a share of that bound. The clock of the simulation
is the CPU time that this process has used, plus the waits, which are skipped: what else the machine does has no
influence. CPU time per turn is that of the process without what the simulation takes.

(b), the real local engine against padded `generate` and continuous batching, is bench/engine.py.

(c) The calculator example with tools of 200 ms (median, lognormal), three times from the same start policy.

(d) A task that is learnt in seconds (or the calculator), synchronous and at staleness 4, corrected and not.

Runs of (c) and (d) are kept under FOLDER and not run again. The last line is JSON; all but `--quick` write their
part of bench/results/rollout.json, which rollout.md explains.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import os
import random
import selectors
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl import ToolEnv, reward, tool
from agentrl.chat.demonstrate import completion_of
from agentrl.chat.template import Renderer
from agentrl.engine.base import Engine
from agentrl.env.curriculum import TaskSampler
from agentrl.models.tiny import make_tokenizer
from agentrl.rollout.admission import Admission
from agentrl.rollout.episode import Player
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.limits import EpisodeLimits
from agentrl.rollout.scheduler import Scheduler
from agentrl.testing.policy import call, say
from agentrl.types import Completion, Message, Sampling, Task

SLOTS, STEP_S, PREFILL = 256, 0.03, 60_000.0
TURNS, GROUP = 4, 8
TOOL_MEDIAN_S, TOOL_SIGMA = 0.2, 1.0
GOAL_SHARE, GOAL_CPU_MS = 0.95, 2.0
RESULTS = Path(__file__).parent / "results"


@dataclass
class Load:
    """What the engine is asked for, from which the bound follows."""

    sampled: int = 0
    prefilled: int = 0
    longest_s: float = 0.0
    turns: int = 0
    cpu_s: float = 0.0

    def bound_s(self, slots: int, step_s: float) -> float:
        """Seconds below which no schedule can be: decoding, prefilling, and the longest episode by itself."""
        return max(self.sampled * step_s / slots, self.prefilled / PREFILL, self.longest_s)


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock counts the CPU time of its thread, and jumps where there is only waiting to do."""

    def __init__(self) -> None:
        self.skipped = 0.0
        super().__init__(_SkippingSelector(self))

    def time(self) -> float:
        """Seconds of computing and of skipped waits."""
        return time.thread_time() + self.skipped


class _SkippingSelector(selectors.DefaultSelector):
    def __init__(self, loop: SkippingLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready now; the wait for the next timer is skipped."""
        # A moment for threads at work, whose time the clock does not count; it must not jump ahead of them.
        ready = super().select(None if timeout is None else min(timeout, 0.002))
        if not ready and timeout:
            self._loop.skipped += timeout
        return ready


class SimulatedEngine(Engine):
    """Answers with written completions after the time that a real engine of these rates would take."""

    policy_version = 0
    max_context = 32_768

    def __init__(self, completions: Sequence[Completion], slots: int, step_s: float) -> None:
        self.load = Load()
        self._completions, self._step_s = completions, step_s
        self._free = [0.0] * slots  # since when each idle slot has been idle; a heap
        self._waiting: deque[tuple[float, int, Completion, asyncio.Future[Completion]]] = deque()
        self._ending: list[tuple[float, int, Completion, asyncio.Future[Completion]]] = []
        self._known: dict[str | None, tuple[int, int, float]] = {}  # tokens, turn, seconds alone
        self._prompts: set[tuple[int, ...]] = set()
        self._prefill_free = 0.0
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, session: str | None = None) -> Completion:
        """A call of the tool, the last time the answer."""
        began = time.thread_time()
        known, turn, alone = self._known.get(session, (0, 0, 0.0))
        rng = random.Random(f"{session}/{turn}")
        last = turn == TURNS - 1
        completion = (
            self._completions[-1] if last else self._completions[rng.randrange(len(self._completions) - 1)]
        )
        new = len(ids) - known
        if not known:  # a prompt that another episode of the group brought is in the prefix cache
            new = new if (prompt := tuple(ids)) not in self._prompts else 1
            self._prompts.add(prompt)
        alone += new / PREFILL + len(completion.ids) * self._step_s
        self._known[session] = (len(ids) + len(completion.ids), turn + 1, alone)
        self.load.sampled += len(completion.ids)
        self.load.prefilled += new
        self.load.turns += 1
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((asyncio.get_running_loop().time(), new, completion, future))
        self._fill()
        self.load.cpu_s += time.thread_time() - began
        return await future

    def _fill(self) -> None:
        """Give free slots to who waits longest; wake up when the first of the running ones ends.

        A real engine is another process: it takes the next request from its queue when a slot is free, whether or
        not this loop is busy at that moment. So a request begins when both it and the slot were there.
        """
        while self._waiting and self._free:
            asked, new, completion, future = self._waiting.popleft()
            self._prefill_free = max(asked, heapq.heappop(self._free), self._prefill_free) + new / PREFILL
            ends = self._prefill_free + len(completion.ids) * self._step_s
            self._count += 1
            heapq.heappush(self._ending, (ends, self._count, completion, future))
        if self._timer is not None:
            self._timer.cancel()
        if self._ending:
            self._timer = asyncio.get_running_loop().call_at(self._ending[0][0], self._end)

    def _end(self) -> None:
        began, now = time.thread_time(), asyncio.get_running_loop().time()
        while self._ending and self._ending[0][0] <= now + 1e-6:
            ended, _, completion, future = heapq.heappop(self._ending)
            heapq.heappush(self._free, ended)
            if not future.done():
                future.set_result(completion)
            self._fill()
        self.load.cpu_s += time.thread_time() - began

    def worked(self, session: str, seconds: float) -> None:
        """Count the time of a tool to its episode's."""
        tokens, turn, alone = self._known[session]
        self._known[session] = (tokens, turn, alone + seconds)

    async def release(self, session: str) -> None:
        self.load.longest_s = max(self.load.longest_s, self._known.pop(session)[2])

    async def update_weights(self, weights: Mapping[str, Any], version: int) -> None:
        self.policy_version = version

    async def close(self) -> None: ...


class Slow(ToolEnv):
    """Look things up with the tool, then answer."""

    median_s = TOOL_MEDIAN_S

    def setup(self, number: int) -> str:
        self.rng = random.Random(f"{number}/{id(self)}")
        return f"Question {number}: " + "what is known about the matter at hand, and how sure can we be? " * 4

    @tool
    async def look_up(self, query: str) -> str:
        """Look something up."""
        await asyncio.sleep(self.median_s * self.rng.lognormvariate(0, TOOL_SIGMA))
        return "Found: " + query[:40]

    @reward
    def solved(self) -> float:
        return self.rng.random()


class Quick(Slow):
    """Look things up with the tool, then answer."""

    median_s = 0.0


def make_renderer() -> Renderer:
    with tempfile.TemporaryDirectory() as directory:
        words = (
            "Look things up with the tool, then answer. Question what is known about the matter Found: call one "
        )
        make_tokenizer(
            Path(directory),
            [words + '{"name": "look_up", "arguments": {"query": "a"}}'] * 4,
            vocab=600,
            max_context=4096,
        )
        return Renderer.from_directory(Path(directory))


def make_completions(renderer: Renderer, tools: Sequence[Mapping[str, Any]]) -> list[Completion]:
    """64 calls of lognormal length, and the answer."""
    rng = random.Random(0)

    def completion(message: Message) -> Completion:
        return completion_of(renderer, message, tools)

    words = ["matter", "known", "things", "tool", "answer", "question"]
    lengths = [max(1, min(60, int(rng.lognormvariate(2.0, 0.8)))) for _ in range(64)]
    calls = [call("look_up", query=" ".join(rng.choice(words) for _ in range(n))) for n in lengths]
    return [*map(completion, calls), completion(say("It is known."))]


async def play(
    renderer: Renderer, episodes: int, env: type[Slow], *, slots: int, step_s: float, concurrent: int
) -> tuple[float, float, Load]:
    """Wall and CPU seconds of playing this many episodes, `concurrent` of them at once, in four or more steps."""
    engine = SimulatedEngine(make_completions(renderer, env().tools), slots, step_s)
    sampling = Sampling(max_tokens=512, stop_ids=renderer.stop_ids)
    player = Player(
        engine, renderer, env, EpisodeLimits(max_turns=TURNS, timeout_s=3600, token_budget=16_384), sampling
    )
    tasks = [Task(f"t{n}", {"number": n}) for n in range(episodes // GROUP)]
    per_step = max(1, concurrent // GROUP // 4)
    admission = Admission(
        TaskSampler(tasks), groups_per_step=per_step, last_step=len(tasks) // per_step, max_staleness=3
    )
    groups = GroupPlayer(player, GROUP, seed=0)
    loop = asyncio.get_running_loop()
    wall, cpu = loop.time(), time.process_time()
    async with Scheduler(groups, admission, version=lambda: engine.policy_version) as scheduler:
        async for batch in scheduler.batches():
            engine.policy_version = batch.step
    wall, cpu = loop.time() - wall, time.process_time() - cpu
    assert engine.load.turns == TURNS * per_step * GROUP * admission.last_step
    return wall, cpu - engine.load.cpu_s, engine.load


def simulate(quick: bool) -> dict[str, Any]:
    """Part (a)."""

    def run(work: Coroutine[None, None, tuple[float, float, Load]]) -> tuple[float, float, Load]:
        with asyncio.Runner(loop_factory=SkippingLoop) as runner:
            return runner.run(work)

    renderer = make_renderer()
    episodes, slots = (1024, 128) if quick else (4096, SLOTS)
    costs = {}
    for concurrent in (64, 1024) if quick else (64, 256, 1024, 4096):
        num = max(concurrent, 1024)
        _, cpu, load = run(play(renderer, num, Quick, slots=num, step_s=0.0, concurrent=concurrent))
        costs[concurrent] = 1000 * cpu / load.turns
        print(f"{concurrent:5} concurrent episodes: {costs[concurrent]:.3f} ms of CPU per turn", flush=True)
    wall, cpu, load = run(play(renderer, episodes, Slow, slots=slots, step_s=STEP_S, concurrent=episodes))
    bound = load.bound_s(slots, STEP_S)
    print(
        f"{episodes} episodes, {load.turns} turns, {load.sampled} tokens: {wall:.1f} s, bound {bound:.1f} s "
        f"(decoding {load.sampled * STEP_S / slots:.1f}, prefilling {load.prefilled / PREFILL:.1f}, the longest "
        f"episode {load.longest_s:.1f}); {1000 * cpu / load.turns:.3f} ms of CPU per turn",
        flush=True,
    )
    share = bound / wall
    dearest = max(costs.values())
    return {
        "bench": "rollout",
        "ours": round(share, 3),
        "unit": "throughput as a share of what no schedule can exceed",
        "goal": GOAL_SHARE,
        "met": _met(share, dearest),
        "wall_s": round(wall, 1),
        "bound_s": round(bound, 1),
        "slots": slots,
        "step_s": STEP_S,
        "episodes": episodes,
        "turns": load.turns,
        "sampled_tokens": load.sampled,
        "cpu_ms_per_turn": {str(n): round(ms, 3) for n, ms in costs.items()},
        "load_average": round(os.getloadavg()[0], 1),
    }


def _met(share: float, dearest_ms: float) -> bool | str:
    """Whether the goals are met; `inconclusive` if not and other work wanted this machine's cores."""
    if share >= GOAL_SHARE and dearest_ms < GOAL_CPU_MS:
        return True
    return "inconclusive" if os.getloadavg()[0] > (os.cpu_count() or 1) else False


def learning(folder: Path, steps: int) -> dict[str, Any]:
    """Part (c)."""
    from bench.asynchronous import compare

    modes = ["synchronous", "one step ahead", "asynchronous"]
    runs = {mode: found[0] for mode, found in compare(folder, modes, 1, steps, "slow calculator").items()}
    speedup = runs["synchronous"]["train_s"] / runs["asynchronous"]["train_s"]
    return {"bench": "rollout", "ours": round(speedup, 2), "unit": "times as fast as synchronous", "runs": runs}


def staleness(folder: Path, seeds: int, steps: int, task: Any, lr: float | None) -> dict[str, Any]:
    """Part (d)."""
    from bench.asynchronous import MODES, compare

    modes = [mode for mode in MODES if mode != "one step ahead"]
    runs = compare(folder, modes, seeds, steps, task, lr)
    after = {mode: [run["held_out_after"] for run in found] for mode, found in runs.items()}
    during = {mode: round(statistics.fmean(run["solved_all"] for run in found), 3) for mode, found in runs.items()}
    means = {mode: round(statistics.fmean(values), 3) for mode, values in after.items()}
    spread = {mode: round(statistics.stdev(values), 3) if seeds > 1 else None for mode, values in after.items()}
    return {
        "bench": "rollout",
        "ours": means["asynchronous"],
        "baseline": means["synchronous"],
        "unit": "held-out tasks solved",
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
    print(json.dumps(result))


if __name__ == "__main__":
    main()
