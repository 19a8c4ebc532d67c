"""Tasksets of verifiers with their own environments, tool servers and rewards: `verifiers:ID`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.envs.others.outside import OutsideEnv, Player, player_of
from agentrl.errors import ConfigError


@dataclass(frozen=True)
class VerifiersOptions:
    """Options of `verifiers:ID`."""

    python: str = ""
    """The Python that has verifiers and the taskset; by default, ours."""
    path: str = ""
    """A folder with the taskset's package, if it is not installed."""
    args: Mapping[str, object] = field(default_factory=dict)
    """Settings of the taskset."""
    harness: str = ""
    """A harness of verifiers; by default the taskset's own, or a chat loop."""
    env: str = ""
    """An environment of verifiers to pair with the taskset; it sets up its agents itself."""
    limit: int = 1000
    """Tasks to take of an infinite taskset."""
    held_out: str = "fifth"
    """fifth holds out every fifth task (if there are five); all uses all tasks in both splits."""


class Verifiers(OutsideEnv):
    """One task per episode."""

    Options = VerifiersOptions
    options: VerifiersOptions
    solved_at = 1.0

    @classmethod
    def player(cls) -> Player:
        """A program that keeps the taskset's environment up. Raises ConfigError."""
        options = cls.options
        if options.limit < 1:
            raise ConfigError(f"env.options.limit must be at least 1, got {options.limit}")
        if options.harness and options.env:
            raise ConfigError("env.options.harness has no effect with `env`: its agents choose theirs; remove one")
        if options.path and not Path(options.path).is_dir():
            raise ConfigError(f"env.options.path: no such folder: {options.path}")
        given: dict[str, object] = {"id": cls.rest, "args": dict(options.args), "limit": options.limit}
        given |= {"harness": options.harness, "env": options.env}
        given |= {"path": str(Path(options.path).resolve()) if options.path else ""}
        return player_of(options.python, "verifiers_tasks.py", json.dumps(given), f"verifiers:{cls.rest}")
