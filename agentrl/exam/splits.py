"""Held-out tasks that are also training tasks: a policy that remembers them seems to generalize."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from agentrl.env.play import Policy
from agentrl.env.tasks import is_generated
from agentrl.exam.arena import Arena, ExamEpisode, MakePolicy
from agentrl.exam.examinee import choose
from agentrl.exam.floors import opening_of
from agentrl.exam.leaks import row_answers
from agentrl.exam.marks import ExamResult, Level
from agentrl.exam.repeats import ORACLE_TURNS
from agentrl.exam.row_checks import NAMING
from agentrl.exam.strategies import saying
from agentrl.types import Task

NUM_GENERATED = 2_000
"""Rows of each split that are compared if rows are made on access; stored rows are all compared."""
NUM_PLAYED = 12
"""Pairs of equal rows that are played."""
ERROR_SHARE = 0.5
"""From this share of the held-out tasks, held-out results say nothing about new tasks."""


async def examine_splits(
    result: ExamResult,
    arena: Arena,
    train: Sequence[Task],
    held_out: Sequence[Task],
    oracle: Callable[[Task], Policy] | None,
    *,
    num_played: int = NUM_PLAYED,
) -> None:
    """Look for held-out rows among the training rows, and play some to compare prompts and answers."""
    given, asked = _compared(train), _compared(held_out)
    known: dict[int, Task] = {}
    for task in given:
        known.setdefault(_key(task), task)
    pairs = [(known[key], task) for task in asked if (key := _key(task)) in known]
    if not pairs:
        return
    tried = [pairs[i * len(pairs) // num_played] for i in range(num_played)] if len(pairs) > num_played else pairs
    same = [pair for pair in tried if await _same_task(arena, *pair, oracle)]
    if not same:
        return
    num = len(pairs) if len(same) == len(tried) else len(same)
    of = f"{len(asked):,} compared held-out" if len(asked) < len(held_out) else f"{len(asked):,} held-out"
    trained = (
        f"{len(given):,} of the {len(train):,} training tasks" if len(given) < len(train) else "training tasks"
    )
    text = (
        f"{num:,} of {of} tasks are among {trained} (equal rows; prompt and answer are equal on {len(same)} of "
        f"{len(tried)} played), e.g. {same[0][1].id} is {same[0][0].id}, so held-out results measure memory"
    )
    level = Level.ERROR if num >= ERROR_SHARE * len(asked) else Level.WARNING
    result.add("splits", level, text, [task.id for _, task in (same if num < len(pairs) else pairs)[:100]])


async def examine_openings(
    result: ExamResult,
    arena: Arena,
    train: Sequence[ExamEpisode],
    held_out: Sequence[ExamEpisode],
    oracle: Callable[[Task], Policy] | None,
) -> None:
    """Look for played held-out tasks whose prompt and answer are those of a played training task.

    This finds tasks whose rows only name an entry of a data set.
    """
    known = {question: p.task for p in reversed(train) if (question := _question(p))}
    exact = {opening_of(p): p.task for p in reversed(train)}
    asked_again = [(exact.get(opening_of(p), known.get(_question(p))), p.task) for p in held_out if _question(p)]
    pairs = [(trained, task) for trained, task in asked_again if trained is not None]
    if len(known) < 2 or not pairs or result.of("splits"):
        return
    tried, same = pairs[:NUM_PLAYED], []
    for trained, asked in tried:
        other = next(task for task in known.values() if task is not trained)
        if await _same_task(arena, trained, asked, oracle) and (
            oracle is None or not await _oracle_solves(arena, other, asked, oracle)
        ):
            same.append((trained, asked))
    if same:
        num = len(pairs) if len(same) == len(tried) else len(same)
        text = (
            f"{num} of {len(held_out)} examined held-out tasks have the prompt and the answer of one of "
            f"{len(train)} examined training tasks, e.g. {same[0][1].id} is {same[0][0].id}, so held-out results "
            "measure memory"
        )
        level = Level.ERROR if num >= ERROR_SHARE * len(held_out) else Level.WARNING
        result.add("splits", level, text, [asked.id for _, asked in same])


def _question(played: ExamEpisode) -> str:
    """The opening without case, spaces and the punctuation after words, which do not make another task of it."""
    return " ".join(re.sub(r"[.,;:?]+(?=\s|$)", " ", opening_of(played).casefold()).split())


def _compared(tasks: Sequence[Task]) -> Sequence[Task]:
    return choose(tasks, NUM_GENERATED) if is_generated(tasks) else tasks


def _key(task: Task) -> int:
    """A hash of the task: its row without names, or with names and the seed if it has nothing else."""
    content = {name: value for name, value in task.row.items() if name.lower() not in NAMING}
    return hash(repr(sorted(content.items()) if content else (sorted(task.row.items()), task.seed)))


async def _same_task(arena: Arena, trained: Task, held_out: Task, oracle: Callable[[Task], Policy] | None) -> bool:
    """Whether prompt and answer are equal."""
    idle = [await arena.one("null", task, saying(""), keep=False) for task in (trained, held_out)]
    question = _question(idle[0])
    if not question or question != _question(idle[1]):
        return False
    if oracle is None:
        answers = list(row_answers(held_out.row))
        return (trained.seed, trained.row) == (held_out.seed, held_out.row) or bool(
            answers and answers == list(row_answers(trained.row))
        )
    return await _oracle_solves(arena, trained, held_out, oracle)


async def _oracle_solves(arena: Arena, known: Task, asked: Task, oracle: Callable[[Task], Policy]) -> bool:
    """Whether the oracle of one task earns the same on another task as that task's own oracle."""
    answering: MakePolicy = lambda env, task: oracle(known)  # noqa: E731
    crossed = await arena.one("the oracle of an equal task", asked, answering, max_turns=ORACLE_TURNS, keep=False)
    own = await arena.one("oracle", asked, lambda env, task: oracle(task), max_turns=ORACLE_TURNS, keep=False)
    if crossed.episode is None or own.episode is None:
        return False
    return crossed.reward >= own.reward - 1e-6 and crossed.episode.solved == own.episode.solved
