"""Whether each row can be played, and equal prompts have the same answer."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

from agentrl.env.play import Policy
from agentrl.env.tasks import is_generated
from agentrl.exam.arena import Arena, ExamEpisode, MakePolicy
from agentrl.exam.examinee import Examinee
from agentrl.exam.floors import opening_of
from agentrl.exam.leaks import Answer, is_answer_column
from agentrl.exam.marks import ExamResult, Level
from agentrl.exam.repeats import ORACLE_TURNS
from agentrl.exam.strategies import random_policy, saying
from agentrl.types import Task

_NUM_PAIRS = 12
_NUM_SCANNED = 100_000
_NUM_SUSPECTS = 16
_USUAL = 0.95
"""A column that is filled in this share of the rows is expected to be filled in all."""
NAMING = frozenset({"id", "idx", "index", "number", "split", "task_id", "uid", "uuid"})
"""Columns that only identify a row."""
_NUM_ROWS = 256
"""Rows of each split that are loaded twice."""


def suspects(tasks: Sequence[Task]) -> list[Task]:
    """Stored rows that are always examined: equal but for the answer, or empty where others are not."""
    if is_generated(tasks):
        return []
    rows = [tasks[i] for i in range(min(len(tasks), _NUM_SCANNED))]
    twins: dict[str, Task] = {}
    filled: Counter[str] = Counter()
    found: dict[str, Task] = {}
    for task in rows:
        filled.update(name for name, value in task.row.items() if not _empty(value))
        answer = {name: value for name, value in task.row.items() if is_answer_column(name)}
        asked = repr(sorted((n, v) for n, v in task.row.items() if n not in answer and n not in NAMING))
        twin = twins.setdefault(asked, task)
        if answer and any(twin.row.get(name) != value for name, value in answer.items()):
            found |= {twin.id: twin, task.id: task}
    usual = {name for name, num in filled.items() if num >= _USUAL * len(rows)}
    holes = (task for task in rows if any(_empty(task.row.get(name)) for name in usual))
    found |= {task.id: task for task in itertools.islice(holes, _NUM_SUSPECTS)}
    return list(found.values())[:_NUM_SUSPECTS]


def _empty(value: object) -> bool:
    return value is None or (isinstance(value, str | list | tuple | dict) and not value)


def judge_playable(result: ExamResult, played: Sequence[ExamEpisode]) -> None:
    """Report rows on which no episode can start."""
    failed = [p for p in played if p.episode is None and (".setup on task" in p.error or "task " in p.error)]
    if failed:
        text = f"{len(failed)} of {len(played)} rows cannot be played, e.g. {failed[0].error[:200]}"
        result.add("rows", Level.ERROR, text, [p.task.id for p in failed])


def judge_generator(result: ExamResult, first: Examinee, second: Examinee) -> None:
    """Tasks that were loaded twice with the same seed must be the same."""
    for split in ("train", "held_out"):
        once, again = getattr(first, split), getattr(second, split)
        numbers = range(min(len(once), len(again), _NUM_ROWS))
        pairs = [(once[n], again[n]) for n in numbers]
        differ = [a.id for a, b in pairs if (a.row, a.seed) != (b.row, b.seed)]
        if differ or len(once) != len(again):
            text = (
                f"the {split} tasks differ each time they are loaded with the same seed ({len(differ)} of "
                f"the first {len(numbers)} rows), so resumed runs see other tasks and results do not compare"
            )
            result.add("determinism", Level.ERROR, text, differ[:10])


async def examine_duplicates(
    result: ExamResult,
    arena: Arena,
    played: Sequence[ExamEpisode],
    answers: Sequence[Answer],
    oracle: Callable[[Task], Policy] | None,
) -> None:
    """Tasks with the same prompt must have the same answer, unless the policy can tell them apart by acting."""
    groups: dict[str, list[ExamEpisode]] = {}
    for p in played:
        if opening := opening_of(p):
            groups.setdefault(opening, []).append(p)
    known = {answer.task.id: answer.texts for answer in answers}
    pairs = [(g[0], other) for g in groups.values() for other in g[1:]]
    pairs = [(a, b) for a, b in pairs if a.task.row != b.task.row or a.task.seed != b.task.seed]
    # Pairs whose rows give different answers first.
    pairs.sort(key=lambda pair: known.get(pair[0].task.id) == known.get(pair[1].task.id))
    bad = []
    for a, b in pairs[:_NUM_PAIRS]:
        if await _ambiguous(arena, a, b, known, oracle):
            bad.append((a, b))
    if bad:
        a, b = bad[0]
        text = (
            f"{len(bad)} pairs of tasks have the same prompt and different answers, and nothing a policy can see "
            f"tells them apart, e.g. {a.task.id} and {b.task.id}: {opening_of(a)[:160]!r}"
        )
        result.add("rows", Level.ERROR, text, list(dict.fromkeys(p.task.id for pair in bad for p in pair)))


async def _ambiguous(
    arena: Arena,
    a: ExamEpisode,
    b: ExamEpisode,
    known: dict[str, tuple[str, ...]],
    oracle: Callable[[Task], Policy] | None,
) -> bool:
    if oracle is not None:
        of_a: MakePolicy = lambda env, task: oracle(a.task)  # noqa: E731
        crossed = await arena.one("the oracle of an equal prompt", b.task, of_a, max_turns=ORACLE_TURNS)
        if crossed.episode is None or a.episode is None or b.episode is None:
            return False
        if crossed.reward >= b.reward - 1e-6 and crossed.episode.solved == b.episode.solved:
            return False
        if _observations(a)[:-1] != _observations(crossed)[: len(_observations(a)) - 1]:
            return False
        if len(crossed.episode.turns) > len(a.episode.turns):
            return False  # the episode went on after the wrong answer
    elif known.get(a.task.id) == known.get(b.task.id) or not known.get(a.task.id):
        return False
    return not await _distinguishable(arena, a.task, b.task)


async def _distinguishable(arena: Arena, a: Task, b: Task) -> bool:
    """Whether a policy sees anything different in the two tasks before they end."""
    policies = [("random", random_policy(seed)) for seed in range(4)] + [("null", saying(""))]
    for name, policy in policies:
        one, other = await arena.one(name, a, policy), await arena.one(name, b, policy)
        if _observations(one)[:-1] != _observations(other)[:-1] or _goes_on(one) or _goes_on(other):
            return True
    return False


def _goes_on(played: ExamEpisode) -> bool:
    """Whether the episode went on after a text: the policy may answer several times."""
    if played.episode is None:
        return False
    return any(turn.observation and not turn.message.tool_calls for turn in played.episode.turns[:-1])


def _observations(played: ExamEpisode) -> list[list[str]]:
    if played.episode is None:
        return []
    return [[str(m.content) for m in turn.observation] for turn in played.episode.turns]
