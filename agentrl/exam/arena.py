"""Play episodes for an exam: with a time limit, concurrently or one by one, with failures as data."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from agentrl.async_tasks import time_limit
from agentrl.env.env import Env, PolicyAccess
from agentrl.env.play import Policy, play
from agentrl.env.toolenv.observe import error_text, plain_text
from agentrl.types import Episode, Message, Task, ToolSchema

MakePolicy = Callable[[Env, Task], Policy]
EPISODE_S = 60.0
"""Time limit of an episode in seconds."""


@dataclass(frozen=True, slots=True)
class ExamEpisode:
    """An episode of an exam; `episode` is None if it failed with `error`."""

    task: Task
    policy: str
    episode: Episode | None
    error: str = ""

    @property
    def reward(self) -> float:
        """The total reward; 0 if the episode failed."""
        return 0.0 if self.episode is None or self.episode.reward is None else self.episode.reward

    @property
    def solved(self) -> bool:
        """Whether the env declares the episode solved."""
        return self.episode is not None and bool(self.episode.solved)

    @property
    def fingerprint(self) -> str:
        """Everything that must be the same in an equal episode, as JSON."""
        if self.episode is None:
            return json.dumps({"error": self.error.splitlines()[:1]})
        e = self.episode
        return json.dumps(
            {
                "messages": [_said(message) for message in e.messages],
                "tools": list(e.tools),
                "turns": [_number(turn.reward) for turn in e.turns],
                "rewards": {name: _number(value) for name, value in sorted(e.rewards.items())},
                "stop": str(e.stop_reason),
                "solved": e.solved,
            },
            sort_keys=True,
            default=repr,
        )


def _said(message: Message) -> list[object]:
    calls = [[call.name, call.arguments] for call in message.tool_calls]
    return [message.role, plain_text(message.content), calls]


def _number(value: float) -> str:
    return f"{value:.9g}"


def difference(first: str, second: str) -> str:
    """The first difference between two fingerprints, as text."""
    a, b = json.loads(first), json.loads(second)
    if "error" in a or "error" in b:
        return f"{_short(a.get('error', 'an episode'))} became {_short(b.get('error', 'an episode'))}"
    for number, (x, y) in enumerate(zip(a["messages"], b["messages"], strict=False)):
        if x != y:
            return f"message {number} ({x[0]}): {_short(x[1:])} became {_short(y[1:])}"
    for key, what in (
        ("turns", "turn rewards"),
        ("rewards", "rewards"),
        ("solved", "solved"),
        ("stop", "stop reason"),
    ):
        if a[key] != b[key]:
            return f"{what}: {_short(a[key])} became {_short(b[key])}"
    return "the tools differ" if a["tools"] != b["tools"] else "the number of messages differs"


def _short(value: object, limit: int = 120) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= limit else text[: limit - 3] + "..."


@dataclass(slots=True)
class Arena:
    """Plays the episodes of one env and keeps all of them.

    Attributes:
        max_turns: maximum turns of an episode.
        at_once: maximum concurrent episodes of `all_of`.
    """

    make_env: Callable[[], Env]
    max_turns: int = 16
    at_once: int = 8
    seen: list[ExamEpisode] = field(default_factory=list)

    async def one(
        self, name: str, task: Task, policy: MakePolicy, *, max_turns: int | None = None, keep: bool = True
    ) -> ExamEpisode:
        """Play one episode on a new env."""
        try:
            async with time_limit(EPISODE_S):
                env = self.make_env()
                env.bind(PolicyAccess())
                chosen = policy_begins(policy, env, task)
                episode = await play(
                    env, task, partial(policy_acts, chosen), max_turns=max_turns or self.max_turns
                )
            played = ExamEpisode(task, name, episode)
        except TimeoutError:
            played = ExamEpisode(task, name, None, f"no end within {EPISODE_S:g} s")
        except Exception as e:
            played = ExamEpisode(task, name, None, error_text(e))
        if keep:
            self.seen.append(played)
        return played

    async def all_of(
        self, plan: Sequence[tuple[str, Task, MakePolicy]], *, max_turns: int | None = None
    ) -> list[ExamEpisode]:
        """Play several episodes concurrently; the order of the results is that of the plan."""
        places = asyncio.Semaphore(self.at_once)

        async def one(name: str, task: Task, policy: MakePolicy) -> ExamEpisode:
            async with places:
                return await self.one(name, task, policy, max_turns=max_turns)

        return list(await asyncio.gather(*[one(*item) for item in plan]))


def policy_begins(make: MakePolicy, env: Env, task: Task) -> Policy:
    """Make the policy; a frame by which `agentrl.exam.speed` tells code of a policy from code of the env."""
    return make(env, task)


def policy_acts(policy: Policy, messages: Sequence[Message]) -> Message | Awaitable[Message]:
    """Ask the policy; see `policy_begins`."""
    return policy(messages)


class Together:
    """Holds episodes at their first turn until all have begun, so that they overlap."""

    def __init__(self, number: int) -> None:
        self._missing = number
        self._all = asyncio.Event()

    def __call__(self, policy: MakePolicy) -> MakePolicy:
        """The same policy, which waits before its first turn and yields before every other."""

        def make(env: Env, task: Task) -> Policy:
            inner, first = policy(env, task), True

            async def said(messages: Sequence[Message]) -> Message:
                nonlocal first
                if first:
                    first = False
                    await self._arrive()
                await asyncio.sleep(0)
                answer = inner(messages)
                return await answer if isinstance(answer, Awaitable) else answer

            return said

        return make

    async def _arrive(self) -> None:
        self._missing -= 1
        if self._missing <= 0:
            self._all.set()
        try:
            async with asyncio.timeout(1.0):
                await self._all.wait()
        except TimeoutError:
            self._all.set()


def finite(value: float | None) -> bool:
    """Whether a reward is a number that can train."""
    return value is not None and math.isfinite(value)


def parameters_of(tool: ToolSchema) -> Mapping[str, Mapping[str, object]]:
    """The properties of a tool's arguments."""
    found: Mapping[str, Mapping[str, object]] = (tool["function"].get("parameters") or {}).get("properties") or {}
    return found
