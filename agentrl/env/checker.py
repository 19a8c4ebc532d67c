"""The contract checker for envs, and the replay of a recorded episode."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from agentrl.env.env import Env
from agentrl.env.play import FORMATS, Policy, RandomPolicy, play, random_arguments
from agentrl.env.returned import answer_of, opening_of
from agentrl.env.stand_in import with_stand_in
from agentrl.env.toolenv.dispatch import awaitable
from agentrl.env.toolenv.env import ToolEnv
from agentrl.env.toolenv.json_schema import InvalidArguments
from agentrl.env.toolenv.observe import plain_text
from agentrl.types import Episode, Message, Task, ToolCall

Make = Callable[[], Env]
WIDTH = 24
"""Number of concurrent episodes in `check_env`."""
_WRONG_PLACE = re.compile(
    r"same thread|different thread|wrong thread|different (event )?loop|no current event loop"
)


class EnvCheckError(AssertionError):
    """Violations of the env contract; one line per finding."""


@dataclass(frozen=True, slots=True)
class ReplayDifference:
    """Where a replayed episode differs from the recorded one. `turn` is -1 for the opening and `len(turns)` for
    the rewards."""

    turn: int
    what: str
    recorded: str
    replayed: str


async def check_env(
    make: Make,
    tasks: Sequence[Task],
    *,
    oracle: Callable[[Task], Policy] | None = None,
    reward_range: tuple[float, float] = (0.0, 1.0),
    max_turns: int = 12,
) -> None:
    """Check the env contract on the first tasks (at most 8): determinism by seed, close on every path, schemas
    that accept what they describe, rewards in range, no state left over between episodes, and `WIDTH` concurrent
    episodes, which exposes objects tied to the thread or event loop that created them.

    Args:
        make: creates one instance; usually the class.
        tasks: tasks to play.
        oracle: a policy that solves a task; if given, it must earn the maximum of `reward_range`.
        reward_range: minimum and maximum total reward of an episode.
        max_turns: maximum turns per episode.

    Raises:
        EnvCheckError: lists all findings.
    """
    make = partial(_make, make)
    chosen = list(tasks[:8])
    if not chosen:
        raise EnvCheckError("no tasks to check with")
    findings: list[str] = []
    checks: list[tuple[str, Callable[[], Awaitable[list[str]]]]] = [
        ("tools", partial(_check_tools, make, chosen)),
        ("opening", partial(_check_opening, make, chosen)),
        ("mistakes", partial(_check_mistakes, make, chosen)),
        ("close", partial(_check_close, make, chosen)),
        ("play", partial(_check_play, make, chosen, reward_range, max_turns)),
    ]
    if oracle is not None:
        checks.append(("oracle", partial(_check_oracle, make, chosen, oracle, reward_range, max_turns)))
    for what, check in checks:
        try:
            findings += await check()
        except Exception as e:
            findings.append(f"{what}: {type(e).__name__}: {e}")
    if findings:
        raise EnvCheckError("\n".join(findings))


def _make(make: Make) -> Env:
    return with_stand_in(make())


async def replay(episode: Episode, env: Env) -> list[ReplayDifference]:
    """Replay the recorded assistant messages on a new env, then close it.

    Returns:
        The differences in observations, endings and rewards; empty if the replay matches.
    """
    differences: list[ReplayDifference] = []

    def compare(turn: int, what: str, recorded: Any, replayed: Any) -> None:
        if recorded != replayed:
            differences.append(ReplayDifference(turn, what, str(recorded), str(replayed)))

    try:
        opening = opening_of(await awaitable(env.reset, episode.task), f"{type(env).__name__}.reset")
        compare(-1, "opening", _texts(episode.messages[: len(opening)]), _texts(opening))
        for number, turn in enumerate(episode.turns):
            answer = answer_of(await awaitable(env.step, turn.message), f"{type(env).__name__}.step")
            observation, reward, terminated, truncated, _ = answer
            compare(number, "observation", _texts(turn.observation), _texts(observation))
            compare(number, "reward", round(turn.reward, 9), round(reward, 9))
            last = number == len(episode.turns) - 1
            if (terminated or truncated) and not last:
                compare(number, "end", "goes on", "ended")
                break
        if episode.reward is not None:
            compare(
                len(episode.turns),
                "rewards",
                _rounded(episode.rewards),
                _rounded(await awaitable(env.score, episode)),
            )
    finally:
        await awaitable(env.close)
    return differences


def _texts(messages: Sequence[Message]) -> list[tuple[str, str]]:
    return [(m.role, plain_text(m.content)) for m in messages]


def _rounded(rewards: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 9) for name, value in rewards.items()}


async def _check_tools(make: Make, tasks: Sequence[Task]) -> list[str]:
    env = make()
    try:
        await awaitable(env.reset, tasks[0])
        return await _tool_findings(env, make, tasks[0])
    finally:
        await awaitable(env.close)


async def _tool_findings(env: Env, make: Make, task: Task) -> list[str]:
    findings: list[str] = []
    schemas = list(env.tools)
    names = [schema["function"]["name"] for schema in schemas]
    if len(set(names)) != len(names):
        findings.append(f"tools: two of one name: {names}")
    if json.loads(json.dumps(schemas)) != schemas:
        findings.append("tools: a schema does not survive JSON")
    other = make()
    try:
        await other.reset(task)
        if list(other.tools) != schemas:
            findings.append("tools: two instances have different tools for the same task")
    finally:
        await other.close()
    if isinstance(env, ToolEnv):
        rng = random.Random(0)
        for name, bound in env._bound().items():
            for _ in range(20):
                arguments = random_arguments(bound.schema["function"]["parameters"], rng)
                try:
                    bound.validate(arguments)
                except InvalidArguments as e:
                    if not _wants_special_text(bound.schema):
                        findings.append(f"tool {name}: its schema allows {arguments}, but: {e}")
                        break
    return findings


def _wants_special_text(schema: Mapping[str, object]) -> bool:
    """Whether a schema wants text of a form that `random_arguments` has no examples of."""
    text = json.dumps(schema)
    formats = re.findall(r'"format": "([^"]*)"', text)
    return '"pattern"' in text or '"contentMediaType"' in text or not FORMATS.keys() >= set(formats)


async def _check_opening(make: Make, tasks: Sequence[Task]) -> list[str]:
    findings: list[str] = []
    for task in tasks[:2]:
        env = make()
        try:
            opening, info = await awaitable(env.reset, task)
            if not opening or not all(isinstance(m, Message) for m in opening):
                findings.append(f"reset on {task.id}: must return messages, got {opening!r:.100}")
            elif opening[-1].role not in ("user", "tool"):
                findings.append(f"reset on {task.id}: the last message is {opening[-1].role!r}, not the user's")
            if not isinstance(info, Mapping):
                findings.append(f"reset on {task.id}: info must be a dict")
        finally:
            await awaitable(env.close)
    return findings


async def _check_mistakes(make: Make, tasks: Sequence[Task]) -> list[str]:
    """Check that no policy output makes the env raise."""
    findings: list[str] = []
    env = make()
    try:
        await awaitable(env.reset, tasks[0])
        known = [schema["function"]["name"] for schema in env.tools]
    finally:
        await awaitable(env.close)
    bad = [
        Message("assistant", parse_errors=("not JSON",)),
        Message("assistant", tool_calls=(ToolCall("x", "no_such_tool", {}),)),
        *[Message("assistant", tool_calls=(ToolCall("x", name, {"no such": [1]}),)) for name in known],
        *[Message("assistant", tool_calls=(ToolCall("x", name, 3),)) for name in known],  # type: ignore[arg-type]
        Message("assistant", "\x00 \U0001f642 " * 50),
    ]
    for message in bad:
        env = make()
        try:
            await awaitable(env.reset, tasks[0])
            observation, _, terminated, truncated, _ = await awaitable(env.step, message)
            ended = terminated or truncated
            if (
                message.tool_calls
                and not ended
                and [m.tool_call_id for m in observation if m.tool_call_id] != ["x"]
            ):
                findings.append(f"step({message!r:.120}): the call was not answered under its id")
        except Exception as e:
            findings.append(f"step({message!r:.120}) raised {type(e).__name__}: {e}")
        finally:
            await awaitable(env.close)
    return findings


async def _check_close(make: Make, tasks: Sequence[Task]) -> list[str]:
    findings: list[str] = []

    async def attempt(what: str, env: Env) -> None:
        for times in ("once", "twice"):
            try:
                await awaitable(env.close)
            except Exception as e:
                findings.append(f"close {times} {what} raised {type(e).__name__}: {e}")

    await attempt("before reset", make())
    env = make()
    await awaitable(env.reset, tasks[0])
    await attempt("after reset", env)
    env = make()
    await awaitable(env.reset, tasks[0])
    policy = RandomPolicy(env.tools, 1)
    step = asyncio.ensure_future(env.step(policy([])))
    await asyncio.sleep(0)
    step.cancel()
    await asyncio.wait([step])
    await attempt("after a cancelled step", env)
    await awaitable(env.reset, tasks[0])
    await attempt("after a second reset", env)
    return findings


async def _check_play(
    make: Make, tasks: Sequence[Task], reward_range: tuple[float, float], max_turns: int
) -> list[str]:
    findings: list[str] = []

    async def run(env: Env, task: Task, seed: int) -> Episode:
        return await play(env, task, RandomPolicy(lambda: env.tools, seed), max_turns=max_turns)

    alone = [await run(make(), task, i) for i, task in enumerate(tasks)]
    for episode in alone:
        findings += _range(episode, reward_range)
    again = [await run(make(), task, i) for i, task in reversed(list(enumerate(tasks)))][::-1]
    findings += _same("a second time", alone, again)
    shared = make()
    made = _containers(shared)
    findings += _same("on one instance", alone, [await run(shared, task, i) for i, task in enumerate(tasks)])
    findings += _kept(shared, made)
    wide = [i % len(tasks) for i in range(WIDTH)]
    together = await asyncio.gather(*[run(make(), tasks[i], i) for i in wide])
    findings += _same("at the same time", [alone[i] for i in wide], together)
    findings += _misplaced([*alone, *together])
    for episode in alone[:2]:
        for difference in await replay(episode, make()):
            findings.append(f"{episode.task.id}: replayed: {difference}")
    return list(dict.fromkeys(findings))


async def _check_oracle(
    make: Make,
    tasks: Sequence[Task],
    oracle: Callable[[Task], Policy],
    reward_range: tuple[float, float],
    max_turns: int,
) -> list[str]:
    wide = [tasks[i % len(tasks)] for i in range(WIDTH)]
    episodes = await asyncio.gather(*[play(make(), task, oracle(task), max_turns=max_turns) for task in wide])
    findings = _misplaced(episodes)
    for episode in episodes:
        findings += _range(episode, reward_range)
        if episode.reward is None or episode.reward < reward_range[1] - 1e-6:
            findings.append(f"{episode.task.id}: the oracle earned {episode.reward}, not {reward_range[1]}")
    return list(dict.fromkeys(findings))


def _misplaced(episodes: Sequence[Episode]) -> list[str]:
    """Calls that failed because an object was used on a different thread or event loop than the one that created
    it."""
    findings = [
        f"tool {call.call.name}: {call.result:.200}; objects created by a plain method belong to the episode's "
        "thread, those of an async method to the event loop: make methods that share one all plain or all async, "
        "and none of them parallel"
        for episode in episodes
        for turn in episode.turns
        for call in turn.calls
        if call.outcome == "tool_exception" and _WRONG_PLACE.search(call.result)
    ]
    return findings[:1]


def _containers(env: Env) -> dict[str, tuple[object, str]]:
    """The lists, dicts and sets created by `__init__`, with their repr."""
    own = {name: value for name, value in vars(env).items() if name.strip("_") == name}
    return {name: (value, repr(value)) for name, value in own.items() if isinstance(value, list | dict | set)}


def _kept(env: Env, made: Mapping[str, tuple[object, str]]) -> Iterator[str]:
    """State that episodes changed in place, which the next episode on the same instance would see."""
    for name, (value, text) in made.items():
        if repr(value) != text:
            yield (
                f"{type(env).__name__}.{name}: made in __init__ and changed in place by an episode, so the next "
                f"one on this instance meets {value!r:.80}; make it in setup"
            )


def _range(episode: Episode, reward_range: tuple[float, float]) -> Iterator[str]:
    low, high = reward_range
    if episode.reward is None or not low - 1e-6 <= episode.reward <= high + 1e-6:
        yield f"{episode.task.id}: reward {episode.reward} is outside [{low}, {high}]"


def _same(how: str, first: Sequence[Episode], second: Sequence[Episode]) -> Iterator[str]:
    for a, b in zip(first, second, strict=True):
        if _texts(a.messages) != _texts(b.messages):
            for x, y in zip(_texts(a.messages), _texts(b.messages), strict=False):
                if x != y:
                    yield f"{a.task.id}: played {how} it differs: {x!r:.200} became {y!r:.200}"
                    break
            else:
                yield f"{a.task.id}: played {how} it has {len(b.messages)} messages, not {len(a.messages)}"
        elif a.reward != b.reward or a.stop_reason != b.stop_reason:
            yield (
                f"{a.task.id}: played {how}: reward {a.reward} ({a.stop_reason}) became "
                f"{b.reward} ({b.stop_reason})"
            )
