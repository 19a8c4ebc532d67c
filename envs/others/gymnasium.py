"""`gymnasium:ID`: any Gymnasium env whose actions a language model can write, through the tool `act`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.env.adapter import Adapter
from agentrl.env.gym import GymnasiumEnv
from agentrl.errors import ConfigError


@dataclass(frozen=True)
class GymnasiumOptions:
    """Options of `gymnasium:ID`."""

    actions: tuple[str, ...] = ()
    """Names of a Discrete space's actions; numbers if it is empty."""
    make: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `gymnasium.make`."""
    reward_scale: float = 1.0
    """Factor for the game's rewards."""
    system: str = "Play the game: call act with your next action until it ends."
    """System prompt."""


class GymnasiumGame(GymnasiumEnv, Adapter):
    """A Gymnasium env named in the YAML file."""

    Options = GymnasiumOptions
    options: GymnasiumOptions

    @classmethod
    def check_name(cls) -> None:
        """Make the game once."""
        if not (math.isfinite(cls.options.reward_scale) and cls.options.reward_scale):
            raise ConfigError(
                f"env.options.reward_scale must be a finite number other than 0, got {cls.options.reward_scale}"
            )
        cls.env_id, cls.actions = cls.rest, cls.options.actions
        cls.make_options, cls.reward_scale = cls.options.make, cls.options.reward_scale
        cls()

    def system(self) -> str:
        """The configured system prompt."""
        return self.options.system
