"""Does the oracle reach the maximum, and do policies that solve nothing stay at the floor?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from agentrl.exam.arena import Arena, ExamEpisode, MakePolicy, finite
from agentrl.exam.marks import ExamResult, Level, PolicyResult
from agentrl.exam.strategies import (
    calling,
    echo,
    final_tools,
    gives_up,
    random_policy,
    saying,
    takes_nothing,
    takes_text,
)
from agentrl.exam.texts import CONSTANTS, FILLER, GIVE_UP, INJECTIONS, NONSENSE, STUFFED
from agentrl.types import Task, ToolSchema

PAID = 0.2
"""Share of the way from the floor to the oracle's reward from which a policy counts as paid."""
SHARES: Mapping[str, tuple[float, float]] = {
    "null": (0.5, 0.25),
    "nonsense": (0.5, 0.25),
    "give-up": (0.5, 0.25),
    "echo": (0.75, 0.5),
    "injection": (0.75, 0.6),
}
"""Share of the tasks on which a policy is paid that makes an error, and a warning."""
CONSTANT_SHARE = 0.8
NUM_FLOOR, NUM_FLOOR_FEW = 6, 3
"""Tasks on which every policy at the floor plays before it is confirmed on more, and of slow envs."""
NUM_SEARCH, NUM_SEARCH_FEW = 4, 2
"""The same for constant answers."""
NUM_CONFIRMED = 24
MARGIN = 1e-6


Calls = Sequence[tuple[str, Mapping[str, object]]]
"""Names and arguments of calls."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The floor and the maximum of each task.

    Attributes:
        high: the oracle's reward by task id; without an oracle, 1 or the best that was seen.
        calls: what the oracle calls by task id, if that differs between tasks: on some, nothing may be right.
    """

    high: Mapping[str, float]
    low: Mapping[str, float]
    calls: Mapping[str, Calls]

    def gain(self, played: ExamEpisode, floor: Mapping[str, float] | None = None) -> float:
        """How far an episode got from the floor (0) to the maximum (1)."""
        if not finite(played.reward) or self.calls.get(played.task.id) == calls_of(played):
            return 0.0
        if played.solved:
            return 1.0
        high, low = self.high.get(played.task.id, 1.0), self.low.get(played.task.id, 0.0)
        if floor is not None:
            low = max(low, floor.get(played.task.id, low))
        return max(0.0, (played.reward - low) / (high - low)) if high - low > MARGIN else 0.0


def scale_of(oracle: Sequence[ExamEpisode], seen: Iterable[ExamEpisode]) -> Scale:
    """The scale of the tasks, from the oracle's and all other episodes."""
    earned: dict[str, list[float]] = {}
    for played in seen:
        if played.episode is not None and finite(played.reward):
            earned.setdefault(played.task.id, []).append(played.reward)
    best = {p.task.id: p.reward for p in oracle if p.episode is not None and finite(p.reward)}
    usual = median(best.values()) if best else max([1.0, *(max(values) for values in earned.values())])
    high = {task: max(best.get(task, usual), usual) if best else usual for task in {*earned, *best}}
    low = {task: min(values) for task, values in earned.items()}
    low = {task: max(0.0, value) if high[task] > 0 else value for task, value in low.items()}
    made = {p.task.id: calls_of(p) for p in oracle if p.episode is not None}
    idle = sum(not calls for calls in made.values())
    return Scale(high, low, made if 0 < idle < len(made) else {})


def calls_of(played: ExamEpisode) -> Calls:
    """The names and arguments of the calls of an episode."""
    turns = played.episode.turns if played.episode is not None else ()
    return [(made.name, made.arguments) for turn in turns for made in turn.message.tool_calls]


def judge_oracle(result: ExamResult, episodes: Sequence[ExamEpisode], idle: Sequence[ExamEpisode]) -> None:
    """Findings about the oracle: failures, unsolved tasks, and rewards that a policy without skill also gets."""
    failed = [p for p in episodes if p.episode is None]
    for played in failed[:3]:
        result.add("oracle", Level.ERROR, f"the oracle's episode failed: {played.error[:300]}", [played.task.id])
    if len(failed) > 3:
        rest = [p.task.id for p in failed[3:]]
        result.add("oracle", Level.ERROR, f"the oracle's episodes failed on {len(rest)} more tasks", rest)
    played_out = [p for p in episodes if p.episode is not None]
    if not played_out:
        return
    bad = [p for p in played_out if p.episode is not None and p.episode.solved is False]
    if bad:
        _unsolved(result, bad, played_out)
        return
    floor = {p.task.id: p.reward for p in idle}
    top = max(p.reward for p in played_out)
    made = scale_of(episodes, []).calls
    flat = [
        p
        for p in played_out
        if p.task.id in floor
        and p.reward <= floor[p.task.id] + MARGIN
        and not (p.task.id in made and not made[p.task.id] and p.reward >= top - MARGIN)  # nothing is to be done
    ]
    low = min([*floor.values(), *(p.reward for p in played_out)])
    short = [p for p in played_out if p not in flat and p.reward < low + 0.5 * (top - low) - MARGIN]
    if flat:
        which = (
            "every examined task" if len(flat) == len([p for p in played_out if p.task.id in floor]) else "tasks"
        )
        text = f"on {which}, the oracle earns no more than a policy that says nothing: {_rewards(flat)}"
        result.add("oracle", Level.ERROR, text, [p.task.id for p in flat])
    if short:
        text = f"the oracle earns up to {top:g}, but less than half of that on these tasks: {_rewards(short)}"
        usual = mean(p.reward >= low + 0.9 * (top - low) for p in played_out) >= 0.5
        result.add("oracle", Level.ERROR if usual else Level.NOTE, text, [p.task.id for p in short])


def _unsolved(result: ExamResult, bad: Sequence[ExamEpisode], played_out: Sequence[ExamEpisode]) -> None:
    tasks = [p.task.id for p in bad]
    if len(bad) < len(played_out):
        text = (
            f"the oracle does not solve {len(bad)} of {len(played_out)} tasks: {_rewards(bad)}; the row is "
            "unsolvable or its label is wrong"
        )
        result.add("rows", Level.ERROR, text, tasks)
    else:
        text = (
            f"the oracle solves 0 of {len(played_out)} tasks: {_rewards(bad)}; the oracle is wrong, or no "
            "episode can count as solved"
        )
    result.add("oracle", Level.ERROR, text, tasks)


def _rewards(episodes: Sequence[ExamEpisode]) -> str:
    said = ", ".join(f"{p.task.id} earns {p.reward:g}" for p in episodes[:5])
    return said + (f" and {len(episodes) - 5} more" if len(episodes) > 5 else "")


Entry = tuple[str, str, MakePolicy]
"""Group, description and policy of a strategy."""


def strategies(tools: Sequence[ToolSchema], seen: Sequence[ExamEpisode], *, few: bool) -> list[Entry]:
    """All policies that ignore the task, by group; `few` of each for slow envs."""
    final = final_tools(tools, seen)
    texts = [tool for tool in final if takes_text(tool)][: 1 if few else 3]
    found: list[Entry] = [("null", "saying nothing", saying(""))]
    for tool in final:
        name = tool["function"]["name"]
        if gives_up(tool):
            found.append(("give-up", f"calling {name}", calling(name, "I give up")))
        elif takes_nothing(tool) or takes_text(tool):
            found.append(("null", f"calling {name} with empty arguments", calling(name, "")))
    found += [("echo", "repeating the last message", echo)]
    found += [("echo", f"calling {_name(t)} with the prompt", calling(_name(t), None)) for t in texts]
    groups = (("nonsense", NONSENSE), ("give-up", GIVE_UP), ("injection", INJECTIONS))
    for group, all_texts in groups:
        for text in all_texts[: 4 if few else None]:
            found.append((group, f"saying {text[:60]!r}", saying(text)))
            found += [(group, f"calling {_name(t)} with {text[:60]!r}", calling(_name(t), text)) for t in texts]
    return found


def _name(tool: ToolSchema) -> str:
    return str(tool["function"]["name"])


async def examine_floors(
    result: ExamResult,
    arena: Arena,
    tasks: Sequence[Task],
    oracle: Sequence[ExamEpisode],
    tools: Sequence[ToolSchema],
    *,
    few: bool,
) -> None:
    """Play every policy that ignores the task on several tasks and report those that are rewarded."""
    entries = strategies(tools, arena.seen, few=few)
    some = tasks[: NUM_FLOOR_FEW if few else NUM_FLOOR]
    plan = [(what, task, policy) for _, what, policy in entries for task in some]
    episodes = iter(await arena.all_of(plan))
    by_entry = [[next(episodes) for _ in some] for _ in entries]
    scale = scale_of(oracle, arena.seen)
    floor = _floor(entries, by_entry)
    for (group, what, policy), played in zip(entries, by_entry, strict=True):
        under = None if group in ("null", "nonsense") else floor
        if _share(scale, played, under) < SHARES[group][1]:
            continue
        if len(tasks) > len(some):  # confirm on more tasks: some answers are right by chance
            more = [(what, task, policy) for task in tasks[len(some) : NUM_CONFIRMED if not few else 6]]
            played = played + await arena.all_of(more)
            scale = scale_of(oracle, arena.seen)
        _judge(result, group, what, scale, played, under)
    for group in SHARES:
        summarize(result, group, [p for e, ps in zip(entries, by_entry, strict=True) if e[0] == group for p in ps])


def _floor(entries: Sequence[Entry], by_entry: Sequence[Sequence[ExamEpisode]]) -> dict[str, float]:
    """The reward of nonsense by task: the format alone may be rewarded."""
    found: dict[str, float] = {}
    for (group, _, _), played in zip(entries, by_entry, strict=True):
        for p in played:
            if group == "nonsense" and finite(p.reward) and not p.solved:
                found[p.task.id] = max(found.get(p.task.id, p.reward), p.reward)
    return found


def _share(scale: Scale, played: Sequence[ExamEpisode], floor: Mapping[str, float] | None = None) -> float:
    return mean(scale.gain(p, floor) >= PAID for p in played)


def _judge(
    result: ExamResult,
    group: str,
    what: str,
    scale: Scale,
    played: Sequence[ExamEpisode],
    floor: Mapping[str, float] | None,
) -> None:
    share, (error, warning) = _share(scale, played, floor), SHARES[group]
    if share < warning:
        return
    paid = [p for p in played if scale.gain(p, floor) >= PAID]
    high = mean(scale.high.get(p.task.id, 1.0) for p in paid)
    text = (
        f"a policy {what} earns {mean(p.reward for p in paid):g} of {high:g} on {len(paid)} of {len(played)} tasks"
    )
    level = Level.ERROR if share >= error else Level.WARNING
    if len(result.of(group)) < 5:
        result.add(group, level, text, [p.task.id for p in paid])


def summarize(result: ExamResult, name: str, played: Sequence[ExamEpisode]) -> None:
    """Add a line about a group of policies to the table."""
    found = [p for p in played if p.episode is not None and finite(p.reward)]
    if not found:
        return
    verdicts = [p.episode.solved for p in found if p.episode is not None and p.episode.solved is not None]
    solved = mean(map(float, verdicts)) if verdicts else None
    result.policies.append(PolicyResult(name, len(found), mean(p.reward for p in found), solved))


async def examine_random(
    result: ExamResult, arena: Arena, tasks: Sequence[Task], oracle: Sequence[ExamEpisode]
) -> None:
    """A policy that acts at random should not solve what the oracle solves."""
    played = await arena.all_of([("random", task, random_policy(i)) for i, task in enumerate(tasks)])
    summarize(result, "random", played)
    scale = scale_of(oracle, arena.seen)
    share = mean(scale.gain(p) >= 0.9 for p in played)
    if share >= 0.9 and len(played) >= 4 and oracle:
        result.add(
            "random", Level.WARNING, f"a random policy earns the oracle's reward on {share:.0%} of the tasks"
        )
    elif share >= 0.5 and oracle:
        result.add("random", Level.NOTE, f"a random policy earns the oracle's reward on {share:.0%} of the tasks")


async def examine_search(
    result: ExamResult,
    arena: Arena,
    tasks: Sequence[Task],
    oracle: Sequence[ExamEpisode],
    tools: Sequence[ToolSchema],
    *,
    few: bool,
) -> None:
    """Search for one answer, or one repeated call, that is rewarded whatever the task is."""
    final = final_tools(tools, arena.seen)
    texts = [tool for tool in final if takes_text(tool)][: 1 if few else 2]
    some = tasks[: NUM_SEARCH_FEW if few else NUM_SEARCH]
    entries: list[Entry] = []
    for text in (FILLER, *CONSTANTS, *STUFFED)[: 6 if few else None]:
        what = f"{text[:30]!r}" + ("..." if len(text) > 30 else "")
        group = "stuffed" if text in STUFFED else "constant"
        entries.append((group, f"always answering {what}", saying(text)))
        entries += [(group, f"always calling {_name(t)} with {what}", calling(_name(t), text)) for t in texts]
    await _constants(result, arena, tasks, some, oracle, entries)
    await _farming(result, arena, some, oracle, final)


async def _constants(
    result: ExamResult,
    arena: Arena,
    tasks: Sequence[Task],
    some: Sequence[Task],
    oracle: Sequence[ExamEpisode],
    entries: Sequence[Entry],
) -> None:
    episodes = iter(await arena.all_of([(what, task, policy) for _, what, policy in entries for task in some]))
    by_entry = [[next(episodes) for _ in some] for _ in entries]
    summarize(result, "search", [p for played in by_entry for p in played])
    scale = scale_of(oracle, arena.seen)
    prompts = {prompt for p in oracle if (prompt := opening_of(p))}
    if len(tasks) < 4 or len(prompts) == 1:
        result.skip("search", "the tasks are too few or all alike: one answer may be right for all of them")
        return
    for (group, what, policy), found in zip(entries, by_entry, strict=True):
        if _share(scale, found) < CONSTANT_SHARE:
            continue
        chosen = tasks[len(some) : NUM_CONFIRMED]
        played = [*found, *await arena.all_of([(what, task, policy) for task in chosen])]
        share = _share(scale, played)
        if share < CONSTANT_SHARE or len(result.of("search")) >= 5:
            continue
        level = Level.WARNING if group == "stuffed" else Level.ERROR
        text = f"a policy {what} is paid on {share:.0%} of {len(played)} tasks, e.g. {_rewards(played[:2])}"
        result.add("search", level, text)


async def _farming(
    result: ExamResult,
    arena: Arena,
    tasks: Sequence[Task],
    oracle: Sequence[ExamEpisode],
    tools: Sequence[ToolSchema],
) -> None:
    """Calling the same tool again and again must not earn more than solving the task."""
    entries = [("saying the same in every turn", saying("again"))]
    entries += [(f"calling {_name(t)} in every turn", calling(_name(t), "a", repeat=True)) for t in tools]
    for what, policy in entries:
        played = await arena.all_of([(what, task, policy) for task in tasks[:2]], max_turns=24)
        scale = scale_of(oracle, [p for p in arena.seen if p not in played])
        over = [
            p
            for p in played
            if oracle
            and finite(p.reward)
            and p.reward > scale.high.get(p.task.id, 1.0) + 0.1 * abs(scale.high.get(p.task.id, 1.0)) + 0.05
        ]
        solving = {name for p in oracle for name, _ in calls_of(p)}
        called = {name for p in played for name, _ in calls_of(p)}
        if not over and called and solving and called != solving and all(scale.gain(p) >= 0.9 for p in played):
            text = f"a policy {what} for 24 turns earns as much as the oracle, which calls other tools as well"
            result.add("search", Level.ERROR, text, [p.task.id for p in played])
        if over:
            high = scale.high.get(over[0].task.id, 1.0)
            text = f"a policy {what} for 24 turns earns {over[0].reward:g}, more than the oracle's {high:g}"
            result.add("search", Level.ERROR, text, [p.task.id for p in over])


def opening_of(played: ExamEpisode) -> str:
    """The opening messages of an episode, with whitespace normalized."""
    if played.episode is None:
        return ""
    first = next((i for i, m in enumerate(played.episode.messages) if m.role == "assistant"), None)
    said = played.episode.messages[:first]
    return " ".join(" ".join(f"{m.role}: {m.content}" for m in said).split())
