"""Evaluations and comparisons as text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.text import Text

from agentrl.env.solved import NOT_DECLARED
from agentrl.eval.result import EvalResult
from agentrl.eval.stats import Estimate
from agentrl.plural import plural
from agentrl.reporting.display import duration, percent

if TYPE_CHECKING:
    from agentrl.eval.compare import Comparison

WIDEST = 40
"""Characters of a name that are shown."""


def result_text(result: EvalResult) -> Text:
    """Results with confidence intervals, counts of problems, cost, and the folder."""
    spec, estimates = result.spec, result.estimates
    tasks = result.episodes // spec.attempts
    what = plural(tasks, f"{spec.split.replace('_', '-')} task")
    what += f", {spec.attempts} attempts each" if spec.attempts > 1 else ""
    if (solved := estimates.get("solved")) is not None:
        rows = [
            ("solved", f"{percent(solved.mean)} of {what}"),
            ("", f"between {percent(solved.low)} and {percent(solved.high)} with 95 % confidence"),
            ("", f"that is: {result.solved}" if result.solved else ""),
        ]
        rows = [row for row in rows if row[1]]
    else:
        rows = [("played", what), ("solved", NOT_DECLARED)]
    if result.lost:
        rows.append(("lost", f"{plural(result.lost, 'task')} that could not be played; excluded from all metrics"))
    rows += [(name, _share(value)) for name, value in estimates.items() if name.startswith("pass")]
    rewards = {name: value for name, value in estimates.items() if name.startswith("reward/")}
    if "reward" in estimates:
        rows.append(("reward", _number(estimates["reward"])))
    if len(rewards) > 1 or any(value != estimates.get("reward") for value in rewards.values()):
        rows += [("  " + name.removeprefix("reward/"), _number(value)) for name, value in rewards.items()]
    stops = ", ".join(f"{reason} {count}" for reason, count in result.stop_reasons.items())
    tokens = f"{result.sampled_tokens:,} sampled, {result.prompt_tokens:,} read"
    tokens += f" ({result.cached_tokens:,} of them cached)" if result.cached_tokens else ""
    if not result.counted:
        tokens = f"{tokens}; not reported for {plural(result.unreported, 'request')}"
    if not result.counted and not result.prompt_tokens + result.sampled_tokens:
        tokens = "not reported by the endpoint"
    rows += [
        ("stopped", stops),
        ("malformed", str(result.malformed)),
        ("limits", str(result.limits)),
        ("infra failures", " ".join([str(result.infra_failures), _why_lost(result)]).rstrip()),
        *[("faults", f"{sum(result.faults.values())} {_counts(result.faults)}") for _ in result.faults][:1],
        ("turns", f"{result.turns:.1f} an episode"),
        ("tokens", tokens),
        ("latency", f"{_spread(result.turn_seconds)} a turn, {_spread(result.episode_seconds)} an episode"),
        ("time", duration(result.seconds)),
    ]
    if result.cost is not None:
        rows.append(("cost", _dollars(result.cost)))
    rows += [("policy", spec.policy), ("folder", result.folder)]
    return _rows(rows)


def comparison_text(found: Comparison) -> Text:
    """B against A, value by value, and the tasks that B lost."""
    rows = [
        ("A", f"{found.a.spec.policy}  ({found.a.folder})"),
        ("B", f"{found.b.spec.policy}  ({found.b.folder})"),
    ]
    only = [f"{count} only in {side}" for side, count in (("A", found.only_a), ("B", found.only_b)) if count]
    rows.append(("tasks", f"{found.tasks} in both" + (f", {', '.join(only)} left out" if only else "")))
    if found.changed:
        text = f"{found.changed} with an id that both have, and another row; they are not compared"
        rows.append(("", text))
    for name, value in found.values.items():
        share = name == "solved"
        if name.startswith("reward/") and value == found.values["reward"]:
            continue
        a, b = (percent(x) if share else _plain(x) for x in (value.a, value.b))
        scale, unit = (100, " points") if share else (1, "")
        difference = value.difference
        low, high = difference.low * scale, difference.high * scale
        rows += [
            (name, f"{a} -> {b}"),
            ("", f"{difference.mean * scale:+.3g}{unit}, between {low:+.3g} and {high:+.3g} with 95 % confidence"),
            ("", f"better on {plural(value.better, 'task')}, equal on {value.equal}, worse on {value.worse}"),
            (
                "",
                f"p = {value.p:.4g} (paired sign-flip permutation test, {'exact' if value.exact else 'sampled'})",
            ),
        ]
    if found.worst:
        more = f" and {len(found.worst) - 5} more" if len(found.worst) > 5 else ""
        rows.append(("B loses", ", ".join(found.worst[:5]) + more))
    rows += [("note", f"they differ in {note}") for note in found.notes]
    return _rows(rows)


def _rows(rows: list[tuple[str, str]]) -> Text:
    names = [f"{name[:WIDEST]}…" if len(name) > WIDEST else name for name, _ in rows]
    width = max(16, *(len(name) + 2 for name in names))
    return Text("\n").join(
        Text(f"{name:<{width}}", style="bold").append(value, style="not bold")
        for name, (_, value) in zip(names, rows, strict=True)
    )


def _share(value: Estimate) -> str:
    return f"{percent(value.mean)}  ({percent(value.low)} to {percent(value.high)})"


def _number(value: Estimate) -> str:
    return f"{_plain(value.mean)}  ({_plain(value.low)} to {_plain(value.high)})"


def _plain(value: float) -> str:
    """Three decimals, or three digits of a number that they would not show."""
    return f"{value:.3f}" if value == 0 or 0.01 <= abs(value) < 1e6 else f"{value:.3g}"


def _dollars(value: float) -> str:
    """Four decimals, or two digits of an amount that they would not show."""
    decimals = 1 - math.floor(math.log10(value)) if 0 < value < 0.001 else 4
    return f"${value:,.{decimals}f}"


def _spread(values: tuple[float, float, float]) -> str:
    """`0.12 s (p90 0.30, p99 0.71)`."""
    p50, p90, p99 = values
    return f"{p50:.3g} s (p90 {p90:.3g}, p99 {p99:.3g})"


def _why_lost(result: EvalResult) -> str:
    """Infrastructure failures by class, with an example of each."""
    examples = result.redrawn_examples
    named = {f"{name}: {examples[name]}" if examples.get(name) else name: n for name, n in result.redrawn.items()}
    return _counts(named)


def _counts(by_name: Mapping[str, int]) -> str:
    return f"({', '.join(f'{count} {name}' for name, count in by_name.items())})" if by_name else ""
