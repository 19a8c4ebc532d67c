"""One session: an episode that a client plays turn by turn, with the rules of a run's episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from agentrl.env.env import PolicyAccess
from agentrl.env_server.served import EnvSource, RequestError
from agentrl.errors import InfraError
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
from agentrl.types import CallRecord, Episode, Message, StopReason, Task, ToolSchema, Turn

CLOSED = "the session was closed"


@dataclass(frozen=True, slots=True)
class TurnResult:
    """What a client gets: the env's messages, the reward since the last result, and the episode at its end."""

    messages: Sequence[Message]
    reward: float | None = None
    calls: Sequence[CallRecord] = ()
    episode: Episode | None = None

    @property
    def done(self) -> bool:
        """Whether the episode has ended."""
        return self.episode is not None


@dataclass(slots=True)
class EnvSession:
    """Episodes of one client, one after another; requests wait for each other."""

    source: EnvSource
    id: str
    task: Task | None = None
    turns: int = 0
    last: TurnResult | None = None
    _tools: Sequence[ToolSchema] | None = None
    _player: asyncio.Task[None] | None = None
    _inbox: asyncio.Queue[Message | None] = field(default_factory=asyncio.Queue)
    _outbox: asyncio.Queue[TurnResult | Exception] = field(default_factory=asyncio.Queue)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _closed: bool = False
    _stopping: bool = False

    @property
    def tools(self) -> Sequence[ToolSchema]:
        """The task's tools; before the first reset, the env's."""
        return self.source.own_tools if self._tools is None else self._tools

    @property
    def playing(self) -> bool:
        """Whether an episode is in progress."""
        return self._player is not None and self.last is not None and not self.last.done

    @property
    def busy(self) -> bool:
        """Whether a request waits for its answer."""
        return self._lock.locked()

    async def reset(self, wanted: Mapping[str, object]) -> TurnResult:
        """Start an episode of the task that `wanted` names; an episode in progress is dropped.

        Raises:
            RequestError: there is no such task.
            InfraError: the env cannot be set up.
        """
        async with self._lock:
            task = self.source.task(wanted)
            await self._stop()
            self._check_open()
            self.task, self.turns, self._tools = task, 0, None
            self._stopping = False
            self._inbox, self._outbox = asyncio.Queue(), asyncio.Queue()
            self._player = asyncio.create_task(self._play(task))
            self._player.add_done_callback(self._tell_closed)
            return await self._answer()

    async def act(self, message: Message | None) -> TurnResult:
        """Play one turn; None ends the episode, which is scored as it stands.

        Raises:
            RequestError: no episode is in progress.
            InfraError: the episode is lost; reset to play another.
        """
        async with self._lock:
            self._check_open()
            if not self.playing:
                raise RequestError("the episode is over; reset" if self.last else "no episode; reset first")
            self._inbox.put_nowait(message)
            self.turns += message is not None
            return await self._answer()

    async def close(self) -> None:
        """Drop the episode in progress and release its resources; idempotent.

        A request that waits for an answer gets an InfraError.
        """
        self._closed = True
        await self._stop()

    def _check_open(self) -> None:
        if self._closed:
            raise InfraError(CLOSED)

    async def _answer(self) -> TurnResult:
        found = await self._outbox.get()
        if isinstance(found, Exception):
            await self._stop()
            raise found
        self.last = found
        return found

    async def _stop(self) -> None:
        player = self._player
        if player is not None:
            if not self._stopping:
                self._stopping = True
                player.cancel()
            await asyncio.wait({player})
        self._player = None

    async def _next(self) -> Message | None:
        """The next message of the client. Raises CancelledError, also if the env has caught it."""
        if self._stopping:
            raise asyncio.CancelledError
        return await self._inbox.get()

    async def _play(self, task: Task) -> None:
        try:
            self._outbox.put_nowait(await self._episode(task))
        except Exception as e:
            self._outbox.put_nowait(e)

    def _tell_closed(self, player: asyncio.Task[None]) -> None:
        if player.cancelled():
            self._outbox.put_nowait(InfraError(CLOSED))

    async def _episode(self, task: Task) -> TurnResult:
        source, paid = self.source, 0.0
        episode = OpenEpisode(task, EpisodeStatus(self.id, task.id))
        last = TurnResult(())
        with attribution(episode):
            async with closing(source.make_env, episode, source.timeout_s) as env:
                async with episode_clock(episode, source.timeout_s):
                    env.bind(PolicyAccess())
                    episode.messages = list(await reset_env(env, episode))
                self._tools = tuple(env.tools)
                self._outbox.put_nowait(TurnResult(tuple(episode.messages)))
                while episode.stop is None:
                    last = TurnResult(())
                    message = await self._next()
                    if message is None:
                        episode.stop = StopReason.MAX_TURNS
                        break
                    last = await self._turn(episode, message)
                    if episode.stop is None:
                        paid += last.reward or 0.0
                        self._outbox.put_nowait(last)
                await score_env(env, episode, source.timeout_s)
        played = episode.result()
        if played.error is not None or played.reward is None:
            raise InfraError(played.error or "the episode has no reward")
        return replace(last, reward=played.reward - paid, episode=played)

    async def _turn(self, episode: OpenEpisode, message: Message) -> TurnResult:
        assert episode.env is not None
        assert episode.messages is not None
        episode.messages.append(message)
        turn = Turn(message, (), 0.0, "stop", 0, 0.0, 0.0, place=len(episode.messages) - 1)
        number = len(episode.turns)
        async with episode_clock(episode, self.source.timeout_s):
            episode.messages += await step_env(episode.env, turn, episode, self.source.max_turns)
        played = episode.turns[number:]
        return TurnResult(played[0].observation, played[0].reward, played[0].calls) if played else TurnResult(())
