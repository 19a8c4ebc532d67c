"""Small programming problems put together from steps: each has a text, a reference, and inputs."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Problem:
    """A function to write: its text, the steps of the reference (by name and number), and what it takes."""

    text: str
    steps: tuple[tuple[str, int], ...]
    takes: str

    def reference(self, value: Any) -> Any:
        """The right result, by running our own source."""
        space: dict[str, Any] = {}
        exec(self.source, space)
        return space["solve"](value)

    def inputs(self, seed: int, num: int) -> list[Any]:
        """Arguments to test with; the first is empty."""
        rng = random.Random(f"python_code/{seed}")
        if self.takes == "text":
            words = ["", *[_text(rng) for _ in range(num - 1)]]
            return list(words)
        return [[], *[[rng.randint(-20, 20) for _ in range(rng.randint(1, 9))] for _ in range(num - 1)]]

    @property
    def source(self) -> str:
        """The reference as Python text."""
        lines = [f"    value = {STEPS[name][1].format(number)}" for name, number in self.steps]
        return "\n".join(["def solve(value):", *lines, "    return value", ""])


def _text(rng: random.Random) -> str:
    letters = "abcdefghijklmnopqrstuvwxyzAEIOU"
    return " ".join("".join(rng.choices(letters, k=rng.randint(1, 7))) for _ in range(rng.randint(1, 5)))


STEPS: dict[str, tuple[str, str]] = {
    "keep_even": ("keep the even ones", "[x for x in value if x % 2 == 0]"),
    "keep_odd": ("keep the odd ones", "[x for x in value if x % 2 == 1]"),
    "keep_above": ("keep those above {}", "[x for x in value if x > {}]"),
    "keep_below": ("keep those below {}", "[x for x in value if x < {}]"),
    "distinct": ("drop repetitions, keeping the first of each", "list(dict.fromkeys(value))"),
    "square": ("square each", "[x * x for x in value]"),
    "plus": ("add {} to each", "[x + {} for x in value]"),
    "times": ("multiply each by {}", "[x * {} for x in value]"),
    "absolute": ("take the absolute value of each", "[abs(x) for x in value]"),
    "running": (
        "replace each by the sum up to and including it",
        "[sum(value[:i + 1]) for i in range(len(value))]",
    ),
    "sort": ("sort in ascending order", "sorted(value)"),
    "backwards": ("reverse the order", "value[::-1]"),
    "first": ("keep the first {}", "value[:{}]"),
    "total": ("return the sum", "sum(value)"),
    "count": ("return how many there are", "len(value)"),
    "largest": ("return the largest, or 0 if there is none", "max(value, default=0)"),
    "listed": ("return the list", "value"),
    "split": ("split it into words", "value.split()"),
    "longer": ("keep the words longer than {} letters", "[w for w in value if len(w) > {}]"),
    "reverse_words": ("reverse the letters of each word", "[w[::-1] for w in value]"),
    "upper": ("make each word upper case", "[w.upper() for w in value]"),
    "no_vowels": (
        "remove the vowels (either case) of each word",
        "[''.join(c for c in w if c.lower() not in 'aeiou') for w in value]",
    ),
    "join": ("return the words joined by a dash", "'-'.join(value)"),
}
"""What a step says, and its Python expression of `value`; {} is the step's number."""
_FILTERS = ("keep_even", "keep_odd", "keep_above", "keep_below", "distinct")
_MAPS = ("square", "plus", "times", "absolute", "running", "sort", "backwards", "first")
_ENDS = ("total", "count", "largest", "listed")
_WORD_STEPS = ("longer", "reverse_words", "upper", "no_vowels", "backwards", "sort", "first")


def draw(rng: random.Random) -> Problem:
    """A random problem of three or four steps."""
    if rng.random() < 0.3:
        names = ["split", *rng.sample(_WORD_STEPS, 2), rng.choice(("join", "count", "listed"))]
        takes, begin = "text", "Write a Python function solve(value) of a text:"
    else:
        names = [rng.choice(_FILTERS), *rng.sample(_MAPS, rng.randint(1, 2)), rng.choice(_ENDS)]
        takes, begin = "numbers", "Write a Python function solve(value) of a list of integers:"
    return describe(tuple((name, rng.randint(2, 6)) for name in names), takes, begin)


def describe(steps: tuple[tuple[str, int], ...], takes: str, begin: str = "") -> Problem:
    """A problem of the given steps."""
    begin = (
        begin
        or f"Write a Python function solve(value) of {'a text' if takes == 'text' else 'a list of integers'}:"
    )
    return Problem(f"{begin} {', then '.join(STEPS[n][0].format(k) for n, k in steps)}.", steps, takes)
