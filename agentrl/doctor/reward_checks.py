"""Does the reward say what it should? Length, tools, constant parts, faults, lost episodes, held-out tasks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import numpy as np

from agentrl.doctor.evidence import Evidence
from agentrl.doctor.finding import Finding
from agentrl.doctor.statistics import correlation, difference_is_sure, ends, slope, within_groups

ENOUGH = 32


def follows_length(evidence: Evidence) -> Iterator[Finding]:
    """The reward is a function of how much the policy writes."""
    rewards = {round(played.reward or 0.0, 6) for played in evidence.scored}
    lengths, gains = within_groups(evidence.groups(), "num_tokens")
    if len(lengths) < ENOUGH or len(rewards) < 6:
        return
    related = correlation(lengths, gains)
    if related > 0.85 and slope(lengths, gains) > 0:
        yield Finding(
            "reward-follows-length",
            "error" if related > 0.95 else "warning",
            "within groups, the reward follows the number of sampled tokens (correlation "
            f"{related:.2f}): the policy "
            "will learn to write more",
            "the rewards of the env, then algorithm.aggregation and rollout.overlong",
            step=evidence.steps[-1],
            series=("reward", "sampled_tokens"),
            why=f"{len(lengths)} episodes with {len(rewards)} different rewards",
        )


def ignores_tools(evidence: Evidence) -> Iterator[Finding]:
    """Episodes without a tool call score as well as those with one."""
    offered = [played for played in evidence.scored if played.tools and math.isfinite(played.reward or 0.0)]
    called = [p.reward or 0.0 for p in offered if any(call.outcome == "ok" for call in p.calls)]
    silent = [p for p in offered if not p.calls]
    if len(called) < ENOUGH or len(silent) < ENOUGH or len(silent) < 0.1 * len(offered):
        return
    quiet = [played.reward or 0.0 for played in silent]
    every = [*called, *quiet]
    if float(np.mean(every)) <= min(every) + 1e-9:
        return  # nothing is earned at all
    worse = float(np.mean(called)) - float(np.mean(quiet)) > 0.05 * (max(every) - min(every) + 1e-9)
    if worse or (difference_is_sure(called, quiet, 2.0) and np.mean(called) > np.mean(quiet)):
        return
    best = max(silent, key=lambda played: played.reward or 0.0)
    yield Finding(
        "reward-ignores-tools",
        "warning",
        f"episodes without a tool call score {np.mean(quiet):.2f}, those with one "
        f"{np.mean(called):.2f}: nothing rewards "
        "the use of tools",
        "the rewards of the env: check the result that only a tool can give",
        step=best.step,
        episode=best.id,
        series=("reward", "turns"),
        why=f"{len(silent)} of {len(offered)} episodes call no tool; a task that needs none would look the same",
    )


def constant_parts(evidence: Evidence) -> Iterator[Finding]:
    """A part of the reward has one value for everything, such as a judge that always says 0.5."""
    values: dict[str, list[float]] = {}
    for played in evidence.scored:
        for name, value in played.parts.items():
            values.setdefault(name, []).append(value)
    for name, found in values.items():
        known = [value for value in found if math.isfinite(value)]
        if len(known) < 2 * ENOUGH or len(set(known)) > 1 or known[0] == 0:
            continue
        answers = len({played.answer for played in evidence.scored})
        solved = sum(played.raw.get("solved") is True for played in evidence.scored)
        if answers < 10 or solved > 0.9 * len(evidence.scored):
            continue
        yield Finding(
            "reward-part-constant",
            "warning",
            f"the reward {name} is {known[0]:g} in all {len(known)} episodes, whatever the policy says",
            f"the reward {name} of the env (its judge, prompt and endpoint); "
            f"env.reward_weights.{name}: 0 meanwhile",
            step=evidence.steps[-1],
            episode=evidence.scored[-1].id,
            series=(f"reward/{name}", "reward"),
            why=f"{answers} different last messages got it",
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
            yield Finding(
                "reward-at-fault",
                "error" if "not a number" in text or "nan" in text.lower() else "warning",
                f"the reward {name} failed in {count} of {len(evidence.episodes)} episodes: {text[:160]}",
                f"the reward {name} of the env; a fault scores 0, so the policy learns to cause it or to avoid it",
                step=step,
                episode=id,
                why="the fault is recorded in each episode",
            )


def lost_episodes(evidence: Evidence) -> Iterator[Finding]:
    """Failures that are drawn again and depend on what the policy does."""
    for kind, text in evidence.redraws.findings().items():
        yield Finding(
            "redraws-favor-failures",
            "error",
            text,
            "the env and sandbox whose failures are drawn again (sandbox.on_death: score), "
            "rollout.redrawn_stop_above",
            step=evidence.steps[-1] if evidence.steps else 0,
            series=("infra_failures",),
            why=kind,
        )


def hacked(evidence: Evidence) -> Iterator[Finding]:
    """The training reward rises and held-out results fall."""
    name = "held_out_reward"
    steps, held = evidence.with_start(name)
    _, reward = evidence.series("reward")
    if len(held) < 2 or len(reward) < 4:
        return
    low, high = ends(reward)
    tasks = int(evidence.setting("eval.tasks", 200) or 200)
    spread = max(float(np.ptp(reward)), 1e-9)
    noise = 3 * max(0.5 / math.sqrt(tasks), 0.0) * max(1.0, abs(float(held.max())))
    best = float(held[:-1].max())
    if high - low > 0.3 * spread and high - low > 0.05 and best - float(held[-1]) > max(noise, 0.1 * abs(best)):
        yield Finding(
            "reward-hacking",
            "error",
            f"the training reward rises ({low:.2f} to {high:.2f}) while {name} falls ({best:.2f} to "
            f"{held[-1]:.2f})",
            "the rewards of the env (read the best training episodes), then algorithm.kl.coef "
            "(higher) and more tasks",
            step=int(steps[-1]),
            series=("reward", name),
            why="the reward pays for something that is not the task, or the policy learns the tasks by heart",
        )


CHECKS = (follows_length, ignores_tools, constant_parts, faults, lost_episodes, hacked)
