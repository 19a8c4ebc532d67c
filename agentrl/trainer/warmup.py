"""The cold start: supervised steps on demonstrations, until there is something to reinforce.

Progress is measured by playing training tasks every few steps, not by the loss. The anneal starts at the first
probe in which enough tasks are solved at least occasionally; the next one is at its end.
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from agentrl.chat.demonstrate import imitate
from agentrl.chat.template import Renderer
from agentrl.chat.transcript import Transcript
from agentrl.config.run import RolloutConfig, WarmupConfig
from agentrl.errors import ConfigError, TemplateError
from agentrl.learner.learner import Learner
from agentrl.learner.pack import packed_size
from agentrl.reporting.report import Reporter
from agentrl.rollout.oracle import Demonstration
from agentrl.suggest import did_you_mean
from agentrl.trainer.signals import unless_stopped
from agentrl.types import Message, Sample


def demonstration_samples(
    renderer: Renderer,
    demonstrations: Sequence[Sequence[Message]],
    tools: Sequence[Mapping[str, Any]],
    *,
    env: str = "",
    longest: Callable[[int], object] = lambda tokens: None,
    room: int | None = None,
    context: int | None = None,
) -> list[Sample]:
    """The rows of the demonstrations, each rendered turn by turn as an episode would be.

    Args:
        longest: told the tokens of the longest completion of each demonstration.
        room: tokens of a micro-batch, which takes a whole demonstration.
        context: tokens that the model takes, if it has a limit.

    Raises:
        ConfigError: a demonstration has no assistant message or is too long, or no policy could sample it.
    """
    where = f"envs.{env}: warmup" if env else "warmup"
    samples = []
    for number, messages in enumerate(demonstrations):
        transcript = imitated(renderer, messages, tools, f"{where}: demonstration {number + 1}")
        rows = transcript.rows()
        if not rows:
            raise ConfigError(f"{where}: demonstration {number + 1} has no assistant message")
        longest(max(len(segment.ids) for segment in transcript.segments if segment.origin == "sampled"))
        made = []
        for row in rows:
            zeros = (0.0,) * len(row.ids)
            name = f"demonstration/{env}/{number}"
            made.append(Sample(row.ids, row.loss_mask, zeros, zeros, row.versions, episode_id=name))
        if said := _too_long(made, room, context):
            raise ConfigError(f"{where}: demonstration {number + 1} {said}, shorten it, or leave it out")
        samples += made
    return samples


def imitated(
    renderer: Renderer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], where: str
) -> Transcript:
    """The transcript of a demonstration.

    Args:
        tools: of the env, unless the demonstration has its own.

    Raises:
        ConfigError: no policy could sample it.
    """
    own = messages.tools if isinstance(messages, Demonstration) else None
    try:
        return imitate(renderer, messages, tools if own is None else own)
    except TemplateError as e:
        raise ConfigError(f"{where}: {e}") from e


def _too_long(rows: Sequence[Sample], room: int | None, context: int | None) -> str:
    """What is wrong with the length of a demonstration, and what may be raised; empty if nothing is."""
    if context is not None and (tokens := max(len(row.ids) for row in rows)) > context:
        return f"has {tokens} tokens, and the model takes {context}: take another model"
    if room is not None and (tokens := packed_size(rows)) > room:
        return (
            f"has {tokens} tokens, and a micro-batch takes {room} (learner.tokens_per_micro_batch x "
            "learner.sequence_ranks): raise one of the two"
        )
    return ""


def too_long_to_sample(longest: Sequence[int], rollout: RolloutConfig) -> str:
    """The note about demonstrations with completions that the policy may not sample; else empty.

    Args:
        longest: tokens of the longest completion of each demonstration.
    """
    above = [tokens for tokens in longest if tokens > rollout.max_tokens]
    if not above:
        return ""
    return (
        f"{len(above):,} of {len(longest):,} demonstrations have a completion above rollout.max_tokens = "
        f"{rollout.max_tokens:,} (the longest has {max(above):,} tokens): the policy learns what it may not "
        "sample; raise rollout.max_tokens, or shorten them"
    )


def not_offered(demonstrations: Sequence[Sequence[Message]], tools: Sequence[Mapping[str, Any]]) -> str:
    """The note about demonstrations that call tools which the policy does not have; else empty.

    Args:
        tools: of the env, unless a demonstration has its own.
    """
    unknown: dict[int, str] = {}
    for number, messages in enumerate(demonstrations, 1):
        own = messages.tools if isinstance(messages, Demonstration) else None
        names = {str(tool["function"]["name"]) for tool in (tools if own is None else own)}
        calls = (call.name for message in messages for call in message.tool_calls)
        if (name := next((name for name in calls if name not in names), None)) is not None:
            unknown[number] = name + (f" ({hint})" if (hint := did_you_mean(name, sorted(names))) else "")
    if not unknown:
        return ""
    number, name = next(iter(unknown.items()))
    return (
        f"{len(unknown):,} of {len(demonstrations):,} demonstrations call a tool that the policy is not offered; "
        f"demonstration {number} calls {name}: the policy learns such calls; correct the name, unless the error "
        "that answers it is meant to be seen"
    )


def lr_factor(step: int, end: int, anneal: int) -> float:
    """Rise over 20 steps, hold, fall linearly over the last `anneal` steps before `end`."""
    rise = (step + 1) / 20
    return min(1.0, rise, (end - step) / anneal) if anneal else min(1.0, rise)


async def cold_start(
    learner: Learner,
    samples: Sequence[Sample],
    config: WarmupConfig,
    probe: Callable[[], Awaitable[float]],
    *,
    seed: int,
    reporter: Reporter,
    stopping: Callable[[], bool],
) -> float:
    """Train on the demonstrations until `probe` reaches `until_pass`, then anneal; returns the last probe.

    Args:
        learner: its policy is trained in place.
        samples: rows of the demonstrations.
        config: see `WarmupConfig`.
        probe: plays training tasks with the learner's present weights and returns the share solved at least once.
        seed: of the order of the demonstrations.
        reporter: receives the result of every probe.
        stopping: checked after every step, and during probes.

    Raises:
        ConfigError: the success at the end is below `at_least`.
        StoppedEarly: the run was asked to stop during a probe.
    """
    rng = random.Random(f"{seed}/warmup")
    rows_of: dict[str, list[Sample]] = {}  # of each demonstration: several where the template rewrites history
    for sample in samples:
        rows_of.setdefault(sample.episode_id, []).append(sample)
    per_epoch = math.ceil(len(rows_of) / config.batch_episodes)
    end, anneal = per_epoch * config.max_epochs, per_epoch * config.anneal_epochs
    reporter.phase("warm-up", end)
    order: list[list[Sample]] = []
    passed, step, reached = 0.0, 0, False
    while step < end and not stopping():
        if len(order) < config.batch_episodes:
            fresh = list(rows_of.values())
            rng.shuffle(fresh)
            order += fresh
        batch, order = order[: config.batch_episodes], order[config.batch_episodes :]
        loss = await learner.imitate(
            [row for rows in batch for row in rows], config.lr * lr_factor(step, end, anneal)
        )
        metrics = {"loss": loss}
        step += 1
        if step == end or (step % config.probe_every == 0 and not reached):
            passed = await unless_stopped(stopping, probe())
            metrics["pass"] = passed
            if passed >= config.until_pass and not reached:
                end, reached = min(end, step + anneal), True
        reporter.step(metrics)
    if passed < config.at_least and not stopping():
        raise ConfigError(
            f"the cold start ended with {passed:.1%} of the training tasks solved at least once, below "
            f"warmup.at_least = {config.at_least:.1%}: there is too little to reinforce; give it more "
            "demonstrations (warmup.num), more epochs (warmup.max_epochs), or a larger model"
        )
    return passed
