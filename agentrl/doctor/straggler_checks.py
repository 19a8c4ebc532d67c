"""Does one learner rank or inference server always make the others wait?"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from agentrl.config.address import without_credentials
from agentrl.doctor.evidence import Evidence
from agentrl.doctor.finding import Finding

FEW_STEPS = 4
"""Steps that a comparison needs, without the first."""
SLOWER = 1.5
"""Times as long as usual."""
ALWAYS = 0.9
"""Share of the steps in which it is the slowest."""


@dataclass(frozen=True, slots=True)
class _Slow:
    """The one that is always the slowest, with seconds per token."""

    number: int
    seconds: float
    others: float
    steps: int
    of: int
    last: int


def slow_rank(evidence: Evidence) -> Iterator[Finding]:
    """A rank of the learner that computes slower than the others; they meet before every layer."""
    times = _members(evidence, r"rank/(\d+)/forward_seconds")
    found = _slowest({n: _per_token(evidence, f"rank/{n}") for n in times})
    if found is None:
        return
    yield Finding(
        "slow-rank",
        "warning",
        f"learner rank {found.number} takes {found.seconds / found.others:.2g} times as long per token as the "
        f"others ({_per_1000(found.seconds)} instead of {_per_1000(found.others)}): all ranks wait for it in "
        "every layer",
        f"learner.ranks and ray (the node and GPU of rank {found.number}: its clocks, temperature, and other "
        "processes on it)",
        step=found.last,
        series=(f"rank/{found.number}/forward_seconds", f"rank/{found.number}/tokens", "update_seconds"),
        why=f"it is the slowest in {found.steps} of {found.of} steps; waiting for others is not counted",
    )


def slow_server(evidence: Evidence) -> Iterator[Finding]:
    """An inference server that samples slower than the others."""
    times = _members(evidence, r"server/(\d+)/token_seconds")
    found = _slowest({n: dict(zip(*evidence.series(name), strict=True)) for n, name in times.items()})
    if found is None:
        return
    urls = evidence.setting("engine.server.urls")
    url = (
        f" ({without_credentials(str(urls[found.number]))})"
        if isinstance(urls, list) and found.number < len(urls)
        else ""
    )
    yield Finding(
        "slow-server",
        "warning",
        f"inference server {found.number}{url} takes {found.seconds / found.others:.2g} times as long per sampled "
        f"token as the others ({_per_1000(found.seconds)} instead of {_per_1000(found.others)}): episodes on it "
        "end last",
        f"engine.server (the machine and GPU of server {found.number}, and other processes on it); "
        "rollout.groups_ahead hides it meanwhile",
        step=found.last,
        series=(f"server/{found.number}/token_seconds", f"server/{found.number}/busy_seconds", "rollout_seconds"),
        why=f"it is the slowest in {found.steps} of {found.of} steps; requests go to the server with the fewest",
    )


def _members(evidence: Evidence, pattern: str) -> dict[int, str]:
    """The series of a kind, by the number in their names."""
    names = [(re.fullmatch(pattern, name), name) for name in evidence.reader.metrics.values]
    return {int(found[1]): name for found, name in names if found}


def _per_token(evidence: Evidence, prefix: str) -> dict[float, float]:
    """Seconds per token by step, of the steps in which the rank had rows."""
    tokens = dict(zip(*evidence.series(f"{prefix}/tokens"), strict=True))
    seconds = dict(zip(*evidence.series(f"{prefix}/forward_seconds"), strict=True))
    return {step: spent / tokens[step] for step, spent in seconds.items() if tokens.get(step, 0.0) > 0}


def _slowest(times: Mapping[int, Mapping[float, float]]) -> _Slow | None:
    """The member that is the slowest in nearly all steps that have a time of every member, if there is one."""
    if len(times) < 2:
        return None
    known = [{step for step, value in found.items() if math.isfinite(value)} for found in times.values()]
    steps = sorted(set.intersection(*known))[1:]  # the first warms up
    if len(steps) < FEW_STEPS:
        return None
    numbers = sorted(times)
    table = np.asarray([[times[number][step] for number in numbers] for step in steps])
    usual = np.median(table, axis=0)
    slow = int(np.argmax(usual))
    others = float(np.median(np.delete(usual, slow)))
    worst = int((np.argmax(table, axis=1) == slow).sum())
    if usual[slow] < SLOWER * others or worst < ALWAYS * len(steps):
        return None
    return _Slow(numbers[slow], float(usual[slow]), others, worst, len(steps), int(steps[-1]))


def _per_1000(seconds: float) -> str:
    return f"{1000 * seconds:.3g} s per 1,000"


CHECKS = (slow_rank, slow_server)
