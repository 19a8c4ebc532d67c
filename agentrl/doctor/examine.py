"""Look a run over: all checks, on all or on the first steps of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from agentrl.doctor import data_checks, learning_checks, reward_checks, sampler_checks, tool_checks
from agentrl.doctor.evidence import Evidence
from agentrl.doctor.finding import Finding

CHECKS = (
    *sampler_checks.CHECKS,
    *tool_checks.CHECKS,
    *reward_checks.CHECKS,
    *learning_checks.CHECKS,
    *data_checks.CHECKS,
)
ORDER = ("error", "warning", "hint")
CONSEQUENCES = {
    "no-tool-called": {"no-signal", "never-solved"},
    "tool-always-fails": {"no-signal", "never-solved"},
    "tokens-shifted": {
        *("sampler-learner-mismatch", "temperature-mismatch", "learning-rate-too-high", "entropy-collapse"),
    },
    "kl-sign": {"learning-rate-too-high", "length-explosion"},
}
"""What follows from a finding is not reported next to it."""


def findings(run: Path, upto: int | None = None) -> list[Finding]:
    """What is wrong with a run, the worst first; reads the files of the run folder and nothing else.

    Args:
        upto: the last step to look at.
    """
    found = list(_found(Evidence.of(run, upto)))
    implied = {name for finding in found for name in CONSEQUENCES.get(finding.name, ())}
    return sorted((f for f in found if f.name not in implied), key=lambda f: ORDER.index(f.severity))


def _found(evidence: Evidence) -> Iterator[Finding]:
    for check in CHECKS:
        yield from check(evidence)
