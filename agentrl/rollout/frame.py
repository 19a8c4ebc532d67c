"""What every episode has, whoever plays it: a clock, rewards at its end, an env that is closed, and no exception.

`rollout/episode.py` plays with our engine, `rollout/chat.py` through a chat endpoint; in `serve/record_agent.py` a
program of the user's plays.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

from agentrl.chat.transcript import Transcript
from agentrl.env.env import Env
from agentrl.errors import ConfigError, InfraError
from agentrl.sandbox import SandboxBroken
from agentrl.types import Episode, Message, StopReason, Task, Turn


@dataclass(frozen=True, slots=True)
class Limits:
    """What an episode may use. Precedence where several apply at once: see `StopReason`."""

    max_turns: int = 8
    max_tokens: int = 256
    token_budget: int = 4096
    timeout_s: float = 300.0


@dataclass(slots=True)
class Whereabouts:
    """Where an episode that is being played stands: what it waits for, and since when (`time.monotonic`)."""

    episode_id: str
    task_id: str
    doing: str = "starting"
    started: float = field(default_factory=time.monotonic)
    since: float = field(default_factory=time.monotonic)

    def now(self, doing: str) -> None:
        """Note what the episode waits for from now on."""
        self.doing, self.since = doing, time.monotonic()

    def __str__(self) -> str:
        now = time.monotonic()
        return (
            f"episode {self.episode_id} (task {self.task_id}), begun {now - self.started:.0f} s ago, waits for "
            f"{self.doing} since {now - self.since:.0f} s"
        )


@dataclass(slots=True)
class Progress:
    """What is known of an episode while it is played.

    Attributes:
        transcript: the ledger of its tokens, from when the env is set up; None where a policy has no tokens.
        messages: the conversation, where there is no transcript.
        tools: schemas that the policy saw, where they are not the env's.
        outside: names what is waited for where that is not the policy's doing: running out of time there is an
            infrastructure failure, not a limit.
    """

    transcript: Transcript | None = None
    messages: list[Message] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    turns: list[Turn] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    stop: StopReason | None = None
    outside: str = ""

    @property
    def began(self) -> bool:
        """Whether the env has been set up."""
        return self.transcript is not None or self.messages is not None

    def count(self, metrics: Mapping[str, float]) -> None:
        """Add counts of a turn."""
        for name, count in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + count


async def run_framed(
    play: Callable[[Env, Progress], Awaitable[None]],
    task: Task,
    *,
    make_env: Callable[[], Env],
    timeout_s: float,
    where: Whereabouts,
    release: Callable[[], Awaitable[None]] | None = None,
) -> tuple[Episode, Progress]:
    """Play one episode; trouble that the policy cannot cause becomes `Episode.error`, never an exception.

    Args:
        play: alternates policy and env until `Progress.stop` is set.
        task: what the env is reset to.
        make_env: makes the env; it is closed whatever happens.
        timeout_s: limit of the episode, of its rewards, and of the env's closing.
        where: kept up to date with what the episode waits for; it also names the episode.
        release: frees what the policy holds for this episode; runs before the env is closed.

    Raises:
        ConfigError: what the user has to mend; every other episode would meet the same.
    """
    progress = Progress()
    error: str | None = None
    env: Env | None = None
    rewards: Mapping[str, float] = {}
    try:
        env = make_env()
        try:
            async with asyncio.timeout(timeout_s) as clock:
                await play(env, progress)
        except TimeoutError:
            if not clock.expired():  # the env's own
                raise
            if progress.outside:
                raise InfraError(f"{progress.outside} took longer than {timeout_s:g} s") from None
            progress.stop = StopReason.TIMEOUT
        if not progress.began:
            raise InfraError(f"{type(env).__name__}.reset took longer than {timeout_s:g} s")
        where.now("its rewards")
        rewards = await _score(env, _episode(progress, task, where, env), timeout_s)
    except Exception as e:  # the episode is lost, its siblings are not
        if isinstance(e, ConfigError) and progress.outside:
            raise
        if (
            isinstance(e, SandboxBroken) and progress.turns
        ):  # before the first turn nobody but the env ran anything
            rewards = _broken(progress, e)
        else:
            error = _describe(e, env)
            progress.stop = StopReason.INFRA
    finally:
        where.now("the env to close")
        await _close(env, release, timeout_s)
    total = sum(t.reward for t in progress.turns) + sum(rewards.values())
    reward = None if error else float(total)
    found = _episode(progress, task, where, env)
    return replace(found, reward=reward, rewards=dict(rewards), error=error), progress


async def step_env(env: Env, turn: Turn, progress: Progress, max_turns: int) -> Sequence[Message]:
    """Give the env the turn's message and note what came of it; sets `progress.stop` where that is the end.

    Raises:
        InfraError: the reward is no finite number.
    """
    began = time.monotonic()
    try:
        observed, reward, terminated, truncated, info = await env.step(turn.message)
    except SandboxBroken:
        progress.turns.append(replace(turn, env_seconds=time.monotonic() - began))  # it trains
        raise
    if not _is_number(reward):
        raise InfraError(f"{type(env).__name__}.step returned the reward {reward!r}: it must be a finite number")
    progress.turns.append(
        replace(
            turn,
            observation=tuple(observed),
            reward=float(reward),
            env_seconds=time.monotonic() - began,
            calls=info.calls,
        )
    )
    progress.count(info.metrics)
    if terminated or truncated:
        progress.stop = info.stop_reason or (StopReason.TERMINATED if terminated else StopReason.MAX_TURNS)
    elif len(progress.turns) >= max_turns:
        progress.stop = StopReason.MAX_TURNS
    return observed


def _episode(progress: Progress, task: Task, where: Whereabouts, env: Env | None) -> Episode:
    transcript = progress.transcript
    messages = transcript.messages if transcript else progress.messages or ()
    tools = progress.tools if progress.tools is not None else env.tools if env is not None else ()
    return Episode(
        id=where.episode_id,
        task=task,
        messages=tuple(messages),
        turns=tuple(progress.turns),
        segments=tuple(transcript.segments) if transcript else (),
        stop_reason=progress.stop or StopReason.INFRA,
        reward=None,
        metrics=dict(progress.metrics),
        seconds=time.monotonic() - where.started,
        tools=tuple(tools) if progress.began else (),
    )


async def _score(env: Env, episode: Episode, timeout_s: float) -> Mapping[str, float]:
    """The env's rewards. Raises InfraError when they take too long or one of them is no finite number."""
    where = type(env).__name__
    try:
        async with asyncio.timeout(timeout_s) as clock:
            rewards = await env.score(episode)
    except TimeoutError:
        if not clock.expired():
            raise
        raise InfraError(f"{where}.score took longer than {timeout_s:g} s") from None
    for name, value in rewards.items():
        if not _is_number(value):
            raise InfraError(f"reward {name!r} of {where} is {value!r}: a reward must be a finite number")
    return rewards


def _broken(progress: Progress, error: SandboxBroken) -> Mapping[str, float]:
    """End an episode whose sandbox the policy broke; the rewards that make its total `error.reward`."""
    progress.stop = StopReason.SANDBOX_BROKEN
    progress.count({"sandbox_broken": 1.0})
    correction = error.reward - sum(turn.reward for turn in progress.turns)
    return {"sandbox_broken": correction} if correction else {}


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _describe(e: Exception, env: Env | None) -> str:
    where = type(env).__name__ if env is not None else "making the env"
    return f"{type(e).__name__}: {e}" if isinstance(e, InfraError) else f"{where}: {type(e).__name__}: {e}"


async def _close(env: Env | None, release: Callable[[], Awaitable[None]] | None, timeout_s: float) -> None:
    """Teardown that finishes even when the episode is being cancelled, however often."""

    async def teardown() -> None:
        try:
            if release is not None:
                await release()
        finally:
            if env is not None:
                await _close_env(env, timeout_s)

    task = asyncio.ensure_future(teardown())
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as e:
            cancelled = e
    if cancelled is not None:
        raise cancelled


async def _close_env(env: Env, timeout_s: float) -> None:
    """Close it; a failure is told and loses nothing: what was played stays valid."""
    try:
        async with asyncio.timeout(timeout_s) as clock:
            await env.close()
    except Exception as e:
        said = f"took longer than {timeout_s:g} s" if clock.expired() else f"{type(e).__name__}: {e}"
        warnings.warn(f"{type(env).__name__}.close: {said}", stacklevel=2)


def draw_seed(*parts: int | str) -> int:
    """A 63-bit seed from the run's seed and the place of the draw; the same on every machine."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
