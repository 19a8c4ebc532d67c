"""Shorten a context that fills up: the episode continues in a new branch of its transcript.

The tokens of every branch are those that the policy saw: the old branch stays in the tree and trains as it was
sampled, a summary is a completion that continues the old branch, and the new branch is rendered from its messages,
in which earlier turns are prompt. Trained memories: MemAgent, arXiv:2507.02259.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from agentrl.chat.transcript import Transcript
from agentrl.config.compact import CompactConfig
from agentrl.config.run import RunConfig
from agentrl.engine.base import Engine
from agentrl.env.toolenv.dispatch import wrapping_exits
from agentrl.env.toolenv.observe import error_text, plain_text
from agentrl.env.toolenv.threads import ToolRaised
from agentrl.errors import ConfigError, EngineError, EnvError, infra_error, traceback_of
from agentrl.importing import load_object
from agentrl.types import Completion, Message, Sampling

IN_VAIN = "compact/in_vain"
"""The metric of an episode that could not be made shorter; the policy is not asked for a summary again."""
AROUND = 16
"""Tokens that a template may put around the prompt of a summary."""
DROPPED = "(removed to save space)"
INTRODUCTION = "\n\nYour summary of the work so far:\n"
Rewrite = Callable[[Sequence[Message]], object]
"""A function of the user: the messages of the old branch to those of the new one, async or not."""


@dataclass(frozen=True, slots=True)
class Compaction:
    """When and how the episodes of a run are made shorter.

    Attributes:
        config: the settings.
        context: maximum tokens of a branch.
        max_tokens: maximum tokens of a summary.
        rewrite: the user's function, if there is one.
    """

    config: CompactConfig
    context: int
    max_tokens: int
    rewrite: Rewrite | None = None

    @classmethod
    def of(cls, config: RunConfig, engine: Engine) -> Compaction | None:
        """The compaction of a run, None if it has none.

        Raises:
            ConfigError: it would have no effect, or its function cannot be loaded.
        """
        compact, rollout = config.rollout.compact, config.rollout
        if compact is None:
            return None
        if compact.context is not None and compact.context > engine.max_context:
            raise ConfigError(
                f"rollout.compact.context is {compact.context}, more than the {engine.max_context} tokens that "
                "the engine takes: lower it or leave it out"
            )
        context = compact.context or engine.max_context
        if int(compact.at * context) >= rollout.token_budget:
            raise ConfigError(
                f"rollout.compact has no effect: it begins at {int(compact.at * context)} tokens of context, and "
                f"rollout.token_budget ends the episode at {rollout.token_budget}, over all branches; raise "
                "token_budget (and learner.tokens_per_micro_batch), or lower rollout.compact.context"
            )
        max_tokens = compact.max_tokens or rollout.max_tokens
        if compact.use is None and compact.how == "summary" and max_tokens >= context:
            raise ConfigError(
                f"rollout.compact: a summary may have {max_tokens} tokens "
                f"(rollout.{'compact.' if compact.max_tokens else ''}max_tokens), which do not fit into a context "
                f"of {context}: set rollout.compact.max_tokens below that"
            )
        rewrite = None if compact.use is None else load_object(compact.use)
        if rewrite is not None and not callable(rewrite):
            raise ConfigError(f"rollout.compact.use {compact.use!r}: is not a function; write `def f(messages)`")
        return cls(compact, context, max_tokens, rewrite)

    @property
    def asks(self) -> bool:
        """Whether the policy is asked for a summary."""
        return self.rewrite is None and self.config.how == "summary"

    @property
    def trains(self) -> bool:
        """Whether the policy learns from its summaries, and reads there what was answered last."""
        return self.asks and self.config.train

    def due(self, transcript: Transcript) -> bool:
        """Whether the context of a branch is so full that it is made shorter before the next turn.

        With summaries, that is also the case if less room is left than a summary may need.
        """
        limit = self.config.at * self.context
        if self.asks:
            asked = len(transcript.renderer.encode_text(self.config.prompt)) + AROUND
            limit = min(limit, self.context - asked - self.max_tokens)
        return len(transcript.ids) > limit


@dataclass(frozen=True, slots=True)
class Compacted:
    """The branch in which the episode continues, and counts for its metrics."""

    transcript: Transcript
    metrics: dict[str, float]


async def compact(
    how: Compaction,
    transcript: Transcript,
    opening: Sequence[Message],
    engine: Engine,
    sampling: Sampling,
    session: str,
) -> Compacted:
    """Continue an episode in a shorter branch; in the same one if nothing would be gained.

    Args:
        transcript: the branch that fills up; it ends with a prompt for the next turn.
        opening: the messages with which the episode began.
        sampling: for the summary; `max_tokens` is what the episode may still spend.
        session: the engine's session of the episode.

    Raises:
        EngineError: the engine is lost.
        EnvError: the user's function raised, or did not return messages. Its InfraError is raised as it is.
    """
    before, spent = len(transcript.ids), transcript.spent
    metrics: dict[str, float] = {}
    messages: Sequence[Message] | None
    if how.rewrite is not None:
        messages = await _rewritten(how.rewrite, transcript.context)
    else:
        messages = await _shortened(how, transcript, opening, engine, sampling, session, metrics)
    measured = Transcript(transcript.renderer, transcript.tools)
    if messages is not None:
        measured.extend(messages)
    after = len(measured.ids)
    left = sampling.max_tokens - (transcript.spent - spent)
    if messages is None or after >= min(before, left):
        return Compacted(transcript, metrics | {IN_VAIN: 1.0})
    branch = transcript.fork(keep=0)
    branch.extend(messages, answers=0 if how.trains else _unread(transcript.context[len(opening) :], messages))
    counts = {"compact/times": 1.0, "compact/tokens_before": float(before), "compact/tokens_after": float(after)}
    return Compacted(branch, metrics | counts)


async def _shortened(
    how: Compaction,
    transcript: Transcript,
    opening: Sequence[Message],
    engine: Engine,
    sampling: Sampling,
    session: str,
    metrics: dict[str, float],
) -> Sequence[Message] | None:
    """The messages of the new branch, after at least one turn; None if there is no room for a summary."""
    turns = _turns(transcript.context[len(opening) :])
    config = how.config
    if config.how == "drop_tool_results":
        kept = len(turns) - config.keep_turns
        head = transcript.context[: len(opening)]
        return [*head, *(m for n, turn in enumerate(turns) for m in (_dropped(turn) if n < kept else turn))]
    recent = turns[len(turns) - min(config.keep_turns, len(turns) - 1) :]
    request = Message("user", config.prompt)
    branch = transcript.apart()
    branch.extend([request], answers=0)
    left = sampling.max_tokens - (branch.spent - transcript.spent if config.train else 0)
    room = min(how.max_tokens, left, how.context - len(branch.ids))
    if room < 1:
        return None
    if config.train:  # only what the policy reads joins the episode
        branch = transcript.fork()
        branch.extend([request], answers=0)
    completion = await engine.generate(branch.ids, replace(sampling, max_tokens=room), session=session)
    summary = _summary(branch, completion)
    metrics["compact/summary_tokens"] = float(len(completion.ids))
    metrics["compact/cut"] = float(completion.finish == "length")
    metrics["compact/empty"] = float(not summary)
    return [*_with_summary(opening, summary), *(message for turn in recent for message in turn)]


def _summary(branch: Transcript, completion: Completion) -> str:
    """The text of a summary as sampled; calls in it are not made, and its reasoning is not kept."""
    if completion.finish == "abort":
        raise EngineError("the engine aborted a summary")
    return plain_text(branch.complete(completion).content).strip()


def _turns(messages: Sequence[Message]) -> list[list[Message]]:
    """The turns after the opening: each begins with the policy's message."""
    turns: list[list[Message]] = []
    for message in messages:
        if message.role == "assistant" or not turns:
            turns.append([])
        turns[-1].append(message)
    return turns


def _unread(before: Sequence[Message], after: Sequence[Message]) -> int:
    """How many messages behind the policy's last turn are also the last ones of the new context."""
    count = 0
    for old, new in zip(reversed(before), reversed(after), strict=False):
        if old.role == "assistant" or old != new:
            break
        count += 1
    return count


def _dropped(turn: Sequence[Message]) -> list[Message]:
    """A turn without its tool results."""
    return [replace(message, content=DROPPED) if message.role == "tool" else message for message in turn]


def _with_summary(opening: Sequence[Message], summary: str) -> list[Message]:
    """The opening with the summary behind the task, in one message if that is a user's text: many templates want
    the roles to alternate."""
    last = opening[-1] if opening else Message("user")
    if last.role == "user" and isinstance(last.content, str):
        return [*opening[:-1], replace(last, content=f"{last.content}{INTRODUCTION}{summary}")]
    return [*opening, Message("user", (INTRODUCTION + summary).strip())]


async def _rewritten(rewrite: Rewrite, messages: Sequence[Message]) -> Sequence[Message]:
    """What the user's function makes of the messages."""
    where = f"rollout.compact.use: {getattr(rewrite, '__name__', rewrite)}"
    try:
        with wrapping_exits():
            found = rewrite(messages)
            found = await found if inspect.isawaitable(found) else found
    except Exception as e:
        cause = e.cause if isinstance(e, ToolRaised) else e
        said = f"{where} raised {error_text(cause)}\n{traceback_of(cause)}"
        raise infra_error(cause) or EnvError(said) from cause
    if not isinstance(found, list | tuple) or not found or not all(isinstance(m, Message) for m in found):
        raise EnvError(f"{where} returned {found!r:.100}; it must return a list of agentrl.types.Message")
    return found
