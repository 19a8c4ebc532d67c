"""Completions held to a grammar are what was asked for, whatever the policy would rather say."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from agentrl.chat.template import Renderer
from agentrl.serve.grammar import AnswerFormat, GrammarError, Grammars
from tests.serve.serve_kit import TOOLS

SUBTRACT = {
    "type": "function",
    "function": {
        "name": "subtract",
        "parameters": {
            "type": "object",
            "properties": {"x": {"enum": ["one", "two"]}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
}


async def drawn(renderer: Renderer, seed: int, limit: int = 400, **asked: object) -> str:
    """Random tokens among those that are allowed, until the end; the text without the stop token."""
    mask = await Grammars(renderer).mask(asked.pop("format", None), **asked)  # type: ignore[arg-type]
    assert mask is not None
    rng, ids = random.Random(seed), []
    while len(ids) < limit:
        allowed = np.flatnonzero(mask.allowed()[: renderer.vocabulary.size]).tolist()
        ends = {*renderer.stop_ids, *(renderer.vocabulary.control[mark] for mark in ("</think>", "</tool_call>"))}
        stops = [id for id in allowed if id in ends]
        ids.append(stops[0] if stops and rng.random() < 0.5 else rng.choice(allowed))
        mask.take(ids[-1])
        if ids[-1] in renderer.stop_ids:
            return renderer.decode(ids[:-1])
    raise AssertionError(f"no end after {limit} tokens: {renderer.decode(ids)!r}")


@pytest.mark.parametrize("seed", range(4))
async def test_an_answer_follows_its_schema(renderer: Renderer, seed: int):
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["a", "b"]}, "count": {"type": "integer", "minimum": 1, "maximum": 99}},
        "required": ["kind", "count"],
        "additionalProperties": False,
    }
    text = await drawn(renderer, seed, format=AnswerFormat(schema))
    value = json.loads(text.rpartition("</think>")[2])
    assert value["kind"] in "ab"
    assert 1 <= value["count"] <= 99


@pytest.mark.parametrize("seed", range(4))
async def test_a_required_call_is_one_of_the_tools_in_the_format_of_the_template(renderer: Renderer, seed: int):
    text = await drawn(renderer, seed, tools=[*TOOLS, SUBTRACT])
    read = renderer.read_text(text, tools=TOOLS)
    assert read.parse_errors == ()
    assert len(read.tool_calls) >= 1
    for call in read.tool_calls:
        assert call.name in ("add", "subtract")
        assert set(call.arguments) >= ({"a", "b"} if call.name == "add" else {"x"})


@pytest.mark.parametrize("seed", range(4))
async def test_a_named_call_is_that_one_and_the_only_one(renderer: Renderer, seed: int):
    text = await drawn(renderer, seed, tools=[*TOOLS, SUBTRACT], named="subtract")
    assert [call.name for call in renderer.read_text(text).tool_calls] == ["subtract"]


@pytest.mark.parametrize("named", [None, "now"])
@pytest.mark.parametrize("seed", range(4))
async def test_a_tool_without_parameters_is_called_without_arguments(
    renderer: Renderer, seed: int, named: str | None
):
    now = {"type": "function", "function": {"name": "now"}}
    text = await drawn(renderer, seed, tools=[now], named=named)
    calls = renderer.read_text(text).tool_calls
    assert {(call.name, json.dumps(call.arguments)) for call in calls} == {("now", "{}")}


async def test_a_schema_that_cannot_be_held_is_named(renderer: Renderer):
    with pytest.raises(GrammarError, match="cannot be made a grammar"):
        await Grammars(renderer).mask(AnswerFormat({"type": "no such type"}))


@pytest.mark.parametrize("pattern", ["(a", "a" * 2000 + "(", "(?x)\n 1 | a\n("])
async def test_a_pattern_that_is_none_is_refused_with_the_reason_on_one_line(renderer: Renderer, pattern: str):
    with pytest.raises(GrammarError) as found:
        await Grammars(renderer).mask(AnswerFormat({"type": "string", "pattern": pattern}))
    assert "regex parse error: " in str(found.value)
    assert str(found.value).endswith("error: unclosed group")
    assert len(str(found.value).splitlines()) == 1
    assert len(str(found.value)) < 500
