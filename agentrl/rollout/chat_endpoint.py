"""Episodes through a chat endpoint: the same env and limits as in training, but with text instead of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.engine.chat_client import ChatClient, ContextFullError, Conversation, Reply
from agentrl.env.env import Env, PolicyAccess
from agentrl.rollout.branch import check_conversation
from agentrl.rollout.lifecycle import (
    EpisodeStatus,
    OpenEpisode,
    attribution,
    closing,
    episode_clock,
    reset_env,
    score_env,
    step_env,
)
from agentrl.rollout.limits import EpisodeLimits
from agentrl.types import Episode, Message, StopReason, Task, Turn


@dataclass(frozen=True, slots=True)
class ChatPlayer:
    """Plays episodes with a model behind a chat API.

    Args:
        client: client of the endpoint.
        make_env: creates the env of an episode.
        limits: limits, as in training; token counts come from the endpoint's usage.
        temperature: 0 is greedy.
    """

    client: ChatClient
    make_env: Callable[[], Env]
    limits: EpisodeLimits
    temperature: float = 0.0

    async def play(
        self, task: Task, *, episode_id: str, seed: int, status: EpisodeStatus | None = None
    ) -> Episode:
        """Play one episode; `seed` has no effect, because most endpoints do not accept one."""
        limits = self.limits
        episode = OpenEpisode(task, status or EpisodeStatus(episode_id, task.id))
        with attribution(episode):
            async with closing(self.make_env, episode, limits.timeout_s) as env:
                async with episode_clock(episode, limits.timeout_s):
                    env.bind(PolicyAccess(model=_Branch(self, episode)))
                    observed = await reset_env(env, episode)
                    conversation = Conversation(self.client, env.tools)
                    messages = episode.messages = list(observed)
                    used = 0
                    while episode.stop is None:
                        conversation.extend(observed)
                        room = min(limits.max_tokens, limits.token_budget - used)
                        if room < 1:
                            episode.stop = StopReason.TOKEN_BUDGET
                            break
                        asked = episode.status.now(f"the endpoint (turn {len(episode.turns)})")
                        try:
                            reply = await self.ask(conversation, episode, room)
                        except ContextFullError:
                            episode.stop = StopReason.CONTEXT_FULL
                            break
                        episode.status.now(f"env.step (turn {len(episode.turns)})")
                        used = reply.prompt_tokens + reply.completion_tokens
                        messages.append(reply.message)
                        turn = _turn(reply, asked - episode.status.started, len(messages) - 1)
                        if reply.finish == "length":
                            by_budget = room < limits.max_tokens
                            episode.cut(turn, StopReason.TOKEN_BUDGET if by_budget else StopReason.MAX_TOKENS)
                            break
                        observed = await step_env(env, turn, episode, limits.max_turns)
                        messages += observed
                await score_env(env, episode, limits.timeout_s)
        return episode.result()

    async def ask(self, conversation: Conversation, episode: OpenEpisode, max_tokens: int) -> Reply:
        """Get one answer and count its tokens; the waiting time is not charged to the policy."""
        episode.outside.append(endpoint := f"{self.client.endpoint.address} ({self.client.endpoint.model})")
        try:
            reply = await conversation.answer(temperature=self.temperature, max_tokens=max_tokens)
        finally:  # unless the episode's own time ran out meanwhile
            if episode.clock is None or not episode.clock.expired():
                episode.outside.remove(endpoint)
        counts = {
            "usage/prompt_tokens": reply.prompt_tokens,
            "usage/completion_tokens": reply.completion_tokens,
            "usage/cached_tokens": reply.cached_tokens,
        }
        reported = reply.prompt_tokens + reply.completion_tokens > 0
        episode.count(counts if reported else {"usage/unreported": 1})
        return reply


def _turn(reply: Reply, start_s: float, place: int) -> Turn:
    tokens, seconds = reply.completion_tokens, reply.seconds
    return Turn(reply.message, (), 0.0, reply.finish, tokens, seconds, 0.0, start_s=start_s, place=place)


@dataclass(frozen=True, slots=True)
class _Branch:
    """The object behind `self.model`: separate conversations with the endpoint."""

    player: ChatPlayer
    episode: OpenEpisode

    async def chat(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), train: bool = False
    ) -> Message:
        """The model's answer to `messages`; `train` has no effect, because nothing is trained.

        Raises:
            EngineError: no answer.
            ValueError: the conversation is too long, which the policy may have caused.
            TypeError: these are no messages, or no tool schemas.
        """
        check_conversation(messages, tools)
        conversation = Conversation(self.player.client, tools)
        conversation.extend(messages)
        try:
            return (await self.player.ask(conversation, self.episode, self.player.limits.max_tokens)).message
        except ContextFullError as e:
            raise ValueError(f"self.model: {e}") from e
