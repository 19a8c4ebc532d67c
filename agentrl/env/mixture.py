"""Tasks of several envs by share: a deterministic low-discrepancy order, with an optional curriculum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Protocol

from agentrl.env.curriculum import TaskSampler
from agentrl.env.own_sampler import OwnSampler
from agentrl.env.solved import solve_rate
from agentrl.types import Group, Task

WINDOW = 64
"""Number of recent groups of an env that its solve rate is averaged over."""
FLOOR = 0.1
"""Weight of the share of an env that is always or never solved."""
_GRAIN = 1_000_000


class TaskSource(Protocol):
    """Where a run's tasks come from: one env (`TaskSampler`, `OwnSampler`) or several (`MixedSampler`)."""

    @property
    def rated(self) -> bool:
        """Whether results are reported, because the order depends on them."""
        ...

    def task(self, position: int) -> Task:
        """The task at a position."""
        ...

    def take(self, num: int) -> list[tuple[int, Task]]:
        """The next `num` tasks with their positions."""
        ...

    def replacement(self, position: int) -> tuple[int, Task]:
        """The next task of the same env, in place of the one at `position`."""
        ...

    def report(self, position: int, group: Group) -> None:
        """Record how the group on the task at a position ended."""
        ...

    def state(self) -> dict[str, Any]:
        """The state needed to resume, as JSON data."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved `state`."""
        ...


class MixedSampler:
    """Samples the envs by their shares, and from each its tasks in its own order.

    After n tasks, an env with the share s has given more than n s - 1 and less than n s + 1 of them. Replacements
    of groups without signal come from the same env and are not counted. Source: Tijdeman, "The chairman
    assignment problem", 1980.

    Args:
        samplers: the order of each env's tasks.
        shares: the share of each env, relative to the others.
        by_solve_rate: weigh the shares by recent solve rates; an env solved half the time, or not played yet, has
            its full weight.
    """

    def __init__(
        self,
        samplers: Mapping[str, TaskSampler | OwnSampler],
        shares: Mapping[str, float],
        *,
        by_solve_rate: bool = False,
    ) -> None:
        self.samplers, self.by_solve_rate = dict(samplers), by_solve_rate
        self._names = list(self.samplers)
        self._share_of = {name: Fraction(str(shares[name])) for name in self._names}
        self._due = [Fraction(0)] * len(self._names)  # what each is owed: its shares so far, less what it gave
        self._results: dict[str, list[float]] = {name: [] for name in self._names}

    @property
    def rated(self) -> bool:
        """Whether results are reported."""
        return self.by_solve_rate or any(sampler.rated for sampler in self.samplers.values())

    def take(self, num: int) -> list[tuple[int, Task]]:
        """The next `num` tasks with their positions."""
        return [self._next(self._choose()) for _ in range(num)]

    def replacement(self, position: int) -> tuple[int, Task]:
        """The next task of the same env, in place of the one at `position`."""
        return self._next(position % len(self._names))

    def task(self, position: int) -> Task:
        """The task at a position."""
        own, env = divmod(position, len(self._names))
        return self.samplers[self._names[env]].task(own)

    def report(self, position: int, group: Group) -> None:
        """Record how the group on the task at a position ended.

        Raises:
            ConfigError: a solve rate is needed, and nothing declares when an episode is solved.
        """
        own, env = divmod(position, len(self._names))
        name = self._names[env]
        if self.samplers[name].rated:
            self.samplers[name].report(own, group)
        if self.by_solve_rate:
            self._results[name].append(solve_rate(group, "rollout.env_shares: solve_rate"))
            del self._results[name][:-WINDOW]

    def shares(self) -> dict[str, float]:
        """The current share of each env; their sum is 1."""
        return {name: float(share) for name, share in zip(self._names, self._current(), strict=True)}

    def state(self) -> dict[str, Any]:
        """The state needed to resume, as JSON data."""
        envs = {
            name: {
                "sampler": self.samplers[name].state(),
                "due": str(due),
                "solve_rates": list(self._results[name]),
            }
            for name, due in zip(self._names, self._due, strict=True)
        }
        return {"envs": envs}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved `state`. Raises KeyError, TypeError or ValueError if it is invalid."""
        envs = state["envs"]
        self._names = sorted(self.samplers, key=list(envs).index)  # positions count the envs in this order
        self._due = [Fraction(envs[name]["due"]) for name in self._names]
        self._results = {name: [float(rate) for rate in envs[name]["solve_rates"]] for name in self._names}
        for name, sampler in self.samplers.items():
            sampler.restore(envs[name]["sampler"])

    def _next(self, env: int) -> tuple[int, Task]:
        ((own, task),) = self.samplers[self._names[env]].take(1)
        return own * len(self._names) + env, task

    def _choose(self) -> int:
        """The env that is furthest behind its share among those that may be next."""
        shares = self._current()
        self._due = [due + share for due, share in zip(self._due, shares, strict=True)]
        slack = Fraction(1, 2 * max(len(shares) - 1, 1))
        owed = [env for env, due in enumerate(self._due) if due >= slack] or range(len(shares))
        env = min(owed, key=lambda i: ((1 - slack - self._due[i]) / shares[i], i))
        self._due[env] -= 1
        return env

    def _current(self) -> Sequence[Fraction]:
        if not self.by_solve_rate:
            return [self._share_of[name] / sum(self._share_of.values()) for name in self._names]
        weighted = [
            self._share_of[name] * Fraction(_weight(self._results[name])).limit_denominator(_GRAIN)
            for name in self._names
        ]
        parts = [max(1, int(_GRAIN * share / sum(weighted))) for share in weighted]  # denominators stay small
        parts[parts.index(max(parts))] += _GRAIN - sum(parts)
        return [Fraction(part, _GRAIN) for part in parts]


def _weight(rates: Sequence[float]) -> float:
    if not rates:
        return 1.0
    rate = sum(rates) / len(rates)
    return max(FLOOR, 4 * rate * (1 - rate))
