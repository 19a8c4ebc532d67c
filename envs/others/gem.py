"""GEM: `gem:game:Sudoku-v0-easy`. Its rewards are those of `gem.Env.step`, added up."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.env.adapter import Adapter
from agentrl.env.env import DeclaredReward
from agentrl.env.tasks import Split, generated
from agentrl.env.textenv import TextEnv
from agentrl.env.toolenv.declare import Stop, ToolResult, reward
from agentrl.envs.others.own_random import OwnRandom
from agentrl.errors import ConfigError
from agentrl.suggest import did_you_mean
from agentrl.types import Task


@dataclass(frozen=True)
class GemOptions:
    """Options of `gem:ID`."""

    make: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `gem.make`."""
    system: str = ""
    """System prompt; none by default, because GEM's games explain themselves."""


class Gem(TextEnv, Adapter):
    """A game or question of GEM."""

    Options = GemOptions
    options: GemOptions

    def system(self) -> str:
        """The configured system prompt."""
        return self.options.system

    def setup(self) -> str:
        """Start the game with the task's seed."""
        self.random, self.last, self.over = OwnRandom(self.task.seed), 0.0, False
        with self.random:
            self.game = self.make()
            observation, info = self.game.reset(seed=self.task.seed)
        return str(observation) + _suffix(info)

    def reply(self, text: str) -> Any:
        """Play one action."""
        with self.random:
            observation, gained, terminated, truncated, info = self.game.step(text)
        self.last, self.over = float(gained), bool(terminated)
        said = str(observation) + _suffix(info)
        return Stop(said, self.last) if terminated or truncated else ToolResult(said, reward=self.last)

    @reward(weight=0.0, solved=True)
    def won(self) -> bool:
        """Whether the game ended with its full reward for success."""
        return self.over and self.last >= 1.0

    def declared_rewards(self) -> Mapping[str, DeclaredReward] | None:
        """Undeclared: they are the game's, for its moves; `won` is none of them."""
        return None

    @classmethod
    def make(cls) -> Any:
        """A new game."""
        handlers = logging.root.handlers[:]
        import gem
        import gem.envs

        logging.root.handlers[:] = handlers  # importing gem configures logging for the whole process
        return gem.make(cls.rest, **cls.options.make)

    @classmethod
    def check_name(cls) -> None:
        """Make the game once."""
        try:
            with OwnRandom(0):
                cls.make()
        except ValueError as e:
            from gem.envs.registration import ENV_REGISTRY

            if cls.rest in ENV_REGISTRY:
                raise
            raise ConfigError(
                f"env gem:{cls.rest}: {did_you_mean(cls.rest, ENV_REGISTRY, otherwise=str(e))}"
            ) from e

    @classmethod
    def tasks(cls, split: Split = "train", seed: int = 0, *, size: int = 10_000) -> Sequence[Task]:
        """Games by seed."""
        return generated(f"gem-{cls.rest}", split, seed, size, lambda rng: {})


def _suffix(info: Mapping[str, Any]) -> str:
    """The text after the observation."""
    return f"\n{info['suffix']}" if info.get("suffix") else ""
