"""Whatever a policy writes: no exception, no hang, linear time, and piece by piece the same as at once."""

# ruff: noqa: E501 (completions as a model writes them)

from __future__ import annotations

import random
import time

import pytest

from agentrl.chat.parsers import Parser, choose_parser, collect, parser_names
from agentrl.chat.proof import TOOLS

PIECES = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<function=f>", "</function>", "<parameter=a>", "</parameter>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", '<invoke name="f">', "</invoke>", '<parameter name="a">',
    "<minimax:tool_call>", "</minimax:tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]",
    "<|python_tag|>", "<|python_start|>", "<|python_end|>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "```json", "```", "function",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
    "<|tool_call_argument_begin|>", "functions.f:0", "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>",
    "<|call|>", "<|return|>", "commentary to=functions.f ", "analysis", "<|tool_call>", "<tool_call|>", '<|"|>', "<escape>",
    "<start_function_call>", "<end_function_call>", "<|channel>thought\n", "<channel|>", "call:f", "f(", "a=", "a:",
    '{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "parameters": {}}', '{"name":', '"arguments":', '"', "'", "\\", "{",
    "}", "[", "]", "(", ")", ",", ":", ";", "\n", " ", "1", "-1e9", "NaN", "null", "True", "\\u12", "\\ud800", "é", "👩‍🔬", "\x00", "<", ">>>",
    "<|tool_call|>", "<|/tool_call|>", "functools", "<tool_calls>", "</tool_calls>", "<TOOLCALL>", "<|action_start|><|plugin|>",
    "<|action_end|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>", "<|python_start|>", "<|python_end|>", "all\n", "f\n",
    "]<]minimax[>[", "<tool_call>", "</invoke>", "<a>", "</a>", "<item>", "</item>", '<function name="f">', '<param name="a">', "</param>",
    "<![CDATA[", "]]>", " to=f<|message|>", " to=self", "<|eom|>", "<atem:function_calls>", "</atem:function_calls>",
    '<atem:invoke name="f">', "</atem:invoke>", '<atem:parameter name="a">', "</atem:parameter>",
    "<seed:tool_call>", "</seed:tool_call>", "<function=f>", "</function>", "<｜DSML｜invoke name=\"f\">", "<|tool_call_start|>",
]  # fmt: skip

PARSERS = [choose_parser(name) for name in parser_names()]


@pytest.mark.parametrize("parser", PARSERS, ids=lambda p: p.name)
def test_no_text_raises_and_streams_agree(parser: Parser):
    rng = random.Random(parser.name)
    for _ in range(600):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 24)))
        thinking = rng.random() < 0.2
        whole = parser.parse(text, tools=TOOLS, thinking=thinking)
        stream = parser.stream(tools=TOOLS, thinking=thinking)
        events, at = [], 0
        while at < len(text):
            step = rng.randint(1, 12)
            events += stream.feed(text[at : at + step])
            at += step
        assert collect([*events, *stream.close()]) == whole, text
        for found in (*whole.calls, *whole.errors):
            assert 0 <= found.span[0] <= found.span[1] <= len(text), text


@pytest.mark.parametrize("parser", PARSERS, ids=lambda p: p.name)
def test_a_sound_call_cut_or_damaged_anywhere_never_raises(parser: Parser):
    seeds = {
        "hermes": '<think>t</think><tool_call>{"name": "f", "arguments": {"a": "x"}}</tool_call>',
        "qwen3_coder": "<tool_call><function=f><parameter=a>x</parameter></function></tool_call>",
        "glm": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
        "llama3_json": '{"name": "f", "parameters": {"a": "x"}}; {"name": "f", "parameters": {}}',
        "pythonic": "[f(a='x', b=[1, {'c': None}]), g()]",
        "mistral": '[TOOL_CALLS]f[CALL_ID]x[ARGS]{"a": "x"}[TOOL_CALLS]g{}',
        "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        "harmony": "<|channel|>analysis<|message|>t<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        "<|constrain|>json<|message|>{}",
        "minimax_m3": ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="f">]<]minimax[>[<a>x]<]minimax[>[</a>]<]minimax[>[</invoke>]<]minimax[>[</tool_call>',
        "minicpm5": '<function name="f"><param name="a">x</param></function>',
        "muse_glimmer": ' to=self<|message|>t<|eom|><|start|>assistant to=f<|message|><atem:function_calls><atem:invoke name="f"><atem:parameter name="a">x</atem:parameter></atem:invoke></atem:function_calls>',
        "minimax_m2": '<minimax:tool_call><invoke name="f"><parameter name="a">x</parameter></invoke></minimax:tool_call>',
        "gemma": '<|tool_call>call:f{a:<|"|>x<|"|>,b:[1,{c:null}]}<tool_call|>',
        "granite": '<|tool_call|>[{"name": "f", "arguments": {"a": "x"}}, {"name": "g", "arguments": {}}]',
        "phi4_mini": '<|tool_call|>[{"name": "f", "arguments": {"a": "x"}}, {"name": "g", "arguments": {}}]<|/tool_call|>',
        "functools": 'functools[{"name": "f", "arguments": {"a": "x"}}, {"name": "g", "arguments": {}}]',
        "hunyuan": '<tool_calls>[{"name": "f", "arguments": {"a": "x"}}, {"name": "g", "arguments": {}}]</tool_calls>',
        "nemotron": '<TOOLCALL>[{"name": "f", "arguments": {"a": "x"}}, {"name": "g", "arguments": {}}]</TOOLCALL>',
        "xlam": '[{"name": "f", "arguments": {"a": "x"}}, {"name": "g", "arguments": {}}]',
        "gigachat": '<|function_call|>{"name": "f", "arguments": {"a": "x"}}',
        "internlm": '<|action_start|><|plugin|>{"name": "f", "parameters": {}}<|action_end|>',
        "apertus": '<|tools_prefix|>[{"f": {"a": "x"}}]<|tools_suffix|>',
        "cohere": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {}}]<|END_ACTION|>',
        "llama4_json": '<|python_start|>t<|python_end|>{"name": "f", "parameters": {"a": "x"}}',
        "lfm2": "<|tool_call_start|>[f(a='x', b=[1, {'c': None}]), g()]<|tool_call_end|>",
        "seed_oss": "<seed:tool_call><function=f><parameter=a>x</parameter></function></seed:tool_call>",
        "deepseek_v32": '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">x'
        "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>",
        "functionary_v31": '<function=f>{"a": "x"}</function>',
        "functionary_v32": 'all\nSo:>>>f\n{"a": "x"}>>>g\n{}',
    }
    if parser.name == "plain":
        assert parser.parse("<think>t</think>f()").content == "f()"
        return
    seed = seeds[parser.name]
    assert parser.parse(seed, tools=TOOLS).calls
    rng = random.Random(0)
    for at in range(len(seed)):
        parser.parse(seed[:at], tools=TOOLS)
        parser.parse(seed[at:], tools=TOOLS)
        parser.parse(seed[:at] + rng.choice(PIECES) + seed[at:], tools=TOOLS)
        parser.parse(seed[:at] + seed[at + 1 :], tools=TOOLS)


HOSTILE = [
    *PIECES,
    '<tool_call>{"', '<tool_call>{"a": "</tool_call>', "<tool_call>[", '<tool_call>{"name": "f", "arguments": {"a": [',
    "<tool_call><function=f><parameter=a>", "</parameter> ", "</arg_value> ", "<tool_call>f<arg_key>a</arg_key><arg_value>",
    "<tool_call> f ", "[TOOL_CALLS]f ", "[TOOL_CALLS]f[ARGS]{}", "[TOOL_CALLS][", '{"name": "f", "parameters": {}}; ',
    '{"name": "f", "parameters": {"a": ', "[f(a=", "[f(a='", "[f(), ", "<|tool_call>call:f{a:[", "<|tool_call>call:f{a:{b:",
    '<minimax:tool_call><invoke name="f">', "</invoke> <", "<|channel|>analysis<|message|>x<|end|><|start|>", "<|channel|><|",
    "<think></think>", "<think>\n", ">>>", ">>>f", ">>>f\n{}", "<function=f>", "<tool_calls>[", "functools[{", "<|tool_call|>", "[{'a': ", "\n\n", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
]  # fmt: skip
PREFIXES = {
    "hermes": "<tool_call>", "qwen3_coder": "<tool_call><function=f><parameter=a>", "glm": "<tool_call>f<arg_key>a</arg_key><arg_value>",
    "llama3_json": '{"name": "f", "parameters": {"a": ', "pythonic": "[f(a=", "mistral": "[TOOL_CALLS]",
    "deepseek_v3": "<｜tool▁calls▁begin｜>", "deepseek_v31": "<｜tool▁calls▁begin｜>", "kimi_k2": "<|tool_calls_section_begin|>",
    "harmony": "<|channel|>commentary to=functions.f<|message|>", "minimax_m2": "<minimax:tool_call>", "gemma": "<|tool_call>call:f{", "functionary_v32": ">>>f\n", "plain": "<think>",
    "muse_glimmer": " to=f<|message|><atem:function_calls>", "minimax_m3": ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="f">]<]minimax[>[<a>',
    "minicpm5": '<function name="f"><param name="a">', "xlam": '[{"name": "f", "arguments": {"a": ', "lfm2": "<|tool_call_start|>[f(a=", "functools": "functools[",
    "seed_oss": "<seed:tool_call><function=f><parameter=a>", "functionary_v31": '<function=f>{"a": "',
}  # fmt: skip


def cpu_seconds(parser: Parser, text: str, step: int) -> float:
    started = time.process_time()
    stream = parser.stream(tools=TOOLS)
    for at in range(0, len(text), step):
        stream.feed(text[at : at + step])
    stream.close()
    return time.process_time() - started


ALIKE = {"phi4_mini", "functools", "nemotron", "gigachat", "internlm", "seed_oss", "plain"}
"""Formats that another one's machine reads: the same code, other markers."""


def blocks(parser: Parser) -> tuple[tuple[str, str], ...]:
    """What stands before and after the calls of a format, where they are so marked."""
    return getattr(parser, "blocks", ())


MARKERS = {marker for parser in PARSERS for pair in blocks(parser) for marker in pair if len(marker) > 2}


def beginnings(parser: Parser, number: int, piece: str) -> tuple[str, ...]:
    """In and outside of a call; one of the two, by turns, where the piece is a marker of other formats only."""
    inside = PREFIXES.get(parser.name) or parser.blocks[0][0]
    own = {marker for pair in blocks(parser) for marker in pair if marker}
    foreign = any(m in piece for m in MARKERS) and not any(m in piece for m in own)
    return (("", inside)[number % 2],) if foreign else ("", inside)


@pytest.mark.parametrize("parser", [p for p in PARSERS if p.name not in ALIKE], ids=lambda p: p.name)
def test_time_is_linear_in_the_text(parser: Parser):
    for number, piece in enumerate(dict.fromkeys(HOSTILE)):
        for prefix in beginnings(parser, number, piece):
            for size, step in ((64_000, 64_000), (12_000, 16)):
                small, large = (prefix + piece * (length // len(piece)) for length in (size // 8, size))
                if cpu_seconds(parser, large, step) < 0.05:  # a quadratic pass takes seconds at this size
                    continue
                times = [min(cpu_seconds(parser, text, step) for _ in range(3)) for text in (small, large)]
                assert times[1] / times[0] < 24, (prefix, piece, step, times)  # linear: 8, quadratic: 64
