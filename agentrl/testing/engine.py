"""An engine without a model: each completion is scripted, as a message or as raw text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrl.chat.demonstrate import completion_of
from agentrl.chat.template import Renderer
from agentrl.engine.base import Engine, EngineCapabilities, GenerateOptions, TokenLogprob
from agentrl.errors import EngineError
from agentrl.types import Completion, Message, Sampling

Line = Message | str | BaseException
"""A message as the template writes it, the raw text of a completion (with control tokens, as a policy may sample
them), or what the engine raises instead."""
Script = Callable[[int], Line]
"""Turn number to what the policy says."""


def raw_completion(renderer: Renderer, text: str) -> Completion:
    """The ids of `text` with its control tokens, followed by a stop token; log-probabilities are 0."""
    ids = (*renderer.vocabulary.encode(text), min(renderer.stop_ids))
    return Completion(ids, (0.0,) * len(ids), (0,) * len(ids), "stop")


class ScriptedEngine(Engine):
    """Replays the same script in every session. Safe to call from many tasks.

    Args:
        renderer: turns messages into tokens.
        script: lines by turn, as a list or a function of the turn's number.
        tools: the tools of the env, if the template needs them to write calls.
        delay_s: how long each completion takes.
    """

    capabilities = EngineCapabilities(streaming=True, masks=True)

    def __init__(
        self,
        renderer: Renderer,
        script: Sequence[Line] | Script,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        delay_s: float = 0.0,
        max_context: int = 32_768,
    ) -> None:
        self._version = 0
        self.max_context = max_context
        self.released: list[str] = []
        self._renderer, self._tools, self._delay_s = renderer, tools, delay_s
        self._script: Script = script if callable(script) else lambda turn: script[turn]
        self._turns: dict[str | None, int] = {}

    @property
    def policy_version(self) -> int:
        """The version of the last update."""
        return self._version

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
        if isinstance(said, str):
            completion = raw_completion(self._renderer, said)
        else:
            completion = completion_of(self._renderer, said, self._tools)
        if len(completion.ids) <= sampling.max_tokens:
            return completion
        kept = completion.ids[: sampling.max_tokens]
        return Completion(kept, (0.0,) * len(kept), (0,) * len(kept), "length")

    async def generate_streaming(
        self, ids: Sequence[int], sampling: Sampling, options: GenerateOptions, *, session: str | None = None
    ) -> Completion:
        """Like `generate`, token by token; masks are ignored, and each token is its only alternative."""
        completion = await self.generate(ids, sampling, session=session)
        for id, logprob, version in zip(completion.ids, completion.logprobs, completion.versions, strict=True):
            if options.on_token is not None:
                options.on_token(TokenLogprob(id, logprob, version, ((id, logprob),) if options.top else ()))
            await asyncio.sleep(0)
        return completion

    async def release(self, session: str) -> None:
        """Forget the session's position."""
        self.released.append(session)
        self._turns.pop(session, None)

    async def update_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """Only the version changes; there are no weights."""
        self._version = version

    async def close(self) -> None:
        """Nothing to free."""
