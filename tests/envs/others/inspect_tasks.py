"""Inspect tasks; `inspect_tasks.py`, run by a Python with inspect-ai, prints Inspect's own scores."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from typing import Any

from inspect_ai import Task, eval, task
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelAPI, ModelOutput, modelapi
from inspect_ai.scorer import Score, Target, accuracy, includes, match, mean, model_graded_qa, scorer
from inspect_ai.solver import TaskState, generate, system_message, use_tools
from inspect_ai.tool import ToolError, tool


def rows(num: int = 50) -> list[Sample]:
    return [
        Sample(input=f"What is {i} + {3 * i % 7}?", target=str(i + 3 * i % 7), id=f"sum-{i}") for i in range(num)
    ]


@tool
def add() -> Any:
    async def execute(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        if a > 40:
            raise ToolError("too large")
        if a < 0:
            raise ValueError("the abacus fell down")
        return a + b

    return execute


@tool
def shell() -> Any:
    async def execute(command: str) -> str:
        """Run a command, which reads the standard input that it inherits.

        Args:
            command: The command.
        """
        if command == "exit":
            raise SystemExit(3)
        process = await asyncio.create_subprocess_shell(command, stdout=asyncio.subprocess.PIPE)
        return (await process.communicate())[0].decode()

    return execute


@scorer(metrics={"*": [mean()]})
def closeness() -> Any:
    async def score(state: TaskState, target: Target) -> Score:
        said = state.output.completion.strip()
        right = said == target.text
        calls = sum(m.role == "tool" for m in state.messages)
        return Score(value={"right": right, "tools": calls / 10, "half": "P" if said.isdigit() else "N"})

    return score


@scorer(metrics=[accuracy()])
def broken() -> Any:
    async def score(state: TaskState, target: Target) -> Score:
        raise KeyError("no ruler")

    return score


class Bolt(BaseException):
    """Nobody catches it."""


@scorer(metrics=[mean()])
def odd() -> Any:
    async def score(state: TaskState, target: Target) -> Score | None:
        said = state.output.completion
        if said in ("exit", "interrupt", "bolt"):
            raise {"exit": SystemExit, "interrupt": KeyboardInterrupt, "bolt": Bolt}[said]("the end")
        return None if said == "nothing" else Score(value=1)

    return score


@task
def sums() -> Task:
    """One answer."""
    return Task(
        dataset=rows(), solver=[system_message("Answer with the number."), generate()], scorer=match(numeric=True)
    )


@task
def tools(num: int = 50) -> Task:
    """An answer after calls, three scorers."""
    return Task(
        dataset=rows(num),
        solver=[use_tools(add()), generate()],
        scorer=[match(numeric=True), includes(), closeness()],
    )


@task
def graded() -> Task:
    """The policy grades itself."""
    return Task(dataset=rows(), solver=generate(), scorer=model_graded_qa())


@task
def unscored() -> Task:
    """A scorer that raises."""
    return Task(dataset=rows(), solver=generate(), scorer=broken())


@task
def scorerless() -> Task:
    """No scorer."""
    return Task(dataset=rows(1), solver=generate())


@task
def shells() -> Task:
    """A tool that starts programs."""
    return Task(dataset=rows(4), solver=[use_tools(shell()), generate()], scorer=odd())


@task
def twins(first: str | None = None, second: int | None = 1) -> Task:
    """Samples with ids of our choice."""
    questions = [Sample(input="1?", target="1", id=first), Sample(input="2?", target="2", id=second)]
    return Task(dataset=questions, solver=generate(), scorer=match())


def said(kind: str, question: str, turn: int, tools: bool) -> tuple[str, dict[str, int]]:
    """What a policy says at a turn: a text, or a call's arguments."""
    a, b = (int(w) for w in question.removeprefix("What is ").removesuffix("?").split(" + "))
    if kind == "oracle":
        return ("", {"a": a, "b": b}) if tools and turn == 0 and a < 41 else (str(a + b), {})
    if kind == "random":
        pick = (a * 7919 + b * 104729 + turn * 31) % 11
        if tools and pick < 6 and turn < 6:
            return "", {"a": pick * 9, "b": turn} if pick else {"c": 1}
        return str(pick * 3), {}
    return ("thinking", {"a": 45, "b": 1}) if tools and turn < 2 else (f"I think it is {a + b}.", {})


@modelapi(name="scripted")
class Scripted(ModelAPI):
    """A model that says what `said` says; Inspect's mock model needs a network."""

    async def generate(self, input: Any, tools: Any, tool_choice: Any, config: Any) -> ModelOutput:
        question = next(m.text for m in input if m.role == "user")
        turn = sum(m.role == "assistant" for m in input)
        text, arguments = said(self.model_name, question, turn, bool(tools))
        if not arguments:
            return ModelOutput.from_content("scripted", text)
        return ModelOutput.for_tool_call("scripted", "add", arguments, content=text)


def main() -> None:
    """Print Inspect's scores of each policy on each task, by sample."""
    options: Any = {"display": "none", "log_dir": tempfile.mkdtemp(), "max_samples": 64}
    found = {}
    for name, made in (("sums", sums), ("tools", tools)):
        for kind in ("oracle", "random", "scripted"):
            (log,) = eval(made(), model=f"scripted/{kind}", **options)
            found[f"{name}/{kind}"] = {
                s.id: {n: score.value for n, score in (s.scores or {}).items()} for s in log.samples or []
            }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
