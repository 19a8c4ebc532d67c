import json
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.env.read import final_answer
from agentrl.envs.calculator import Calculator, CalculatorError, evaluate
from agentrl.envs.calculator.env import Problem
from agentrl.types import Episode, Message, StopReason, Task, ToolCall, Turn


def answered(text: str) -> Episode:
    turn = Turn(Message("assistant", text), (), 0.0, "stop", 1, 0.0, 0.0)
    return Episode("e", Task("t"), (turn.message,), (turn,), (), StopReason.ANSWERED, None)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1+2*3", "7"),
        ("(1+2)*3", "9"),
        ("-4--2", "-2"),
        ("7/2", "7/2"),
        ("6/3/2", "1"),
        (" 2 * ( 3 - 1 ) ", "4"),
    ],
)
def test_values_are_exact(expression, value):
    assert str(evaluate(expression)) == value


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("", "empty expression"),
        ("1/0", "division by zero"),
        ("1/(2-2)", "division by zero"),
        ("2^3", "unknown character '^'"),
        ("__import__('os')", "unknown character '_'"),
        ("1.5", "unknown character '.'"),
        ("٣+1", "unknown character"),
        ("1+", "unexpected end"),
        ("(1+2", "expected ')'"),
        ("1 2", "unexpected '2'"),
        (")", "unexpected ')'"),
        ("1" * 31, "more than 30 digits"),
        ("*".join(["9999999999"] * 10), "more than 30 digits"),
        ("(" * 60 + "1" + ")" * 60, "nested deeper than 20"),
        ("1+" * 200 + "1", "longer than 200 characters"),
    ],
)
def test_bad_expressions_say_what_is_wrong(expression, text):
    with pytest.raises(CalculatorError, match=re.escape(text)):
        evaluate(expression)


@given(st.text(alphabet="0123456789+-*/() x\n٣", max_size=250))
def test_any_text_is_a_number_or_a_calculator_error(expression):
    try:
        value = evaluate(expression)
    except CalculatorError:
        return
    assert isinstance(value, Fraction)


@given(st.integers(1, 99), st.lists(st.tuples(st.sampled_from("+-*"), st.integers(1, 99)), min_size=1, max_size=3))
def test_the_expression_of_a_problem_is_its_chain(start, operations):
    value = start
    for operator, number in operations:
        value = {"+": value + number, "-": value - number, "*": value * number}[operator]
    assert Problem(start, tuple(operations)).result == value


def test_tasks_are_determined_by_seed_and_position_and_splits_never_meet():
    def problem(task: Task) -> Problem:
        return Problem(task.row["start"], tuple((o, n) for o, n in task.row["operations"]))

    train, held_out = Calculator.tasks("train", 3), Calculator.tasks("held_out", 3)
    assert train[17] == Calculator.tasks("train", 3)[17]
    assert train[17] != Calculator.tasks("train", 4)[17]
    assert not {problem(train[i]).expression for i in range(3000)} & {problem(t).expression for t in held_out}
    assert {len(problem(t).operations) for t in held_out} == {1, 2, 3}
    json.dumps([dict(train[i].row) for i in range(10)])
    assert Calculator.spec().setup.problem(train[0].row) is None


async def test_the_answer_must_equal_the_result_and_be_the_only_number():
    env = Calculator()
    await env.reset(Task("t", {"start": 37, "operations": [["+", 58], ["*", 3]]}))
    observation, *_ = await env.step(
        Message("assistant", tool_calls=(ToolCall("c", "calculator", {"expression": "(37+58)*3"}),))
    )
    assert observation[0].content == "285"
    for text, solved in [
        ("285", 1),
        ("It is 285.", 1),
        ("284", 0),
        ("285 or 286", 0),
        ("", 0),
        ("-285", 0),
        ("9" * 5000, 0),
    ]:
        assert await env.score(answered(text)) == {"solved": float(solved)}, text


async def test_demonstrations_are_what_the_env_would_have_shown():
    def solves(messages: list[Message]) -> bool:
        chain = messages[1].content
        numbers = [w.strip(".") for w in chain.split() if w.strip(".").isdigit()]
        words = [w for w in chain.split() if w in ("Add", "Subtract", "Multiply")]
        operators = [{"Add": "+", "Subtract": "-", "Multiply": "*"}[w] for w in words]
        problem = Problem(int(numbers[0]), tuple(zip(operators, map(int, numbers[1:]), strict=True)))
        assert not problem.held_out
        return messages[-1].content == str(problem.result)

    demonstrations = Calculator.demonstrations(1, 400, quality=0.6, style="mixed")
    assert demonstrations == Calculator.demonstrations(1, 400, quality=0.6, style="mixed")
    assert 0.5 < sum(map(solves, demonstrations)) / 400 < 0.72
    assert all(map(solves, Calculator.demonstrations(2, 100, quality=1.0)))
    env = Calculator()
    for messages in demonstrations[:50]:
        opening, _ = await env.reset(Calculator.tasks()[0])
        assert messages[0] == opening[0]
        for said, heard in zip(messages[2::2], messages[3::2], strict=False):
            observation, *_ = await env.step(said)
            assert observation == [heard]


def test_final_answer_of_an_unanswered_episode_is_empty():
    assert final_answer(Episode("e", Task("t"), (), (), (), StopReason.TIMEOUT, None)) == ""
