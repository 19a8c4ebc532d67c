"""Policies without a model (scripted, random), and the loop that plays an env with them."""

from __future__ import annotations

import inspect
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.env.env import Env
from agentrl.env.returned import answer_of, opening_of
from agentrl.env.stand_in import with_stand_in
from agentrl.env.tasks import with_own_row
from agentrl.env.toolenv.dispatch import awaitable
from agentrl.env.toolenv.json_schema import INTEGER
from agentrl.env.toolenv.observe import plain_text
from agentrl.env.toolenv.rewards import finite, finite_step
from agentrl.errors import RewardError
from agentrl.types import HINT_FAULT, Episode, Message, StopReason, Task, ToolCall, ToolSchema, Turn

HINT_S = 60.0
"""Limit of an env's `teacher_hint`."""
FORMATS = {
    "date": ("2024-02-29", "1999-12-31"),
    "date-time": ("2024-02-29T12:30:00", "1999-12-31T23:59:59"),
    "duration": ("PT90S", "P1DT2H"),
    "email": ("ann@example.com", "bob@example.org"),
    "ipv4": ("127.0.0.1", "192.0.2.7"),
    "ipv6": ("::1", "2001:db8::7"),
    "time": ("12:30:00", "23:59:59"),
    "uri": ("https://example.com/a", "http://example.org/b?c=d"),
    "uuid": ("12345678-1234-4678-8234-567812345678", "00000000-0000-4000-8000-000000000001"),
}
"""Texts by the `format` of their JSON schema."""
_TRIES = 100
"""Random draws for values that must differ from each other."""
Policy = Callable[[Sequence[Message]], Message | Awaitable[Message]]
"""Takes the conversation so far and returns the next assistant message; may be async."""


def say(text: str) -> Message:
    """An assistant message without a call."""
    return Message("assistant", text)


def call(name: str, /, **arguments: object) -> Message:
    """An assistant message with one call; its id is set when it is played."""
    return calls((name, arguments))


def calls(*wanted: tuple[str, Mapping[str, object]]) -> Message:
    """An assistant message with several calls."""
    return Message(
        "assistant", tool_calls=tuple(ToolCall(f"call_{i}", n, dict(a)) for i, (n, a) in enumerate(wanted))
    )


class ScriptedPolicy:
    """Replays the given messages in order, then answers `otherwise`."""

    def __init__(self, script: Iterable[Message | str], otherwise: str = "done") -> None:
        self._script = [say(m) if isinstance(m, str) else m for m in script]
        self._otherwise, self._next = otherwise, 0

    def __call__(self, messages: Sequence[Message]) -> Message:
        self._next += 1
        return self._script[self._next - 1] if self._next <= len(self._script) else say(self._otherwise)


class RandomPolicy:
    """Calls random tools with arguments that fit their schemas, then answers with text from the conversation.

    `tools` may be a function that returns them, for envs whose tools depend on the task. String arguments are
    words from the conversation, so that they sometimes name existing things.
    """

    def __init__(
        self,
        tools: Sequence[ToolSchema] | Callable[[], Sequence[ToolSchema]],
        seed: int,
        answer_share: float = 0.25,
    ) -> None:
        self._offered = tools
        self._rng, self._answer_share = random.Random(seed), answer_share

    def __call__(self, messages: Sequence[Message]) -> Message:
        rng = self._rng
        words = re.findall(r"[\w./-]+", " ".join(plain_text(m.content) for m in messages[-6:])) or ["a"]
        tools = self._offered() if callable(self._offered) else self._offered
        if not tools or rng.random() < self._answer_share:
            return say(rng.choice(words))
        function = rng.choice(tools)["function"]
        return call(function["name"], **random_arguments(function["parameters"], rng, words))


def random_arguments(schema: Mapping[str, Any], rng: random.Random, words: Sequence[str] = ("a",)) -> Any:
    """A random value that fits `schema` (the subset of JSON schema that typed tools produce)."""
    return _value(schema, schema.get("$defs", {}), rng, words, 0)


def _value(
    schema: Any, definitions: Mapping[str, Any], rng: random.Random, words: Sequence[str], depth: int
) -> object:
    def inner(part: object) -> object:
        return _value(part, definitions, rng, words, depth + 1)

    schema = schema if isinstance(schema, Mapping) else {}  # `true` takes anything
    if "$ref" in schema:
        return inner(definitions[schema["$ref"].rsplit("/", 1)[-1]])
    for part in schema.get("allOf", ()):
        schema = _merged(schema, definitions[part["$ref"].rsplit("/", 1)[-1]] if "$ref" in part else part)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return rng.choice(list(schema["enum"]))
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return inner(rng.choice(list(options)))
    kind = schema.get("type", "string")
    kind = rng.choice(kind) if isinstance(kind, list) else kind
    if kind == "object":
        required = schema.get("required", ())
        properties = schema.get("properties", {})
        chosen = [n for n in properties if n in required or (depth < 3 and rng.random() < 0.5)]
        found = {name: inner(properties[name]) for name in chosen}
        more, names = schema.get("additionalProperties"), schema.get("propertyNames")
        for _ in range(_TRIES):
            if len(found) >= schema.get("minProperties", 0):
                break
            name = str(inner(names)) if names else f"{rng.choice(list(words))}{len(found)}"
            found[name] = inner(more if isinstance(more, Mapping) else {})
        return found
    if kind == "array":
        if "prefixItems" in schema:
            return [inner(part) for part in schema["prefixItems"]]
        low = schema.get("minItems", 0)
        high = max(low, min(schema.get("maxItems", 3), 3 if depth < 3 else 0))
        items = [inner(schema.get("items", {})) for _ in range(rng.randint(low, high))]
        if not schema.get("uniqueItems"):
            return items
        for number in range(_TRIES):
            items = list({repr(item): item for item in items}.values())
            if len(items) >= low:
                break
            others = [f"{number}{word}" for word in words]
            items.append(_value(schema.get("items", {}), definitions, rng, others, depth + 1))
        return items
    return _scalar(kind, schema, rng, words)


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """A schema of what fits both, unless they say different things of the same."""
    properties = {**first.get("properties", {}), **second.get("properties", {})}
    required = [*first.get("required", ()), *second.get("required", ())]
    return {**first, **second} | {"properties": properties, "required": required}


def _scalar(kind: str, schema: Mapping[str, Any], rng: random.Random, words: Sequence[str]) -> object:
    if kind == "null":
        return None
    if kind == "boolean":
        return rng.random() < 0.5
    if kind in ("integer", "number"):
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        high = schema.get("maximum", schema.get("exclusiveMaximum"))
        if low is None:
            low = 0 if high is None else min(high - 10, -10 if "maximum" in schema else 0)
        high = low + 10 if high is None else high
        if step := schema.get("multipleOf"):
            first = low // step + ("exclusiveMinimum" in schema or low % step > 0)
            return step * rng.randint(int(first), int(max(first, high // step - ("exclusiveMaximum" in schema))))
        if kind == "integer":
            return rng.randint(
                int(low) + ("exclusiveMinimum" in schema), int(high) - ("exclusiveMaximum" in schema)
            )
        return rng.uniform(low, high)
    if schema.get("pattern") == INTEGER:
        return str(rng.randint(0, 99))
    if examples := FORMATS.get(schema.get("format", "")):
        return rng.choice(examples)
    text = rng.choice(list(words))
    return (text * (schema.get("minLength", 0) // max(1, len(text)) + 1))[: schema.get("maxLength", 200)]


async def play(
    env: Env, task: Task, policy: Policy, *, max_turns: int = 50, close: bool = True, episode_id: str = ""
) -> Episode:
    """Play one episode without tokens: `segments` is empty, `tokens` of each turn 0; rewards are computed as
    usual.

    Raises:
        RewardError: a reward raised or is not a finite number (in a run it would count as 0).
        TypeError: `reset` or `step` returned something of another form.
        InfraError: raised by the env. The env is closed in any case (unless `close` is False).
    """
    start = time.perf_counter()
    turns: list[Turn] = []
    metrics: dict[str, float] = {}
    stop = StopReason.MAX_TURNS
    try:
        where = type(env).__name__
        messages = list(opening_of(await awaitable(with_stand_in(env).reset, task), f"{where}.reset"))
        for number in range(max_turns):
            said = policy(messages)
            message = _with_ids(await said if inspect.isawaitable(said) else said, number)
            began = time.perf_counter()
            answer = answer_of(await awaitable(env.step, message), f"{where}.step")
            observation, reward, terminated, truncated, info = answer
            seconds = time.perf_counter() - began
            faults = dict(info.faults)
            earned, numbers = finite_step(reward, info.metrics, where, faults)
            if faults:
                raise RewardError(faults)
            messages += [message, *observation]
            turns.append(
                Turn(message, tuple(observation), earned, "stop", 0, 0.0, seconds, info.calls, info.rewards)
            )
            for name, value in numbers.items():
                metrics[name] = metrics.get(name, 0.0) + value
            if terminated or truncated:
                stop = info.stop_reason or StopReason.TERMINATED
                break
        tools = tuple(env.tools)
        unscored = Episode(
            episode_id or task.id, task, tuple(messages), tuple(turns), (), stop, None, {}, metrics, tools=tools
        )
        faults = {}
        rewards = finite(await awaitable(env.score, with_own_row(unscored)), where, faults)
        if faults:
            raise RewardError(faults)
        total = sum(t.reward for t in turns) + sum(rewards.values())
        played = replace(
            unscored,
            reward=total,
            rewards=rewards,
            seconds=time.perf_counter() - start,
            solved=env.solved_verdict(rewards, total),
        )
        return replace(played, hint=await _hint(env, played)) if env.gives_hints else played
    finally:
        if close:
            await awaitable(env.close)


async def _hint(env: Env, episode: Episode) -> str | None:
    """What the env tells a teacher. Raises RewardError if it is no text."""
    found = await env.call_teacher_hint(episode, HINT_S)
    if found is not None and not isinstance(found, str):
        where = f"{type(env).__name__}.teacher_hint"
        raise RewardError({HINT_FAULT: f"{where} returned {found!r:.200}; return text, or None for no hint"})
    return found or None


def _with_ids(message: Message, turn: int) -> Message:
    renamed = tuple(
        ToolCall(f"call_{turn}_{i}", c.name, c.arguments) if c.id == f"call_{i}" else c
        for i, c in enumerate(message.tool_calls)
    )
    return Message(
        message.role,
        message.content,
        renamed,
        message.tool_call_id,
        message.name,
        message.reasoning,
        message.parse_errors,
    )
