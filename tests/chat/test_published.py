"""What published templates do that the families do not show: each test says which template does it."""

# ruff: noqa: E501 (templates)

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.chat.demonstrate import completion_of, imitate
from agentrl.chat.proof import prove
from agentrl.chat.roundtrip import TOOL
from agentrl.chat.template import CHATML_TEMPLATE, Renderer
from agentrl.chat.token_check import check_tokens
from agentrl.errors import TemplateError
from agentrl.types import Message, ToolCall
from tests.chat.chat_tokenizers import CHATML_MARKERS, CHATML_SPECIAL, make
from tests.chat.families import GEMMA, KIMI_K2, LISTED, Family

USER = Message("user", "u")
THOUGHT = Message("assistant", "Four.", reasoning="Two and two.")
NAMES = {family.name: family for family in LISTED}


def said(name: str = "look_up", *, number: int = 0, reasoning: str | None = None) -> Message:
    return Message(
        "assistant", "", tool_calls=(ToolCall(f"call0000{number}", name, {"query": "a"}),), reasoning=reasoning
    )


def answer(number: int = 0) -> Message:
    return Message("tool", f"r{number}", tool_call_id=f"call0000{number}", name="look_up")


def with_template(family: Family, folder: Path, template: str) -> Renderer:
    return Renderer.from_directory(family.directory(folder), template=template)


def test_reasoning_is_written_once_where_prompt_and_turn_open_the_block_differently(tmp_path: Path):
    """Axolotl's Qwen3: the prompt ends with an empty line that the turn does not have."""
    spaced = CHATML_TEMPLATE + "{%- if add_generation_prompt %}{{ '<think>\n\n' }}{%- endif %}"
    renderer = Renderer.from_directory(make(tmp_path, spaced, CHATML_SPECIAL, CHATML_MARKERS))
    ids = completion_of(renderer, THOUGHT).ids
    assert renderer.decode(ids) == "Two and two.\n</think>\n\nFour.<|im_end|>"
    assert renderer.parse(ids).reasoning == "Two and two."


def test_a_think_block_that_the_template_removes_is_not_put_into_the_text(tmp_path: Path):
    """Gemma 4 up to July 2026: it strips blocks from the text, and shows the reasoning of calls only."""
    stripping = GEMMA.template.replace(
        "m.reasoning_content is string", "m.reasoning_content is string and m.tool_calls"
    ).replace("{{ m.content | trim }}", "{{ m.content.split('<channel|>')[-1] | trim }}", 1)
    assert stripping.count("split") == 1
    renderer = with_template(GEMMA, tmp_path, stripping)
    assert not renderer.habits.inline_think
    assert not renderer.habits.inline_think_calls
    assert renderer.data(THOUGHT)["content"] == "Four."
    called = said(reasoning="I look.")
    assert renderer.parse(renderer.completion_ids(called, [TOOL]), tools=[TOOL]).reasoning == "I look."
    imitate(renderer, [USER, called, answer(), Message("assistant", "Four.")], [TOOL])
    with pytest.raises(
        TemplateError, match=r"has reasoning, which the chat template leaves out: .*'Four\.<turn\|>'"
    ):
        imitate(renderer, [USER, THOUGHT])


NUMBERED = """
{%- set ns = namespace(made=0, answered=0) %}
{%- if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls %}{{ '<|im_start|>assistant\n' }}
{%- if m.reasoning_content %}{{ '<|START_THINKING|>' + m.reasoning_content + '<|END_THINKING|>' }}{% endif %}{{ '<|START_ACTION|>[' }}
{%- for c in m.tool_calls %}
{{- '{"tool_call_id": "' + (ns.made | string) + '", "tool_name": "' + c.function.name + '", "parameters": ' + (c.function.arguments | tojson) + '}' }}
{{- ', ' if not loop.last }}{% set ns.made = ns.made + 1 %}{% endfor %}{{ ']<|END_ACTION|><|im_end|>' }}
{%- elif m.role == 'tool' %}{{ '<|im_start|>tool\n' + (ns.answered | string) + ': ' + m.content + '<|im_end|>' }}{% set ns.answered = ns.answered + 1 %}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
"""As Command R7B: calls and results are numbered through the conversation, only calls have a field for reasoning."""


def test_calls_that_a_template_numbers_get_the_number_that_follows(tmp_path: Path):
    family, template = NAMES["cohere"], NUMBERED.replace("\n{", "{").strip()
    renderer = with_template(family, tmp_path, template)
    assert renderer.parser.name == "cohere"
    assert renderer.habits.numbers_calls
    assert (renderer.habits.inline_think, renderer.habits.inline_think_calls) == (True, False)
    proof = prove(renderer)
    assert not [f for f in proof.findings if "thinking" not in f.shape], proof.findings
    messages = [
        USER,
        said(),
        answer(),
        said(number=1, reasoning="Again."),
        answer(1),
        Message("assistant", "Four."),
    ]
    transcript = imitate(renderer, messages, [TOOL])
    text = renderer.decode(transcript.ids)
    assert '"tool_call_id": "1"' in text
    assert "tool\n1: r1" in text
    assert not check_tokens(transcript).differences


def test_a_prompt_that_opens_the_think_block_only_after_a_result(tmp_path: Path):
    """Gemma 4 with enable_thinking."""
    opening = (
        GEMMA.template
        + "{%- if add_generation_prompt and messages[-1].role == 'tool' %}{{ '<|channel>thought\\n' }}{% endif %}"
    )
    renderer = with_template(GEMMA, tmp_path, opening)
    assert not renderer.habits.thinks
    proof = prove(renderer)
    assert proof.wrong == ()
    proof.require(tools=True)
    transcript = imitate(renderer, [USER, said(), answer(), THOUGHT], [TOOL])
    assert renderer.decode(transcript.ids).endswith("<|channel>thought\nTwo and two.<channel|>Four.<turn|>")
    assert not check_tokens(transcript).differences
    silent = imitate(renderer, [USER, said(), answer(), Message("assistant", "Four.")], [TOOL])
    assert renderer.decode(silent.ids).endswith("<|channel>thought\n<channel|>Four.<turn|>")


@pytest.mark.parametrize("where", ["m.tool_calls", "tools"])
def test_a_template_that_fails_at_calls_or_tools_is_named_as_the_cause(where: str, tmp_path: Path):
    """llama.cpp's Kimi K2 Thinking appends to a list, which the sandbox forbids; its R1 writes a generator as JSON."""
    failing = "{%- for m in messages %}{%- if WHERE %}{%- set _ = [].append(1) %}{%- endif %}{%- endfor %}"
    proof = prove(with_template(KIMI_K2, tmp_path, failing.replace("WHERE", where) + KIMI_K2.template))
    proof.require()
    with pytest.raises(TemplateError, match=r"writes no tool call that a policy could sample: a call: .*append"):
        proof.require(tools=True)


def test_a_template_that_reads_the_descriptions_of_parameters(tmp_path: Path):
    """Command R+ adds them to text."""
    reading = (
        "{%- for tool in tools or [] %}{%- for _, p in tool.function.parameters.properties | items %}"
        "{%- set _ = 'x' + p.description %}{%- endfor %}{%- endfor %}"
    )
    folder = make(tmp_path, reading + CHATML_TEMPLATE, CHATML_SPECIAL, CHATML_MARKERS)
    renderer = Renderer.from_directory(folder)
    assert not renderer.habits.inline_calls
    prove(renderer).require(tools=True)
