"""The environment: start with a number, apply one to three operations, answer with the result."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from agentrl.env import ToolEnv, reward, tool
from agentrl.env.play import ScriptedPolicy, call
from agentrl.env.read import final_answer
from agentrl.env.tasks import Split, generated
from agentrl.envs.calculator.demonstrate import Style, demonstrate
from agentrl.envs.calculator.expression import as_text, evaluate
from agentrl.types import Episode, Message, Task

Operation = tuple[Literal["+", "-", "*"], int]
_WORDS = {"+": "Add {}.", "-": "Subtract {}.", "*": "Multiply by {}."}
_INTEGER = re.compile(r"-?\d+")
_HELD_OUT_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Problem:
    """One chain of operations, applied from left to right."""

    start: int
    operations: tuple[Operation, ...]

    @property
    def text(self) -> str:
        """The user message."""
        steps = (_WORDS[operator].format(number) for operator, number in self.operations)
        return " ".join([f"Start with {self.start}.", *steps])

    @property
    def expression(self) -> str:
        """The whole chain as one expression, with parentheses where the order needs them."""
        text, loose = str(self.start), False
        for operator, number in self.operations:
            if operator == "*" and loose:
                text = f"({text})"
            text, loose = f"{text}{operator}{number}", operator != "*"
        return text

    @property
    def result(self) -> int:
        """The right answer."""
        return int(evaluate(self.expression))

    @property
    def held_out(self) -> bool:
        """Which split the problem belongs to: decided by a hash of the expression, so the two cannot overlap."""
        digest = hashlib.blake2b(self.expression.encode(), digest_size=8).digest()
        return int.from_bytes(digest) / 2**64 < _HELD_OUT_SHARE


class Calculator(ToolEnv):
    """Use the calculator, then answer with the number."""

    def setup(self, start: int, operations: list[tuple[str, int]]) -> str:
        self.problem = Problem(start, tuple((op, n) for op, n in operations))  # type: ignore[misc]
        return self.problem.text

    @tool(inline=True)  # bounded by the evaluator: microseconds, and nothing to wait for
    def calculator(self, expression: str) -> str:
        """Evaluate arithmetic."""
        return as_text(evaluate(expression))

    @reward(solved=True)
    def solved(self, episode: Episode) -> bool:
        answer = _INTEGER.findall(final_answer(episode))
        return len(answer) == 1 and len(answer[0]) < 40 and int(answer[0]) == self.problem.result

    @classmethod
    def tasks(
        cls,
        split: Split = "train",
        seed: int = 0,
        *,
        min_operations: int = 1,
        max_operations: int = 3,
        size: int | None = None,
    ) -> Sequence[Task]:
        """Problems of `split`, drawn by seed and position. `size` defaults to a million (held out: 1,000)."""
        if not 1 <= min_operations <= max_operations:
            raise ValueError(f"operations from {min_operations} to {max_operations}: no such count")

        def row(rng: random.Random) -> dict[str, object]:
            problem = draw(rng, split, min_operations, max_operations)
            return {"start": problem.start, "operations": [list(o) for o in problem.operations]}

        return generated(
            "calculator", split, seed, (1_000_000 if split == "train" else 1_000) if size is None else size, row
        )

    @classmethod
    def oracle(cls, task: Task) -> ScriptedPolicy:
        """A policy that solves `task` with one call."""
        problem = Problem(task.row["start"], tuple((op, n) for op, n in task.row["operations"]))
        return ScriptedPolicy([call("calculator", expression=problem.expression), str(problem.result)])

    @classmethod
    def demonstrations(
        cls,
        seed: int,
        num: int,
        *,
        quality: float = 0.5,
        style: Style = "steps",
        silent: float = 0.0,
        min_operations: int = 1,
        max_operations: int = 3,
    ) -> list[list[Message]]:
        """`num` episodes on training problems, a share of `quality` right and the others wrong in a known way,
        and a share of `silent` of the longer right ones ending without the number.

        See `agentrl.envs.calculator.demonstrate` for the mistakes and their shares. Each opens with the system
        and user message of the env, and its tool messages are what the calculator really answers.
        """
        rng = random.Random(f"calculator/demonstrations/{seed}")
        episodes = []
        for _ in range(num):
            problem = draw(rng, "train", min_operations, max_operations)
            opening = [Message("system", cls().system()), Message("user", problem.text)]
            episodes.append(
                opening
                + demonstrate(problem.start, problem.operations, rng, quality=quality, style=style, silent=silent)
            )
        return episodes


def draw(rng: random.Random, split: Split, min_operations: int, max_operations: int) -> Problem:
    """A random problem that belongs to `split`."""
    return next(p for p in _draws(rng, min_operations, max_operations) if p.held_out == (split == "held_out"))


def _draws(rng: random.Random, min_operations: int, max_operations: int) -> Iterator[Problem]:
    while True:
        operations: list[Operation] = []
        for _ in range(rng.randint(min_operations, max_operations)):
            operator: Literal["+", "-", "*"] = rng.choice(("+", "-", "*"))
            operations.append((operator, rng.randint(2, 9) if operator == "*" else rng.randint(1, 99)))
        yield Problem(rng.randint(1, 99), tuple(operations))
