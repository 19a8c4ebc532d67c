"""An engine without a model: each completion is a message written beforehand, as the tokens it would have been."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrl.chat.demonstrate import completion_of
from agentrl.chat.template import Renderer
from agentrl.errors import EngineError
from agentrl.types import Completion, Message, Sampling

Script = Callable[[int], Message | BaseException]
"""Turn number to what the policy says, or what the engine raises instead."""


class ScriptedEngine:
    """Says the same script in every session. Safe to call from many tasks.

    Args:
        renderer: turns messages into tokens.
        script: messages (or errors) by turn, as a list or a function of the turn's number.
        tools: the tools of the env, where the template writes calls by them.
        delay_s: how long each completion takes.
    """

    def __init__(
        self,
        renderer: Renderer,
        script: Sequence[Message | BaseException] | Script,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        delay_s: float = 0.0,
        max_context: int = 32_768,
    ) -> None:
        self.policy_version = 0
        self.max_context = max_context
        self.released: list[str] = []
        self._renderer, self._tools, self._delay_s = renderer, tools, delay_s
        self._script: Script = script if callable(script) else lambda turn: script[turn]
        self._turns: dict[str | None, int] = {}

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, session: str | None = None) -> Completion:
        """The next line of the script; cut at `sampling.max_tokens`. Raises EngineError at its end."""
        turn = self._turns.get(session, 0)
        self._turns[session] = turn + 1
        await asyncio.sleep(self._delay_s)
        try:
            said = self._script(turn)
        except IndexError:
            raise EngineError(f"the script ends before turn {turn}") from None
        if isinstance(said, BaseException):
            raise said
        completion = completion_of(self._renderer, said, self._tools)
        if len(completion.ids) <= sampling.max_tokens:
            return completion
        kept = completion.ids[: sampling.max_tokens]
        return Completion(kept, (0.0,) * len(kept), (0,) * len(kept), "length")

    async def release(self, session: str) -> None:
        """Forget where the session was."""
        self.released.append(session)
        self._turns.pop(session, None)

    async def update_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """There are no weights; the version counts."""
        self.policy_version = version

    async def close(self) -> None:
        """Nothing to free."""
