"""One episode: alternate engine and env until it ends. Whatever happens, the env is closed."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real

from agentrl.chat.check import Mode, Watch
from agentrl.chat.template import Renderer
from agentrl.chat.transcript import Transcript
from agentrl.engine.base import Engine
from agentrl.env.env import Env
from agentrl.env.toolenv import ToolEnv
from agentrl.errors import EngineError, InfraError
from agentrl.rollout.branch import PolicyBranch
from agentrl.types import Episode, Sampling, StopReason, Task, Turn


@dataclass(frozen=True, slots=True)
class Limits:
    """What an episode may use. Precedence where several apply at once: see `StopReason`."""

    max_turns: int = 8
    max_tokens: int = 256
    token_budget: int = 4096
    timeout_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Player:
    """Everything that plays episodes: where tokens come from and how text becomes tokens."""

    engine: Engine
    renderer: Renderer
    make_env: Callable[[], Env]
    limits: Limits
    sampling: Sampling
    token_check: TokenCheck | None = None
    """Compares every ledger with a fresh rendering; None where nothing is compared."""

    async def play(self, task: Task, *, episode_id: str, seed: int, where: Whereabouts | None = None) -> Episode:
        """Play one episode in this process; see `run_episode`."""
        return await run_episode(self, task, episode_id=episode_id, seed=seed, where=where)


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


@dataclass(frozen=True, slots=True)
class TokenCheck:
    """How ledgers are compared with fresh renderings, and what that has found in this run."""

    mode: Mode
    watch: Watch

    def metrics(self, transcript: Transcript, episode_id: str) -> dict[str, float]:
        """Counts of differing windows by class; `tokens/failed` where the transcript must not train.

        Raises:
            TemplateError: too many of the run's transcripts failed.
        """
        report = transcript.check(self.mode)
        trains = self.watch.add(report, episode_id)
        found = {f"tokens/{drift.value}": float(count) for drift, count in report.counts.items()}
        return found | ({} if trains else {"tokens/failed": 1.0})


@dataclass(slots=True)
class _Progress:
    """What is known of an episode while it is played."""

    transcript: Transcript | None = None
    turns: list[Turn] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    stop: StopReason | None = None


async def run_episode(
    player: Player, task: Task, *, episode_id: str, seed: int, where: Whereabouts | None = None
) -> Episode:
    """Play one episode; trouble that the policy cannot cause becomes `Episode.error`, never an exception.

    Args:
        player: engine, renderer, env factory and limits.
        task: what the env is reset to.
        episode_id: unique in the run; also the engine's session.
        seed: with the turn number it determines every draw of the sampler.
        where: kept up to date with what the episode waits for.
    """
    started = time.monotonic()
    where = where or Whereabouts(episode_id, task.id)
    progress = _Progress()
    error: str | None = None
    env: Env | None = None
    rewards: Mapping[str, float] = {}
    try:
        env = player.make_env()
        try:
            async with asyncio.timeout(player.limits.timeout_s) as clock:
                await _play(player, env, task, progress, where, seed)
        except TimeoutError:
            if not clock.expired():  # the env's own
                raise
            progress.stop = StopReason.TIMEOUT
        if progress.transcript is None:
            raise InfraError(f"{type(env).__name__}.reset took longer than {player.limits.timeout_s:g} s")
        scored = _episode(progress, task, episode_id, started, env)
        where.now("its rewards")
        rewards = await _score(env, scored, player.limits.timeout_s)
    except Exception as e:  # the episode is lost, its siblings are not
        error = _describe(e, env)
        progress.stop = StopReason.INFRA
    finally:
        where.now("the env to close")
        await _close(env, player.engine, episode_id, player.limits.timeout_s)
    if player.token_check is not None and progress.transcript is not None and error is None:
        progress.metrics |= player.token_check.metrics(progress.transcript, episode_id)
    total = sum(t.reward for t in progress.turns) + sum(rewards.values())
    return replace(
        _episode(progress, task, episode_id, started, env),
        reward=None if error else float(total),
        rewards=dict(rewards),
        error=error,
    )


async def _play(player: Player, env: Env, task: Task, progress: _Progress, where: Whereabouts, seed: int) -> None:
    """Alternate policy and env until `progress.stop` is set."""
    session = where.episode_id
    where.now("env.reset")
    ledger = Transcript(player.renderer)
    if isinstance(env, ToolEnv):
        env.count_tokens = lambda text: len(player.renderer.encode_text(text))
        sampling = replace(player.sampling, max_tokens=player.limits.max_tokens, seed=draw_seed(seed, "branch"))
        env.model = PolicyBranch(player.engine, player.renderer, ledger, sampling, session)
    observation, _ = await env.reset(task)
    transcript = ledger.fork(keep=0, tools=env.tools)
    transcript.extend(observation)
    progress.transcript = transcript
    while progress.stop is None:
        room, tight = _room(player, len(transcript.ids))
        if room < 1:
            progress.stop = tight
            return
        sampling = replace(player.sampling, max_tokens=room, seed=draw_seed(seed, len(progress.turns)))
        where.now(f"the engine (turn {len(progress.turns)})")
        t0 = where.since
        completion = await player.engine.generate(transcript.ids, sampling, session=session)
        where.now(f"env.step (turn {len(progress.turns)})")
        t1 = where.since
        if completion.finish == "abort":
            raise EngineError(f"the engine aborted the completion of turn {len(progress.turns)}")
        message = transcript.complete(completion)
        turn = Turn(message, (), 0.0, completion.finish, len(completion.ids), t1 - t0, 0.0)
        if completion.finish == "length":
            progress.turns.append(turn)
            progress.stop = tight
            return
        observed, reward, terminated, truncated, info = await env.step(message)
        if not _is_number(reward):
            raise InfraError(
                f"{type(env).__name__}.step returned the reward {reward!r}: it must be a finite number"
            )
        progress.turns.append(
            replace(
                turn,
                observation=tuple(observed),
                reward=float(reward),
                env_seconds=time.monotonic() - t1,
                calls=info.calls,
            )
        )
        for name, count in info.metrics.items():
            progress.metrics[name] = progress.metrics.get(name, 0.0) + count
        if terminated or truncated:
            progress.stop = info.stop_reason or (StopReason.TERMINATED if terminated else StopReason.MAX_TURNS)
        elif len(progress.turns) >= player.limits.max_turns:
            progress.stop = StopReason.MAX_TURNS
        else:
            transcript.extend(observed)


def _room(player: Player, used: int) -> tuple[int, StopReason]:
    """Tokens that the next completion may have, and the stop reason if that many do not suffice."""
    limits = player.limits
    by_context, by_budget = player.engine.max_context - used, limits.token_budget - used
    room = min(limits.max_tokens, by_context, by_budget)
    return room, StopReason.CONTEXT_FULL if by_context <= max(room, 0) else StopReason.TOKEN_BUDGET


def _episode(progress: _Progress, task: Task, episode_id: str, started: float, env: Env | None) -> Episode:
    transcript = progress.transcript
    return Episode(
        id=episode_id,
        task=task,
        messages=tuple(transcript.messages) if transcript else (),
        turns=tuple(progress.turns),
        segments=tuple(transcript.segments) if transcript else (),
        stop_reason=progress.stop or StopReason.INFRA,
        reward=None,
        metrics=dict(progress.metrics),
        seconds=time.monotonic() - started,
        tools=tuple(env.tools) if env is not None and transcript else (),
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


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _describe(e: Exception, env: Env | None) -> str:
    where = type(env).__name__ if env is not None else "making the env"
    return f"{type(e).__name__}: {e}" if isinstance(e, InfraError) else f"{where}: {type(e).__name__}: {e}"


async def _close(env: Env | None, engine: Engine, session: str, timeout_s: float) -> None:
    """Teardown that finishes even when the episode is being cancelled, however often."""

    async def teardown() -> None:
        try:
            with contextlib.suppress(EngineError):
                await engine.release(session)
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
