"""Inspect tasks with their own solvers, tools and scorers: `inspect:FILE@TASK`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.envs.others.outside import OutsideEnv, Player, player_of
from agentrl.errors import ConfigError


@dataclass(frozen=True)
class InspectOptions:
    """Options of `inspect:FILE@TASK`."""

    python: str = ""
    """The Python that has inspect-ai; by default, ours."""
    args: Mapping[str, object] = field(default_factory=dict)
    """Arguments of the task."""
    scorers: tuple[str, ...] = ()
    """The scorers whose values are added up as reward; all by default."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """Models of Inspect for roles, e.g. {grader: openai/gpt-5}."""
    held_out: str = "fifth"
    """fifth holds out every fifth sample (if there are five); all uses all samples in both splits."""


class InspectTask(OutsideEnv):
    """One sample per episode."""

    solved_at = 1.0
    Options = InspectOptions
    options: InspectOptions

    @classmethod
    def player(cls) -> Player:
        """A program with one endless evaluation."""
        file, _, task = cls.rest.partition("@")
        if not Path(file).is_file():
            raise ConfigError(f"env inspect:{cls.rest}: no such file: {file}")
        options = cls.options
        given = {"file": str(Path(file).resolve()), "task": task, "args": dict(options.args)}
        given |= {"roles": dict(options.roles), "scorers": list(options.scorers)}
        return player_of(options.python, "inspect_tasks.py", json.dumps(given), f"inspect:{cls.rest}")
