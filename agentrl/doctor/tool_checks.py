"""Are tools called, and do they answer?"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from agentrl.doctor.evidence import Call, Evidence, Played
from agentrl.doctor.finding import Finding
from agentrl.doctor.statistics import correlation, ends

POLICY_OUTCOMES = frozenset({"ok", "parse_error", "unknown_tool", "invalid_args", "not_run", "output_truncated"})
"""Outcomes that say nothing about the tool itself."""
FAILURES = frozenset({"tool_exception", "tool_timeout"})
"""Outcomes of a tool that did not answer."""
ENOUGH = 16
"""Episodes or calls that a share needs."""
SOME_STEPS = 6
RISING = 0.7
"""Rank correlation of times with steps."""
LONGER = 1.5
"""Growth of calls or results that may explain longer times."""
FEW = 6
"""Episodes of each worker that a comparison of workers needs."""
_ERROR = re.compile(
    r"error|exception|traceback|not found|failed|denied|refused|unknown|invalid|unavailable", re.IGNORECASE
)
_CALL = re.compile(r"<tool_call>|<function|\[TOOL_CALLS\]|<\|python_tag\|>|\"(name|function)\"\s*:|```(json|tool)")


def never_called(evidence: Evidence) -> Iterator[Finding]:
    """Tools are offered, but none was ever called, or no call could be parsed."""
    offered = [played for played in evidence.scored if played.tools]
    if len(offered) < ENOUGH:
        return
    if any(played.calls for played in offered):
        yield from _never_read(offered)
        return
    written = [
        p
        for p in offered
        if _CALL.search(p.text("assistant")) or any(t + "(" in p.text("assistant") for t in p.tools)
    ]
    broken = [p for p in offered if any(m.get("parse_errors") for m in p.raw.get("messages", ()))]
    read = written[0] if written else offered[0]
    why = f"in {len(written)} of {len(offered)} episodes the text looks like a call that was not read as one"
    if len(written) < 0.1 * len(offered) and len(broken) < 0.1 * len(offered):
        why = "the policy's text does not look like calls either: it has not learned to write them"
        setting = "warmup (demonstrations or oracle), then the prompt, then model.parser"
    else:
        setting = "model.parser: it must read the format that the policy writes; then warmup"
    yield Finding(
        "no-tool-called",
        "error",
        f"no tool was called in {len(offered)} episodes that offer {', '.join(offered[0].tools[:4])}",
        setting,
        step=read.step,
        episode=read.id,
        series=("malformed", "turns"),
        why=why,
    )


def _never_read(offered: Sequence[Played]) -> Iterator[Finding]:
    """One tool of several that is never called, although the policy writes its name where calls go."""
    called = {call.tool for played in offered for call in played.calls}
    for tool in sorted({tool for played in offered for tool in played.tools} - called):
        having = [played for played in offered if tool in played.tools]
        named = re.compile(rf"(\"name\"\s*:\s*\"|<function=|name=\"|\b){re.escape(tool)}(\"|>|\()")
        wrote = [played for played in having if named.search(played.unread)]
        if len(having) < 2 * ENOUGH or len(wrote) < max(3, 0.02 * len(having)):
            continue
        yield Finding(
            "tool-never-called",
            "warning",
            f"{tool} was never called in {len(having)} episodes that offer it, although {len(wrote)} of them "
            "write its name as a call does",
            f"model.parser and the schema of {tool}: its calls must be read; then warmup",
            step=wrote[0].step,
            episode=wrote[0].id,
            series=("malformed", "env/parse_error"),
            why="other tools are called, so the format itself is known",
        )


def one_error(evidence: Evidence) -> Iterator[Finding]:
    """Most calls to a tool return the same error text."""
    calls: dict[str, list[tuple[Call, Played]]] = {}
    for played in evidence.scored:
        for call in played.calls:
            calls.setdefault(call.tool, []).append((call, played))
    for tool, made in calls.items():
        if len(made) < ENOUGH // 2:
            continue
        texts = Counter(_shape(call) for call, _ in made)
        shape, count = texts.most_common(1)[0]
        same = [(call, played) for call, played in made if _shape(call) == shape]
        failed = sum(call.outcome not in POLICY_OUTCOMES for call, _ in same) > 0.5 * count
        looks = bool(_ERROR.search(shape[:300])) or _same_error(call for call, _ in same)
        arguments = len({call.arguments for call, _ in same})
        share = count / len(made)
        if len(made) < ENOUGH and share < 1:
            continue
        if share >= 0.5 and (failed or (looks and (arguments >= 5 or _tasks(same) >= 8))):
            call, played = same[0]
            yield Finding(
                "tool-always-fails",
                "error" if share >= 0.9 else "warning",
                f"{share:.0%} of the {len(made)} answers of {tool} are the same error: {call.result[:120]!r}",
                f"the tool {tool} of the env (or its service, network and sandbox); agentrl check "
                "--play calls it once",
                step=played.step,
                episode=played.id,
                series=("env/tool_exception",) if failed else (),
                why=f"{arguments} different arguments in {_tasks(same)} tasks got it",
            )
        elif _one_result(made):
            call, played = same[0]
            text = f"{tool} returns the same result for every call ({len(made)} calls): {call.result[:80]!r}"
            yield Finding(
                "tool-answers-the-same", "warning", text, f"the tool {tool} of the env", played.step, played.id
            )


def _one_result(made: Sequence[tuple[Call, Played]]) -> bool:
    """Whether nearly all calls have the same result, to the letter, although their arguments differ much."""
    result, count = Counter(call.result.strip() for call, _ in made).most_common(1)[0]
    arguments = {call.arguments for call, _ in made if call.result.strip() == result}
    return count >= 0.95 * len(made) and len(arguments) >= 10


def _tasks(made: Sequence[tuple[Call, Played]]) -> int:
    return len({str(played.raw["task"]["id"]) for _, played in made})


def _shape(call: Call) -> str:
    """A result without what varies from call to call: arguments, numbers, addresses, quoted parts."""
    return re.sub(r"'[^']*'|\"[^\"]*\"", "#", _text(call))


def _text(call: Call) -> str:
    """The same with its quoted parts."""
    text = call.result.strip()[:500]
    for value in re.findall(r'"([^"\\]{2,})"', call.arguments):
        text = text.replace(value, "#")
    return re.sub(r"\b(?=\w*\d)[0-9a-fA-F]{6,}\b|0x[0-9a-f]+|\d+", "#", text)


def _same_error(calls: Iterable[Call]) -> bool:
    """Whether most results of one shape are the same error inside of quotes as well, as in JSON."""
    texts = Counter(map(_text, calls))
    text, count = texts.most_common(1)[0]
    return count > 0.5 * texts.total() and bool(_ERROR.search(text[:300]))


def unreliable(evidence: Evidence) -> Iterator[Finding]:
    """A tool that fails in some episodes where the same first call of the same group succeeds in others."""
    alike: dict[str, list[list[tuple[Call, Played]]]] = {}
    for group in evidence.groups():
        same: dict[tuple[str, str], list[tuple[Call, Played]]] = {}
        for played in group:
            if played.calls and played.first_call is not None:
                same.setdefault(played.first_call, []).append((played.calls[0], played))
        for (tool, _), made in same.items():
            if len(made) > 1:
                alike.setdefault(tool, []).append(made)
    for tool, sets in alike.items():
        every = sum(map(len, sets))
        mixed = [made for made in sets if any(call.outcome == "ok" for call, _ in made)]
        failed = [(call, played) for made in mixed for call, played in made if call.outcome in FAILURES]
        if every < ENOUGH or len(failed) < max(3, 0.02 * every):
            continue
        call, played = failed[0]
        yield Finding(
            "tool-unreliable",
            "warning",
            f"{tool} failed in {len(failed)} of {every} first calls although the same call succeeded in another "
            f"episode of the group: {call.result[:120]!r}",
            f"the tool {tool} of the env (its service, network and sandbox): retry inside the tool, or raise "
            "InfraError so that the episode is replayed",
            step=played.step,
            episode=played.id,
            series=("env/tool_exception", "env/tool_timeout"),
            why="first calls of one group act on the same state, so the policy did not cause the failures",
        )


def truncated(evidence: Evidence) -> Iterator[Finding]:
    """Many answers are shortened before the policy sees them."""
    calls = [(call, played) for played in evidence.scored for call in played.calls]
    cut = [(call, played) for call, played in calls if " characters left out ...]" in call.result]
    if len(calls) >= ENOUGH and len(cut) > 0.3 * len(calls):
        _, played = cut[0]
        yield Finding(
            "observations-truncated",
            "warning",
            f"{len(cut) / len(calls):.0%} of {len(calls)} tool results were shortened before the policy saw them",
            f"{evidence.env_key}.settings.observation_tokens (larger), or shorter results from the tool",
            step=played.step,
            episode=played.id,
            series=("env/output_truncated",),
        )


def limits(evidence: Evidence) -> Iterator[Finding]:
    """Most episodes end at one limit."""
    scored = evidence.scored
    if len(scored) < ENOUGH:
        return
    for reasons, name, setting in (
        (
            ("context_full", "token_budget"),
            "context-full",
            "rollout.token_budget, shorter observations, or a model with more context",
        ),
        (("max_tokens",), "completions-cut", "rollout.max_tokens"),
        (("max_turns", "tool_call_limit"), "turns-run-out", "rollout.max_turns"),
        (("timeout",), "timeouts", "rollout.timeout_s, or faster tools"),
    ):
        ended = [played for played in scored if played.raw.get("stop_reason") in reasons]
        if len(ended) > 0.5 * len(scored) and not _mostly_solved(ended):
            text = f"{len(ended) / len(scored):.0%} of the episodes end at a limit ({', '.join(reasons)})"
            series = tuple(f"stop/{reason}" for reason in reasons)
            yield Finding(name, "warning", text, setting, ended[0].step, ended[0].id, series)


def _mostly_solved(episodes: Sequence[Played]) -> bool:
    return sum(played.raw.get("solved") is True for played in episodes) > 0.5 * len(episodes)


def slows_down(evidence: Evidence) -> Iterator[Finding]:
    """A tool whose calls take longer from step to step."""
    made: dict[str, dict[int, list[Call]]] = {}
    for played in evidence.scored:
        for call in played.calls:
            made.setdefault(call.tool, {}).setdefault(played.step, []).append(call)
    for tool, by_step in made.items():
        steps = sorted(step for step, found in by_step.items() if len(found) >= FEW)
        if len(steps) < SOME_STEPS:
            continue
        usual = np.asarray([float(np.median([call.seconds for call in by_step[step]])) for step in steps])
        sizes = np.asarray([float(np.median([_size(call) for call in by_step[step]])) for step in steps])
        (first, last), (short, long) = ends(usual), ends(sizes)
        ranks = np.argsort(np.argsort(usual)).astype(float)
        rising = correlation(range(len(steps)), ranks) > RISING
        if not rising or last < 3 * first or last < first + 0.02 or long > LONGER * short:
            continue
        yield Finding(
            "tool-slows-down",
            "warning",
            f"a call of {tool} takes longer from step to step: {first:.2g} s at first, {last:.2g} s in the end",
            f"the tool {tool} of the env: what grows with every episode (lists, files, tables, open connections)",
            step=steps[-1],
            series=("env_seconds", "rollout_seconds"),
            why=f"medians of {len(steps)} steps; the calls and their results did not get longer",
        )


def _size(call: Call) -> int:
    """Characters of a call and its result, which may explain its time."""
    return len(call.arguments) + len(call.result)


def slow_worker(evidence: Evidence) -> Iterator[Finding]:
    """One env worker takes longer than all others for the same work: every step waits for it."""
    times: dict[int, list[tuple[float, Played]]] = {}
    for played in evidence.scored:
        if played.raw.get("worker") is not None and played.raw.get("turns"):
            times.setdefault(int(played.raw["worker"]), []).append((played.seconds_outside_engine, played))
    enough = {worker: found for worker, found in times.items() if len(found) >= FEW}
    if len(enough) < 2:
        return
    usual = {worker: float(np.median([seconds for seconds, _ in found])) for worker, found in enough.items()}
    slow = max(usual, key=lambda worker: usual[worker])
    others = float(np.median([seconds for worker, seconds in usual.items() if worker != slow]))
    if usual[slow] < max(3 * others, others + 0.05):
        return
    _, played = max(enough[slow], key=lambda found: found[0])
    yield Finding(
        "slow-worker",
        "warning",
        f"env worker {slow} takes {usual[slow]:.2g} s per turn outside of the engine, the others {others:.2g} s: "
        "every step waits for it",
        f"rollout.workers and ray (the node of worker {slow}: its cores, disk, network and sandboxes); "
        "rollout.groups_ahead hides it meanwhile",
        step=played.step,
        episode=played.id,
        series=("rollout_seconds", "env_seconds"),
        why=f"medians over {sum(map(len, enough.values()))} episodes of {len(enough)} workers",
    )


CHECKS = (never_called, one_error, unreliable, truncated, limits, slow_worker, slows_down)
