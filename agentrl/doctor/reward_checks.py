"""Does the reward say what it should? Length, tools, constant parts, faults, lost episodes, held-out tasks."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.doctor.evidence import Evidence, Floats, Played
from agentrl.doctor.finding import Finding
from agentrl.doctor.statistics import correlation, difference_is_sure, ends, slope

ENOUGH = 32
FEW_ANSWERS = 8
"""Different answers that are paid, where the answer decides."""
NOISE = 0.2
"""Share of the variance within groups that is worth a warning."""
_JUDGED = re.compile(r"judge|grade|score|rating|rubric|quality|critic|model", re.IGNORECASE)
"""Names of rewards that are opinions."""
_OPINION = re.compile(r"judge|rating|rubric|quality|critic", re.IGNORECASE)
"""Those of which one value for nearly everything is no coincidence."""
_HELD_OUT = re.compile(r"(env/[^/]+/)?held_out_reward")


def follows_length(evidence: Evidence) -> Iterator[Finding]:
    """The reward, or a part of it that counts, is a function of how much the policy writes."""
    table = _relative(evidence.groups())
    if len(table.lengths) < ENOUGH or table.lengths.std() < 1e-9:
        return
    for name, gains in table.gains.items():
        if len(set(np.round(gains, 6))) < 6 or gains.std() < 0.2 * table.total.std():
            continue  # a small part among others may price length
        related = correlation(table.lengths, gains)
        if related > 0.85 and slope(table.lengths, gains) > 0:
            what = f"the reward {name}" if name else "the reward"
            yield Finding(
                "reward-follows-length",
                "error" if related > 0.95 and gains.std() > 0.5 * table.total.std() else "warning",
                f"within groups, {what} follows the number of sampled tokens (correlation {related:.2f}): the "
                "policy will learn to write more",
                f"{what} of the env, then algorithm.aggregation and rollout.overlong",
                step=evidence.steps[-1],
                episode=max(evidence.scored, key=lambda played: played.num_tokens).id,
                series=(f"reward/{name}" if name else "reward", "sampled_tokens"),
                why=f"{len(gains)} episodes; tasks with several honest lengths would not correlate this much",
            )
            return


def punishes_length(evidence: Evidence) -> Iterator[Finding]:
    """A part that falls with length and outweighs all other parts, before the tasks are solved."""
    table = _relative(evidence.groups())
    solved = [played.raw.get("solved") is True for played in evidence.scored]
    if len(table.lengths) < ENOUGH or table.lengths.std() < 1e-9 or sum(solved) > 0.5 * len(solved):
        return
    for name, gains in table.gains.items():
        rest = float((table.total - gains).std())
        related = correlation(table.lengths, gains)
        if not name or related > -0.85 or gains.std() < rest or len(set(np.round(gains, 6))) < 6:
            continue
        yield Finding(
            "reward-punishes-length",
            "warning",
            f"within groups, the reward {name} falls with the number of sampled tokens (correlation "
            f"{related:.2f}) and varies more than all other parts ({gains.std():.2g}, the others {rest:.2g}): "
            "the policy will learn to write as little as possible",
            f"{evidence.env_key}.reward_weights.{name} (closer to 0), until the tasks are solved",
            step=evidence.steps[-1],
            episode=min(evidence.scored, key=lambda played: played.reward or 0.0).id,
            series=(f"reward/{name}", "sampled_tokens", "solved"),
            why=f"{sum(solved)} of {len(solved)} episodes are solved; once all are, length may decide",
        )


@dataclass(frozen=True)
class _Relative:
    """Lengths and rewards of episodes, relative to the means of their groups.

    Attributes:
        total: the rewards.
        gains: what each part adds to them, by name; under the empty name all together.
    """

    lengths: Floats
    total: Floats
    gains: dict[str, Floats]


def _relative(groups: Iterable[Sequence[Played]]) -> _Relative:
    rows: list[list[float]] = []
    names: list[str] = []
    for group in groups:
        names = names or sorted(group[0].parts)
        values = np.asarray(
            [[p.num_tokens, p.reward or 0.0, *(p.parts.get(name, 0.0) for name in names)] for p in group]
        )
        if len(group) > 1 and np.isfinite(values).all():
            rows += list(values - values.mean(0))
    table = np.asarray(rows, dtype=float).reshape(-1, 2 + len(names))
    total, parts = table[:, 1], table[:, 2:]
    gains = {"": total}
    if len(table) and len(names) > 1:  # what a part weighs is not recorded, and can be told from the sums
        weights = np.linalg.lstsq(parts, total, rcond=None)[0]
        gains |= {name: parts[:, n] * weights[n] for n, name in enumerate(names)}
    return _Relative(table[:, 0], total, gains)


def ignores_tools(evidence: Evidence) -> Iterator[Finding]:
    """Episodes without a tool call score as well as those with one."""
    offered = [played for played in evidence.scored if played.tools and math.isfinite(played.reward or 0.0)]
    called = [p.reward or 0.0 for p in offered if any(call.outcome == "ok" for call in p.calls)]
    silent = [p for p in offered if p.first_call is None and _by_choice(p)]
    if len(called) < ENOUGH or len(silent) < ENOUGH or len(silent) < 0.1 * len(offered):
        return
    quiet = [played.reward or 0.0 for played in silent]
    low, high = min(p.reward or 0.0 for p in offered), max(p.reward or 0.0 for p in offered)
    width = high - low if high > low else abs(high)
    if float(np.mean(quiet)) - (low if high > low else 0.0) <= 0.2 * width:
        return  # nothing is earned without a call
    gain = float(np.mean(called)) - float(np.mean(quiet))
    if gain > 0.05 * width and (gain > 0.2 * width or difference_is_sure(called, quiet)):
        return
    best = max(silent, key=lambda played: played.reward or 0.0)
    yield Finding(
        "reward-ignores-tools",
        "hint" if _answers_decide(silent) else "warning",
        f"episodes without a tool call score {np.mean(quiet):.2f}, those with one "
        f"{np.mean(called):.2f}: nothing rewards the use of tools",
        "the rewards of the env: check the result that only a tool can give",
        step=best.step,
        episode=best.id,
        series=("reward", "turns"),
        why=f"{len(silent)} of {len(offered)} episodes call no tool; a task that needs none would look the same",
    )


def _answers_decide(episodes: Sequence[Played]) -> bool:
    """Whether right answers are paid and wrong ones are not: tasks that can be solved without a tool."""
    rewards: dict[tuple[str, str], set[float]] = {}
    for played in episodes:
        rewards.setdefault((str(played.raw["task"]["id"]), played.answer), set()).add(played.reward or 0.0)
    paid = {answer for (_, answer), found in rewards.items() if max(found) > 0}
    values = {value for found in rewards.values() for value in found}
    return all(len(found) == 1 for found in rewards.values()) and len(values) > 1 and len(paid) >= FEW_ANSWERS


def _by_choice(played: Played) -> bool:
    """Whether an episode ended because the policy answered, not at a limit or in a call that cannot be read."""
    broken = any(message.get("parse_errors") for message in played.raw.get("messages", ()))
    return not broken and played.raw.get("stop_reason") in ("answered", "terminated", "stopped_by_tool")


def noisy(evidence: Evidence) -> Iterator[Finding]:
    """Episodes of a group that are the same to the letter and get different rewards."""
    sets = [same for group in evidence.groups() for same in _same_text(group) if len(same) > 1]
    total = _spread([[p.reward or 0.0 for p in group] for group in evidence.groups()])
    count = sum(map(len, sets))
    if count < ENOUGH or not math.isfinite(total) or total <= 0:
        return
    share = _spread([[p.reward or 0.0 for p in same] for same in sets]) / total
    mixed = [same for same in sets if float(np.ptp([p.reward or 0.0 for p in same])) > 1e-6]
    if share < NOISE or len(mixed) < 4:
        return
    parts = {
        name: _spread([[p.parts.get(name, 0.0) for p in same] for same in sets]) for name in mixed[0][0].parts
    }
    worst = max(parts, key=lambda name: parts[name]) if parts else ""
    what = f"the reward {worst}" if worst else "the reward"
    yield Finding(
        "reward-is-noise",
        "error" if share > 0.5 else "warning",
        f"identical episodes of a group get different rewards in {len(mixed)} of {len(sets)} cases: about "
        f"{min(share, 1.0):.0%} of the variance within groups is noise",
        f"{what} of the env: state shared by episodes, chance, time, or a judge's temperature; "
        "agentrl check --exam tells which",
        step=mixed[0][0].step,
        episode=mixed[0][0].id,
        series=(f"reward/{worst}" if worst else "reward",),
        why=f"{count} episodes have a sibling with the same messages; their rewards should be equal",
    )


def _same_text(group: Sequence[Played]) -> list[list[Played]]:
    """The episodes of a group by what was said in them."""
    found: dict[tuple[str, int], list[Played]] = {}
    for played in group:
        found.setdefault((played.transcript, played.num_tokens), []).append(played)
    return list(found.values())


def _spread(sets: Sequence[Sequence[float]]) -> float:
    """The pooled variance within sets."""
    squares = sum(float(np.var(values)) * len(values) for values in sets)
    return squares / max(1, sum(len(values) - 1 for values in sets))


def constant_parts(evidence: Evidence) -> Iterator[Finding]:
    """A part of the reward has one value for everything, such as a judge that always says 0.5."""
    values: dict[str, list[float]] = {}
    for played in evidence.scored:
        for name, value in played.parts.items():
            values.setdefault(name, []).append(value)
    differ = len({(p.answer, p.first_call, p.num_tokens) for p in evidence.scored})
    solved = sum(played.raw.get("solved") is True for played in evidence.scored) / max(1, len(evidence.scored))
    for name, found in values.items():
        known = [value for value in found if math.isfinite(value)]
        if len(known) < 2 * ENOUGH or differ < 10:
            continue
        value, count = Counter(known).most_common(1)[0]
        between = value not in (0.0, 1.0)
        nearly = between and count >= 0.95 * len(known) and _OPINION.search(name) is not None
        if (count < len(known) and not nearly) or (len(values) < 2 and value == 0):
            continue
        judged = bool(_JUDGED.search(name))
        share = "all" if count == len(known) else f"{count / len(known):.0%} of the"
        # All or nothing may be right: good form that everybody has, a bonus that nobody earned.
        sure = 0.02 < solved < 0.9 and (between or judged)
        yield Finding(
            "reward-part-constant",
            "warning" if sure else "hint",
            f"the reward {name} is {value:g} in {share} {len(known)} episodes, regardless of what the policy does",
            f"the reward {name} of the env (its judge, prompt and endpoint); "
            f"{evidence.env_key}.reward_weights.{name}: 0 meanwhile",
            step=evidence.steps[-1],
            episode=evidence.scored[-1].id,
            series=(f"reward/{name}", "reward"),
            why=f"{differ} different episodes got it; {solved:.0%} of all are solved",
        )


def faults(evidence: Evidence) -> Iterator[Finding]:
    """Rewards that raise, or are not a number."""
    names: Counter[str] = Counter()
    texts: dict[str, tuple[str, int, str]] = {}
    for played in evidence.episodes:
        bad = {name: "it is not a number" for name, value in played.parts.items() if not math.isfinite(value)}
        if played.reward is not None and not math.isfinite(played.reward) and not bad:
            bad = {"reward": "it is not a number"}
        for name, text in {**bad, **(played.raw.get("faults") or {})}.items():
            names[name] += 1
            texts.setdefault(name, (str(text), played.step, played.id))
    for name, count in names.items():
        text, step, id = texts[name]
        if count >= 3 and count >= 0.01 * len(evidence.episodes):
            first, every = text.partition("\n")[0], len(evidence.episodes)
            sure = count == every or "not a number" in text or re.search(r"\bnan\b", text.lower()) is not None
            yield Finding(
                "reward-at-fault",
                "error" if sure else "warning",
                f"the reward {name} failed in {count} of {every} episodes: {first[:160]}",
                f"the reward {name} of the env; a fault scores 0, so the policy learns to cause it or to avoid it",
                step=step,
                episode=id,
                why="the fault is recorded in each episode",
            )


def agent_crashes(evidence: Evidence) -> Iterator[Finding]:
    """An agent program that fails in many episodes."""
    crashed = [played for played in evidence.scored if played.raw.get("crash")]
    if len(crashed) < max(3.0, 0.1 * len(evidence.scored)):
        return
    (worst, _), *_ = Counter(str(played.raw["crash"]).partition("\n")[0] for played in crashed).most_common(1)
    share = len(crashed) / len(evidence.scored)
    yield Finding(
        "agent-crashes",
        "error" if share > 0.5 else "warning",
        f"the agent crashed in {len(crashed)} of {len(evidence.scored)} episodes, most often with: {worst[:160]}",
        "the program or function of `agent`; `agent.crash` decides whether such episodes are scored or replayed",
        step=crashed[-1].step,
        episode=crashed[-1].id,
        series=("env/agent/crashed",),
        why="an episode that ends in a crash is scored as it stands",
    )


def lost_episodes(evidence: Evidence) -> Iterator[Finding]:
    """Failures that are drawn again and depend on what the policy does."""
    for kind, text in evidence.redraws.findings().items():
        yield Finding(
            "redraws-favor-failures",
            "error",
            text,
            'the env and sandbox whose failures are drawn again (Sandbox(on_death="score") in the env), '
            "rollout.redrawn_stop_above",
            step=evidence.steps[-1] if evidence.steps else 0,
            series=("infra_failures",),
            why=kind,
        )
    yield from _bad_are_lost(evidence)


def _bad_are_lost(evidence: Evidence) -> Iterator[Finding]:
    """Failed episodes began as siblings did that score badly, or as no survivor did: the good ones survive."""
    gaps: list[float] = []
    alike: list[float] = []
    usual: list[float] = []
    hit: list[Played] = []
    for group in evidence.groups(evidence.episodes):
        callers = [p for p in group if p.reward is not None and p.first_call is not None]
        for played in (p for p in group if p.first_call is not None):
            rest = [p for p in callers if p is not played]
            same = [p.reward or 0.0 for p in rest if p.first_call == played.first_call]
            if rest and played.reward is not None:
                usual.append(len(same) / len(rest))
            elif rest:
                hit.append(played)
                alike.append(len(same) / len(rest))
                gaps.append(float(np.mean(same) - np.mean([p.reward or 0.0 for p in rest])) if same else 0.0)
    if len(hit) < 16:
        return
    worse = float(np.mean(gaps)) < -3.3 * max(float(np.std(gaps)) / math.sqrt(len(gaps)), 1e-9)
    apart = float(np.mean(alike)) < 0.1 and float(np.mean(usual or [0.0])) > 0.4
    if worse or apart:
        how = f"score {-np.mean(gaps):.2f} less than their groups" if worse else "were lost as well, all of them"
        yield Finding(
            "redraws-favor-failures",
            "error",
            f"{len(hit)} lost episodes had made calls that depend on the policy: siblings with that call {how}; "
            "the run trains on the survivors",
            'the env and sandbox whose failures are drawn again (Sandbox(on_death="score") in the env), '
            "rollout.redrawn_stop_above",
            step=hit[0].step,
            episode=hit[0].id,
            series=("infra_failures",),
            why="episodes of one group that began with the same call are compared",
        )


def hacked(evidence: Evidence) -> Iterator[Finding]:
    """The training reward rises and held-out results fall, in the whole run or in one env."""
    names = [n.removesuffix("held_out_reward") for n in evidence.reader.metrics.values if _HELD_OUT.fullmatch(n)]
    for prefix in names:
        if (finding := _hacked(evidence, f"{prefix}reward", f"{prefix}held_out_reward")) is not None:
            yield finding
            return


def _hacked(evidence: Evidence, name: str, held_name: str) -> Finding | None:
    steps, held = evidence.with_start(held_name)
    _, reward = evidence.series(name)
    if len(held) < 2 or len(reward) < 4:
        return None
    low, high = ends(reward)
    tasks = max(1.0, evidence.number("eval.tasks", 200))
    spread = max(float(np.ptp(reward)), 1e-9)
    noise = 3 * 0.5 / math.sqrt(tasks) * max(1.0, abs(float(held.max())))
    best = float(held[:-1].max())
    rises = high - low > max(0.3 * spread, 0.05)
    if not rises or best - float(held[-1]) <= max(noise, 0.1 * abs(best)):
        return None
    return Finding(
        "reward-hacking",
        "error",
        f"the training reward rises ({low:.2f} to {high:.2f}) while {held_name} falls ({best:.2f} to "
        f"{held[-1]:.2f})",
        "the rewards of the env (read the best training episodes), then algorithm.kl.coef (higher) and more tasks",
        step=int(steps[-1]),
        series=(name, held_name),
        why="the reward pays for something that is not the task, or the policy learns the tasks by heart",
    )


CHECKS = (lost_episodes, hacked)
ENV_CHECKS = (follows_length, punishes_length, ignores_tools, noisy, constant_parts, faults, agent_crashes)
