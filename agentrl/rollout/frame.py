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
from agentrl.clean import clean_message, clean_text
from agentrl.env.env import Env
from agentrl.env.toolenv.asked import asking
from agentrl.errors import AgentRLError, EnvError, InfraError, JudgeError, RewardError, TemplateError, traceback_of
from agentrl.sandbox import SandboxBroken
from agentrl.types import Episode, Message, StopReason, Task, Turn

_NAME = 200
"""Characters of the name of a reward or metric."""


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
        faults: what raised on what the policy did, by name; see `Episode`.
    """

    transcript: Transcript | None = None
    messages: list[Message] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    turns: list[Turn] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    stop: StopReason | None = None
    outside: str = ""
    faults: dict[str, str] = field(default_factory=dict)

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
    """Play one episode. Trouble that the policy cannot cause becomes `Episode.error`; what the env's author wrote
    and raises on the policy's doing becomes a fault, and the episode is scored.

    Args:
        play: alternates policy and env until `Progress.stop` is set.
        task: what the env is reset to.
        make_env: makes the env; it is closed whatever happens.
        timeout_s: limit of the episode, of its rewards, and of the env's closing.
        where: kept up to date with what the episode waits for; it also names the episode.
        release: frees what the policy holds for this episode; runs before the env is closed.

    Raises:
        ConfigError: what the user has to mend; every other episode would meet the same.
        TemplateError: the chat template refuses the opening.
        Exception: a bug of agentrl, as it is: it is not to be mistaken for a failure of the infrastructure.
    """
    progress = Progress()
    error: str | None = None
    env: Env | None = None
    rewards: Mapping[str, float] = {}
    solved: bool | None = None
    try:
        env = _made(make_env)
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
        rewards = await _score(env, _episode(progress, task, where, env), timeout_s, progress.faults)
        solved = _verdict(env, progress, rewards)
    except SandboxBroken as e:
        if progress.turns:
            rewards = _broken(progress, e)
            solved = _verdict(env, progress, rewards)
        else:  # nobody but the env ran anything before the first turn
            error = f"{type(e).__name__}: {e}"
            progress.stop = StopReason.INFRA
    except InfraError as e:  # the episode is lost, its siblings are not
        error = f"{type(e).__name__}: {e}"
        progress.stop = StopReason.INFRA
    except (EnvError, TemplateError) as e:
        if isinstance(e, TemplateError) and not progress.turns:
            raise
        progress.faults["step" if isinstance(e, EnvError) else "template"] = str(e)
        progress.stop = StopReason.FAULT
        solved = _verdict(env, progress, rewards)
    finally:
        where.now("the env to close")
        await _close(env, release, timeout_s)
    total = _total(progress, rewards)
    if progress.stop is StopReason.FAULT:  # never better than what it would have been left with
        total = min(total, 0.0)
    reward = None if error else total
    found = _episode(progress, task, where, env)
    said = None if error is None else clean_text(error)
    return replace(found, reward=reward, rewards=_clean_names(rewards), error=said, solved=solved), progress


async def step_env(env: Env, turn: Turn, progress: Progress, max_turns: int) -> Sequence[Message]:
    """Give the env the turn's message and note what came of it; sets `progress.stop` where that is the end.

    Raises:
        EnvError: it raised.
    """
    began = time.monotonic()
    try:
        observed, reward, terminated, truncated, info = await env.step(turn.message)
    except (SandboxBroken, EnvError):
        progress.turns.append(replace(turn, env_seconds=time.monotonic() - began))  # it trains
        raise
    except AgentRLError:
        raise
    except Exception as e:
        if _is_ours(env, "step"):
            raise
        progress.turns.append(replace(turn, env_seconds=time.monotonic() - began))
        where = f"{type(env).__name__}.step"
        raise EnvError(f"{where}: {type(e).__name__}: {e}\n{traceback_of(e)}") from e
    observed = [clean_message(message) for message in observed]
    progress.faults.update(info.faults)
    if not _is_number(reward):
        progress.faults["step"] = f"{type(env).__name__}.step returned the reward {reward!r}: not a finite number"
        reward = 0.0
    progress.turns.append(
        replace(
            turn,
            observation=tuple(observed),
            reward=float(reward),
            env_seconds=time.monotonic() - began,
            calls=tuple(replace(call, result=clean_text(call.result)) for call in info.calls),
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
        metrics=_clean_names(progress.metrics),
        seconds=time.monotonic() - where.started,
        tools=tuple(tools) if progress.began else (),
        faults={clean_text(name)[:_NAME]: clean_text(text) for name, text in progress.faults.items()},
    )


def _clean_names(numbers: Mapping[str, float]) -> dict[str, float]:
    return {clean_text(name)[:_NAME]: number for name, number in numbers.items()}


async def _score(env: Env, episode: Episode, timeout_s: float, faults: dict[str, str]) -> Mapping[str, float]:
    """The env's rewards; what raises, takes too long or is no finite number counts 0 and is noted in `faults`.

    Raises:
        InfraError: a judge cannot be reached.
    """
    where = type(env).__name__
    rewards: Mapping[str, float] = {}
    with asking() as asked:
        try:
            async with asyncio.timeout(timeout_s) as clock:
                rewards = await env.score(episode)
        except RewardError as e:
            faults.update(e.faults)
            rewards = e.rewards if isinstance(e.rewards, Mapping) else {}
        except AgentRLError:
            raise
        except Exception as e:
            if not clock.expired() and _is_ours(env, "score"):
                raise
            if clock.expired() and asked.waiting:
                raise JudgeError(f"{where}.score: no answer of {asked.waiting[0]} in {timeout_s:g} s") from None
            late = f"took longer than {timeout_s:g} s"
            said = late if clock.expired() else f"raised {type(e).__name__}: {e}"
            faults["score"] = f"{where}.score {said}\n{traceback_of(e)}"
    for name, value in rewards.items():
        if not _is_number(value):
            faults[name] = f"reward {name!r} of {where} is {value!r}: a reward must be a finite number"
    return {name: value if _is_number(value) else 0.0 for name, value in rewards.items()}


def _made(make_env: Callable[[], Env]) -> Env:
    try:
        return make_env()
    except AgentRLError:
        raise
    except Exception as e:  # the author's: what made one before may not now
        raise InfraError(f"making the env: {type(e).__name__}: {e}\n{traceback_of(e)}") from e


async def reset_env(env: Env, task: Task) -> Sequence[Message]:
    """The opening messages.

    Raises:
        InfraError: it cannot be had, or the env raised something else: the policy has not acted yet.
        ConfigError: the task does not fit the env.
    """
    try:
        observation, _ = await env.reset(task)
    except AgentRLError:
        raise
    except Exception as e:
        if _is_ours(env, "reset"):
            raise
        text = f"{type(env).__name__}.reset: {type(e).__name__}: {e}\n{traceback_of(e)}"
        raise InfraError(text) from e
    return [clean_message(message) for message in observation]


def _is_ours(env: Env, method: str) -> bool:
    """Whether this method of the env is agentrl's own code, so that what escapes it is a bug of agentrl."""
    return str(getattr(type(env), method).__module__).startswith("agentrl.env.")


def _broken(progress: Progress, error: SandboxBroken) -> Mapping[str, float]:
    """End an episode whose sandbox the policy broke; the rewards that make its total `error.reward`."""
    progress.stop = StopReason.SANDBOX_BROKEN
    progress.count({"sandbox_broken": 1.0})
    correction = error.reward - sum(turn.reward for turn in progress.turns)
    return {"sandbox_broken": correction} if correction else {}


def _verdict(env: Env | None, progress: Progress, rewards: Mapping[str, float]) -> bool | None:
    """Whether the episode is solved; None where nothing says. One with a fault or a broken sandbox is not."""
    if env is None:
        return None
    if not progress.faults and progress.stop is not StopReason.SANDBOX_BROKEN:
        return env.solved_verdict(rewards, _total(progress, rewards))
    rule = env.solved_rule()
    return False if rule is not None and rule.strict else None


def _total(progress: Progress, rewards: Mapping[str, float]) -> float:
    return float(sum(t.reward for t in progress.turns) + sum(rewards.values()))


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


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
