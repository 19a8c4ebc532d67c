"""Limits of an episode."""

from __future__ import annotations

from dataclasses import dataclass, replace

from agentrl.config.run import RunConfig
from agentrl.types import LIMITS, Episode


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


def less_overlong(episode: Episode, penalty: float) -> Episode:
    """The episode with `penalty` subtracted from its reward, as part `overlong`, if a limit cut it."""
    if episode.stop_reason not in LIMITS or episode.reward is None:
        return episode
    parts = {**episode.rewards, "overlong": episode.rewards.get("overlong", 0.0) - penalty}
    return replace(episode, reward=episode.reward - penalty, rewards=parts)
