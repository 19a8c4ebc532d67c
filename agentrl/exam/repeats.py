"""Whether the same task with the same seed gives the same episode: again, in another order, concurrently."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agentrl.exam.arena import Arena, ExamEpisode, MakePolicy, Together, difference
from agentrl.exam.marks import ExamResult, Level
from agentrl.types import Task

ORACLE_TURNS = 64
WIDTH = 16
"""Concurrent episodes of the parallel check."""
NUM_LATE = 4
_ALONE = 8
"""If none of this many failures ends differently alone, the others are not tried."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """One episode that is repeated: the policy is the same each time."""

    name: str
    task: Task
    policy: MakePolicy

    @property
    def max_turns(self) -> int | None:
        """The oracle needs as many turns as it takes; None for the default."""
        return ORACLE_TURNS if self.name == "oracle" else None

    @property
    def key(self) -> str:
        """Identifies it in another process."""
        return f"{self.name}/{self.task.id}"


async def play_script(arena: Arena, script: Repeat) -> ExamEpisode:
    """Play a script on a new env."""
    return await arena.one(script.name, script.task, script.policy, max_turns=script.max_turns)


async def examine_repeats(result: ExamResult, arena: Arena, scripts: Sequence[Repeat]) -> dict[str, str]:
    """Play every script again, in another order and concurrently.

    Returns:
        The fingerprints of the scripts that are deterministic within this process, by key.
    """
    first = [await play_script(arena, s) for s in scripts]
    pairs = []
    for script in scripts:  # right after itself, so that no other episode comes between
        await play_script(arena, script)
        pairs.append([await play_script(arena, script) for _ in range(2)])
    unstable = _twice(result, scripts, [(a, b) for a, b in pairs])
    again = [after for _, after in pairs]
    kinds = {scripts[i].name for i in unstable}
    rest = [i for i in range(len(scripts)) if scripts[i].name not in kinds]
    reverse = {i: await play_script(arena, scripts[i]) for i in reversed(rest)}
    moved = _compare(result, "order", "after other episodes", [(first[i], again[i]) for i in rest])
    moved += _compare(result, "order", "in another order", [(again[i], reverse[i]) for i in rest])
    changed = {p.task.id for p in moved}
    rest = [i for i in rest if scripts[i].task.id not in changed]
    rest.sort(key=lambda i: scripts[i].task.id)  # episodes of the same task overlap, as those of a group do
    await _parallel(result, arena, [scripts[i] for i in rest], [first[i] for i in rest])
    return {scripts[i].key: first[i].fingerprint for i in rest}


async def examine_late(
    result: ExamResult, arena: Arena, scripts: Sequence[Repeat], stable: Mapping[str, str]
) -> None:
    """Play some scripts again after all other policies: quotas, and what builds up slowly, show only now."""
    for script in [s for s in scripts if s.key in stable][:NUM_LATE]:
        late = (await play_script(arena, script)).fingerprint
        if late != stable[script.key]:
            text = (
                f"played after {len(arena.seen):,} other episodes, an episode differs, e.g. ({script.name}) "
                f"{difference(stable[script.key], late)}"
            )
            result.add("order", Level.ERROR, text, [script.task.id])
            return


async def without_collisions(
    result: ExamResult, arena: Arena, played: Sequence[ExamEpisode], policy: MakePolicy
) -> list[ExamEpisode]:
    """Play the oracle's failures again one by one: some may fail only because others ran at the same time.

    Returns:
        The episodes; those that end differently whenever they are alone are replaced.
    """
    replaced: dict[int, ExamEpisode] = {}
    failed = [i for i, p in enumerate(played) if p.episode is None or p.episode.solved is False]
    for tried, i in enumerate(failed):
        if tried == _ALONE and not replaced:
            break
        one = played[i]
        alone = [await arena.one(one.policy, one.task, policy, max_turns=ORACLE_TURNS) for _ in range(2)]
        if alone[0].fingerprint == alone[1].fingerprint != one.fingerprint and alone[0].solved:
            replaced[i] = alone[0]
    if replaced:
        plan = [(p.policy, p.task, policy) for p in played]
        again = await arena.all_of(plan, max_turns=ORACLE_TURNS)
        _compare(
            result,
            "parallel",
            f"concurrently ({arena.at_once} at a time)",
            [(replaced[i], again[i]) for i in replaced],
        )
    return [replaced.get(i, p) for i, p in enumerate(played)]


def _twice(
    result: ExamResult, scripts: Sequence[Repeat], pairs: Sequence[tuple[ExamEpisode, ExamEpisode]]
) -> set[int]:
    """Numbers of the scripts that differ between two episodes in a row."""
    found = {i for i, (a, b) in enumerate(pairs) if a.fingerprint != b.fingerprint}
    if found:
        a, b = pairs[min(found)]
        text = (
            f"played twice with the same task, seed and actions ({a.policy}), {len(found)} of {len(scripts)} "
            f"episodes differ, e.g. {difference(a.fingerprint, b.fingerprint)}; draw everything from self.rng, "
            "and keep nothing from earlier episodes"
        )
        result.add("determinism", Level.ERROR, text, _tasks([pairs[i][0] for i in sorted(found)]))
    return found


def _compare(
    result: ExamResult, check: str, how: str, pairs: Sequence[tuple[ExamEpisode, ExamEpisode]]
) -> list[ExamEpisode]:
    """Add a finding about the pairs that differ; returns their episodes."""
    found = [(a, b) for a, b in pairs if a.fingerprint != b.fingerprint]
    if found:
        a, b = found[0]
        text = (
            f"played {how}, {len(found)} of {len(pairs)} episodes differ, e.g. ({a.policy}) "
            f"{difference(a.fingerprint, b.fingerprint)}"
        )
        result.add(check, Level.ERROR, text, _tasks([a for a, _ in found]))
    return [a for a, _ in found]


def _tasks(episodes: Sequence[ExamEpisode]) -> list[str]:
    return list(dict.fromkeys(p.task.id for p in episodes))


async def _parallel(
    result: ExamResult, arena: Arena, scripts: Sequence[Repeat], serial: Sequence[ExamEpisode]
) -> None:
    if not scripts:
        result.skip("parallel", "no episode is the same when it is repeated")
        return
    if result.of("parallel"):
        return
    pairs: list[tuple[ExamEpisode, ExamEpisode]] = []
    for start in range(0, len(scripts), WIDTH):
        chosen = list(scripts[start : start + WIDTH])
        together = Together(len(chosen))
        overlapping = [replace(s, policy=together(s.policy)) for s in chosen]
        played = await asyncio.gather(*[play_script(arena, s) for s in overlapping])
        pairs += list(zip(serial[start : start + WIDTH], played, strict=True))
    _compare(result, "parallel", f"concurrently ({min(WIDTH, len(scripts))} at a time)", pairs)


def differ(mine: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """The keys of episodes that are different in another process."""
    return [key for key, value in mine.items() if key in theirs and theirs[key] != value]


def compare_processes(
    result: ExamResult, check: str, how: str, mine: Mapping[str, str], theirs: Mapping[str, str]
) -> dict[str, str]:
    """Compare the fingerprints of another process; returns those that are the same."""
    if found := differ(mine, theirs):
        name, _, task = found[0].partition("/")
        example = difference(mine[found[0]], theirs[found[0]])
        text = f"{how}, {len(found)} of {len(mine)} episodes differ, e.g. ({name}, {task}) {example}"
        result.add(check, Level.ERROR, text, list(dict.fromkeys(key.partition("/")[2] for key in found)))
    return {key: value for key, value in mine.items() if key not in found}
