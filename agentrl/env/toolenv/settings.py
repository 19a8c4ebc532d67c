"""Settings of a ToolEnv that a run can change without touching code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from agentrl.config.typed import check_types
from agentrl.env.toolenv.dispatch import MISTAKES
from agentrl.errors import ConfigError
from agentrl.suggest import did_you_mean

MistakePolicy = Literal["observe", "penalise", "terminate"]


@dataclass(frozen=True, slots=True)
class ToolSettings:
    """Limits and policies. A class can set defaults with `settings = ToolSettings(...)`."""

    max_calls_per_turn: int = 8
    """Maximum calls per message; further calls get an error instead of running."""
    max_tool_calls: int | None = None
    """Maximum calls per episode (None: no limit); the next one gets an error and truncates the episode."""
    tool_timeout_s: float = 30.0
    """Timeout of one tool call in seconds, unless the tool sets one; exceeding it is the mistake
    `tool_timeout`."""
    setup_timeout_s: float = 120.0
    """Timeout of `setup` and `respond` in seconds. If `setup` exceeds it, the episode is an infrastructure
    failure; if `respond` does, the episode ends with the stop reason `fault` (an infrastructure failure if
    `respond` is waiting for a `Judge`)."""
    teardown_timeout_s: float = 30.0
    """Timeout of `teardown` in seconds; exceeding it logs a warning, and the episode stays valid."""
    reward_timeout_s: float = 60.0
    """Timeout of one reward in seconds; beyond it, the reward counts as 0 (an infrastructure failure if it is
    waiting for a judge)."""
    observation_tokens: int = 1024
    """Maximum length of one tool result in tokens; the middle of longer results is cut out."""
    mistakes: Mapping[str, MistakePolicy] = field(default_factory=dict)
    """Consequences of the policy's mistakes, by name; mistakes not listed are only observed."""
    mistake_penalty: float = 0.1
    """Subtracted from the turn's reward for each mistake set to `"penalise"`."""
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    """Reward weights by name; they override those in the code."""

    def changed(self, values: Mapping[str, Any]) -> ToolSettings:
        """A copy with some settings replaced. Raises ConfigError on an unknown name or an invalid value."""
        known = [f.name for f in fields(self)]
        for name in values:
            if name not in known:
                hint = did_you_mean(name, known, otherwise=f"the settings are: {', '.join(known)}")
                raise ConfigError(f"env.settings.{name}: unknown; {hint}")
        check_types(type(self), values, "env.settings")
        try:
            found = replace(self, **values)
        except ConfigError as e:
            raise ConfigError(f"env.settings.{e}") from None
        if "mistake_penalty" in values and "penalise" not in found.mistakes.values():
            raise ConfigError(
                "env.settings.mistake_penalty: has no effect unless a mistake is set to penalise in "
                "env.settings.mistakes: remove it, or set one"
            )
        return found

    def __post_init__(self) -> None:
        for name, policy in self.mistakes.items():
            if name not in MISTAKES:
                hint = did_you_mean(name, MISTAKES, otherwise=f"the mistakes are: {', '.join(MISTAKES)}")
                raise ConfigError(f"mistakes.{name}: there is no such mistake; {hint}")
            if policy not in ("observe", "penalise", "terminate"):
                raise ConfigError(f"mistakes.{name}: {policy!r} must be observe, penalise or terminate")
        for key in ("max_calls_per_turn", "observation_tokens"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key} must be at least 1, got {getattr(self, key)}")
        for key in ("tool_timeout_s", "setup_timeout_s", "teardown_timeout_s", "reward_timeout_s"):
            if getattr(self, key) <= 0:
                raise ConfigError(f"{key} must be positive, got {getattr(self, key)}")
        if self.mistake_penalty < 0:
            raise ConfigError(
                f"mistake_penalty must not be negative, got {self.mistake_penalty}: it is subtracted"
            )
        if self.max_tool_calls is not None and self.max_tool_calls < 0:
            raise ConfigError(f"max_tool_calls must not be negative, got {self.max_tool_calls}")
