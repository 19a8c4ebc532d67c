"""When an episode is solved: the env or the run declares it; a positive reward alone is not enough.

The first of these applies:

1. `env.solved_at` of the run, or `solved_at` on the class: a total, or thresholds by part name;
2. the rewards marked `@reward(solved=True)` or `@reward(solved=0.9)`, all of them;
3. a part named `solved`, or `NAME/solved` of a composed reward or of one annotated to return a mapping;
4. the only reward of the class, if it is per episode and returns `bool`.

Otherwise nothing is declared. Parts are compared before their weight; True is 1.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import ConfigError, JudgeError
from agentrl.types import Group, StopReason

SolvedAt = float | Mapping[str, float] | None
NOT_DECLARED = "not declared (mark a reward with @reward(solved=True), or set env.solved_at)"
_ROUNDING = 1e-6
"""More than the rounding of float32, in which many rewards are computed."""


def reaches(value: float, bound: float) -> bool:
    """Whether a reward is at least a bound that a user gave, up to rounding."""
    return value >= bound - _ROUNDING * abs(bound)


@dataclass(frozen=True, slots=True)
class SolvedRule:
    """The condition for a solved episode.

    Attributes:
        source: where the rule was declared.
        parts: thresholds by reward name; all must be reached.
        total: threshold of the sum of all rewards, weighted; None if the parts decide.
        strict: every part must be present; if False, an episode without one has no verdict.
    """

    source: str
    parts: Mapping[str, float] = field(default_factory=dict)
    total: float | None = None
    strict: bool = True

    def __str__(self) -> str:
        if self.total is not None:
            return f"total reward at least {self.total:g} ({self.source})"
        said = (name if at == 1 else f"{name} at least {at:g}" for name, at in self.parts.items())
        return f"{' and '.join(said)} ({self.source})"

    def verdict(self, parts: Mapping[str, float], total: float) -> bool | None:
        """Whether an episode with these parts, before their weights, is solved; None if nothing is declared.

        Raises:
            JudgeError: the episode lacks a part named by the rule.
        """
        if self.total is not None:
            return total >= self.total - _ROUNDING
        found: list[bool] = []
        for name, at in self.parts.items():
            values = [v for part, v in parts.items() if part == name or (not self.strict and _last(part) == name)]
            if not values and self.strict:
                have = ", ".join(parts) or "none"
                raise JudgeError(f"{self.source} names the reward {name!r}; the episode only has: {have}")
            found += [value >= at - _ROUNDING for value in values]
        return all(found) if found else None


BY_NAME = SolvedRule("the reward named `solved`", {"solved": 1.0}, strict=False)


def rule_of(at: SolvedAt, source: str) -> SolvedRule | None:
    """The rule of a `solved_at`; None if it is None.

    Raises:
        ConfigError: a threshold is not a finite number, or there is no threshold.
    """
    if at is None:
        return None
    thresholds: Mapping[str, Any] = at if isinstance(at, Mapping) else {"": at}
    for name, value in thresholds.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            where = f"{source}.{name}" if name else source
            raise ConfigError(
                f"{where}: {value!r} must be a finite number: the reward at which an episode is solved"
            )
    if isinstance(at, Mapping):
        if not at:
            raise ConfigError(f"{source}: name at least one reward, or give a number for their total")
        return SolvedRule(source, dict(at))
    return SolvedRule(source, total=float(at))


def undeclared(groups: Sequence[Group]) -> bool:
    """Whether nothing declares what is solved, as far as these episodes show: one with a fault, or whose sandbox
    the policy broke, may lack the part that decides, and shows nothing."""
    sound = any(
        not e.faults and e.stop_reason is not StopReason.SANDBOX_BROKEN for g in groups for e in g.episodes
    )
    return sound and all(e.solved is None for g in groups for e in g.episodes)


def solve_rate(group: Group, needed_by: str) -> float:
    """The fraction of a group's episodes that are solved.

    Args:
        needed_by: the setting that needs it, for the message.

    Raises:
        ConfigError: nothing declares when an episode is solved.
    """
    if undeclared([group]):
        raise ConfigError(f"{needed_by} has to know when an episode is solved: {NOT_DECLARED}")
    return sum(e.solved is True for e in group.episodes) / max(1, len(group.episodes))


def _last(part: str) -> str:
    return part.rpartition("/")[2]
