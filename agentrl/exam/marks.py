"""Results of an exam: findings by check and level, and what could not be examined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

CHECKS: Mapping[str, str] = {
    "contract": "the env follows the contract of `check_env`",
    "oracle": "the oracle reaches the maximum on every task",
    "null": "a policy that says nothing stays at the floor",
    "nonsense": "meaningless answers stay at the floor",
    "give-up": "a policy that gives up stays at the floor",
    "echo": "a policy that repeats the prompt stays at the floor",
    "injection": "text aimed at parsers and judges stays at the floor",
    "random": "a random policy does not match the oracle",
    "search": "no answer or repeated call that ignores the task earns the reward",
    "determinism": "the same task and seed give the same episode",
    "order": "an episode does not depend on those before it",
    "parallel": "concurrent episodes equal serial ones",
    "process": "another process with another hash seed gives the same episodes",
    "clock": "another date and time give the same episodes",
    "bounds": "rewards are finite, bounded numbers",
    "parts": "the parts of the reward add up",
    "rows": "every row can be played and has one answer",
    "splits": "held-out tasks are not training tasks",
    "leak": "the answer is neither in the prompt nor in reach of a tool the solution does not need",
    "leftovers": "no files remain after an episode",
    "speed": "calls are quick and do not block the event loop",
}
"""The checks by name, in the order of the report."""


class Level(StrEnum):
    """How serious a finding is."""

    ERROR = "error"
    """A policy trained here learns the wrong thing, or results cannot be trusted."""
    WARNING = "warning"
    """Probably a fault; may be intended."""
    NOTE = "note"
    """Worth knowing."""


ORDER = (Level.NOTE, Level.WARNING, Level.ERROR)


@dataclass(frozen=True, slots=True)
class ExamFinding:
    """One finding of a check.

    Attributes:
        check: a name in `CHECKS`.
        text: what was seen, with values.
        tasks: ids of the tasks on which it was seen.
    """

    check: str
    level: Level
    text: str
    tasks: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """The result of one policy: its mean reward and share of solved episodes (None if nothing is declared)."""

    name: str
    episodes: int
    reward: float
    solved: float | None


@dataclass(frozen=True, slots=True)
class CallTime:
    """Seconds of the calls of one tool, or of `step` without a call."""

    name: str
    calls: int
    median_s: float
    max_s: float


@dataclass(frozen=True, slots=True)
class TaskProfile:
    """How often a model solved one task in `attempts` episodes."""

    task: str
    attempts: int
    solved: int | None
    reward: float


@dataclass(frozen=True, slots=True)
class Profile:
    """The difficulty of the tasks for a model."""

    policy: str
    attempts: int
    tasks: Sequence[TaskProfile]


@dataclass(slots=True)
class ExamResult:
    """The result of the exam of one env.

    Attributes:
        name: its name in a run of several envs.
        use: what the run names under `env`.
        oracle: whether the env has an oracle.
        not_examined: reasons by check.
    """

    name: str
    use: str
    num_tasks: int = 0
    num_examined: int = 0
    oracle: bool = False
    findings: list[ExamFinding] = field(default_factory=list)
    not_examined: dict[str, str] = field(default_factory=dict)
    policies: list[PolicyResult] = field(default_factory=list)
    calls: list[CallTime] = field(default_factory=list)
    episodes: int = 0
    seconds: float = 0.0
    profile: Profile | None = None

    def add(self, check: str, level: Level, text: str, tasks: Sequence[str] = ()) -> None:
        """Add a finding once."""
        assert check in CHECKS, check
        found = ExamFinding(check, level, text, tuple(tasks))
        if found not in self.findings:
            self.findings.append(found)

    def skip(self, check: str, why: str) -> None:
        """Record that a check was not possible."""
        assert check in CHECKS, check
        self.not_examined.setdefault(check, why)

    def of(self, check: str) -> list[ExamFinding]:
        """The findings of a check, worst first."""
        found = [finding for finding in self.findings if finding.check == check]
        return sorted(found, key=lambda finding: -ORDER.index(finding.level))

    def state(self, check: str) -> str:
        """`ok`, the worst level found, or `not examined`."""
        if found := self.of(check):
            return found[0].level.value
        return "not examined" if check in self.not_examined else "ok"

    def at_least(self, level: Level) -> list[ExamFinding]:
        """Findings of this level and above."""
        return [f for f in self.findings if ORDER.index(f.level) >= ORDER.index(level)]
