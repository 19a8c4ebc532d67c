"""Separate conversations with the policy inside an episode: a sub-agent, a user simulator, a judge."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.chat.template import Renderer
from agentrl.chat.transcript import Transcript
from agentrl.engine.base import Engine
from agentrl.env.toolenv.json_schema import shorten
from agentrl.errors import EngineError
from agentrl.types import Message, Sampling


def check_conversation(messages: Any, tools: Any) -> None:
    """Raises TypeError unless these are messages and tool schemas."""
    listed = isinstance(messages, Sequence) and all(isinstance(message, Message) for message in messages)
    if not listed or not all(isinstance(message.content, str | Sequence) for message in messages):
        raise TypeError(
            f'self.model.chat takes a list of Message with text, such as [Message("user", "...")], got '
            f"{shorten(messages)}"
        )
    schemas = isinstance(tools, Sequence) and all(isinstance(tool, Mapping) for tool in tools)
    if not schemas or not all(isinstance(tool.get("function"), Mapping) for tool in tools):
        raise TypeError(
            'self.model.chat takes tools as a list of schemas, {"type": "function", "function": {...}}, such as '
            f"self.tools, got {shorten(tools)}"
        )


class PolicyBranch:
    """The object behind `self.model`: separate conversations that start from an empty context.

    A call whose messages start with an earlier conversation, including its answer, continues it: its ids are kept
        as sampled and extended, never rendered again.

    Args:
        engine: samples the tokens.
        renderer: turns messages into tokens.
        ledger: the episode's transcript; trained branches are added to its tree and trained with its advantage.
        sampling: sampling parameters; the call number is mixed into the seed.
        session: name of the episode's engine session.
        token_budget: maximum tokens of the episode, of which trained branches are a part.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        ledger: Transcript,
        sampling: Sampling,
        session: str,
        token_budget: int,
    ) -> None:
        self._engine, self._renderer, self._ledger = engine, renderer, ledger
        self._sampling, self._session, self._token_budget = sampling, session, token_budget
        self._promised = 0  # tokens that trained calls in progress may add to the episode
        self._entry, self._kept = asyncio.Lock(), asyncio.Event()
        self._numbers = itertools.count()
        self._answered: list[
            tuple[Transcript, bool]
        ] = []  # every branch that ends with an answer, and whether it trains

    async def chat(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), train: bool = False
    ) -> Message:
        """The policy's parsed answer to `messages`; the caller runs its tool calls.

        Args:
            messages: the whole conversation of the branch.
            tools: tool schemas of the branch.
            train: keep the branch in the episode, so that its sampled tokens are trained with the episode's
                advantage.

        Raises:
            EngineError: the engine is lost.
            ValueError: the conversation leaves no room in the context, or a trained one in the token budget of the
                episode; the policy may have caused it.
            TypeError: these are no messages, or no tool schemas.
        """
        check_conversation(messages, tools)
        number = next(self._numbers)
        branch, known = self._branch(messages, tools, train)
        branch.extend(messages[known:])
        room = self._room(branch)
        promised = 0
        if train:
            async with self._entry:  # in the order of the calls
                room = await self._share(branch, room)
                promised = branch.spent - self._ledger.spent + room
                self._promised += promised
        seed = None if self._sampling.seed is None else self._sampling.seed + number
        sampling = replace(self._sampling, max_tokens=room, seed=seed)
        session = f"{self._session}/branch{number}"
        try:
            completion = await self._engine.generate(branch.ids, sampling, session=session)
            if completion.finish == "abort":
                raise EngineError("self.model: the engine aborted the completion")
            answer = branch.complete(completion)
        finally:
            self._promised -= promised
            self._kept.set()
            await self._engine.release(session)
        self._answered.append((branch, train))
        return answer

    def trained(self) -> list[Transcript]:
        """The trained conversations, without those that a later call continues."""
        ours = [branch for branch, train in self._answered if train]
        inner = {id(segment) for branch in ours for segment in branch.branch[:-1]}
        return [branch for branch in ours if id(branch.branch[-1]) not in inner]

    def _room(self, branch: Transcript) -> int:
        """Tokens of the next answer by the context. Raises ValueError if there is no room for any."""
        context = self._engine.max_context
        if (by_context := context - len(branch.ids)) < 1:
            raise ValueError(f"self.model: {len(branch.ids)} tokens leave no room in {context}")
        return min(self._sampling.max_tokens, by_context)

    async def _share(self, branch: Transcript, wanted: int) -> int:
        """What the token budget leaves of `wanted`. Where that depends on the calls in progress, they end first.

        Raises:
            ValueError: nothing is left.
        """
        while self._promised and self._token_budget - branch.spent - self._promised < wanted:
            self._kept.clear()
            await self._kept.wait()
        room = min(wanted, self._token_budget - branch.spent)
        if room < 1:
            raise ValueError(
                f"self.model: {branch.spent} tokens of all trained conversations of the episode leave no room "
                f"in {self._token_budget} (rollout.token_budget)"
            )
        return room

    def _branch(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], train: bool
    ) -> tuple[Transcript, int]:
        """The longest conversation that `messages` continue, or None, and its messages."""
        found = [
            branch
            for branch, trains in self._answered
            if trains == train
            and branch.tools == tuple(tools)
            and len(messages) > len(branch.context)
            and tuple(messages[: len(branch.context)]) == branch.context
        ]
        if found:
            longest = max(found, key=lambda branch: len(branch.context))
            return longest.fork(), len(longest.context)
        return (self._ledger.fork(keep=0, tools=tools) if train else Transcript(self._renderer, tools)), 0
