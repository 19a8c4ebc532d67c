"""Building blocks of every episode: a clock, closing the env, rewards, and attribution of failures.

`rollout/episode.py` plays with an engine, `rollout/chat_endpoint.py` through a chat endpoint, and
`agents/player.py` runs the user's program. Each is one function built from these parts:

    with attribution(episode):
        async with closing(make_env, episode, timeout_s) as env:
            async with episode_clock(episode, timeout_s):
                observed = await reset_env(env, episode)
                ...                                               # turns, until `episode.stop` is set
            await score_env(env, episode, timeout_s)
    return episode.result()
"""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from agentrl.async_tasks import shielded, time_limit
from agentrl.clean import clean_message, clean_text
from agentrl.env.env import Env
from agentrl.env.returned import answer_of, opening_of
from agentrl.env.tasks import with_own_row
from agentrl.env.toolenv.asked import asking
from agentrl.env.toolenv.calls import is_recorded
from agentrl.env.toolenv.dispatch import no_exit, wrapping_exits
from agentrl.env.toolenv.json_schema import shorten
from agentrl.env.toolenv.observe import error_text
from agentrl.env.toolenv.rewards import finite, finite_entries, finite_step
from agentrl.env.toolenv.threads import CallTimeout, ToolRaised
from agentrl.errors import (
    AgentRLError,
    ConfigError,
    EngineError,
    EnvError,
    InfraError,
    JudgeError,
    RewardError,
    TemplateError,
    infra_error,
    traceback_of,
)
from agentrl.sandbox import SandboxBroken, met_inside
from agentrl.types import HINT_FAULT, SANDBOX_FAULT, SOLVED_FAULT, Episode, Message, StopReason, Task, Turn

if TYPE_CHECKING:
    from agentrl.chat.transcript import Transcript  # imports numpy, which most commands do not need

CLOSE_TIMEOUT_S = 60.0
"""Limit of closing an env that was only looked at."""
_NAME = 200
"""Maximum length of a reward or metric name, in characters."""
PASSED_ON = (InfraError, ConfigError, TemplateError)
"""Errors that mean the same in whatever method of an env they are raised; all others are the author's."""


@dataclass(slots=True)
class EpisodeStatus:
    """What an episode in flight waits for, and since when (`time.monotonic`)."""

    episode_id: str
    task_id: str
    doing: str = "starting"
    started: float = field(default_factory=time.monotonic)
    since: float = field(default_factory=time.monotonic)

    def now(self, doing: str) -> float:
        """Record what the episode is now waiting for; returns the time."""
        self.doing, self.since = doing, time.monotonic()
        return self.since

    def __str__(self) -> str:
        now = time.monotonic()
        return (
            f"episode {self.episode_id} (task {self.task_id}), started {now - self.started:.0f} s ago, has been "
            f"waiting for {self.doing} for {now - self.since:.0f} s"
        )


@dataclass(slots=True)
class OpenEpisode:
    """An episode in progress; `result` builds the `Episode`.

    Attributes:
        env: the env, once created.
        transcript: the tokens, once the env is set up; None for policies without tokens.
        messages: the conversation if there is no transcript.
        tools: tool schemas shown to the policy, if they are not the env's.
        stop: why the episode ended; None while in progress.
        outside: external services the episode is waiting for; a timeout there is an infrastructure failure, not a
            limit.
        clock: limits the turns; None before they begin.
        faults: errors the policy may have caused, by name; see `Episode`.
        crash: how the agent program failed; see `Episode`.
        error: the infrastructure failure that ended it.
    """

    task: Task
    status: EpisodeStatus
    env: Env | None = None
    transcript: Transcript | None = None
    messages: list[Message] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    turns: list[Turn] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    rewards: Mapping[str, float] = field(default_factory=dict)
    solved: bool | None = None
    hint: str | None = None
    stop: StopReason | None = None
    outside: list[str] = field(default_factory=list)
    clock: asyncio.Timeout | None = None
    faults: dict[str, str] = field(default_factory=dict)
    crash: str = ""
    error: str | None = None

    @property
    def began(self) -> bool:
        """Whether the env has been set up."""
        return self.transcript is not None or self.messages is not None

    @property
    def total(self) -> float:
        """All rewards so far."""
        return float(sum(turn.reward for turn in self.turns) + sum(self.rewards.values()))

    def count(self, metrics: Mapping[str, float]) -> None:
        """Add counts of a turn."""
        for name, count in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + count

    def cut(self, turn: Turn, reason: StopReason) -> None:
        """End with a completion that reached a limit, which the env never sees."""
        self.turns.append(turn)
        self.stop = reason

    def judge_solved(self) -> None:
        """Decide whether the episode is solved; one with a fault or a broken sandbox is not.

        A part that the rule needs and the rewards lack is a fault: they may depend on what the policy did.
        """
        if self.env is None:
            return
        if not self.faults and self.stop is not StopReason.SANDBOX_BROKEN:
            try:
                self.solved = self.env.solved_verdict(self.rewards, self.total)
                return
            except JudgeError as e:
                self.faults[SOLVED_FAULT] = str(e)
        rule = self.env.solved_rule()
        self.solved = False if rule is not None and rule.strict else None

    def unscored(self) -> Episode:
        """The episode as rewards see it."""
        transcript = self.transcript
        messages = transcript.messages if transcript else self.messages or ()
        tools = self.tools if self.tools is not None else self.env.tools if self.env is not None else ()
        return Episode(
            id=self.status.episode_id,
            task=self.task,
            messages=tuple(messages),
            turns=tuple(self.turns),
            segments=tuple(transcript.segments) if transcript else (),
            stop_reason=self.stop or StopReason.INFRA,
            reward=None,
            metrics=_clean_names(self.metrics),
            seconds=(seconds := time.monotonic() - self.status.started),
            start_s=time.time() - seconds,
            tools=tuple(tools) if self.began else (),
            faults={clean_text(name)[:_NAME]: clean_text(text) for name, text in self.faults.items()},
            crash=clean_text(self.crash),
        )

    def result(self) -> Episode:
        """The finished episode. It has a reward exactly when it has no error."""
        total = (
            min(self.total, 0.0) if self.stop is StopReason.FAULT else self.total
        )  # a fault never earns a reward
        return replace(
            self.unscored(),
            reward=None if self.error else total,
            rewards=_clean_names(self.rewards),
            error=None if self.error is None else clean_text(self.error),
            solved=self.solved,
            hint=self.hint,
        )


def _clean_names(numbers: Mapping[str, float]) -> dict[str, float]:
    return {clean_text(name)[:_NAME]: number for name, number in numbers.items()}


@contextmanager
def attribution(episode: OpenEpisode) -> Iterator[None]:
    """Attribute the cause if the episode ends early.

    An infrastructure failure is recorded as the episode's error. A sandbox broken by the policy, an env that
    raised after the policy had acted, and a template that rejects the policy's text end the episode, which is then
    scored.

    Raises:
        ConfigError: the user's input cannot be used; every other episode would fail in the same way.
        TemplateError: the chat template refuses the opening.
        Exception: a bug of agentrl, unchanged: it must not pass for an infrastructure failure.
    """
    try:
        yield
    except SandboxBroken as e:
        if not episode.turns:  # only the env has run anything in it
            _lose(episode, e)
            return
        episode.stop = StopReason.SANDBOX_BROKEN
        episode.count({"sandbox_broken": 1.0})
        correction = e.reward - sum(turn.reward for turn in episode.turns)
        episode.rewards = {"sandbox_broken": correction} if correction else {}
        episode.judge_solved()
    except InfraError as e:  # this episode is lost, its siblings are not
        _lose(episode, e)
    except (EnvError, TemplateError) as e:
        if not episode.turns:  # the policy has not acted
            if isinstance(e, TemplateError):
                raise
            _lose(episode, e)
            return
        episode.faults["step" if isinstance(e, EnvError) else "template"] = str(e)
        episode.stop = StopReason.FAULT
        episode.judge_solved()


def _lose(episode: OpenEpisode, error: InfraError | EnvError) -> None:
    episode.error = f"{type(error).__name__}: {error}"
    episode.stop = StopReason.INFRA


@asynccontextmanager
async def episode_clock(
    episode: OpenEpisode, timeout_s: float, *, outage_s: Callable[[], float] = lambda: 0.0
) -> AsyncIterator[None]:
    """Limit the block to `timeout_s`; an episode that runs out of time ends with `StopReason.TIMEOUT`.

    Args:
        episode: what the block plays.
        timeout_s: limit of the block.
        outage_s: seconds in which the policy could not answer at all, over the whole run.

    Raises:
        InfraError: time ran out before the env was set up, or while something other than the policy was slow.
    """
    before_s = outage_s()
    try:
        async with time_limit(timeout_s) as clock:
            episode.clock = clock
            yield
    except TimeoutError:
        if not clock.expired():  # somebody else's
            raise
        if outage_s() > before_s:
            raise InfraError(during_outage(timeout_s)) from None
        if episode.outside:
            raise InfraError(f"{episode.outside[0]} took longer than {timeout_s:g} s") from None
        episode.stop = StopReason.TIMEOUT
    if not episode.began:
        raise InfraError(f"{type(episode.env).__name__}.reset took longer than {timeout_s:g} s")


def during_outage(timeout_s: float) -> str:
    """Why an episode is lost that ran out of time while no server could answer."""
    return f"an episode during which no server could answer took longer than {timeout_s:g} s"


@asynccontextmanager
async def closing(
    make_env: Callable[[], Env],
    episode: OpenEpisode,
    timeout_s: float,
    *,
    release: Callable[[], Awaitable[None]] | None = None,
) -> AsyncIterator[Env]:
    """Create the env and close it in any case, even if the episode is canceled repeatedly.

    Args:
        make_env: makes it.
        episode: what is played.
        timeout_s: limit of closing; a failure to close is a warning, because what was played stays valid.
        release: frees what the policy holds for this episode; runs before the env is closed.

    Raises:
        InfraError: the env cannot be made.
    """
    try:
        env = episode.env = _made(make_env)
        yield env
    finally:
        episode.status.now("the env to close")
        await shielded(_teardown(episode.env, release, timeout_s))


async def _teardown(env: Env | None, release: Callable[[], Awaitable[None]] | None, timeout_s: float) -> None:
    try:
        if release is not None:
            with suppress(EngineError):
                await release()
    finally:
        if env is not None:
            await close_env(env, timeout_s)


async def close_env(env: Env, timeout_s: float) -> None:
    """Close an env; a failure is a warning."""
    try:
        async with time_limit(timeout_s) as clock:
            await no_exit(env.close)
    except Exception as e:
        said = f"took longer than {timeout_s:g} s" if clock.expired() else error_text(raised(e))
        warnings.warn(f"{type(env).__name__}.close: {said}", stacklevel=2)


def _made(make_env: Callable[[], Env]) -> Env:
    try:
        with wrapping_exits():
            return make_env()
    except PASSED_ON:
        raise
    except Exception as e:  # the author's: it may fail although it was made before
        cause = raised(e)
        raise InfraError(f"making the env: {error_text(cause)}\n{traceback_of(cause)}") from e


async def reset_env(env: Env, episode: OpenEpisode) -> Sequence[Message]:
    """The opening messages.

    Raises:
        InfraError: the env failed; the policy has not acted yet, so it cannot be the cause.
        TimeoutError: it ran past the limit of the episode, whatever it made of its cancellation.
        ConfigError: the task does not fit the env.
    """
    episode.status.now("env.reset")
    try:
        observation = opening_of(await no_exit(env.reset, episode.task))
    except Exception as e:
        check_clock(episode.clock)
        cause = raised(e)
        if isinstance(cause, PASSED_ON):
            raise cause from (None if cause is e else e)
        if is_ours(env, "reset"):
            raise
        text = f"{type(env).__name__}.reset: {error_text(cause)}\n{traceback_of(cause)}"
        raise InfraError(text) from e
    check_clock(episode.clock)
    return [clean_message(message) for message in observation]


async def opening_messages(env: Env, task: Task) -> Sequence[Message]:
    """The opening messages of a task, outside of an episode.

    Raises:
        AgentRLError: raised by the env.
        ConfigError: its `reset` raised something else, or returned no messages.
    """
    try:
        return opening_of(await no_exit(env.reset, task))
    except Exception as e:
        cause = raised(e)
        if isinstance(cause, AgentRLError):
            raise cause from (None if cause is e else e)
        if is_ours(env, "reset"):
            raise
        where = f"task {task.id}: {type(env).__name__}.reset"
        raise ConfigError(f"{where}: {error_text(cause)}\n{traceback_of(cause)}") from e


async def step_env(env: Env, turn: Turn, episode: OpenEpisode, max_turns: int) -> Sequence[Message]:
    """Give the env the turn's message and record its answer; sets `episode.stop` where the episode ends.

    Raises:
        EnvError: it raised.
        TimeoutError: it ran past the limit of the episode, whatever it made of its cancellation.
    """
    began = time.monotonic()
    episode.turns.append(turn)  # it trains, also if the env never answers within the limit
    try:
        observed, reward, terminated, truncated, info = answer_of(await no_exit(env.step, turn.message))
    except Exception as e:
        check_clock(episode.clock)
        cause = raised(e)
        if isinstance(cause, PASSED_ON):
            refused = isinstance(cause, TemplateError) and len(episode.turns) > 1  # the policy's text
            if not refused and not isinstance(cause, SandboxBroken):
                episode.turns.pop()  # the episode is played again, or the run ends
            raise cause from (None if cause is e else e)
        if isinstance(cause, EnvError) or is_ours(env, "step"):
            raise
        raise EnvError(f"{type(env).__name__}.step: {error_text(cause)}\n{traceback_of(cause)}") from e
    finally:
        if episode.turns and episode.turns[-1] is turn:
            turn = episode.turns[-1] = replace(turn, env_seconds=time.monotonic() - began)
    check_clock(episode.clock)
    observed = [clean_message(message) for message in observed]
    episode.faults.update(info.faults)
    earned, metrics = finite_step(reward, info.metrics, type(env).__name__, episode.faults)
    for name in filter(is_recorded, list(metrics)):
        del metrics[name]
        said = f"{type(env).__name__}.step returned the metric {shorten(name)}"
        episode.faults["step"] = f"{said}: agentrl records those; use another name"
    episode.turns[-1] = replace(
        turn,
        observation=tuple(observed),
        reward=earned,
        calls=tuple(replace(call, result=clean_text(call.result)) for call in info.calls),
        rewards=finite_entries(_clean_names(info.rewards)),
    )
    episode.count(metrics)
    if terminated or truncated:
        episode.stop = info.stop_reason or (StopReason.TERMINATED if terminated else StopReason.MAX_TURNS)
    elif len(episode.turns) >= max_turns:
        episode.stop = StopReason.MAX_TURNS
    return observed


async def score_env(env: Env, episode: OpenEpisode, timeout_s: float) -> None:
    """Add the env's rewards, and whether the episode is solved.

    A reward that raises, takes too long or is not a finite number counts 0 and becomes a fault.

    Raises:
        InfraError: a judge cannot be reached.
    """
    episode.status.now("its rewards")
    where = type(env).__name__
    rewards: Mapping[str, float] = {}
    with asking() as asked:
        try:
            async with time_limit(timeout_s) as clock:
                found = await no_exit(env.score, with_own_row(episode.unscored()))
                check_clock(clock)
            rewards = found
        except RewardError as e:
            episode.faults.update(e.faults)
            rewards = e.rewards if isinstance(e.rewards, Mapping) else {}
        except Exception as e:
            cause = raised(e)
            if isinstance(cause, PASSED_ON):
                raise cause from (None if cause is e else e)
            if not clock.expired() and is_ours(env, "score"):
                raise
            if clock.expired() and asked.waiting:
                raise JudgeError(f"{where}.score: no answer of {asked.waiting[0]} in {timeout_s:g} s") from None
            late = f"took longer than {timeout_s:g} s"
            said = late if clock.expired() else f"raised {error_text(cause)}"
            episode.faults["score"] = f"{where}.score {said}\n{traceback_of(cause)}"
    episode.rewards = finite(rewards, where, episode.faults)
    episode.judge_solved()
    if env.gives_hints:
        await _ask_hint(env, episode, timeout_s)


async def _ask_hint(env: Env, episode: OpenEpisode, timeout_s: float) -> None:
    """Add what the env tells a teacher. What raises, or is no text, becomes a fault, and the episode has no hint.

    Raises:
        InfraError: a service that the hint needs cannot be reached.
    """
    episode.status.now("its hint")
    where, name, fault, found = f"{type(env).__name__}.teacher_hint", HINT_FAULT, "", None
    with asking() as asked:
        try:
            found = await no_exit(env.call_teacher_hint, episode.result(), timeout_s)
        except SandboxBroken as e:  # by the policy: the reward is fixed already
            name, fault = SANDBOX_FAULT, f"{where}: {e}"
        except Exception as e:
            cause = raised(e)
            if isinstance(cause, PASSED_ON):
                raise cause from (None if cause is e else e)
            late = isinstance(e, TimeoutError | CallTimeout)
            if late and asked.waiting:
                raise JudgeError(f"{where}: no answer of {asked.waiting[0]} in {timeout_s:g} s") from None
            said = f"took longer than {timeout_s:g} s" if late else f"raised {error_text(cause)}"
            name, fault = SANDBOX_FAULT if met_inside(cause) else name, f"{where} {said}\n{traceback_of(cause)}"
    if isinstance(found, str):
        episode.hint = clean_text(found) if found.strip() else None
    elif found is not None:
        fault = f"{where} returned {found!r:.200}; return text, or None for no hint"
    if fault:
        episode.faults.setdefault(name, fault)


def raised(error: Exception) -> BaseException:
    """What an author's method raised: an InfraError from within a group of tasks, or what `no_exit` wrapped."""
    cause = error.cause if isinstance(error, ToolRaised) else error
    return infra_error(cause) or cause


def check_clock(clock: asyncio.Timeout | None) -> None:
    """Raise the TimeoutError of a clock whose cancellation the author's code has caught."""
    if clock is not None and clock.expired():
        raise TimeoutError


def is_ours(env: Env, method: str) -> bool:
    """Whether this method of the env is agentrl's own code, so that an exception from it is a bug in agentrl."""
    return str(getattr(type(env), method).__module__).startswith("agentrl.env.")
