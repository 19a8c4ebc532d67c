import enum
import functools
import json
import random
import subprocess
import sys
import typing
from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, Literal, Optional, Self, TypeVar

import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from agentrl.env import ToolEnv, tool
from agentrl.env.toolenv.dispatch import MISTAKES
from agentrl.env.toolenv.json_schema import InvalidArguments, describe_callable
from agentrl.env.toolenv.spec import tool_from
from agentrl.errors import ConfigError
from agentrl.testing.policy import random_arguments
from agentrl.types import Message, Task, ToolCall


@dataclass
class Item:
    sku: str
    qty: Annotated[int, Field(ge=1, description="how many")]


class Address(BaseModel):
    """Where it goes."""

    street: str
    zip: str = Field("00000", pattern=r"\d{5}")


class Options(TypedDict, total=False):
    gift: bool
    title: str


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Tree(BaseModel):
    value: int
    children: list["Tree"] = []


def order(
    items: list[Item],
    address: Address,
    options: Options,
    colour: Colour,
    speed: Literal["slow", "fast"] | None = None,
    note: int | str = "",
    limits: dict[str, float] = {},  # noqa: B006
    pair: tuple[int, int] = (1, 2),
    budget: Annotated[Optional[float], Field(gt=0)] = None,  # noqa: UP045
) -> str:
    """Place an order.

    Several lines are kept.

    Args:
        items: what to buy,
            all of it
        colour (Colour): of the box

    Returns:
        A number.
    """
    return str(items)


def test_every_kind_of_hint_reaches_the_model_with_its_structure():
    signature = describe_callable(order, where="order", method=False)
    assert signature.description == "Place an order.\n\nSeveral lines are kept."
    assert signature.schema == {
        "type": "object",
        "properties": {
            "items": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "sku": {"type": "string"},
                        "qty": {"type": "integer", "minimum": 1, "description": "how many"},
                    },
                    "required": ["sku", "qty"],
                    "additionalProperties": False,
                },
                "description": "what to buy, all of it",
            },
            "address": {
                "type": "object",
                "description": "Where it goes.",
                "properties": {
                    "street": {"type": "string"},
                    "zip": {"type": "string", "default": "00000", "pattern": r"\d{5}"},
                },
                "required": ["street"],
            },
            "options": {
                "type": "object",
                "properties": {"gift": {"type": "boolean"}, "title": {"type": "string"}},
                "additionalProperties": False,
            },
            "colour": {"type": "string", "enum": ["red", "blue"], "description": "of the box"},
            "speed": {"anyOf": [{"type": "string", "enum": ["slow", "fast"]}, {"type": "null"}], "default": None},
            "note": {"anyOf": [{"type": "integer"}, {"type": "string"}], "default": ""},
            "limits": {"type": "object", "additionalProperties": {"type": "number"}, "default": {}},
            "pair": {
                "type": "array",
                "prefixItems": [{"type": "integer"}, {"type": "integer"}],
                "minItems": 2,
                "maxItems": 2,
                "default": [1, 2],
            },
            "budget": {
                "anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}],
                "default": None,
            },
        },
        "required": ["items", "address", "options", "colour"],
    }
    json.dumps(signature.schema)


GOOD: dict[str, Any] = {
    "items": [{"sku": "a", "qty": 2}],
    "address": {"street": "x"},
    "options": {"gift": True},
    "colour": "red",
}


def test_good_arguments_arrive_as_the_annotated_types():
    signature = describe_callable(order, where="order", method=False)
    values = signature.validate(GOOD | {"pair": [3, 4], "budget": 1})
    assert values == {
        "items": [Item("a", 2)],
        "address": Address(street="x"),
        "options": {"gift": True},
        "colour": Colour.RED,
        "pair": (3, 4),
        "budget": 1.0,
    }


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"items": [GOOD["items"][0]] * 2 + [{"sku": "a", "qty": "two"}]},
            "args.items[2].qty: expected integer, got 'two'",
        ),
        ({"items": [{"qty": 1}]}, "args.items[0].sku: required"),
        (
            {"items": [{"sku": "a", "qty": 0}]},
            "args.items[0].qty: input should be greater than or equal to 1, got 0",
        ),
        ({"items": "all"}, "args.items: expected array, got 'all'"),
        ({"address": 3}, "args.address: expected object, got 3"),
        ({"address": {"street": "x", "zip": "1"}}, "args.address.zip: string should match pattern"),
        ({"options": {"gift": "yes"}}, "args.options.gift: expected boolean, got 'yes'"),
        ({"colour": "green"}, "args.colour: expected 'red' or 'blue', got 'green'"),
        ({"speed": 3}, "args.speed: expected 'slow' or 'fast', got 3"),
        ({"note": []}, "args.note: expected integer or string, got []"),
        ({"limits": {"a": "b"}}, "args.limits.a: expected number, got 'b'"),
        ({"pair": [1, None]}, "args.pair[1]: expected integer, got None"),
        ({"budget": True}, "args.budget: expected number, got True"),
        ({"colour": "red", "qty": 1}, "args.qty: unknown argument (known: items, address, "),
    ],
)
def test_a_wrong_argument_is_named_by_its_path(change, text):
    signature = describe_callable(order, where="order", method=False)
    with pytest.raises(InvalidArguments) as caught:
        signature.validate(GOOD | change)
    assert str(caught.value).startswith(text)


def test_text_in_annotated_describes_an_argument_unless_the_docstring_does():
    def brew(cups: Annotated[int, "how many"], tea: Annotated[str, "what kind"], *, milk: bool = False) -> str:
        """Brew.

        Args:
            tea: green or black
        """
        return f"{cups} {tea} {milk}"

    properties: Any = describe_callable(brew, where="brew", method=False).schema["properties"]
    assert {name: part.get("description") for name, part in properties.items()} == {
        "cups": "how many",
        "tea": "green or black",
        "milk": None,
    }


def test_text_after_the_arguments_describes_the_tool_and_no_argument():
    def find(word: str, *, limit: int = 3) -> str:
        """Find a word.

        Args:
          word: what to find
            note: whole words only

        Keyword Args:
          limit: how many

        Returns:
            The places.

        Words of one letter are not found.
        """
        return f"{word} {limit}"

    signature = describe_callable(find, where="find", method=False)
    properties: Any = signature.schema["properties"]
    assert {name: part["description"] for name, part in properties.items()} == {
        "word": "what to find note: whole words only",
        "limit": "how many",
    }
    assert signature.description == "Find a word.\n\nWords of one letter are not found."


def test_sections_need_not_be_indented():
    def find(word: str, limit: int) -> str:
        """Find a word.

        Args:
        word: what to find,
        in any case
        limit: how many

        Raises:
        ValueError: there is no text
        """
        return f"{word} {limit}"

    signature = describe_callable(find, where="find", method=False)
    properties: Any = signature.schema["properties"]
    assert [part["description"] for part in properties.values()] == ["what to find, in any case", "how many"]
    assert signature.description == "Find a word."


@dataclass
class Bill:
    count: int
    total: int = field(default=0, init=False)


def test_a_field_that_nobody_may_give_is_not_in_the_schema():
    def buy(order: Bill) -> None: ...

    signature = describe_callable(buy, where="buy", method=False)
    assert list(signature.schema["properties"]["order"]["properties"]) == ["count"]
    assert signature.validate({"order": {"count": 2}}) == {"order": Bill(2)}


def test_a_recursive_type_keeps_its_definition():
    def grow(tree: Tree) -> str:
        return ""

    signature = describe_callable(grow, where="grow", method=False)
    assert signature.schema["$defs"]["Tree"]["properties"]["children"]["items"] == {"$ref": "#/$defs/Tree"}
    with pytest.raises(InvalidArguments, match=r"args\.tree\.children\[0\]\.value: required"):
        signature.validate({"tree": {"value": 1, "children": [{}]}})


def bare(x): ...
def many(*values: int): ...
def anything(**values: int): ...
def itself(x: Self): ...  # type: ignore[misc]
def callback(x: type(lambda: 0)): ...  # type: ignore[valid-type]
def field_default(x: int = Field(1, ge=1)): ...
def wrong_default(x: int = "x"): ...  # type: ignore[assignment]
def text_default(x: list[int] = [1, "2"]): ...  # type: ignore[list-item]  # noqa: B006
def no_default(x: int = None): ...  # type: ignore[assignment]  # noqa: RUF013
async def yields(n: int):
    yield n


def low_default(x: Annotated[int, Field(ge=1)] = 0): ...


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (bare, "demo.bare: argument 'x' has no type hint; write `x: str`"),
        (many, "cannot be a tool argument"),
        (anything, "cannot be a tool argument"),
        (callback, "type hint without a JSON schema"),
        (itself, "type hint without a JSON schema: `typing.Self` is invalid in this context"),
        (field_default, "write `Annotated"),
        (
            wrong_default,
            "demo.wrong_default: argument 'x' has the default 'x', which its type hint refuses (expected integer, "
            "got 'x'); change one of them",
        ),
        (text_default, "which its type hint refuses (x[1]: expected integer, got '2'); change one of them"),
        (no_default, "(expected integer, got None); change one of them; write `x: ... | None = None`"),
        (low_default, "has the default 0, which its type hint refuses ("),
        (yields, "demo.yields: an async generator cannot be a tool; return a list of what it yields"),
    ],
)
def test_a_tool_that_cannot_be_described_is_refused_once_and_clearly(function, text):
    with pytest.raises(ConfigError) as caught:
        describe_callable(function, where=f"demo.{function.__name__}", method=False)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


class Called:
    def __call__(self, n: int) -> int:
        return n


@pytest.mark.parametrize(
    ("value", "kind"), [(Called(), "Called"), (functools.partial(pow, 2), "partial"), (Called, "type")]
)
def test_a_value_that_is_no_function_is_refused_as_a_tool(value, kind):
    with pytest.raises(ConfigError, match=f"a {kind} cannot be a tool; write a function with typed arguments"):
        tool_from(value)


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Chosen(BaseModel):
    level: Literal[1, 2]
    below: list["Chosen"] = []


@pytest.mark.parametrize(
    ("kind", "right", "wrong", "said"),
    [
        (Literal[1], 1.0, True, "args.value: expected 1, got True"),
        (Literal[True], True, 1, "args.value: expected True, got 1"),
        (Literal["a", 0], 0, False, "args.value: expected 'a' or 0, got False"),
        (Level, 2, True, "args.value: expected 1 or 2, got True"),
        (Level | None, None, True, "args.value: expected 1 or 2 or null, got True"),
        (str | Literal[True], "1", 1, "args.value: expected True or string, got 1"),
        (list[Literal[1]], [1], [1, True], r"args.value\[1\]: expected 1, got True"),
        (tuple[str, Literal[1]], ["a", 1], ["a", True], r"args.value\[1\]: expected 1, got True"),
        (dict[str, Literal[1]], {"a": 1}, {"a": True}, "args.value.a: expected 1, got True"),
        (Chosen, {"level": 1}, {"level": True}, "args.value.level: expected 1 or 2, got True"),
        (Chosen, {"level": 1}, {"level": 1, "below": [{"level": True}]}, r"below\[0\].level: expected 1 or 2"),
        (Literal[1] | bool, True, "1", "expected 1 or boolean, got '1'"),
    ],
)
def test_booleans_are_not_numbers_where_values_are_listed(kind: Any, right: object, wrong: object, said: str):
    def choose(value): ...

    choose.__annotations__ = {"value": kind}
    signature = describe_callable(choose, where="choose", method=False)
    signature.validate({"value": right})
    with pytest.raises(InvalidArguments, match=said):
        signature.validate({"value": wrong})


class Once(BaseModel):
    kind: Literal["once"]
    count: Literal[1] = 1
    inner: "Kind | None" = None


class Often(BaseModel):
    kind: Literal["often"]
    count: bool = True
    inner: "Kind | None" = None


Kind = Annotated[Once | Often, Field(discriminator="kind")]
Once.model_rebuild()


def test_listed_values_are_those_of_the_kind_and_cost_no_more_in_a_deep_one():
    def choose(value): ...

    choose.__annotations__ = {"value": Kind}
    signature = describe_callable(choose, where="choose", method=False)
    signature.validate({"value": {"kind": "often", "count": True}})
    with pytest.raises(InvalidArguments, match=r"args.value.count: expected 1, got True"):
        signature.validate({"value": {"kind": "once", "count": True}})
    deep: dict[str, Any] = {"kind": "often"}
    for _ in range(80):  # to check each kind at each level would take forever
        deep = {"kind": "once", "inner": deep}
    signature.validate({"value": deep})


T = TypeVar("T")
U = TypeVar("U")


class Stack(ToolEnv, Generic[T]):
    def setup(self, first: T) -> str:
        return f"{first!r}"

    @tool
    def push(self, items: list[T], last: T | None = None) -> str: ...


class Pairs(Stack[tuple[T, U]], Generic[U, T]): ...


class Texts(Pairs[str, int]):
    @tool
    def own(self, n: int) -> str: ...


async def test_the_types_of_a_generic_base_are_those_of_the_class():
    pair = {
        "type": "array",
        "prefixItems": [{"type": "integer"}, {"type": "string"}],
        "minItems": 2,
        "maxItems": 2,
    }
    parameters: Any = Texts().tools[0]["function"]
    assert parameters["parameters"]["properties"] == {
        "items": {"type": "array", "items": pair},
        "last": {"anyOf": [pair, {"type": "null"}], "default": None},
    }
    opening, _ = await Texts().reset(Task("t", {"first": [1, "a"]}))
    assert opening[0].content == "(1, 'a')"
    with pytest.raises(ConfigError, match=r"argument 'first'\[0\]: .*integer"):
        await Texts().reset(Task("t", {"first": ["b", "a"]}))


class Box(BaseModel, Generic[T]):
    inside: T


class Boxes(ToolEnv, Generic[T]):
    @tool
    def put(
        self,
        box: Box[T],
        boxes: list[Box[T]],
        named: dict[str, Box[list[T]]] | None = None,
        nested: Annotated[Box[Box[T]] | None, "how"] = None,
    ) -> str: ...


class NumberBoxes(Boxes[int]): ...


def test_pydantic_models_and_what_contains_them_get_the_types_of_the_class():
    function: Any = NumberBoxes().tools[0]["function"]
    found = function["parameters"]["properties"]
    assert found["box"]["properties"]["inside"] == {"type": "integer"}
    assert found["boxes"]["items"]["properties"]["inside"] == {"type": "integer"}
    named = found["named"]["anyOf"][0]["additionalProperties"]
    assert named["properties"]["inside"] == {"type": "array", "items": {"type": "integer"}}
    inner = found["nested"]["anyOf"][0]["properties"]["inside"]
    assert inner["properties"]["inside"] == {"type": "integer"}
    assert found["nested"]["description"] == "how"


class Parcels(Stack["Parcel"]):
    pass


class Parcel(TypedDict):
    n: int


class Unknown(Stack["NoSuchType"]):  # type: ignore[name-defined]
    pass


def test_a_type_of_a_generic_base_may_be_written_as_text():
    function: Any = Parcels().tools[0]["function"]
    assert function["parameters"]["properties"]["items"]["items"]["properties"] == {"n": {"type": "integer"}}
    with pytest.raises(ConfigError, match="'NoSuchType' is not defined; import the name at module level"):
        Unknown.spec()


Ts = typing.TypeVarTuple("Ts")


class Rows(ToolEnv, Generic[*Ts]):
    @tool
    def add(self, row: tuple[*Ts]) -> str: ...


class People(Rows[str, int]): ...


def test_a_variable_for_several_types_is_refused():
    with pytest.raises(ConfigError, match=r"People\.add: type hint without a JSON schema"):
        People.spec()


class Picky(ToolEnv):
    def setup(self) -> str:
        self.seen: list[object] = []
        return ""

    @tool
    def order(self, items: list[Item], colour: Colour, note: int | str = "", deep: Tree | None = None) -> str:
        self.seen.append(items)
        assert all(isinstance(i, Item) and isinstance(i.qty, int) for i in items)
        return "ok"

    @tool
    def ping(self, n: int) -> int:
        assert type(n) is int
        return 1 // n


LEAVES = [
    None,
    True,
    0,
    -1,
    10**5000,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "red",
    "3",
    "\ud800",
    "ä\x00",
    object(),
]


def junk(rng: random.Random, depth: int = 0) -> Any:
    """Any value, JSON or not, sometimes nested beyond every recursion limit."""
    kind = rng.random()
    if kind < 0.6 or depth > 3:
        return rng.choice(LEAVES)
    if kind < 0.605:
        deep: Any = []
        for _ in range(5_000):
            deep = [deep]
        return deep
    if kind < 0.8:
        return [junk(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    return {
        rng.choice(["sku", "qty", "value", "children", "ü", ""]): junk(rng, depth + 1)
        for _ in range(rng.randint(0, 3))
    }


def near_miss(rng: random.Random) -> Any:
    """Arguments that are almost right, so that every branch of the validation is walked."""
    if rng.random() < 0.1:
        return junk(rng)
    items = [
        {"sku": rng.choice(["a", junk(rng)]), "qty": rng.choice([1, junk(rng)])} for _ in range(rng.randint(0, 2))
    ]
    arguments = {"items": items, "colour": rng.choice(["red", "blue", "green"]), "n": rng.choice([0, 1, "1"])}
    for name in ("note", "deep", "colour", "items", "self"):
        if rng.random() < 0.2:
            arguments[name] = junk(rng)
    for name in list(arguments):
        if rng.random() < 0.3:
            del arguments[name]
    return arguments


async def test_ten_thousand_malformed_calls_are_each_answered_and_counted():
    rng, env = random.Random(0), Picky()
    outcomes: Counter[str] = Counter()
    await env.reset(Task("t"))
    while outcomes.total() < 10_000:
        names = ["order", "ping", "order", "ping", "Order", "", "setup", "__init__", "close", "\ud800" * 100]
        calls = tuple(
            ToolCall(f"c{i}", rng.choice(names), near_miss(rng)) for i in range(rng.choice([1, 2, 3, 10]))
        )
        message = Message("assistant", tool_calls=calls, parse_errors=("not JSON",) * rng.randint(0, 2))
        observation, reward, _, _, info = await env.step(message)
        assert [m.tool_call_id for m in observation] == [c.id for c in calls] + [None] * len(message.parse_errors)
        assert all(isinstance(m.content, str) for m in observation)
        wrong = [record.outcome for record in info.calls if record.outcome != "ok"]
        assert sum(info.metrics.get(name, 0) for name in MISTAKES if name != "output_truncated") == len(
            wrong
        ) + len(message.parse_errors)
        assert reward == 0
        outcomes.update(record.outcome for record in info.calls)
    await env.close()
    assert {"ok", "invalid_args", "unknown_tool", "tool_exception", "too_many_calls"} <= set(outcomes)
    assert outcomes["invalid_args"] > 3000


class Line(typing.TypedDict):
    """One line."""

    sku: str
    qty: typing.NotRequired[int]


class Order(typing.TypedDict, total=False):
    lines: list[Line]
    best: Line | None


def test_typed_dicts_of_the_standard_library_are_read_on_every_python():
    def buy(self, order: Order, more: dict[str, Line] | None = None) -> str: ...

    signature = describe_callable(buy, where="buy", method=True)
    line = signature.schema["properties"]["order"]["properties"]["lines"]["items"]
    assert line["required"] == ["sku"]
    assert "required" not in signature.schema["properties"]["order"]
    given = {"order": {"lines": [{"sku": "a", "qty": 2}], "best": None}, "more": {"x": {"sku": "b"}}}
    assert signature.validate(given) == given
    with pytest.raises(InvalidArguments, match=r"args.order.lines\[0\].sku: required"):
        signature.validate({"order": {"lines": [{"qty": 1}]}})


def test_python_without_docstrings_is_refused():
    """They are the system prompt and the descriptions of tools, which would silently be missing."""
    program = "from agentrl.envs.calculator import Calculator; Calculator().system()"
    command = [sys.executable, "-OO", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "ConfigError: python -OO and PYTHONOPTIMIZE=2 remove the docstrings" in done.stderr


def test_a_whole_number_is_an_integer_however_it_is_written():
    def f(n: int, items: list[int | None], share: float = 0.0, any_of: int | str = "") -> None: ...

    signature = describe_callable(f, where="f", method=False)
    given = {"n": 3.0, "items": [1.0, None, 1e3], "share": 2.0, "any_of": -4.0}
    found = signature.validate(given)
    assert found == {"n": 3, "items": [1, None, 1000], "share": 2.0, "any_of": -4}
    assert [type(found["n"]), type(found["share"]), type(found["any_of"])] == [int, float, int]
    with pytest.raises(InvalidArguments, match=r"args\.n: expected integer, got 3\.5"):
        signature.validate(given | {"n": 3.5})
    with pytest.raises(InvalidArguments, match=r"args\.n: expected integer, got '3'$"):
        signature.validate(given | {"n": "3"})


def test_only_numbers_that_must_be_integers_are_written_as_such():
    def f(
        n: int, kind: Literal[1, "a"], rows: list[dict[str, int] | str], price: int | float, other: Any
    ) -> None: ...

    signature = describe_callable(f, where="f", method=False)
    given = {"n": 3.0, "kind": 1.0, "rows": ["a", {"b": 2.0}], "price": 4.0, "other": {"c": [5.0, 1e300]}}
    found = signature.validate(given)
    assert json.dumps(found) == json.dumps(given | {"n": 3, "kind": 1, "rows": ["a", {"b": 2}]})
    with pytest.raises(InvalidArguments, match=r"args\.rows\[1\]: expected .*, got 7\.0$"):
        signature.validate(given | {"n": 3, "kind": "a", "rows": ["a", 7.0]})


def test_names_that_must_be_integers_are_described():
    def f(rows: Annotated[dict[int, str], Field(min_length=2)]) -> None: ...

    signature = describe_callable(f, where="f", method=False)
    assert signature.schema["properties"]["rows"]["propertyNames"] == {"pattern": "^-?[0-9]+$"}
    for seed in range(5):
        drawn = random_arguments(signature.schema, random.Random(seed))
        assert len(signature.validate(drawn)["rows"]) >= 2
