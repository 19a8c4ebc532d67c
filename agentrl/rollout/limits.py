"""Limits of an episode."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.config.run import RunConfig


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Turns, tokens and seconds of one episode; see `StopReason` for which one wins."""

    max_turns: int = 8
    max_tokens: int = 256
    token_budget: int = 4096
    timeout_s: float = 300.0

    @classmethod
    def of(cls, config: RunConfig) -> EpisodeLimits:
        """The limits that a run configures under `rollout:`."""
        rollout = config.rollout
        return cls(rollout.max_turns, rollout.max_tokens, rollout.token_budget, rollout.timeout_s)
