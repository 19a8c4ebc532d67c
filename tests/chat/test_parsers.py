"""Each parser reads what its family's template writes, and says precisely what is wrong with what it does not."""

# ruff: noqa: E501 (completions as a model writes them)

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agentrl.chat.parsers import Malformed, ParsedCall, Parser, choose_parser, collect, parser_names, signs_of
from agentrl.chat.proof import TOOLS
from agentrl.chat.template import Renderer
from agentrl.errors import ConfigError
from agentrl.types import Message, ToolCall
from tests.chat.families import FAMILIES, Family


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Renderer]:
    folder = tmp_path_factory.mktemp("families")
    return {family.name: Renderer.from_directory(family.directory(folder)) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_the_parser_is_read_off_the_template(family: Family, renderers: dict[str, Renderer]):
    assert renderers[family.name].parser.name == family.parser


def test_every_parser_has_a_family():
    assert {family.parser for family in FAMILIES} == set(parser_names()) - {"plain"}


def test_a_misspelt_parser_is_named_with_its_nearest_match():
    with pytest.raises(ConfigError, match="unknown name 'hermse'; did you mean 'hermes'"):
        choose_parser("hermse")


WHOLE = ("llama3_json", "pythonic", "xlam", "functools")
"""Formats in which a call is the whole answer."""

ARGUMENTS: list[dict[str, Any]] = [
    {"query": "plain"},
    {"query": 'quotes " and \\ back\\nslashes', "limit": 3},
    {"query": "line one\nline two\n\tindented", "limit": -1},
    {"query": "Grüße 日本語 👩‍🔬", "nested": {"a": [1, 2.5, None, True, {"b": []}]}},
    {"query": ""},
    {"query": "{'looks': [1]} <b>like</b> = code, (a, b)"},
    {"query": "3", "limit": 3},
    {},
]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_a_rendered_message_reads_back_as_itself(
    family: Family, arguments: dict[str, Any], renderers: dict[str, Renderer]
):
    if family.parser == "minimax_m3" and "nested" in arguments:
        pytest.skip("the format has neither null nor, without a schema, empty lists")
    renderer = renderers[family.name]
    content = "" if family.parser in WHOLE else "Let me see."
    id = "functions.look_up:0" if family.parser == "kimi_k2" else "c00000000"
    call = ToolCall(id, "look_up", arguments)
    message = Message("assistant", content, tool_calls=(call,), reasoning="Which?" if family.reasons else None)
    again = renderer.parse(renderer.completion_ids(message, TOOLS), tools=TOOLS)
    assert again.parse_errors == ()
    assert again.content == content
    assert [(c.name, c.arguments) for c in again.tool_calls] == [("look_up", arguments)]
    assert (again.reasoning or "") == (message.reasoning or "")


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.parser != "harmony"], ids=lambda f: f.name)
def test_parallel_calls_read_back_in_order_with_ids_of_their_own(family: Family, renderers: dict[str, Renderer]):
    renderer = renderers[family.name]
    ids = [f"functions.look_up:{n}" if family.parser == "kimi_k2" else f"c0000000{n}" for n in range(3)]
    calls = tuple(ToolCall(ids[n], "look_up", {"query": f"q{n}"}) for n in range(3))
    again = renderer.parse(renderer.completion_ids(Message("assistant", "", tool_calls=calls), TOOLS), tools=TOOLS)
    assert again.parse_errors == ()
    assert [c.arguments["query"] for c in again.tool_calls] == ["q0", "q1", "q2"]
    assert len({c.id for c in again.tool_calls}) == 3


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
@pytest.mark.parametrize(
    "text", ["", " ", "Just an answer.", " two  spaces \n and a line break\n", "a < b > c [d] {e}"]
)
def test_plain_text_comes_back_to_the_letter(family: Family, text: str, renderers: dict[str, Renderer]):
    parsed = renderers[family.name].parser.parse(text)
    assert (parsed.content, parsed.calls, parsed.errors, parsed.reasoning) == (text, (), (), None)


def spans(parser: Parser, text: str) -> list[str]:
    return [text[slice(*call.span)] for call in parser.parse(text, tools=TOOLS).calls]


def test_spans_show_where_each_call_stands():
    hermes = choose_parser("hermes")
    one = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    two = '<tool_call>{"name": "g", "arguments": {"x": 1}}</tool_call>'
    assert spans(hermes, f"<think>\nhm\n</think>\n\nSo:\n{one}\n{two}") == [one, two]
    llama = choose_parser("llama3_json")
    first, second = '{"name": "f", "parameters": {}}', '{"name": "g", "parameters": {"a": [1]}}'
    assert spans(llama, f"{first}; {second}") == [first, second]
    python = choose_parser("pythonic")
    assert spans(python, "[f(a=1), g()]") == ["f(a=1)", "g()"]


ERRORS = [
    ("hermes", "<tool_call>\n{'name': 'f'}\n</tool_call>", "tool call 1: not valid JSON: .*character 2"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>', "not valid JSON: .* near"),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "call of 'f': the key \"arguments\" is missing"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'the key "name" is missing'),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', '"name" must be text, got a number'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "must be a JSON object, got text"),
    ("hermes", '<tool_call>[{"name": "f", "arguments": {}}]</tool_call>', "must be a JSON object, got a list"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN is not JSON"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', "half of a surrogate pair"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [-1e999]}}</tool_call>', "a number is not finite"),
    ("hermes", '<tool_call>{"name": "f", "arg', "</tool_call> is missing: the call was cut off"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 99 + "]" * 99 + "}}</tool_call>", "nested more"),
    ("hermes", "<think>\nI should <tool_call>{}</tool_call>", r"not closed; 1 tool call\(s\) inside it were not"),
    ("qwen3_coder", "<tool_call>\nf(1)\n</tool_call>", "expected <function=name>, got 'f\\(1\\)'"),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>1</function></tool_call>", "argument 'a' is not closed"),
    ("glm", "<tool_call>\n<arg_key>a</arg_key></tool_call>", "expected the tool's name"),
    ("glm", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_val></tool_call>", "unexpected '<arg_key>a"),
    ("minimax_m2", '<minimax:tool_call><invoke name="f"></minimax:tool_call>', "</invoke> is missing"),
    ("minimax_m3", "]<]minimax[>[<tool_call>]<]minimax[>[<invoke name=\"f\">]<]minimax[>[<a>1]<]minimax[>[</b>"
     "]<]minimax[>[</invoke>]<]minimax[>[</tool_call>", "unexpected '</b>'"),
    ("minimax_m3", "]<]minimax[>[<tool_call>f()]<]minimax[>[</tool_call>", "expected \\]<\\]minimax.*got 'f\\(\\)'"),
    ("minicpm5", '<function name="f"><param name="a">1</function>', "argument 'a' is not closed by </param>"),
    ("muse_glimmer", ' to=f<|message|>{"a": 1}', "a message to 'f' must be one block <atem:function_calls>"),
    ("llama3_json", '{"name": "f", "parameters": {"a": }}', "not valid JSON: Expecting value"),
    ("llama3_json", '{"name": "f"}', 'the key "parameters" is missing'),
    ("pythonic", "[f(1)]", "call of 'f': arguments must be given as key=value at character 3"),
    ("pythonic", "[f(a=__import__('os'))]", "expected a value: text in quotes"),
    ("pythonic", "[f(a=1)", "expected ']'"),
    ("lfm2", "<|tool_call_start|>[a/b(n=1)]<|tool_call_end|>", "expected \\[name\\(key=value\\)\\]"),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": ]', "not valid JSON"),
    ("mistral", "[TOOL_CALLS]f[ARGS]nothing", "expected name\\[ARGS\\]"),
    ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "sep｜> is missing"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>f<｜tool▁calls▁end｜>", "no <｜tool▁call▁begin｜>"),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>"
     "<|tool_calls_section_end|>", "must look like functions.name:0"),
    ("harmony", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{", "tool call 1: call of 'f': argum"),
    ("gemma", '<|tool_call>call:f{a:<|"|>x}<tool_call|>', "text is not closed"),
    ("gemma", "<|tool_call>f(a=1)<tool_call|>", "expected call:name"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "error"), ERRORS)
def test_what_is_malformed_is_said_and_stays_in_the_content(name: str, text: str, error: str):
    parsed = choose_parser(name).parse(text, tools=TOOLS)
    assert parsed.calls == ()
    assert len(parsed.errors) == 1
    with pytest.raises(AssertionError, match=error):
        raise AssertionError(parsed.errors[0].message)
    if name not in ("harmony", "muse_glimmer") and "think" not in text:
        assert parsed.content == text


def test_one_bad_call_does_not_hide_the_good_ones():
    good = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parsed = choose_parser("hermes").parse(f"{good}<tool_call>oops</tool_call>{good}")
    assert [call.name for call in parsed.calls] == ["f", "f"]
    assert [error.message.split(":")[0] for error in parsed.errors] == ["tool call 2"]


def test_an_answer_that_only_looks_like_a_call_is_an_answer():
    for name, text in [
        ("llama3_json", '{"temperature": 3}'),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "[see](url)"),
    ]:
        parsed = choose_parser(name).parse(text)
        assert (parsed.content, parsed.calls, parsed.errors) == (text, (), ())


def test_calls_inside_a_closed_think_block_are_thoughts():
    parsed = choose_parser("hermes").parse(
        '<think>\nmaybe <tool_call>{"name": "f", "arguments": {}}</tool_call>\n</think>\n\nNo.'
    )
    assert (parsed.content, parsed.calls, parsed.errors) == ("No.", (), ())
    assert parsed.reasoning is not None
    assert parsed.reasoning.startswith("maybe <tool_call>")


def test_a_think_block_that_the_prompt_opened_is_reasoning():
    parsed = choose_parser("hermes").parse("so\n</think>\n\nYes.", thinking=True)
    assert (parsed.reasoning, parsed.content, parsed.errors) == ("so", "Yes.", ())


def test_a_closing_marker_inside_a_json_string_is_text():
    text = '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>\\" <tool_call>"}}</tool_call> done'
    parsed = choose_parser("hermes").parse(text)
    assert [call.arguments for call in parsed.calls] == [{"x": '</tool_call>" <tool_call>'}]
    assert parsed.content == "done"


@pytest.mark.parametrize("name", ["pythonic", "lfm2"])
def test_python_calls_take_names_with_hyphens(name: str):
    parser = choose_parser(name)
    wanted = ("get-weather", {"user-id": "u", "n": -1})
    [call] = parser.parse(parser.write([wanted])).calls
    assert (call.name, dict(call.arguments)) == wanted


def test_values_follow_the_schema_where_the_format_has_no_types():
    text = "<tool_call>look_up\n<arg_key>query</arg_key>\n<arg_value>12</arg_value>\n<arg_key>limit</arg_key>\n<arg_value>12</arg_value>\n</tool_call>"
    [call] = choose_parser("glm").parse(text, tools=TOOLS).calls
    assert call.arguments == {"query": "12", "limit": 12}


STREAMED = [
    ("hermes", '<think>\na\n\nb\n</think>\n\n Hi <b> \n<tool_call>\n{"name": "f", "arguments": {"x": "</tool_call>"}}\n</tool_call>\n\nbye <tool_call>{</tool_call> \n'),
    ("qwen3_coder", "x\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>y"),
    ("llama3_json", ' \n{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}'),
    ("pythonic", '[f(a=[1, "x"], b={"c": None})]'),
    ("mistral", "[THINK]t[/THINK]ok[TOOL_CALLS]f[CALL_ID]abc[ARGS]{\"a\": 1}[TOOL_CALLS]g[ARGS]{}"),
    ("deepseek_v3", "a<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
    ("harmony", "<|channel|>analysis<|message|>a < b<|end|><|start|>assistant<|channel|>final<|message|>x <| y"),
    ("harmony", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\": \"<|end\"}"),
    ("minimax_m2", 'so\n</think>\n\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n</invoke>\n</minimax:tool_call>'),
    ("muse_glimmer", ' to=self<|message|>hm<|eom|><|start|>assistant to=f<|message|><atem:function_calls>\n<atem:invoke name="f">\n</atem:invoke>\n</atem:function_calls>'),
    ("minimax_m3", '</mm:think>ok]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="f">]<]minimax[>[<a>]<]minimax[>[<item>1]<]minimax[>[</item>]<]minimax[>[</a>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>'),
    ("gemma", '<|channel>thought\nhm<channel|>ok<|tool_call>call:f{a:<|"|>b<|"|>,c:[1,true,{d:null}]}<tool_call|>'),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text"), STREAMED)
def test_reading_piece_by_piece_is_reading_at_once(name: str, text: str):
    parser = choose_parser(name)
    for thinking in (False, True):
        whole = parser.parse(text, tools=TOOLS, thinking=thinking)
        rng = random.Random(1)
        for trial in range(60):
            stream = parser.stream(tools=TOOLS, thinking=thinking)
            events, at = [], 0
            while at < len(text):
                step = 1 if trial == 0 else rng.randint(1, 9)
                events += stream.feed(text[at : at + step])
                at += step
            assert collect([*events, *stream.close()]) == whole


def test_a_stream_tells_early():
    stream = choose_parser("hermes").stream()
    seen = [type(e).__name__ for e in stream.feed("Let me ")] + [type(e).__name__ for e in stream.feed("see.\n")]
    assert seen == ["Text", "Text"]
    [call] = stream.feed('<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    assert isinstance(call, ParsedCall)
    stream.feed("<tool_call>{")
    assert any(isinstance(event, Malformed) for event in stream.close())


def test_signs_of_a_template_are_tried_first():
    signs = {
        "{{ '<|start_header_id|>' }}": ["llama3_json"],
        "{{ '<start_function_call>call:' }}": ["gemma"],
        "{{ '<|im_middle|>' }}": ["kimi_k2"],
        "{{ '<tool_call>{arg-key}<arg_key>' }}": ["glm", "hermes"],
        "no tools at all": [],
    }
    assert {t: [parser.name for parser in signs_of(t)] for t in signs} == signs


NUMBER = {"type": "integer"}
PLACE = {"type": "object", "properties": {"zip": {"type": "string"}, "floor": NUMBER}}
OF_TYPES: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "pair": {"type": "array", "prefixItems": [NUMBER, {"type": "string"}]},
        "place": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]},
        "groups": {
            "type": "array",
            "items": {"type": "object", "additionalProperties": {"type": "array", "items": NUMBER}},
        },
        "code": {"$ref": "#/$defs/Code"},
        "other_code": {"allOf": [{"$ref": "#/$defs/Code"}]},
        "name": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "other_name": {"$ref": "#/properties/name/anyOf/0"},
        "draft_7_pair": {"type": "array", "items": [NUMBER, {"type": "string"}]},
        "whole": {"$ref": "#"},
    },
    "allOf": [{"properties": {"branch": {"type": "string"}}}],
    "$defs": {"Place": PLACE, "Code": {"$ref": "#/$defs/Text"}, "Text": {"type": "string"}},
}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
@pytest.mark.parametrize(
    "arguments",
    [
        {"labels": {"year": "2024", "on": "true"}},
        {"pair": [1, "2"]},
        {"place": {"zip": "10115", "floor": 3}},
        {"groups": [{"a": []}, {"b": [1]}]},
        {"code": "12", "other_code": "true"},
        {"other_name": "12", "branch": "12"},
        {"draft_7_pair": [1, "2"], "whole": {"code": "12"}},
    ],
    ids=str,
)
def test_text_that_looks_like_another_value_is_read_by_its_schema(
    family: Family, arguments: dict[str, Any], renderers: dict[str, Renderer]
):
    """Inside objects, lists and unions, too, and behind references, as MCP servers send them."""
    renderer = renderers[family.name]
    tool = {"type": "function", "function": {"name": "f", "parameters": OF_TYPES}}
    message = Message("assistant", "", tool_calls=(ToolCall(renderer.parser.call_id("f", 0), "f", arguments),))
    [call] = renderer.parse(renderer.completion_ids(message, [tool]), tools=[tool]).tool_calls
    assert call.arguments == arguments


@pytest.mark.parametrize(
    ("text", "value"), [("007", "007"), ("+1", "+1"), ("1.", "1."), ("7", 7), ("1.5", 1.5), ("-3e2", -300.0)]
)
def test_only_a_number_in_json_is_one_where_text_is_allowed(text: str, value: object):
    either = {"anyOf": [{"type": "number"}, {"type": "string"}]}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"code": either}}}}
    call = f"<tool_call>\n<function=f>\n<parameter=code>\n{text}\n</parameter>\n</function>\n</tool_call>"
    assert choose_parser("qwen3_coder").parse(call, tools=[tool]).calls[0].arguments == {"code": value}


@pytest.mark.parametrize(
    "schema",
    [{"$ref": "#/$defs/Text"}, {"allOf": [{"$ref": "#/$defs/Text"}]}, {"anyOf": [{"type": "string"}, NUMBER]}],
)
def test_null_is_read_where_a_reference_or_union_is_nullable(schema: dict[str, Any]):
    """In OpenAPI 3.0, `nullable` is a key next to the type or the reference."""
    parameters = {"properties": {"code": schema | {"nullable": True}}, "$defs": {"Text": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    call = "<tool_call>\n<function=f>\n<parameter=code>\nnull\n</parameter>\n</function>\n</tool_call>"
    assert choose_parser("qwen3_coder").parse(call, tools=[tool]).calls[0].arguments == {"code": None}


@pytest.mark.parametrize("kind", [[{"type": "string"}], [["string"]], {"type": "string"}, 5, [None, "string"]])
def test_a_type_that_is_no_name_is_passed_over(kind: object):
    """MCP servers and clients send schemas; a wrong one is no reason to fail."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"code": {"type": kind}}}}}
    call = "<tool_call>\n<function=f>\n<parameter=code>\na b\n</parameter>\n</function>\n</tool_call>"
    assert choose_parser("qwen3_coder").parse(call, tools=[tool]).calls[0].arguments == {"code": "a b"}


def test_files_of_the_parsers_never_evaluate():
    folder = Path(__file__).parents[2] / "agentrl" / "chat" / "parsers"
    for file in folder.glob("*.py"):
        source = file.read_text()
        assert "eval(" not in source
        assert "exec(" not in source
