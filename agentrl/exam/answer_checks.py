"""Is the oracle's answer paid because it is right? Answers of other tasks, near misses, and other spellings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import mean

from agentrl.env.play import ScriptedPolicy
from agentrl.env.toolenv.observe import plain_text
from agentrl.exam.arena import Arena, ExamEpisode, MakePolicy
from agentrl.exam.floors import CONSTANT_SHARE, MARGIN, opening_of
from agentrl.exam.marks import ExamResult, Level
from agentrl.exam.repeats import ORACLE_TURNS
from agentrl.types import Message

NUM_DONORS = 3
NUM_TASKS = 24
NUM_MISSED = 8
"""Tasks on which near misses are tried."""
FEW = 4
"""Tasks that a share needs."""
MOST_CHARACTERS = 200
_INTEGER = re.compile(r"-?[1-9]\d{1,8}")
_NOISY = re.compile(r"-?\d+\.\d{8,}")
"""What adding decimal fractions leaves, such as 0.30000000000000004."""

Change = Callable[[str], str]

NEAR_MISSES: Mapping[str, tuple[Level, Change]] = {
    "without its last digit": (Level.ERROR, lambda number: number[:-1]),
    "between other digits": (Level.ERROR, lambda number: f"9{number.lstrip('-')}9"),
    "plus one": (Level.WARNING, lambda number: str(int(number) + 1)),
}
"""Wrong numbers that a careless comparison takes for the right one."""


async def examine_answers(result: ExamResult, arena: Arena, oracle: Sequence[ExamEpisode], *, few: bool) -> None:
    """Play the oracle's episodes on other tasks, and again with other answers; `few` of them for slow envs."""
    paid = [p for p in oracle if p.episode is not None and p.episode.turns and p.reward > 0 and _all_is_well(p)]
    await _of_other_tasks(result, arena, paid, 1 if few else NUM_DONORS)
    await _near_misses(result, arena, paid)
    await _spellings(result, arena, paid)


def _all_is_well(played: ExamEpisode) -> bool:
    return played.episode is not None and played.episode.solved is not False


async def _of_other_tasks(result: ExamResult, arena: Arena, paid: Sequence[ExamEpisode], num_donors: int) -> None:
    """One task's solution must not be paid on nearly all tasks."""
    spread = [paid[i * len(paid) // NUM_TASKS] for i in range(NUM_TASKS)] if len(paid) > NUM_TASKS else list(paid)
    if len({opening_of(p) for p in spread}) < FEW or result.of("search"):
        return
    usual = Counter(map(_said, spread)).most_common(num_donors)
    donors = [next(p for p in spread if _said(p) == said) for said, _ in usual]
    for donor in donors:
        what = f"the solution of {donor.task.id}"
        again = _replay(_script(donor))
        if await _paid(arena, what, spread, again) < CONSTANT_SHARE:
            continue
        if (share := await _paid(arena, what, paid, again)) >= CONSTANT_SHARE:  # a few may be alike by chance
            text = (
                f"{what} ({_last_words(donor)[:60]!r}) is paid in full on {share:.0%} of {len(paid)} tasks: a "
                "policy that ignores the task can repeat it"
            )
            result.add("search", Level.ERROR, text, [donor.task.id])
            return


async def _paid(arena: Arena, what: str, own: Sequence[ExamEpisode], policy: MakePolicy) -> float:
    """How often a policy earns what the oracle earns on the same task."""
    played = await arena.all_of([(what, p.task, policy) for p in own], max_turns=ORACLE_TURNS)
    return mean(_as_good(one, right) for one, right in zip(played, own, strict=True))


async def _near_misses(result: ExamResult, arena: Arena, paid: Sequence[ExamEpisode]) -> None:
    """A number that is nearly right, or contains the right one, must not be paid in full."""
    if any(finding.level is Level.ERROR for finding in result.of("search")):
        return
    numbers = [p for p in paid if _INTEGER.fullmatch(_last_words(p).strip())][:NUM_MISSED]
    if len(numbers) < FEW or await _share(arena, "another number", numbers, lambda number: "-987654") > 0:
        return  # what it says at the end does not decide, or not alone
    for how, (level, change) in NEAR_MISSES.items():
        if await _share(arena, f"the right number {how}", numbers, change) >= CONSTANT_SHARE:
            right = _last_words(numbers[0]).strip()
            text = (
                f"the right number {how} is paid like the right one, e.g. {change(right)} instead of {right} "
                f"({len(numbers)} tasks tried)"
            )
            text += "; fine only if the task allows for it" if level is Level.WARNING else ""
            result.add("search", level, text, [p.task.id for p in numbers])
            return


async def _share(arena: Arena, what: str, right: Sequence[ExamEpisode], change: Change) -> float:
    """How often a changed answer is paid like the right one."""
    plan = [(what, p.task, _replay(_changed(_script(p), change))) for p in right]
    played = await arena.all_of(plan, max_turns=ORACLE_TURNS)
    return mean(_as_good(one, own) for one, own in zip(played, right, strict=True))


async def _spellings(result: ExamResult, arena: Arena, paid: Sequence[ExamEpisode]) -> None:
    """Whitespace around an answer, and the last digits of a float, must not decide."""
    for what, change in (("without the whitespace around it", str.strip), ("rounded to 12 digits", _rounded)):
        odd = [p for p in paid if _single_line(p) and change(_last_words(p)) != _last_words(p)]
        plan = [(f"the answer {what}", p.task, _replay(_changed(_script(p), change))) for p in odd]
        played = await arena.all_of(plan, max_turns=ORACLE_TURNS)
        lost = [own for one, own in zip(played, odd, strict=True) if not _as_good(one, own)]
        if lost:
            said = _last_words(lost[0])
            text = (
                f"on {len(lost)} tasks, the oracle's answer is not paid {what}: {change(said)!r} instead of "
                f"{said!r}; clean the label, or compare less strictly"
            )
            result.add("rows", Level.ERROR, text, [p.task.id for p in lost])


def _rounded(text: str) -> str:
    """A float without the noise of its last digits; one that needs all of its digits stays as it is."""
    if not _NOISY.fullmatch(text.strip()):
        return text
    short = f"{float(text):.12g}"
    return short if len(short) <= len(text.strip()) - 6 else text


def _single_line(played: ExamEpisode) -> bool:
    """Whether the answer is one short line; files and programs may need their whitespace."""
    said = _last_words(played)
    own = played.episode is not None and bool(played.episode.turns[-1].message.tool_calls)
    words = any(character.isalnum() for character in said)  # a delimiter may need its spaces
    return words and len(said.strip()) <= MOST_CHARACTERS and "\n" not in (said if own else said.strip())


def _as_good(played: ExamEpisode, own: ExamEpisode) -> bool:
    """Whether an episode earns what the oracle's own earns."""
    if played.episode is None or own.episode is None:
        return False
    return played.reward >= own.reward - MARGIN and played.episode.solved == own.episode.solved


def _script(played: ExamEpisode) -> list[Message]:
    return [turn.message for turn in played.episode.turns] if played.episode is not None else []


def _replay(script: Sequence[Message]) -> MakePolicy:
    return lambda env, task: ScriptedPolicy(list(script))


def _said(played: ExamEpisode) -> str:
    """The oracle's messages without what differs between equal ones."""
    return repr(
        [(plain_text(m.content), [(c.name, sorted(c.arguments.items())) for c in m.tool_calls])
         for m in _script(played)]
    )  # fmt: skip


def _answer_argument(message: Message) -> str:
    """The only text or number among the arguments of the last call; empty if there is none or are several."""
    given = message.tool_calls[-1].arguments
    names = [n for n, v in given.items() if isinstance(v, str | int | float) and not isinstance(v, bool)]
    return names[0] if len(names) == 1 else ""


def _last_words(played: ExamEpisode) -> str:
    """The text that ends an oracle's episode, or what it hands in with its last call."""
    last = _script(played)[-1]
    if not last.tool_calls:
        return plain_text(last.content)
    name = _answer_argument(last)
    return str(last.tool_calls[-1].arguments[name]) if name else ""


def _changed(script: Sequence[Message], change: Change) -> list[Message]:
    """The same messages with another answer at the end."""
    *before, last = script
    if not last.tool_calls:
        return [*before, replace(last, content=change(plain_text(last.content)))]
    *others, made = last.tool_calls
    name = _answer_argument(last)
    value = made.arguments[name]
    given = dict(made.arguments) | {name: type(value)(change(str(value)))}
    return [*before, replace(last, tool_calls=(*others, replace(made, arguments=given)))]
