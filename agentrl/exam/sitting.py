"""The exam of an env: plays oracle and adversarial policies, repeats episodes, and scans for leaks."""

from __future__ import annotations

import asyncio
import contextlib
import io
import math
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from agentrl.async_tasks import time_limit
from agentrl.config import RunConfig
from agentrl.env.checker import EnvCheckError, check_env
from agentrl.env.toolenv.observe import error_text
from agentrl.exam.answer_checks import examine_answers
from agentrl.exam.arena import Arena, ExamEpisode
from agentrl.exam.examinee import Examinee, choose, examinees, named_policy
from agentrl.exam.floors import examine_floors, examine_random, examine_search, judge_oracle, summarize
from agentrl.exam.fresh_process import FreshProcesses
from agentrl.exam.leaks import answers_of, examine_prompt, examine_replies, examine_tools
from agentrl.exam.magnitude import examine_bounds, judge_bounds, judge_parts, judge_raised
from agentrl.exam.marks import CHECKS, ExamResult, Level
from agentrl.exam.repeats import (
    ORACLE_TURNS,
    Repeat,
    compare_processes,
    differ,
    examine_late,
    examine_repeats,
    without_collisions,
)
from agentrl.exam.row_checks import examine_duplicates, judge_generator, judge_playable, suspects
from agentrl.exam.speed import LoopWatch, judge_blocking, judge_times, watching_loop
from agentrl.exam.splits import NUM_PLAYED, examine_openings, examine_splits
from agentrl.exam.strategies import saying
from agentrl.exam.stray_files import judge_leftovers, judge_process, watching_files
from agentrl.importing import is_given
from agentrl.sandbox import close_pools
from agentrl.types import Task, ToolSchema

NUM_TASKS = 64
ALL_TASKS = 256
"""Data of up to this many rows is examined completely by default."""
SLOW_EPISODE_S = 0.15
"""With slower episodes, fewer tasks and texts are tried."""
CRAWLING_EPISODE_S = 1.5
"""With episodes this slow, only the most important policies play, on a few tasks."""
HANGING_EPISODE_S = 15.0
"""With episodes this slow, nothing else is examined."""
CONTRACT_S = 300.0
NO_ORACLE = "the env has no `oracle` class method"

Say = Callable[[str], None]


def examine(
    config: RunConfig,
    *,
    tasks: int | None = None,
    play_outside: bool = False,
    processes: bool | FreshProcesses = True,
    say: Say = lambda text: None,
) -> list[ExamResult]:
    """Examine the env of a run, or each of several.

    Args:
        tasks: tasks of each env that the oracle plays; by default 64, or all of up to 256 rows.
        play_outside: call tools that act outside of the episode (MCP servers, HTTP) as well.
        processes: repeat episodes in other processes too, which takes some seconds; the processes, where several
            exams share them.
        say: called with progress messages.

    Raises:
        ConfigError: an env or its tasks cannot be loaded.
    """
    found = examinees(config, hold_back=not play_outside)
    with contextlib.ExitStack() as stack:
        fresh = stack.enter_context(FreshProcesses()) if processes is True else processes or None
        results = [asyncio.run(_closing(examinee, tasks, fresh, say)) for examinee in found]
    for result, before, again in zip(results, found, examinees(config, hold_back=not play_outside), strict=True):
        judge_generator(result, before, again)
    return results


async def _closing(
    examinee: Examinee, tasks: int | None, processes: FreshProcesses | None, say: Say
) -> ExamResult:
    started = time.perf_counter()
    result = ExamResult(examinee.name, examinee.config.sole_env.shown)
    with warnings.catch_warnings(), watching_files() as files, contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            environ, folder = dict(os.environ), os.getcwd()
            async with watching_loop() as watch:
                exam = _Exam(examinee, result, watch, tasks, processes, say)
                await exam.take()
            judge_blocking(result, watch)
            judge_process(result, environ, folder)
        finally:
            await close_pools()
        judge_leftovers(result, files.left())
    result.seconds = time.perf_counter() - started
    return result


def _told_apart(tasks: Sequence[Task]) -> list[Task]:
    """The tasks with unique ids."""
    seen: dict[str, int] = {}
    found = []
    for task in tasks:
        number = seen[task.id] = seen.get(task.id, -1) + 1
        found.append(replace(task, id=f"{task.id}#{number}") if number else task)
    return found


class _Exam:
    """The exam of one env."""

    def __init__(
        self,
        examinee: Examinee,
        result: ExamResult,
        watch: LoopWatch,
        tasks: int | None,
        processes: FreshProcesses | None,
        say: Say,
    ) -> None:
        self.examinee, self.result, self.watch, self.processes, self.say = examinee, result, watch, processes, say
        self.arena = Arena(examinee.make_env)
        self.wanted = tasks
        self.few = self.crawls = self.hangs = False
        self.num_train = 0
        self.oracle: list[ExamEpisode] = []
        self.idle: list[ExamEpisode] = []
        self.tools: list[ToolSchema] = []

    async def take(self) -> None:
        """Run every check."""
        result, arena = self.result, self.arena
        result.oracle = self.examinee.oracle is not None
        tasks = await self._choose()
        if self.hangs:
            return
        result.num_tasks, result.num_examined = len(self.examinee.train), len(tasks)
        self.say("oracle and rows")
        await self._rows(tasks)
        if self.watch.repeatedly:  # no two episodes run at once: everything else would take very long
            self._give_up("the env blocks the event loop: fix that first", keep=("oracle", "rows", "splits"))
            return
        self.say("contract")
        await self._contract(tasks[:4])
        some = self._working(tasks)
        if not some:
            result.add("contract", Level.ERROR, "no episode of any task can be played; the other checks need some")
            raised = judge_raised(result, arena.seen)
            for check in CHECKS:
                if check != "splits" and not (check == "bounds" and raised):
                    result.skip(check, "no episode can be played")
            return
        self.say("determinism")
        stable = await examine_repeats(result, arena, self._scripts(some))
        elsewhere = asyncio.ensure_future(self._processes(self._scripts(some), stable))
        await self._policies(some)
        if not self.crawls:
            await examine_late(result, arena, self._scripts(some), stable)
        self.say("other processes")
        await elsewhere
        judge_bounds(result, self.oracle, arena.seen)
        judge_parts(result, arena.seen)
        judge_times(result, arena.seen)
        result.episodes = len(arena.seen)

    async def _choose(self) -> list[Task]:
        train, held_out = self.examinee.train, self.examinee.held_out
        first = [train[0]]
        took = math.inf
        for _ in range(2):
            began = time.perf_counter()
            await self.arena.one("null", first[0], saying(""), keep=False)
            if (oracle := self.examinee.oracle_policy) is not None:
                await self.arena.one("oracle", first[0], oracle)
            took = min(took, time.perf_counter() - began)  # the other one may have waited for a processor
            if took > HANGING_EPISODE_S:
                break
        self.hangs = took > HANGING_EPISODE_S
        if self.hangs:
            text = f"two episodes take {took:.0f} s; nothing else was examined"
            self.result.add("speed", Level.ERROR, text, [first[0].id])
            self._give_up("the episodes are too slow")
            return []
        self.few = took > SLOW_EPISODE_S
        self.crawls = took > CRAWLING_EPISODE_S or self.watch.repeatedly
        default = len(train) if len(train) <= ALL_TASKS else NUM_TASKS
        num = self.wanted or min(4 if self.crawls else 16 if took > 4 * SLOW_EPISODE_S else default, default)
        chosen, others = choose(train, num), choose(held_out, max(1, num // 4 if self.wanted else num // 2))
        if not self.few:
            chosen += [task for task in suspects(train) if task.id not in {one.id for one in chosen}]
        self.num_train = len(chosen)
        ids = {task.id for task in chosen}
        return _told_apart([*chosen, *(task for task in others if task.id not in ids)])

    def _give_up(self, why: str, keep: Sequence[str] = ()) -> None:
        """Skip all other checks."""
        for check in CHECKS:
            if check not in ("speed", *keep):
                self.result.skip(check, why)
        judge_times(self.result, self.arena.seen)
        self.result.episodes = len(self.arena.seen)

    async def _rows(self, tasks: Sequence[Task]) -> None:
        """Play all tasks with the oracle, and without saying anything."""
        result, arena = self.result, self.arena
        self.idle = await arena.all_of([("null", task, saying("")) for task in tasks])
        judge_playable(result, self.idle)
        self.tools = _tools_of(self.idle)
        if (oracle := self.examinee.oracle_policy) is not None:
            plan = [("oracle", task, oracle) for task in tasks]
            played = await arena.all_of(plan, max_turns=ORACLE_TURNS)
            self.oracle = await without_collisions(result, arena, played, oracle)
            startable = {p.task.id for p in self.idle if p.episode is not None}
            judge_oracle(result, [p for p in self.oracle if p.task.id in startable], self.idle)
            summarize(result, "oracle", self.oracle)
        else:
            result.skip("oracle", NO_ORACLE)
            result.skip("rows", f"{NO_ORACLE}, so unsolvable rows cannot be found; other checks of rows were made")
        answers = answers_of(self.oracle, self.idle)
        played = self.oracle or self.idle
        await examine_duplicates(result, arena, played, answers, self.examinee.oracle)
        one = self.examinee
        num = 1 if self.crawls else NUM_PLAYED
        await examine_splits(result, arena, one.train, one.held_out, one.oracle, num_played=num)
        if not self.crawls:
            await examine_openings(result, arena, played[: self.num_train], played[self.num_train :], one.oracle)

    async def _contract(self, tasks: Sequence[Task]) -> None:
        if self.crawls:
            self.result.skip("contract", "the episodes are too slow; `agentrl check` without --exam checks it")
            return
        try:
            async with time_limit(CONTRACT_S):
                await check_env(self.examinee.make_env, tasks, reward_range=(float("-inf"), float("inf")))
        except EnvCheckError as e:
            lines = str(e).splitlines()
            for line in lines[:8]:
                self.result.add("contract", Level.ERROR, line[:400])
        except TimeoutError:
            self.result.add("contract", Level.ERROR, f"check_env did not end within {CONTRACT_S:g} s")
        except Exception as e:
            self.result.add("contract", Level.ERROR, f"check_env failed: {error_text(e)[:300]}")

    def _working(self, tasks: Sequence[Task]) -> list[Task]:
        """Tasks that can be played, preferably those that the oracle solves."""
        playable = {p.task.id for p in self.idle if p.episode is not None}
        unsolved = {p.task.id for p in self.oracle if p.episode is None or p.episode.solved is False}
        good = [task for task in tasks if task.id in playable - unsolved]
        return good or [task for task in tasks if task.id in playable]

    def _scripts(self, tasks: Sequence[Task]) -> list[Repeat]:
        """The episodes that are repeated."""
        some = choose(tasks, 1 if self.crawls else 4 if self.few else 8)
        kinds = [*(["oracle"] if self.examinee.oracle else []), "random-1", "null"]
        if not self.few:
            kinds += ["random-2", "echo", *(["tour"] if self.tools else [])]
        return [Repeat(kind, task, named_policy(self.examinee, kind)) for kind in kinds for task in some]

    async def _processes(self, scripts: Sequence[Repeat], stable: dict[str, str]) -> None:
        result, use = self.result, self.examinee.config.sole_env.use
        processes = self.processes
        if processes is None:
            why = "not asked for"
        elif not stable:
            why = "no episode is the same when it is repeated in one process"
        elif is_given(use):
            why = f"{use} exists only in this process; name it as a file or module"
        else:
            why = ""
        if why:
            result.skip("process", why)
            result.skip("clock", why)
            return
        assert processes is not None
        scripts = [s for s in scripts if s.key in stable]
        play = partial(processes.play, self.examinee.config, scripts, hold_back=self.examinee.hold_back)
        backward = await play(hash_seed=1, backward=True, shifted=False)
        shifted = await play(hash_seed=2, backward=False, shifted=True)
        if isinstance(backward, str) or isinstance(shifted, str):
            result.skip("process", backward if isinstance(backward, str) else str(shifted))
            result.skip("clock", str(shifted))
            return
        same = compare_processes(result, "process", "in another process, in reverse order", stable, backward)
        if differ(same, shifted) and not isinstance(
            forward := await play(hash_seed=2, backward=False, shifted=False), str
        ):
            same = compare_processes(result, "process", "in another process", same, forward)
        compare_processes(result, "clock", "with another date and time", same, shifted)

    async def _policies(self, tasks: Sequence[Task]) -> None:
        result, arena, tools = self.result, self.arena, self.tools
        spread = choose(tasks, 32)
        self.say("policies at the floor")
        await examine_random(result, arena, spread[: 2 if self.crawls else 8] if self.few else spread, self.oracle)
        await examine_floors(result, arena, spread, self.oracle, tools, few=self.few)
        if self.crawls:
            result.skip("search", "the episodes are too slow")
        else:
            self.say("reward search")
            await examine_search(result, arena, spread, self.oracle, tools, few=self.few)
            await examine_answers(result, arena, self.oracle, few=self.few)
        await examine_bounds(result, arena, spread[: 1 if self.crawls else 2], self.oracle, tools)
        self.say("leaks")
        answers = answers_of(self.oracle, self.idle)
        if not answers:
            result.skip("leak", "the answers are not known: no column of the rows and no oracle names them")
            return
        examine_prompt(result, answers)
        if not self.crawls:
            await examine_replies(result, arena, answers, self.oracle)
        if self.crawls:
            result.skip("leak", "the episodes are too slow to ask tools; only the prompt was scanned")
        elif tools:
            await examine_tools(result, arena, answers, self.oracle, tools)


def _tools_of(episodes: Sequence[ExamEpisode]) -> list[ToolSchema]:
    """The tools of the first tasks, each name once."""
    found: dict[str, ToolSchema] = {}
    for played in episodes[:8]:
        for schema in played.episode.tools if played.episode else ():
            found.setdefault(schema["function"]["name"], schema)
    return list(found.values())
