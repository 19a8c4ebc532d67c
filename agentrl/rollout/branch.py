"""Another conversation with the policy inside an episode: a sub-agent, a user simulator, a judge."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.chat.template import Renderer
from agentrl.chat.transcript import Transcript
from agentrl.engine.base import Completer
from agentrl.errors import EngineError
from agentrl.types import Message, Sampling


class PolicyBranch:
    """What an env sees as `self.model`. Every call is a branch of its own, from an empty context.

    Args:
        engine: samples the tokens.
        renderer: turns messages into tokens.
        ledger: the episode's transcript; trained branches are kept in its tree and train with its advantage.
        sampling: how tokens are drawn; the seed is extended by the number of the call.
        session: name of the episode's engine session.
    """

    def __init__(
        self, engine: Completer, renderer: Renderer, ledger: Transcript, sampling: Sampling, session: str
    ) -> None:
        self._engine, self._renderer, self._ledger = engine, renderer, ledger
        self._sampling, self._session = sampling, session
        self._numbers = itertools.count()

    async def chat(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), train: bool = False
    ) -> Message:
        """The policy's answer to `messages`, parsed; a call in it is the caller's to run.

        Args:
            messages: the whole conversation of the branch.
            tools: schemas offered there.
            train: keep the branch in the episode, so that its sampled tokens train with the episode's advantage.

        Raises:
            EngineError: the engine is lost, or the conversation leaves no room in the context.
        """
        number = next(self._numbers)
        branch = self._ledger.fork(keep=0, tools=tools) if train else Transcript(self._renderer, tools)
        branch.extend(messages)
        room = min(self._sampling.max_tokens, self._engine.max_context - len(branch.ids))
        if room < 1:
            raise EngineError(f"self.model: {len(branch.ids)} tokens leave no room in {self._engine.max_context}")
        seed = None if self._sampling.seed is None else self._sampling.seed + number
        sampling = replace(self._sampling, max_tokens=room, seed=seed)
        session = f"{self._session}/branch{number}"
        try:
            completion = await self._engine.generate(branch.ids, sampling, session=session)
        finally:
            await self._engine.release(session)
        if completion.finish == "abort":
            raise EngineError("self.model: the engine aborted the completion")
        return branch.complete(completion)
