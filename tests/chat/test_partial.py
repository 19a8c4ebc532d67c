"""A partial stream tells names and arguments while they are written, and says the same as the whole reading."""

from __future__ import annotations

import json
import random

import pytest

from agentrl.chat.parsers import Malformed, ParsedCall, choose_parser, collect
from agentrl.chat.parsers.parser import Begun, Event, Fragment, Text
from agentrl.chat.proof import TOOLS
from agentrl.chat.template import Renderer
from agentrl.types import Message, ToolCall
from tests.chat.families import FAMILIES, Family

AS_JSON = {
    "hermes", "deepseek_v3", "deepseek_v31", "kimi_k2", "mistral", "llama3_json", "llama4_json", "harmony",
    "granite", "phi4_mini", "functools", "hunyuan", "nemotron", "xlam", "gigachat", "internlm", "functionary_v31",
    "functionary_v32",
}  # fmt: skip
"""Formats whose arguments are JSON text."""
ARGUMENTS = [
    {"query": 'quotes " and \\ back\nslashes } {', "limit": 3},
    {"query": "Grüße 日本語", "nested": {"a": [1, {"b": "}"}]}},
    {},
]


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Renderer]:
    folder = tmp_path_factory.mktemp("families")
    return {family.name: Renderer.from_directory(family.directory(folder)) for family in FAMILIES}


def told(events: list[Event]) -> list[tuple[str, str]]:
    """(name, argument text) of each call that was told in pieces."""
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, Begun):
            calls.append((event.name, ""))
        elif isinstance(event, Fragment):
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    return calls


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_fragments_join_to_the_arguments_of_the_call(
    family: Family, arguments: dict[str, object], renderers: dict[str, Renderer]
):
    renderer, parser = renderers[family.name], choose_parser(family.parser)
    ids = ["functions.look_up:0"] if family.parser == "kimi_k2" else ["c00000000"]
    said = Message("assistant", "", tuple(ToolCall(id, "look_up", arguments) for id in ids))
    text = renderer.decode(renderer.unstopped(renderer.completion_ids(said, TOOLS)))
    thinking = renderer.habits.thinks
    whole = parser.parse(text, tools=TOOLS, thinking=thinking)
    rng = random.Random(text)
    for size in (1, 3, len(text)):
        stream = parser.stream(tools=TOOLS, thinking=thinking, partial=True)
        events: list[Event] = []
        at = 0
        while at < len(text):
            step = rng.randint(1, size)
            events += stream.feed(text[at : at + step])
            at += step
        events += stream.close()
        assert collect(events) == whole
        pieces = told(events)
        if family.parser not in AS_JSON:
            assert pieces == []
            continue
        assert [(name, json.loads(raw)) for name, raw in pieces] == [(c.name, c.arguments) for c in whole.calls]


def test_arguments_come_before_their_call_is_complete():
    stream = choose_parser("hermes").stream(partial=True)
    seen: list[list[Event]] = []
    for piece in [
        '<tool_call>\n{"name": "wri',
        'te", "arguments": {"text": "one',
        " two",
        '"}',
        "}\n</tool_call>",
    ]:
        seen.append(stream.feed(piece))
    assert seen[:4] == [
        [],
        [Begun("write"), Fragment('{"text": "one')],
        [Fragment(" two")],
        [Fragment('"}')],
    ]
    assert [type(event) for event in seen[4]] == [ParsedCall]


def test_a_call_that_turns_out_malformed_does_not_come_as_text_again():
    text = '<tool_call>{"name": "add", "arguments": {"a": 1, }}</tool_call>'
    parser = choose_parser("hermes")
    whole = [*(plain := parser.stream()).feed(text), *plain.close()]
    assert [type(event) for event in whole] == [Malformed, Text]
    partial = [*(stream := parser.stream(partial=True)).feed(text), *stream.close()]
    assert [type(event) for event in partial] == [Begun, Fragment, Malformed]
    assert told(partial) == [("add", '{"a": 1, }')]


def test_a_name_inside_the_arguments_is_no_call():
    text = '<tool_call>{"arguments": {"name": "inner", "arguments": {}}, "name": "add"}</tool_call>'
    stream = choose_parser("hermes").stream(partial=True)
    events = [*stream.feed(text), *stream.close()]
    assert told(events) == []
    assert [event.name for event in events if isinstance(event, ParsedCall)] == ["add"]


def test_a_long_argument_costs_in_proportion_to_its_length():
    stream = choose_parser("hermes").stream(partial=True)
    stream.feed('<tool_call>{"name": "write", "arguments": {"text": "')
    pieces = sum(len(stream.feed("some words ")) for _ in range(20_000))
    assert pieces == 20_000
