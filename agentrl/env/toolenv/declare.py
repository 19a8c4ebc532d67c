"""Decorators for methods (`@tool`, `@reward`) and special return values of tools (`Stop`, `ToolResult`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, TypeVar, get_args, overload

from pydantic_core import PydanticSerializationError, SchemaSerializer
from pydantic_core.core_schema import any_schema, plain_serializer_function_ser_schema

from agentrl.types import Image, Part

Content = str | tuple[Part, ...]
Per = Literal["episode", "turn", "group"]
F = TypeVar("F", bound=Callable[..., Any])

TOOL_MARK = "__agentrl_tool__"
REWARD_MARK = "__agentrl_reward__"


def _refuse_inside(value: object) -> Any:
    raise PydanticSerializationError(
        f"a {type(value).__name__} has an effect only if it is returned itself, not inside another value"
    )


_ALONE = SchemaSerializer(any_schema(serialization=plain_serializer_function_ser_schema(_refuse_inside)))
"""What pydantic looks up to write an instance as JSON, wherever in a value it finds one."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Returned by a tool: answer the call with `content`, add `reward`, and end the episode."""

    content: Content | Mapping[str, Any] = ""
    reward: float = 0.0
    __pydantic_serializer__: ClassVar = _ALONE


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Returned by a tool to add a reward, metrics or an end to its content.

    `reward` is added to the turn's reward, `stop` ends the episode, `metrics` are summed into the episode's.
    """

    content: Any
    reward: float = 0.0
    stop: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    __pydantic_serializer__: ClassVar = _ALONE


@dataclass(frozen=True, slots=True)
class ToolMark:
    name: str | None
    parallel: bool
    timeout_s: float | None
    inline: bool


class RewardJudge(Protocol):
    """The judge of `@reward(judge=...)`: `agentrl.env.judge.Judge` or a compatible object."""

    async def score(self, question: str, /) -> float:
        """The score for a question. Raises InfraError if none is available."""


@dataclass(frozen=True, slots=True)
class RewardMark:
    name: str | None
    weight: float
    per: Per
    timeout_s: float | None
    judge: RewardJudge | None = None
    solved_at: float | None = None


@overload
def tool(function: F) -> F: ...
@overload
def tool(
    *, name: str | None = None, parallel: bool = False, timeout_s: float | None = None, inline: bool = False
) -> Callable[[F], F]: ...
def tool(
    function: F | None = None,
    *,
    name: str | None = None,
    parallel: bool = False,
    timeout_s: float | None = None,
    inline: bool = False,
) -> F | Callable[[F], F]:
    """Make a typed method (or function) a tool; its docstring is the description shown to the model.

    Args:
        function: the method, `async` or plain. Plain functions run on the episode's thread.
        name: the tool's name; by default the method's.
        parallel: calls may run concurrently with adjacent parallel calls of the same turn. Results keep the order
            of the calls. Plain functions then run on separate threads, never on the episode's.
        timeout_s: timeout of one call in seconds; None means `ToolSettings.tool_timeout_s`.
        inline: run a plain function directly on the event loop. Use it for functions that take microseconds and
            never block; there is no timeout.
    """
    _check_use("tool", function, name)
    mark = ToolMark(name, parallel, timeout_s, inline)

    def decorate(function: F) -> F:
        setattr(function, TOOL_MARK, mark)
        return function

    return decorate if function is None else decorate(function)


@overload
def reward(function: F) -> F: ...
@overload
def reward(
    *,
    weight: float = 1.0,
    per: Per = "episode",
    name: str | None = None,
    timeout_s: float | None = None,
    judge: RewardJudge | None = None,
    solved: bool | float = False,
) -> Callable[[F], F]: ...
def reward(
    function: F | None = None,
    *,
    weight: float = 1.0,
    per: Per = "episode",
    name: str | None = None,
    timeout_s: float | None = None,
    judge: RewardJudge | None = None,
    solved: bool | float = False,
) -> F | Callable[[F], F]:
    """Make a method a reward, logged under its name and multiplied by `weight`.

    Args:
        function: the method, `async` or plain; returns bool, int or float, finite, or a mapping of named parts:
            `{"solved": True, "cost": -3}` of the reward `grade` is logged as `grade/solved` and `grade/cost`, and
            each part can have a weight in the run. Its arguments:
            per="episode": nothing, or `episode` (the finished `Episode`);
            per="turn": nothing, or `turn` (a `TurnView`), after every turn;
            per="group": `episodes` (all scored episodes of the task), returning one value per episode; runs on an
            instance without `setup`.
        weight: factor; a run may override it by name.
        per: when it runs.
        name: the name in logs; by default the method's.
        timeout_s: timeout in seconds; None means `ToolSettings.reward_timeout_s`.
        judge: the method returns a question, and the judge's score is the reward (per episode or turn).
        solved: the episode counts as solved if this reward, before its weight, is True (or at least 1), or reaches
            the given number. If several rewards declare it, all must hold. A reward in parts is compared by their
            sum. Only for rewards per episode.

    A reward that raises, times out or returns NaN counts as 0 and is recorded as a fault of the episode, because
    the policy may have caused it. Raise `InfraError` for failures the policy cannot cause.
    """
    _check_use("reward", function, name)
    solved_at = None if solved is False else 1.0 if solved is True else solved
    mark = RewardMark(name, weight, per, timeout_s, judge, solved_at)

    def decorate(function: F) -> F:
        setattr(function, REWARD_MARK, mark)
        return function

    return decorate if function is None else decorate(function)


def _check_use(what: str, function: object, name: object) -> None:
    if function is not None and not callable(function) and not hasattr(function, "__get__"):
        if isinstance(function, str):
            option = "per" if what == "reward" and function in get_args(Per) else "name"
        else:
            option = "weight" if what == "reward" else "timeout_s"
        raise TypeError(f"@{what}({function!r}): options have names; write @{what}({option}={function!r})")
    if name is not None and not (isinstance(name, str) and name):
        raise TypeError(f"@{what}(name={name!r}): the name must be text")


def is_content(value: Any) -> bool:
    """Whether `value` is already content: text, or parts of text and images."""
    return isinstance(value, str | Image) or (
        isinstance(value, tuple | list)
        and bool(value)
        and all(isinstance(p, str | Image) for p in value)
        and any(isinstance(p, Image) for p in value)
    )
