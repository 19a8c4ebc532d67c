"""Imperfect demonstrations for a cold start: what to do, done right only part of the time.

An episode is right with probability `quality`; otherwise it has exactly one of these mistakes, drawn evenly:

- `operator`: one call uses another operator;
- `number`: one digit of a number in one call is changed;
- `copy`: the answer differs from the tool's result in one digit;
- `no_tool`: it answers at once with a guess;
- `early`: it answers after the first of several calls (for one operation: a `copy` mistake).

Of the right ones that chain several operations, a share of `silent` makes all its calls and then says "Done."
without the number. Above one half, the greedy policy of a cold start gets most chains wrong although it has seen
how to do every step: that is what reinforcement then puts right.

On top of that, one episode in twenty, right or wrong, first makes a call that the calculator refuses and then
continues as if nothing had happened, so that errors are seen as well. Whether the final answer happens to be right
in spite of a mistake is not checked.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

from agentrl.env.toolenv.observe import error_text
from agentrl.envs.calculator.expression import CalculatorError, as_text, evaluate
from agentrl.types import Message, ToolCall

Style = Literal["steps", "single", "mixed"]
MISTAKES = ("operator", "number", "copy", "no_tool", "early")
_SLIP_SHARE = 0.05


def demonstrate(
    start: int,
    operations: Sequence[tuple[str, int]],
    rng: random.Random,
    *,
    quality: float,
    style: Style,
    silent: float = 0.0,
) -> list[Message]:
    """The turns after the user message: calls with their results, then the answer.

    `style` "steps" makes one call per operation on the result so far, "single" one call with the whole
    expression, "mixed" either with equal chance.
    """
    for name, share in (("quality", quality), ("silent", silent)):
        if not 0 <= share <= 1:
            raise ValueError(f"{name} must be in [0, 1], got {share}")
    mistake = None if rng.random() < quality else rng.choice(MISTAKES)
    if mistake == "no_tool":
        return [Message("assistant", str(rng.randint(1, 999)))]
    if style == "mixed":
        style = rng.choice(("steps", "single"))
    if mistake == "early" and (style == "single" or len(operations) == 1):
        mistake = "copy"
    operations = list(operations)
    if mistake in ("operator", "number"):
        at = rng.randrange(len(operations))
        operator, number = operations[at]
        if mistake == "operator":
            operations[at] = (rng.choice([o for o in "+-*" if o != operator]), number)
        elif rng.random() < 0.5:
            operations[at] = (operator, int(_change_digit(str(number), rng)))
        else:
            start = int(_change_digit(str(start), rng))
    if mistake == "early":
        operations = operations[:1]
    messages, result = _calls(start, operations, rng, style)
    answer = _change_digit(result, rng) if mistake == "copy" else result
    if mistake is None and len(operations) > 1 and rng.random() < silent:
        answer = "Done."
    return [*messages, Message("assistant", answer)]


def _calls(
    start: int, operations: Sequence[tuple[str, int]], rng: random.Random, style: Style
) -> tuple[list[Message], str]:
    value, messages = str(start), list[Message]()
    if rng.random() < _SLIP_SHARE:
        messages += _call(f"{value}{operations[0][0]}", len(messages))[0]
    if style == "single":
        for operator, number in operations[:-1]:
            value = f"({value}{operator}{number})"
        operations = operations[-1:]
    for operator, number in operations:
        said, value = _call(f"{value}{operator}{number}", len(messages))
        messages += said
    return messages, value


def _call(expression: str, position: int) -> tuple[list[Message], str]:
    call = ToolCall(f"call_{position // 2}", "calculator", {"expression": expression})
    try:
        result = as_text(evaluate(expression))
    except CalculatorError as e:
        result = f"Error: {error_text(e)}"
    return [
        Message("assistant", tool_calls=(call,)),
        Message("tool", result, tool_call_id=call.id, name=call.name),
    ], result


def _change_digit(number: str, rng: random.Random) -> str:
    digits = [i for i, c in enumerate(number) if c.isdigit()]
    at = rng.choice(digits)
    first = at == digits[0] and len(digits) > 1
    other = rng.choice([d for d in "0123456789" if d != number[at] and not (first and d == "0")])
    return number[:at] + other + number[at + 1 :]
