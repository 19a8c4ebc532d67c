"""Run the tool calls of a message within their limits, and format the answers for the policy."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.env.env import CountTokens
from agentrl.env.toolenv.dispatch import MISTAKES, BoundTool, CallOutcome, Mistake, run_call
from agentrl.env.toolenv.json_schema import shorten
from agentrl.env.toolenv.observe import cut_content, plain_text, text_only
from agentrl.env.toolenv.rewards import BadReward, check_number
from agentrl.env.toolenv.settings import ToolSettings
from agentrl.env.toolenv.threads import EpisodeThread
from agentrl.types import CallRecord, Message, ToolCall


@dataclass(slots=True)
class CallRunner:
    """Runs and counts the calls of one episode."""

    num_calls: int = 0

    def over_limit(self, settings: ToolSettings) -> bool:
        """Whether the episode has exceeded its limit of calls."""
        return settings.max_tool_calls is not None and self.num_calls > settings.max_tool_calls

    async def run(
        self,
        calls: Sequence[ToolCall],
        tools: Mapping[str, BoundTool],
        settings: ToolSettings,
        thread: EpisodeThread,
    ) -> list[CallOutcome]:
        """Run the calls in order, adjacent calls of parallel tools concurrently; every call gets an answer."""
        outcomes: list[CallOutcome] = []
        position = 0
        while position < len(calls):
            batch = _next_batch(calls, position, tools)
            position += len(batch)
            if any(o.stop for o in outcomes):
                outcomes += [CallOutcome(c, "Not run: the episode has ended.", "not_run") for c in batch]
            elif len(batch) == 1:
                outcomes.append(await self._one(batch[0], len(outcomes), tools, settings, thread))
            else:
                numbers = range(len(outcomes), len(outcomes) + len(batch))
                outcomes += await _together(
                    [self._one(c, n, tools, settings, thread) for c, n in zip(batch, numbers, strict=True)]
                )
        return outcomes

    async def _one(
        self,
        call: ToolCall,
        position: int,
        tools: Mapping[str, BoundTool],
        settings: ToolSettings,
        thread: EpisodeThread,
    ) -> CallOutcome:
        self.num_calls += 1
        if position >= settings.max_calls_per_turn:
            text = f"Error: not run: more than {settings.max_calls_per_turn} calls in one message"
            return CallOutcome(call, text, "too_many_calls")
        if self.over_limit(settings):
            text = f"Error: not run: more than {settings.max_tool_calls} calls in this episode"
            return CallOutcome(call, text, "too_many_calls")
        if await thread.held():
            text = f"Error: not run: {thread.lost} ran out of time and could not be ended"
            return CallOutcome(call, text, "tool_timeout")
        return await run_call(tools, call, settings.tool_timeout_s)


def _next_batch(calls: Sequence[ToolCall], start: int, tools: Mapping[str, BoundTool]) -> Sequence[ToolCall]:
    end = start
    while end < len(calls) and (bound := tools.get(calls[end].name)) is not None and bound.parallel:
        end += 1
    return calls[start : max(end, start + 1)]


async def _together(calls: Sequence[Awaitable[CallOutcome]]) -> list[CallOutcome]:
    """Run them concurrently; if one fails, stop the others and raise its error unchanged."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        raise


@dataclass(slots=True)
class Answers:
    """What the policy reads after its calls.

    Attributes:
        view: one tool message per call, then one per malformed call.
        records: the calls with their results.
        metrics: counts of mistakes, and metrics of the tools.
        penalty: sum of the penalties for mistakes.
        fatal: whether a mistake ends the episode.
    """

    view: list[Message] = field(default_factory=list)
    records: tuple[CallRecord, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    penalty: float = 0.0
    fatal: bool = False


def answer(
    outcomes: Sequence[CallOutcome],
    message: Message,
    settings: ToolSettings,
    count_tokens: CountTokens,
    *,
    images: bool,
) -> Answers:
    """Turn the outcomes of a message's calls into tool messages, each cut at `settings.observation_tokens`.

    Args:
        outcomes: the outcomes of all calls of `message`.
        message: the policy's message; its parse errors get answers, too.
        settings: limits, and the handling of mistakes.
        count_tokens: the policy's token counter.
        images: whether the policy sees images; otherwise a note replaces them.
    """
    found = Answers()
    mistakes: list[Mistake | str] = [o.outcome for o in outcomes if o.outcome not in ("ok", "not_run")]
    for outcome in outcomes:
        content = outcome.content
        if not images:
            content, left_out = text_only(content)
            add_counts(found.metrics, {"images_left_out": 1.0} if left_out else {})
        content, cut = cut_content(content, settings.observation_tokens, count_tokens)
        if cut:
            mistakes.append("output_truncated")
        call = outcome.call
        found.view.append(Message("tool", content, tool_call_id=call.id, name=call.name))
        found.records += (CallRecord(call, plain_text(content), outcome.outcome, outcome.seconds),)
        add_counts(found.metrics, outcome.metrics)
    for error in message.parse_errors:
        text, _ = cut_content(f"Error: {error}", settings.observation_tokens, count_tokens)
        found.view.append(Message("tool", text))
        mistakes.append("parse_error")
    for mistake in mistakes:
        add_counts(found.metrics, {mistake: 1.0})
        policy = settings.mistakes.get(mistake, "observe")
        found.penalty += settings.mistake_penalty if policy == "penalise" else 0.0
        found.fatal |= policy == "terminate"
    return found


OWN_METRICS = frozenset({*MISTAKES, "images_left_out", "stuck_calls"})
"""Metrics that an env's own must not be named like; neither may they begin with `reward/`."""


def is_recorded(name: str) -> bool:
    """Whether agentrl itself records metrics of this name about an episode: no env may add to them."""
    return name == "sandbox_broken" or name.startswith(("agent/", "compact/", "tokens/", "usage/"))


def checked_metrics(given: object, of: str, faults: dict[str, str]) -> dict[str, float]:
    """Metrics that a tool or `respond` returned. What is not a finite number, or has another's name, is a fault.

    Args:
        of: the tool, or `respond`.
        faults: by name, what is wrong; added to.
    """
    if not isinstance(given, Mapping):
        faults[of] = f"metrics of {of!r}: a mapping from names to numbers is wanted, got {shorten(given)}"
        return {}
    found: dict[str, float] = {}
    for name, value in given.items():
        if not isinstance(name, str) or name in OWN_METRICS or name.startswith("reward/") or is_recorded(name):
            faults[of] = f"metrics of {of!r}: {shorten(name)} cannot be the name of a metric; use other text"
            continue
        try:
            found[name] = check_number(value)
        except BadReward:
            faults[of] = f"metrics of {of!r}: {name} is {shorten(value)}; a finite number is wanted"
    return found


def add_counts(metrics: dict[str, float], more: Mapping[str, float]) -> None:
    """Add counts by name."""
    for name, value in more.items():
        metrics[name] = metrics.get(name, 0.0) + value
