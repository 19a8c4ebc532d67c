"""What an env gets for `self.model` where no model is loaded: in `agentrl check`, `check_env` and `play`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.env.env import Env
from agentrl.types import Message


class StandInModel:
    """Answers every message with the same words."""

    async def chat(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), train: bool = False
    ) -> Message:
        """As `PolicyModel.chat`."""
        return Message("assistant", "(no model is loaded)")


def with_stand_in(env: Env) -> Env:
    """The env itself, able to call `self.model`; one that has a model keeps it."""
    if env.model is None:
        env.model = StandInModel()
    return env
