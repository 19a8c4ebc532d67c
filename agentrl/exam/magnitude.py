"""Are rewards finite and bounded, and do their parts add up?"""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentrl.exam.arena import Arena, ExamEpisode, finite
from agentrl.exam.marks import ExamResult, Level
from agentrl.exam.strategies import calling, final_tools, saying, takes_text
from agentrl.exam.texts import HUGE, LONG
from agentrl.types import Episode, Task, ToolSchema

_TOTAL = re.compile(r"(^|/)(total|sum|overall|total_reward|reward_total|combined)$", re.I)
FAR = 1000.0
"""Times the usual maximum from which a reward counts as unbounded."""


async def examine_bounds(
    result: ExamResult,
    arena: Arena,
    tasks: Sequence[Task],
    oracle: Sequence[ExamEpisode],
    tools: Sequence[ToolSchema],
) -> None:
    """Answer with long texts and huge numbers, and check the rewards."""
    texts = [tool["function"]["name"] for tool in final_tools(tools, arena.seen) if takes_text(tool)][:2]
    top = max([1.0, *(abs(p.reward) for p in oracle if finite(p.reward))])
    for task in tasks[:2]:
        short = await arena.one("saying 'word'", task, saying("word"))
        for what, text in (("20,000 characters", LONG), *((repr(t), t) for t in HUGE)):
            plan = [(f"saying {what}", task, saying(text))]
            plan += [(f"calling {name} with {what}", task, calling(name, text)) for name in texts]
            for played in await arena.all_of(plan, max_turns=4):
                grown = finite(played.reward) and abs(played.reward) > max(10 * top, 5 * abs(short.reward))
                if grown:
                    text_ = (
                        f"a policy {played.policy} earns {played.reward:g}: the reward grows with what it writes"
                    )
                    result.add("bounds", Level.ERROR, text_, [task.id])
                    return


def judge_raised(result: ExamResult, seen: Sequence[ExamEpisode]) -> Sequence[ExamEpisode]:
    """The episodes whose rewards raised or are not finite."""
    raised = [p for p in seen if p.episode is None and "reward" in p.error.lower()]
    if raised:
        result.add("bounds", Level.ERROR, f"a reward failed ({raised[0].policy}): {raised[0].error[:200]}",
                   list(dict.fromkeys(p.task.id for p in raised))[:20])  # fmt: skip
    return raised


def judge_bounds(result: ExamResult, oracle: Sequence[ExamEpisode], seen: Sequence[ExamEpisode]) -> None:
    """Rewards that raised, are not finite, or are far from the oracle's."""
    raised = judge_raised(result, seen)
    broken = [p for p in seen if p.episode is None and p not in raised and not p.error.startswith("no end within")]
    if broken and not all(p.policy == "oracle" for p in broken):
        tasks = list(dict.fromkeys(p.task.id for p in broken))
        text = f"{len(broken)} episodes failed, e.g. ({broken[0].policy}): {broken[0].error[:200]}"
        result.add("contract", Level.ERROR, text, tasks[:20])
    top = max([1.0, *(abs(p.reward) for p in oracle if finite(p.reward))])
    far = [p for p in seen if p.episode is not None and finite(p.reward) and abs(p.reward) > FAR * top]
    if far and not any(f.level is Level.ERROR for f in result.of("bounds")):
        worst = max(far, key=lambda p: abs(p.reward))
        text = f"an episode earns {worst.reward:g} ({worst.policy}), far outside of the usual rewards"
        result.add("bounds", Level.ERROR, text, [worst.task.id])


def judge_parts(result: ExamResult, seen: Sequence[ExamEpisode]) -> None:
    """Find parts named like a total that are added to the parts they sum."""
    names = {name for p in seen if p.episode is not None for name in p.episode.rewards if _TOTAL.search(name)}
    for name in sorted(names):
        episodes = [p for p in seen if p.episode is not None and name in p.episode.rewards]
        told = [(p, p.episode.rewards[name], _others(p.episode, name)) for p in episodes if p.episode is not None]
        nonzero = [(p, value, rest) for p, value, rest in told if rest or value]
        if not any(len(p.episode.rewards) > 1 for p in episodes if p.episode is not None) or not nonzero:
            continue
        wrong = [(p, value, rest) for p, value, rest in nonzero if abs(value - rest) > 1e-6]
        p, value, rest = (wrong or nonzero)[0]
        assert p.episode is not None
        if wrong:
            text = f"the part {name} is {value:g}, and the other parts sum to {rest:g}: {dict(p.episode.rewards)}"
        else:
            text = (
                f"the part {name} is the sum of the others and is added to them, so every episode counts twice "
                f"({p.episode.reward:g}); return the parts only"
            )
        result.add("parts", Level.ERROR, text, [p.task.id])


def _others(episode: Episode, name: str) -> float:
    prefix = name.rpartition("/")[0]
    same = [v for k, v in episode.rewards.items() if k != name and k.rpartition("/")[0] == prefix]
    return sum(same) + (0.0 if prefix else sum(turn.reward for turn in episode.turns))
