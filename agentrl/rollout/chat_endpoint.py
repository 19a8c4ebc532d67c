"""Episodes through a chat endpoint: the env's code and the limits of training, but text instead of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.engine.chat_client import ChatClient, ContextFullError, Conversation, Reply
from agentrl.env.env import Env
from agentrl.env.toolenv.env import ToolEnv
from agentrl.errors import EngineError
from agentrl.rollout.frame import Limits, Progress, Whereabouts, reset_env, run_framed, step_env
from agentrl.types import Episode, Message, StopReason, Task, Turn


@dataclass(frozen=True, slots=True)
class ChatPlayer:
    """Plays episodes with a model that only speaks chat.

    Args:
        client: asks the endpoint.
        make_env: makes the env of an episode.
        limits: as in training; tokens are counted by the endpoint's usage.
        temperature: 0 is greedy.
    """

    client: ChatClient
    make_env: Callable[[], Env]
    limits: Limits
    temperature: float = 0.0

    async def play(self, task: Task, *, episode_id: str, seed: int, where: Whereabouts | None = None) -> Episode:
        """Play one episode; `seed` has no effect, because most endpoints do not take one."""
        where = where or Whereabouts(episode_id, task.id)

        async def play(env: Env, progress: Progress) -> None:
            await self._play(env, task, progress, where)

        episode, _ = await run_framed(
            play, task, make_env=self.make_env, timeout_s=self.limits.timeout_s, where=where
        )
        return episode

    async def _play(self, env: Env, task: Task, progress: Progress, where: Whereabouts) -> None:
        limits = self.limits
        if isinstance(env, ToolEnv):
            env.model = _Branch(self, progress)
        where.now("env.reset")
        observed = await reset_env(env, task)
        conversation = Conversation(self.client, env.tools)
        messages = progress.messages = list(observed)
        used = 0
        while progress.stop is None:
            conversation.extend(observed)
            room = min(limits.max_tokens, limits.token_budget - used)
            if room < 1:
                progress.stop = StopReason.TOKEN_BUDGET
                return
            where.now(f"the endpoint (turn {len(progress.turns)})")
            try:
                reply = await self.ask(conversation, progress, room)
            except ContextFullError:
                progress.stop = StopReason.CONTEXT_FULL
                return
            where.now(f"env.step (turn {len(progress.turns)})")
            used = reply.prompt_tokens + reply.completion_tokens
            message = reply.message
            messages.append(message)
            turn = Turn(message, (), 0.0, reply.finish, reply.completion_tokens, reply.seconds, 0.0)
            if reply.finish == "length":
                progress.turns.append(turn)
                cut_by_budget = room < limits.max_tokens
                progress.stop = StopReason.TOKEN_BUDGET if cut_by_budget else StopReason.MAX_TOKENS
                return
            observed = await step_env(env, turn, progress, limits.max_turns)
            messages += observed

    async def ask(self, conversation: Conversation, progress: Progress, max_tokens: int) -> Reply:
        """One answer, its tokens counted; while it is waited for, time is not the policy's."""
        progress.outside = f"{self.client.endpoint.base_url} ({self.client.endpoint.model})"
        reply = await conversation.answer(temperature=self.temperature, max_tokens=max_tokens)
        progress.outside = ""
        progress.count(
            {
                "usage/prompt_tokens": reply.prompt_tokens,
                "usage/completion_tokens": reply.completion_tokens,
                "usage/cached_tokens": reply.cached_tokens,
            }
        )
        return reply


@dataclass(frozen=True, slots=True)
class _Branch:
    """What an env sees as `self.model`: the endpoint in a conversation of its own."""

    player: ChatPlayer
    progress: Progress

    async def chat(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), train: bool = False
    ) -> Message:
        """The model's answer to `messages`; nothing is trained here, so `train` has no effect.

        Raises:
            EngineError: no answer, or the conversation is too long.
        """
        conversation = Conversation(self.player.client, tools)
        conversation.extend(messages)
        try:
            return (await self.player.ask(conversation, self.progress, self.player.limits.max_tokens)).message
        except ContextFullError as e:
            raise EngineError(f"self.model: {e}") from e
