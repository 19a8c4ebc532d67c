"""Envs with unusual types, rows and return values: clear errors, and no episode changes what another one sees."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, NotRequired, TypedDict

import numpy as np
import pydantic
import pytest

from agentrl import Stop, ToolEnv, ToolResult, reward, tool
from agentrl.env.env import Env
from agentrl.env.toolenv.json_schema import InvalidArguments, describe_callable
from agentrl.errors import ConfigError, EnvError, InfraError, RewardError
from agentrl.types import Message, Task, ToolCall
from tests.env.test_toolenv import episode_of


def calling(name: str, **arguments: object) -> Message:
    return Message("assistant", "", tool_calls=(ToolCall("c", name, arguments),))


async def played(env: Env, message: Message, row: Mapping[str, Any] | None = None) -> tuple[list[Message], Any]:
    await env.reset(Task("t", row or {}))
    view, _, _, _, info = await env.step(message)
    await env.close()
    return list(view), info


async def test_an_episode_changes_only_its_own_row():
    class Pops(ToolEnv):
        def setup(self, todo: list[int], more: dict[str, Any], **rest: Any) -> str:
            self.todo = todo
            todo.append(99)
            more["seen"] = True
            rest["deep"][0]["a"] = 2
            return f"{todo} {self.task.row['more']}"

    row = {"todo": [1], "more": {}, "deep": [{"a": 1}]}
    env, task = Pops(), Task("t", row)
    said = [(await env.reset(task))[0][0].content for _ in range(3)]
    assert len(set(said)) == 1
    assert row == {"todo": [1], "more": {}, "deep": [{"a": 1}]}


@dataclasses.dataclass
class Place:
    """Knows only two places; others raise what is no ValueError."""

    x: int

    def __post_init__(self) -> None:
        {0: 1, 1: 2}[self.x]


class Word(pydantic.BaseModel):
    text: str

    @pydantic.field_validator("text")
    @classmethod
    def known(cls, text: str) -> str:
        return {"a": "A"}[text]


async def test_a_value_that_its_type_does_not_take_is_a_mistake_of_the_policy():
    class Board(ToolEnv):
        @tool
        def move(self, to: Place) -> str:
            """Move."""
            return "ok"

        @tool
        def say(self, word: Word) -> str:
            """Say."""
            return word.text

    for name, given in (("move", {"to": {"x": 5}}), ("say", {"word": {"text": "b"}})):
        view, info = await played(Board(), calling(name, **given))
        assert "invalid arguments: args: refused by their type: KeyError" in str(view[0].content)
        assert info.metrics == {"invalid_args": 1.0}
    view, _ = await played(Board(), calling("say", word={"text": "a"}))
    assert view[0].content == "A"


@pytest.mark.parametrize(
    "metrics",
    [
        *({"m": None}, {"m": "x"}, {"m": math.nan}, {3: 1}, 5, {"invalid_args": 5}, {"reward/right": 1.0}),
        *({"tokens/failed": 1.0}, {"usage/prompt_tokens": 90}, {"agent/crashed": 1}, {"sandbox_broken": 1}),
    ],
)
async def test_metrics_that_are_none_are_faults(metrics):
    class Tells(ToolEnv):
        @tool
        def go(self) -> ToolResult:
            """Go."""
            return ToolResult("went", metrics=metrics)

        def respond(self, message: Message) -> object:
            return ToolResult("and?", metrics=metrics)

    view, info = await played(Tells(), calling("go"))
    assert view[0].content == "went"
    assert info.metrics == {}
    assert list(info.faults) == ["go"]
    view, info = await played(Tells(), Message("assistant", "hello"))
    assert (view[0].content, info.metrics, list(info.faults)) == ("and?", {}, ["respond"])


async def test_good_metrics_are_summed():
    class Tells(ToolEnv):
        @tool
        def go(self) -> ToolResult:
            """Go."""
            return ToolResult("went", metrics={"m": np.float32(0.5), "n": True})

    _, info = await played(Tells(), calling("go"))
    assert info.metrics == {"m": 0.5, "n": 1.0}


async def down() -> None:
    raise InfraError("the judge is down")


async def together() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(down())
        group.create_task(asyncio.sleep(0))


async def nested() -> None:
    raise ExceptionGroup("outer", [ValueError("x"), ExceptionGroup("inner", [InfraError("the judge is down")])])


@pytest.mark.parametrize("fail", [together, nested])
async def test_infrastructure_that_fails_in_a_group_of_tasks_is_infrastructure(fail):
    class Asks(ToolEnv):
        @tool
        async def ask(self) -> str:
            """Ask."""
            await fail()
            return ""

        async def respond(self, message: Message) -> object:
            await fail()
            return None

        @reward
        async def right(self) -> float:
            await fail()
            return 1.0

    for message in (calling("ask"), Message("assistant", "hello")):
        with pytest.raises(InfraError, match="the judge is down"):
            await played(Asks(), message)
    env = Asks()
    await env.reset(Task("t"))
    with pytest.raises(InfraError, match="the judge is down"):
        await env.score(episode_of(Message("assistant", "hello")))


async def test_another_error_in_a_group_of_tasks_is_the_tools_and_named():
    class Asks(ToolEnv):
        @tool
        async def ask(self) -> str:
            """Ask."""
            raise ExceptionGroup("unhandled errors in a TaskGroup", [ValueError("no such word")])

        @reward
        async def right(self) -> float:
            raise ExceptionGroup("unhandled errors in a TaskGroup", [ValueError("no such word")])

    view, info = await played(Asks(), calling("ask"))
    assert view[0].content == "Error: ValueError: no such word"
    assert info.metrics == {"tool_exception": 1.0}
    env = Asks()
    await env.reset(Task("t"))
    with pytest.raises(RewardError, match="ValueError: no such word"):
        await env.score(episode_of(Message("assistant", "hello")))


class Item(pydantic.BaseModel):
    n: int


class Loose(TypedDict):
    a: int
    b: NotRequired[str]


async def test_setup_gets_what_its_annotations_say():
    seen: dict[str, Any] = {}

    class Typed(ToolEnv):
        def setup(
            self,
            item: Item,
            more: list[Item],
            low: Annotated[str, pydantic.StringConstraints(to_lower=True)],
            share: float,
            loose: Loose,
            lazily: Iterable[int],
            **rest: Any,
        ) -> str:
            seen.update(locals())
            return ""

    row = {
        "item": {"n": 1}, "more": [{"n": 2}], "low": "ABC", "share": 3, "loose": {"a": 1, "extra": 2},
        "lazily": [1, 2], "other": {"x": [1]},
    }  # fmt: skip
    await Typed().reset(Task("t", row))
    assert (seen["item"], seen["more"]) == (Item(n=1), [Item(n=2)])
    assert (seen["low"], seen["share"], type(seen["share"])) == ("abc", 3.0, float)
    assert seen["loose"] == {"a": 1, "extra": 2}  # a column that the type does not name is kept
    assert list(seen["lazily"]) == list(seen["lazily"]) == [1, 2]
    assert seen["rest"] == {"other": {"x": [1]}}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"q": 5, "v": {"x": 1}}, "argument 'q': expected object, got 5"),
        ({"q": {"a": "x"}, "v": {"x": 1}}, "argument 'q'.a: "),
        ({"q": {"a": 1}, "v": {"x": 7}}, "argument 'v': refused by its type: KeyError: 7"),
    ],
)
async def test_a_row_that_does_not_fit_is_named(given, problem):
    class Typed(ToolEnv):
        def setup(self, q: Loose, v: Place) -> str:
            return ""

    with pytest.raises(ConfigError) as error:
        await Typed().reset(Task("t", given))
    assert problem in str(error.value)


def signature(function: Callable[..., object]) -> Any:
    return describe_callable(function, where="tool f", method=False)


def test_keys_that_are_not_required_are_known_although_hints_are_text():
    def f(o: Loose) -> None: ...

    found = signature(f)
    assert found.schema["properties"]["o"]["required"] == ["a"]
    assert found.validate({"o": {"a": 1}}) == {"o": {"a": 1}}


class Color(enum.Enum):
    RED = "r"
    BLUE = "b"


class Corner(enum.Enum):
    LOW = (1, 2)
    HIGH = (3, 4)


def test_an_enum_of_text_is_taken():
    def f(c: Color) -> None: ...

    assert signature(f).validate({"c": "r"}) == {"c": Color.RED}


def of_literal(x: Literal[Color.RED]) -> None: ...
def of_bytes(x: Literal[b"x"]) -> None: ...
def of_tuples(x: Corner) -> None: ...
def of_tuples_or_none(x: Corner | None = None) -> None: ...
def lazy(x: Iterable[int]) -> None: ...
def lazy_or_none(x: list[Iterable[int]] | None = None) -> None: ...
def final(x: Final[int]) -> None: ...  # type: ignore[valid-type]
def of_class(x: ClassVar[int]) -> None: ...  # type: ignore[valid-type]
def bad_bound(x: Annotated[int, pydantic.Field(ge="a")]) -> None: ...  # type: ignore[arg-type]
def not_a_number(x: float = math.nan) -> None: ...
def endless(x: float = math.inf) -> None: ...


def unfinished(x: int) -> None: ...


unfinished.__annotations__["x"] = "list["


@pytest.mark.parametrize(
    "function",
    [
        of_literal, of_bytes, of_tuples, of_tuples_or_none, lazy, lazy_or_none, final, of_class, unfinished,
        bad_bound, not_a_number, endless,
    ],
)  # fmt: skip
def test_a_declaration_that_no_call_could_meet_is_one_error(function):
    with pytest.raises(ConfigError, match=r"tool f: .*") as error:
        signature(function)
    assert "\n" not in str(error.value)


def test_json_in_an_error_keeps_its_spelling():
    def f(x: pydantic.Json[list[int]]) -> None: ...

    with pytest.raises(InvalidArguments, match=r"^args\.x: JSON input should be string"):
        signature(f).validate({"x": [1]})


def test_a_default_of_bytes_that_are_no_text_is_left_out_of_the_schema():
    def f(x: bytes = b"\xff") -> None: ...

    assert "default" not in signature(f).schema["properties"]["x"]


@pytest.mark.parametrize("x", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_does_not_have_are_refused(x):
    def f(x: float, more: list[float] | None = None) -> None: ...

    for given in ({"x": x}, {"x": 1.0, "more": [x]}):
        with pytest.raises(InvalidArguments, match="finite number"):
            signature(f).validate(given)


def test_a_union_of_models_names_nothing_that_is_not_there():
    class Cat(pydantic.BaseModel):
        kind: Literal["cat"]

    class Dog(pydantic.BaseModel):
        kind: Literal["dog"]

    def f(pet: object) -> None: ...

    f.__annotations__["pet"] = Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]
    found = signature(f)
    assert "$defs" not in str(found.schema)
    assert found.validate({"pet": {"kind": "dog"}}) == {"pet": Dog(kind="dog")}


async def test_arrays_and_scalars_of_numpy_are_results():
    class Counts(ToolEnv):
        @tool
        def count(self) -> object:
            """Count."""
            return {"n": np.int64(3), "share": np.float32(0.5), "all": np.arange(3)}

    view, info = await played(Counts(), calling("count"))
    assert view[0].content == '{"n": 3, "share": 0.5, "all": [0, 1, 2]}'
    assert info.metrics == {}


@pytest.mark.parametrize("system", [5, b"x", ["a"], None])
async def test_a_system_prompt_is_text(system):
    class Odd(ToolEnv):
        def system(self) -> Any:
            return system

    with pytest.raises(ConfigError, match=r"Odd\.system returned .*; return text"):
        await Odd().reset(Task("t"))


@pytest.mark.parametrize("opening", [True, Stop("x"), ToolResult("x"), [Message("user", 5)], (n for n in [1])])  # type: ignore[arg-type]
async def test_an_opening_is_what_a_user_says(opening):
    class Odd(ToolEnv):
        def setup(self) -> object:
            return opening

    with pytest.raises(ConfigError, match=r"Odd\.setup returned"):
        await Odd().reset(Task("t"))


async def test_a_user_answers_with_messages_or_text():
    class Answers(ToolEnv):
        answer: object = None

        def respond(self, message: Message) -> object:
            return self.answer

    class Two(Answers):
        answer = (Message("user", "first"), Message("user", "second"))

    class Odd(Answers):
        answer = True

    view, _ = await played(Two(), Message("assistant", "hello"))
    assert [m.content for m in view] == ["first", "second"]
    with pytest.raises(EnvError, match=r"Odd\.respond returned True; return text, or None"):
        await played(Odd(), Message("assistant", "hello"))
    Odd.answer = Message("user", 5)  # type: ignore[arg-type]
    with pytest.raises(EnvError, match=r"Odd\.respond returned a message whose content is 5, not text"):
        await played(Odd(), Message("assistant", "hello"))


async def test_messages_may_have_the_form_of_openai():
    class Prompted(ToolEnv):
        """Greet."""

        def setup(self, prompt: list[dict[str, str]]) -> object:
            return prompt

        def respond(self, message: Message) -> object:
            return {"role": "user", "content": [{"type": "text", "text": f"what is {message.content}?"}]}

    env = Prompted()
    opening, _ = await env.reset(Task("t", {"prompt": [{"role": "user", "content": "hi"}]}))
    assert opening == [Message("system", "Greet."), Message("user", "hi")]
    view, *_ = await env.step(Message("assistant", "hello"))
    assert view == [Message("user", "what is hello?")]
    await env.close()
    with pytest.raises(
        ConfigError, match=r"Prompted\.setup returned no user message: role: must be one of system"
    ):
        await env.reset(Task("t", {"prompt": [{"role": "usr", "content": "hi"}]}))


@pytest.mark.parametrize("deep", [600, 5_000])
async def test_a_value_that_cannot_be_copied_is_named(deep):
    class Takes(ToolEnv):
        def setup(self, x: Any) -> str:
            return "x"

    nested: list[Any] = []
    for _ in range(deep):
        nested = [nested]
    with pytest.raises(ConfigError, match=r"task 't': the value of 'x' cannot be copied \(nested too deeply\)"):
        await Takes().reset(Task("t", {"x": nested}))
    with pytest.raises(ConfigError, match=r"the value of 'x' cannot be copied \(TypeError: cannot pickle"):
        await Takes().reset(Task("t", {"x": threading.Lock()}))


async def test_a_reward_that_is_too_large_is_a_fault():
    class Pays(ToolEnv):
        @reward(weight=1e60)
        def large(self) -> float:
            return 1e60

        @reward
        def larger(self) -> float:
            return 1e200

    env = Pays()
    await env.reset(Task("t"))
    with pytest.raises(RewardError) as error:
        await env.score(episode_of(Message("assistant", "hello")))
    assert "times its weight 1e+60 is too large" in error.value.faults["large"]
    assert "no mean or deviation" in error.value.faults["larger"]
