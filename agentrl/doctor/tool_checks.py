"""Are tools called, and do they answer?"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from agentrl.doctor.evidence import Call, Evidence, Played
from agentrl.doctor.finding import Finding

POLICY_OUTCOMES = frozenset({"ok", "parse_error", "unknown_tool", "invalid_args", "not_run", "output_truncated"})
"""Outcomes that say nothing about the tool itself."""
ENOUGH = 16
"""Episodes or calls that a share needs."""
_ERROR = re.compile(
    r"error|exception|traceback|not found|failed|denied|refused|unknown|invalid|unavailable", re.IGNORECASE
)
_CALL = re.compile(r"<tool_call>|<function|\[TOOL_CALLS\]|<\|python_tag\|>|\"(name|function)\"\s*:|```(json|tool)")


def never_called(evidence: Evidence) -> Iterator[Finding]:
    """Tools are offered and nobody ever called one, or no call was ever read."""
    offered = [played for played in evidence.scored if played.tools]
    if len(offered) < ENOUGH or any(played.calls for played in offered):
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


def one_error(evidence: Evidence) -> Iterator[Finding]:
    """Most answers of a tool are one error text, whatever it is asked."""
    calls: dict[str, list[tuple[Call, Played]]] = {}
    for played in evidence.scored:
        for call in played.calls:
            calls.setdefault(call.tool, []).append((call, played))
    for tool, made in calls.items():
        if len(made) < ENOUGH:
            continue
        texts = Counter(_shape(call.result) for call, _ in made)
        shape, count = texts.most_common(1)[0]
        same = [(call, played) for call, played in made if _shape(call.result) == shape]
        failed = sum(call.outcome not in POLICY_OUTCOMES for call, _ in same) > 0.5 * count
        looks = bool(_ERROR.search(shape[:300]))
        arguments = len({call.arguments for call, _ in same})
        share = count / len(made)
        if share >= 0.6 and (failed or (looks and arguments >= 5)):
            call, played = same[0]
            yield Finding(
                "tool-always-fails",
                "error" if share >= 0.9 else "warning",
                f"{share:.0%} of the {len(made)} answers of {tool} are the same error: {call.result[:120]!r}",
                f"the tool {tool} of the env (or its service, network and sandbox); agentrl check "
                "--play calls it once",
                step=played.step,
                episode=played.id,
                why=f"{arguments} different arguments got it",
            )
        elif share >= 0.95 and arguments >= 10 and len(texts) <= 2:
            call, played = same[0]
            text = (
                f"{tool} answers the same whatever it is asked ({share:.0%} of {len(made)} calls): "
                f"{call.result[:80]!r}"
            )
            yield Finding(
                "tool-answers-the-same", "warning", text, f"the tool {tool} of the env", played.step, played.id
            )


def _shape(text: str) -> str:
    """A text without what varies from call to call: numbers, addresses, quoted parts."""
    return re.sub(r"0x[0-9a-f]+|\d+|'[^']*'|\"[^\"]*\"", "#", text.strip())[:500]


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
            "env.settings.observation_tokens (larger), or shorter results from the tool",
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


CHECKS = (never_called, one_error, truncated, limits)
