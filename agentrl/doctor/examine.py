"""Look a run over: all checks, on all or on the first steps of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from agentrl.doctor import (
    data_checks,
    learning_checks,
    reward_checks,
    sampler_checks,
    straggler_checks,
    tool_checks,
)
from agentrl.doctor.evidence import Evidence
from agentrl.doctor.finding import Finding

CHECKS = (
    *sampler_checks.CHECKS,
    *reward_checks.CHECKS,
    *learning_checks.CHECKS,
    *data_checks.CHECKS,
    *straggler_checks.CHECKS,
)
"""Of the whole run."""
ENV_CHECKS = (*tool_checks.CHECKS, *reward_checks.ENV_CHECKS, *data_checks.ENV_CHECKS)
"""Of the episodes of each env."""
ORDER = ("error", "warning", "hint")
BROKEN = ("no-signal", "never-solved", "completions-cut")
"""What a policy looks like that has been torn apart."""
CONSEQUENCES = {
    "no-tool-called": {"no-signal", "never-solved"},
    "tool-always-fails": {"no-signal", "never-solved"},
    "tokens-shifted": {
        *("sampler-learner-mismatch", "temperature-mismatch", "learning-rate-too-high", "entropy-collapse"),
    },
    "kl-sign": {"learning-rate-too-high", "length-explosion", *BROKEN},
    "weights-not-reaching-sampler": {"learning-rate-too-high", *BROKEN},
    "weight-decay-too-high": {"learning-rate-too-high", "entropy-explosion", *BROKEN},
    "learning-rate-too-high": {"entropy-collapse", "length-explosion", *BROKEN},
    "temperature-too-high": {"no-tool-called", "turns-run-out", *BROKEN},
    "entropy-explosion": {"learning-rate-too-high", "length-explosion", "turns-run-out", *BROKEN},
    "entropy-collapse": {"no-signal"},
    "length-explosion": {"completions-cut"},
    "reward-follows-length": {"no-signal"},
    "reward-punishes-length": {"reward-ignores-tools"},
    "context-full": {"no-signal", "never-solved"},
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
    for view in evidence.by_env():
        for check in ENV_CHECKS:
            for finding in check(view):
                yield replace(finding, text=f"env {view.env}: {finding.text}") if view.env else finding
