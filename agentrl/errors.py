"""The tree of errors: each class names the boundary that broke.

What the policy causes (a bad call, a tool that raises, its own code timing out) is never an exception here:
it is an observation. Every class survives pickling, so that it can cross Ray.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_PACKAGE = str(Path(__file__).parent) + "/"
_TRACE_CHARS = 4000


class AgentRLError(Exception):
    """Root of everything agentrl raises on purpose. Text: what, which value, where, what to do."""


class ConfigError(AgentRLError):
    """The user's input (YAML, env path, data row, model directory) cannot be used."""


class TemplateError(AgentRLError):
    """A chat template cannot be rendered, or does not do what the transcript relies on."""


class CheckpointError(AgentRLError):
    """A checkpoint or run folder is missing, damaged, or belongs to another configuration."""


class EnvError(AgentRLError):
    """Code of an env raised after the policy had acted: the episode ends there and earns nothing."""


class RewardError(AgentRLError):
    """Rewards raised, ran out of time, or were no numbers: each of them counts 0, and the episode is scored.

    Attributes:
        faults: by name of the reward, what happened.
        rewards: all rewards by name, those that failed as 0; for rewards per group one mapping an episode.
    """

    def __init__(
        self, faults: Mapping[str, str], rewards: Mapping[str, float] | Sequence[Mapping[str, float]] = ()
    ) -> None:
        super().__init__("; ".join(faults.values()))
        self.faults, self.rewards = dict(faults), rewards

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.faults, self.rewards)


class InfraError(AgentRLError):
    """Trouble the policy cannot cause: the episode does not train, does not vote, and is refilled alone."""


class SandboxError(InfraError):
    """The sandbox itself is gone or could not do its work."""


class EngineError(InfraError):
    """The engine is lost or answered with something that is not a completion."""


class JudgeError(InfraError):
    """A judge or reward model cannot be reached, or failed."""


class JudgeAnswerError(AgentRLError):
    """A judge answered, but not usably, or refused the question: what it was asked about may be the cause."""


class WorkerLost(InfraError):
    """A Ray worker (learner rank, engine replica, env worker) died."""


def traceback_of(error: BaseException) -> str:
    """Where an author's code raised: the traceback without agentrl's own frames, and its end where it is long."""
    trace = traceback.TracebackException.from_exception(error)
    theirs = [frame for frame in trace.stack if not frame.filename.startswith(_PACKAGE)]
    trace.stack = traceback.StackSummary.from_list(theirs or list(trace.stack)[-3:])
    trace.__cause__ = trace.__context__ = None
    text = "".join(trace.format()).rstrip()
    return text if len(text) <= _TRACE_CHARS else "[...] " + text[-_TRACE_CHARS:]


def infra_error(error: BaseException) -> InfraError | None:
    """The InfraError that this error is, or that a group holds, as `asyncio.TaskGroup` raises them; else None."""
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(infra_error, error.exceptions)), None)
    return error if isinstance(error, InfraError) else None


def first_error(error: BaseException) -> BaseException:
    """The first single error inside a group; any other error unchanged. One cause is enough to read."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
