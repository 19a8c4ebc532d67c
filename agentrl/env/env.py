"""The contract of an environment: Gymnasium's shape, with messages as observation and action."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.env.solved import SolvedAt, SolvedRule, rule_of
from agentrl.types import CallRecord, Episode, Message, StopReason, Task


@dataclass(slots=True)
class StepInfo:
    """What `step` tells beside its observation and reward."""

    calls: tuple[CallRecord, ...] = ()
    stop_reason: StopReason | None = None
    """Set when the step ended the episode."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Counted into the episode's metrics: one entry a mistake (parse_error, invalid_args, ...)."""
    faults: Mapping[str, str] = field(default_factory=dict)
    """Rewards of the turn that raised and count 0: what happened, by their names."""


class Env(ABC):
    """One instance plays one episode at a time, may be reused after `reset`, and is always closed.

    What the policy causes is an observation. `InfraError` means that the episode could not be played: it neither
    trains nor votes, and is played again. So does any other exception of `reset`, because the policy has not
    acted yet. An exception of `step` ends the episode, which then earns nothing, and one of `score` counts 0: both
    follow what the policy did and may be its doing.
    """

    solved_at: SolvedAt = None
    """When an episode is solved: at this total reward, or where each part reaches its number. A run may set it."""

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """JSON schemas of the tools in the OpenAI shape ({"type": "function", "function": {...}}); constant."""
        return ()

    @abstractmethod
    async def reset(self, task: Task) -> tuple[Sequence[Message], Mapping[str, Any]]:
        """Begin an episode. Returns the opening messages (system, user) and an info dict."""

    @abstractmethod
    async def step(self, message: Message) -> tuple[Sequence[Message], float, bool, bool, StepInfo]:
        """Take an assistant message; return (observation, reward, terminated, truncated, info)."""

    async def score(self, episode: Episode) -> Mapping[str, float]:
        """Rewards of the finished episode by name, already weighted; their sum joins the turns' rewards."""
        return {}

    def solved_rule(self) -> SolvedRule | None:
        """What decides whether an episode is solved; None where nothing is declared."""
        return rule_of(self.solved_at, "solved_at")

    def solved_verdict(self, rewards: Mapping[str, float], total: float) -> bool | None:
        """Whether the episode that was just scored is solved; None where nothing is declared.

        Args:
            rewards: what `score` returned.
            total: their sum with the rewards of the turns.

        Raises:
            JudgeError: a reward that has to decide is not there.
        """
        rule = self.solved_rule()
        return None if rule is None else rule.verdict(rewards, total)

    async def close(self) -> None:
        """Free everything; idempotent; runs after every episode, however it ended."""
        return None
