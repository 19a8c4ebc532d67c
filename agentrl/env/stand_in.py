"""Placeholder for `self.model` when no model is loaded: in `agentrl check`, `check_env` and `play`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.env.env import Env
from agentrl.types import Message


class StandInModel:
    """Gives the same answer to every message."""

    async def chat(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), train: bool = False
    ) -> Message:
        """See `PolicyModel.chat`."""
        return Message("assistant", "(no model is loaded)")


def with_stand_in(env: Env) -> Env:
    """Return the env with a usable `self.model`; an existing model is kept."""
    if env.model is None:
        env.model = StandInModel()
    return env
