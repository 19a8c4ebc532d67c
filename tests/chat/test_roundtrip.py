"""No run starts with a template whose calls are not read; what a policy cannot sample is no demonstration."""

# ruff: noqa: E501 (templates)

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.chat.demonstrate import completion_of, imitate, with_ids
from agentrl.chat.jinja import compile_template, variables_of
from agentrl.chat.parsers import Parser
from agentrl.chat.proof import prove
from agentrl.chat.roundtrip import TOOL
from agentrl.chat.template import CHATML_TEMPLATE, Renderer
from agentrl.chat.token_check import TokenDrift, check_tokens
from agentrl.config import load_config
from agentrl.config.run import RolloutConfig
from agentrl.errors import ConfigError, TemplateError
from agentrl.rollout.renderer import load_renderer, own_parser, require_template
from agentrl.serve.reader import MessageReader
from agentrl.types import Message, ToolCall
from tests.chat.chat_tokenizers import CHATML_MARKERS, CHATML_SPECIAL, QWEN3, make, needs_qwen3
from tests.chat.families import (
    CHATML,
    FUNCTIONARY_V32,
    KIMI_K2,
    LISTED,
    LLAMA3_JSON,
    MISTRAL,
    MUSE_GLIMMER,
    QWEN3_CODER,
    QWEN25,
    Family,
)

CALLED = Message("assistant", "", tool_calls=(ToolCall("call00000", "look_up", {"query": "a", "limit": 2}),))
ANSWER = Message("tool", "3", tool_call_id="call00000", name="look_up")
BANG = QWEN25.template.replace("<tool_call>\\n", "!!CALL ").replace("\\n</tool_call>", " LLAC!!")
"""Calls in a format that nobody reads."""


def build(folder: Path, template: str, special: tuple[str, ...] = CHATML_SPECIAL) -> Path:
    return make(folder, template, special, CHATML_MARKERS)


def test_a_format_that_nothing_reads_stops_the_run_and_is_shown(tmp_path: Path):
    renderer = Renderer.from_directory(build(tmp_path, BANG))
    with pytest.raises(TemplateError, match=r"'!!CALL .* set model\.parser to the format"):
        require_template(renderer, [TOOL])
    require_template(renderer, [])


def test_a_named_parser_that_reads_something_else_stops_the_run(tmp_path: Path):
    renderer = Renderer.from_directory(QWEN25.directory(tmp_path), parser="glm")
    with pytest.raises(TemplateError, match=r"the parser glm \(model\.parser\) does not read"):
        require_template(renderer, [TOOL])


def test_a_parser_of_ones_own_reads_it(tmp_path: Path):
    file = tmp_path / "bang.py"
    file.write_text(
        "from agentrl.chat.parsers.lists import Hunyuan\n\n\nclass Bang(Hunyuan):\n"
        '    name = "bang"\n    blocks = (("!!CALL ", " LLAC!!"),)\n'
    )
    renderer = Renderer.from_directory(build(tmp_path / "model", BANG), parser=own_parser(f"{file}:Bang"))
    require_template(renderer, [TOOL])
    assert renderer.parse(renderer.completion_ids(CALLED, [TOOL]), tools=[TOOL]).tool_calls[0].arguments == {
        "query": "a",
        "limit": 2,
    }
    for spec, got in (("json:dumps", "a value of type function"), ("pathlib:Path", "the class Path")):
        with pytest.raises(ConfigError, match=rf"instance of agentrl\.chat\.parsers\.Parser, got {got}"):
            own_parser(spec)
    (tmp_path / "leaves.py").write_text("raise SystemExit(4)\n")
    with pytest.raises(ConfigError, match=r"model\.parser .*leaves\.py:1: SystemExit: 4"):
        own_parser(f"{tmp_path / 'leaves.py'}:Bang")


@pytest.mark.parametrize(
    ("parse", "said"),
    [
        (
            'raise KeyError("boom")',
            r"model\.parser .*bang\.py:Bang: raised while it was tried .* KeyError: 'boom'",
        ),
        ("return None", r"model\.parser .*bang\.py:Bang: raised while it was tried"),
    ],
)
def test_a_parser_of_ones_own_is_tried_before_the_run(tmp_path: Path, parse: str, said: str):
    (tmp_path / "bang.py").write_text(
        "from agentrl.chat.parsers.lists import Hunyuan\n\n\nclass Bang(Hunyuan):\n"
        f'    name = "bang"\n    blocks = (("!!CALL ", " LLAC!!"),)\n    def parse(self, *_, **__):\n        {parse}\n'
    )
    build(tmp_path / "model", BANG)
    path = tmp_path / "tools.yaml"
    path.write_text("env: a:B\nmodel: {path: model, parser: bang.py:Bang}\n")
    with pytest.raises(ConfigError, match=said):
        load_renderer(load_config(path), tmp_path / "model")
    path.write_text("env: a:B\nmodel: {path: model, parser: bang.py:Bong}\n")
    with pytest.raises(ConfigError, match=r"model\.parser .*has no 'Bong'; did you mean 'Bang'"):
        load_renderer(load_config(path), tmp_path / "model")
    path.write_text("env: a:B\nmodel: {path: model, parser: bong.py:Bang}\n")
    with pytest.raises(ConfigError, match=r"model\.parser: there is no file .*bong\.py; did you mean .*bang\.py"):
        load_config(path)


@pytest.mark.parametrize(
    ("parse", "said"),
    [
        ('raise KeyError("late")', r"bang\.py:Bang: parse raised KeyError: 'late' .* on 'odd'"),
        ("return text", r"bang\.py:Bang: parse must return agentrl\.chat\.parsers\.Parsed, got 'odd'"),
    ],
)
def test_a_parser_of_ones_own_that_fails_later_is_one_error(tmp_path: Path, parse: str, said: str):
    (tmp_path / "bang.py").write_text(
        "from agentrl.chat.parsers.lists import Hunyuan\n\n\nclass Bang(Hunyuan):\n"
        '    name = "bang"\n    blocks = (("!!CALL ", " LLAC!!"),)\n\n    def parse(self, text, **named):\n'
        f'        if text == "odd":\n            {parse}\n        return super().parse(text, **named)\n'
    )
    build(tmp_path / "model", BANG)
    path = tmp_path / "tools.yaml"
    path.write_text("env: a:B\nmodel: {path: model, parser: bang.py:Bang}\n")
    renderer = load_renderer(load_config(path), tmp_path / "model")
    assert renderer.read_text("fine").content == "fine"
    with pytest.raises(ConfigError, match=rf"(?s)model\.parser .*{said}"):
        renderer.read_text("odd")


@pytest.mark.parametrize("name", ["Bang", "BANG"])
def test_a_parser_of_ones_own_may_be_a_frozen_dataclass_or_an_instance(tmp_path: Path, name: str):
    (tmp_path / "bang.py").write_text(
        "from dataclasses import dataclass\n\nfrom agentrl.chat.parsers.lists import Hunyuan\n\n\n"
        '@dataclass(frozen=True)\nclass Bang(Hunyuan):\n    name = "bang"\n'
        '    blocks = (("!!CALL ", " LLAC!!"),)\n\n\nBANG = Bang()\n'
    )
    build(tmp_path / "model", BANG)
    path = tmp_path / "tools.yaml"
    path.write_text(f"env: a:B\nmodel: {{path: model, parser: bang.py:{name}}}\n")
    config = load_config(path)
    assert load_renderer(config, tmp_path / "model").read_text("fine").content == "fine"
    assert own_parser(config.model.parser).parse.__func__ is Parser.parse  # nothing was changed for others


def test_a_template_in_which_every_tool_conversation_is_refused_stops_the_run(tmp_path: Path):
    refusing = CHATML_TEMPLATE + (
        "{%- for m in messages %}{%- if m.role == 'tool' %}{{ raise_exception('no tools here') }}{%- endif %}{%- endfor %}"
    )
    renderer = Renderer.from_directory(build(tmp_path, refusing))
    require_template(renderer, [])
    with pytest.raises(TemplateError, match=r"renders no conversation in which a tool is called .*no tools here"):
        require_template(renderer, [TOOL])


def test_where_a_template_writes_no_calls_the_parser_does(tmp_path: Path):
    lfm2 = next(family for family in LISTED if family.name == "lfm2")
    start = lfm2.template.index("{%- if m.tool_calls %}")
    silent = lfm2.template[:start] + lfm2.template[lfm2.template.index("{{- '<|im_end|>", start) :]
    renderer = Renderer.from_directory(build(tmp_path, silent, lfm2.special))
    assert (renderer.parser.name, renderer.habits.inline_calls) == ("lfm2", True)
    require_template(renderer, [TOOL])
    row = imitate(renderer, [Message("user", "u"), CALLED, ANSWER, Message("assistant", "3")], [TOOL])
    assert '<|tool_call_start|>[look_up(query="a", limit=2)]<|tool_call_end|>' in renderer.decode(row.ids)


def test_python_words_are_values_where_the_schema_says_so(tmp_path: Path):
    shown = QWEN3_CODER.template.replace("v | tojson", "v | string")
    renderer = Renderer.from_directory(build(tmp_path, shown))
    assert renderer.round_trip.misread == ()
    text = "<tool_call>\n<function=look_up>\n<parameter=query>\nTrue\n</parameter>\n<parameter=exact>\nFalse\n</parameter>\n"
    text += "<parameter=since>\nNone\n</parameter>\n</function>\n</tool_call>"
    [call] = renderer.parser.parse(text, tools=[TOOL]).calls
    assert call.arguments == {"query": "True", "exact": False, "since": None}


@pytest.mark.parametrize(
    ("source", "read"),
    [
        ("{% set x = 1 %}{{ x }}", False),
        ("{% if a %}{% set x = 1 %}{% else %}{% set x = 2 %}{% endif %}{{ x }}", False),
        ("{% if a %}{% set x = 1 %}{% elif b %}{% set x = 2 %}{% else %}{% set x = 3 %}{% endif %}{{ x }}", False),
        ("{% if a %}{% set x = 1 %}{% elif b %}{% set x = 2 %}{% endif %}{{ x }}", True),
        ("{% if a %}{% set x = 1 %}{% elif x %}{% set x = 2 %}{% else %}{% set x = 3 %}{% endif %}{{ x }}", True),
        ("{% if x is not defined %}{% set x = 1 %}{% else %}{% endif %}{{ x }}", True),
        ("{% set x = x or 2 %}{{ x }}", True),
        ("{{ x }}{% set x = 2 %}", True),
        (
            "{% for m in 'ab' %}{% if a %}{% set x = 1 %}{% else %}{% set x = 2 %}{% endif %}{{ x }}{% endfor %}",
            False,
        ),
        ("{% for m in 'ab' %}{% set x = 1 %}{% endfor %}{{ x }}", True),
        ("{% for x in 'ab' %}{{ x }}{% else %}{{ x }}{% endfor %}{{ x }}", True),
        ("{% for m in 'ab' if x %}{{ m }}{% endfor %}", True),
        ("{% with x = x %}{{ x }}{% endwith %}", True),
        ("{% with x = 3 %}{{ x }}{% endwith %}", False),
        ("{% macro f(x, y=x) %}{{ x }}{% endmacro %}{{ f(1) }}", False),
        ("{% macro f(y) %}{{ x }}{% endmacro %}{{ f(1) }}", True),
        ("{% generation %}{% set x = 1 %}{% endgeneration %}{{ x }}", True),
        ("{% set y, x = 1, 2 %}{{ x }}", False),
    ],
)
def test_a_variable_is_read_if_it_changes_what_the_template_writes(source: str, read: bool):
    assert ("x" in variables_of(source)) is read
    render = compile_template(source)
    changed = [render(**given) != render(**given, x=7) for given in ({}, {"a": 1}, {"b": 1})]
    assert any(changed) is read


def test_a_variable_that_the_template_sets_itself_is_refused(tmp_path: Path):
    head = "{% if messages %}{% set motto = 'a' %}{% else %}{% set motto = 'b' %}{% endif %}{{ motto }}"
    folder = build(tmp_path, head + CHATML_TEMPLATE)
    with pytest.raises(ConfigError, match=r"template_options\.motto: has no effect, .* sets this variable before"):
        Renderer.from_directory(folder, variables={"motto": "c"})


def test_a_variable_that_the_template_never_reads_is_refused(tmp_path: Path):
    thinking = CHATML_TEMPLATE + "{%- if enable_thinking is defined and not enable_thinking %}<think>{%- endif %}"
    folder = build(tmp_path, thinking)
    user = [Message("user", "u")]
    off = Renderer.from_directory(folder, variables={"enable_thinking": False})
    assert off.text(user).endswith("<think>")
    assert not Renderer.from_directory(folder).text(user).endswith("<think>")
    with pytest.raises(ConfigError, match="never reads this; did you mean 'enable_thinking'"):
        Renderer.from_directory(folder, variables={"enable_thinkin": False})
    with pytest.raises(ConfigError, match="is set by the renderer"):
        Renderer.from_directory(folder, variables={"messages": []})


def test_a_template_that_needs_tools_is_probed_with_tools(tmp_path: Path):
    needing = QWEN25.template.replace("{%- if tools %}", "{{- tools | length }}{%- if tools %}", 1)
    renderer = Renderer.from_directory(build(tmp_path, needing))
    require_template(renderer, [TOOL])
    with pytest.raises(TemplateError):
        renderer.render([Message("user", "u")])


def test_the_system_prompt_in_the_last_user_turn_is_a_rewrite_and_trains(tmp_path: Path):
    """As Mistral-Nemo: after a tool's answer the system prompt is gone."""
    moving = (
        "{%- set s = messages[0].content if messages[0].role == 'system' else '' %}{%- for m in messages %}"
        "{%- if m.role == 'user' %}<|im_start|>user\n{{ s + '\n\n' if loop.last and s }}{{ m.content }}<|im_end|>\n"
        "{%- elif m.role == 'tool' %}<|im_start|>tool\n{{ m.content }}<|im_end|>\n"
        "{%- elif m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}{% for c in m.tool_calls %}<tool_call>\n"
        "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n"
        "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        "{%- if tools %}{%- endif %}"
    )
    renderer = Renderer.from_directory(build(tmp_path, moving))
    messages = [Message("system", "Be brief."), Message("user", "u"), CALLED, ANSWER, Message("assistant", "3")]
    transcript = imitate(renderer, messages, [TOOL])
    report = check_tokens(transcript, "ignore_strippable")
    assert report.worst is TokenDrift.HISTORY_REWRITE, [str(d) for d in report.differences]
    assert not report.failed
    assert check_tokens(transcript).failed
    assert any("system" in finding.shape for finding in prove(renderer).rewrites)


def test_a_demonstration_ends_where_a_completion_would(tmp_path: Path):
    """As Phi-3: the end of a conversation is no part of the answer."""
    trailing = CHATML_TEMPLATE + "{%- if not add_generation_prompt %}{{ '<|endoftext|>' }}{%- endif %}"
    renderer = Renderer.from_directory(build(tmp_path, trailing))
    ids = completion_of(renderer, Message("assistant", "Four.")).ids
    assert renderer.decode(ids) == "Four.<|im_end|>"


def test_an_opened_think_block_is_closed_once(tmp_path: Path):
    """As GLM-4.7: the prompt opens the block, a turn without a thought is written with its end only."""
    opened = CHATML_TEMPLATE.replace(
        "{%- if message.reasoning_content %}",
        "{%- if not message.reasoning_content %}{{ '</think>' }}{% endif %}{%- if message.reasoning_content %}",
    )
    assert opened != CHATML_TEMPLATE
    opened += "{%- if add_generation_prompt %}{{ '<think>' }}{%- endif %}"
    renderer = Renderer.from_directory(build(tmp_path, opened))
    text = renderer.decode(completion_of(renderer, Message("assistant", "Four.")).ids)
    assert text.count("</think>") == 1
    assert renderer.read_text(text).content == "Four."


def test_a_run_stops_by_default_where_many_episodes_fail():
    assert RolloutConfig().tokenization_stop_above == 0.2
    assert RolloutConfig(tokenization_check="disable").tokenization_stop_above == 0.2
    with pytest.raises(ValueError, match="has no effect"):
        RolloutConfig(tokenization_check="disable", tokenization_stop_above=0.5)


RECORDED = [
    Message("user", "u"),
    Message("assistant", "", tool_calls=(ToolCall("call_aB3", "look_up", {"query": "a"}), ToolCall("call_aB4", "look_up", {"query": "b"}))),
    Message("tool", "1", tool_call_id="call_aB3"),
    Message("tool", "2", tool_call_id="call_aB4"),
    Message("assistant", "", tool_calls=(ToolCall("call_aB5", "look_up", {"query": "c"}),)),
    Message("tool", "3", tool_call_id="call_aB5"),
    Message("assistant", "Done."),
]  # fmt: skip
"""With the ids of the program that recorded it."""


def test_a_demonstration_has_ids_that_the_format_reads(tmp_path: Path):
    """Kimi K2 reads the tool's name in a call's id: with the recorded ids no call of a demonstration is read."""
    renderer = Renderer.from_directory(KIMI_K2.directory(tmp_path))
    transcript = imitate(renderer, RECORDED, [TOOL])
    text = renderer.decode(transcript.ids)
    for number, said in enumerate("123"):
        assert f"<|tool_call_begin|>functions.look_up:{number}<|tool_call_argument_begin|>" in text
        assert f"## Return of functions.look_up:{number}\n{said}<|im_end|>" in text
    assert "call_aB" not in text
    assert not check_tokens(transcript).differences
    own = [
        replace(m, tool_calls=tuple(replace(c, id="functions.look_up:7") for c in m.tool_calls))
        for m in RECORDED[4:5]
    ]
    assert own[0].tool_calls == tuple(with_ids(renderer, own)[0].tool_calls)  # what the format reads stays


def test_a_demonstration_has_ids_that_mistral_takes(tmp_path: Path):
    """Mistral's templates refuse ids that are not nine letters and digits."""
    strict = "{%- for m in messages %}{%- for c in m.tool_calls or [] %}{%- if c.id | length != 9 %}{{ raise_exception('id') }}{% endif %}{%- endfor %}{%- endfor %}"
    renderer = Renderer.from_directory(MISTRAL.directory(tmp_path), template=strict + MISTRAL.template)
    transcript = imitate(renderer, RECORDED, [TOOL])
    assert [c.id for m in transcript.messages for c in m.tool_calls] == ["call00000", "call00001", "call00002"]
    assert [m.tool_call_id for m in transcript.messages if m.role == "tool"] == [
        "call00000",
        "call00001",
        "call00002",
    ]
    assert not check_tokens(transcript).failed


RESULTS_INSIDE = """
{{- bos_token }}{%- set ns = namespace(open=false) %}
{%- if tools %}{{ '<|system_start|>' + (tools | tojson) + '<|system_end|>' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ '[' + m.content + ']' }}
{%- elif m.role == 'assistant' %}
{%- if not ns.open %}{{ '<|assistant_start|>' }}{% set ns.open = true %}{% endif %}{{ m.content }}
{%- if m.tool_calls %}{{ '<|tools_prefix|>[' }}{% for c in m.tool_calls %}
{{- '{"' + c.function.name + '": ' + (c.function.arguments | tojson) + '}' }}{{ ', ' if not loop.last }}
{%- endfor %}{{ ']<|tools_suffix|>' }}{% else %}{{ '<|assistant_end|>' }}{% set ns.open = false %}{% endif %}
{%- else %}{{ '<|' + m.role + '_start|>' + m.content + '<|' + m.role + '_end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.open %}{{ '<|assistant_start|>' }}{% endif %}
"""


def test_a_stop_token_that_ends_the_calls_is_part_of_what_is_read(tmp_path: Path):
    """Apertus ends a completion at <|tools_suffix|>: the answer of the tool follows in the same turn."""
    roles = [f"<|{role}_{end}|>" for role in ("system", "user", "assistant") for end in ("start", "end")]
    special = ("<s>", *roles, "<|tools_prefix|>", "<|tools_suffix|>")
    template = "".join(line.strip() for line in RESULTS_INSIDE.splitlines())
    folder = make(tmp_path / "apertus", template, special, (), "<|assistant_end|>", {"bos_token": "<s>"})
    tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    ids = [t["id"] for t in tokens if t["content"] in ("<|assistant_end|>", "<|tools_suffix|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    renderer = Renderer.from_directory(folder)
    assert renderer.parser.name == "apertus"
    assert renderer.round_trip.readable
    assert {renderer.vocabulary.token(id) for id in renderer.stop_ids} == {"<|assistant_end|>", "<|tools_suffix|>"}
    prove(renderer).require(tools=True)
    call = Message("assistant", "Wait.", tool_calls=(ToolCall("call00000", "look_up", {"query": "a"}),))
    reader = MessageReader(renderer, tools=[TOOL], call_id=lambda n: f"call{n}")
    reader.feed_all(renderer.completion_ids(call, [TOOL]))
    reader.close()
    read = reader.message(0)
    assert read is not None
    assert [(c.name, dict(c.arguments)) for c in read.tool_calls] == [("look_up", {"query": "a"})]


@needs_qwen3
@pytest.mark.parametrize("think", [True, False])
def test_a_demonstration_thinks_only_where_the_prompt_lets_it(think: bool):
    renderer = Renderer.from_directory(QWEN3, variables={"enable_thinking": think})
    said = [Message("user", "Go."), Message("assistant", "Done.", reasoning="I see.")]
    if think:
        assert "<think>\nI see.\n</think>" in renderer.decode(imitate(renderer, said).ids)
        return
    with pytest.raises(TemplateError, match="has reasoning, which the generation prompt leaves no room for"):
        imitate(renderer, said)


@pytest.mark.parametrize("text", ["<think>\nI see.\n</think>\n\nDone.", "I see.</think>Done."])
def test_a_think_block_in_the_text_of_a_demonstration_is_refused(tmp_path: Path, text: str):
    """Text is never a control token, so the policy would learn to write the block in letters."""
    renderer = Renderer.from_directory(CHATML.directory(tmp_path))
    with pytest.raises(TemplateError, match="</think>' in its text, where it is not the token that ends"):
        imitate(renderer, [Message("user", "Go."), Message("assistant", text)])


def test_a_think_block_that_is_text_in_the_vocabulary_stays_in_the_text(tmp_path: Path):
    renderer = Renderer.from_directory(LLAMA3_JSON.directory(tmp_path))
    text = "<think>\nI see.\n</think>\n\nDone."
    written = imitate(renderer, [Message("user", "Go."), Message("assistant", text)])
    reasoned = imitate(renderer, [Message("user", "Go."), Message("assistant", "Done.", reasoning="I see.")])
    assert written.ids == reasoned.ids


def test_a_demonstration_that_the_template_refuses_as_a_whole_is_refused(tmp_path: Path):
    """Each turn alone can be written."""
    alternating = MISTRAL.template.replace(
        "{%- for m in messages %}",
        "{%- for m in messages %}{% if not loop.first and m.role == 'assistant' == messages[loop.index0 - 1].role %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}",
        1,
    )
    folder = make(tmp_path, alternating, MISTRAL.special, eos=MISTRAL.eos)
    said = [Message("user", "Go."), Message("assistant", "One."), Message("assistant", "Two.")]
    with pytest.raises(TemplateError, match=r"\[user assistant assistant\].*roles must alternate"):
        imitate(Renderer.from_directory(folder), said)


@pytest.mark.parametrize(
    ("family", "taken"), [(FUNCTIONARY_V32, ("all", "a b")), (MUSE_GLIMMER, ("user", "self"))]
)
def test_a_tool_whose_name_the_format_cannot_carry_is_refused(
    tmp_path: Path, family: Family, taken: Sequence[str]
):
    renderer = Renderer.from_directory(family.directory(tmp_path))
    require_template(renderer, [TOOL])
    for name in taken:
        tool = {"type": "function", "function": {**TOOL["function"], "name": name}}
        with pytest.raises(
            TemplateError,
            match=rf"the tool '{name}' cannot be called in the format {family.parser} of this chat template: a call: ",
        ):
            require_template(renderer, [TOOL, tool])


def test_a_template_may_write_the_calls_of_one_tool_in_its_own_way(tmp_path: Path):
    usual = "(call.function.arguments | tojson)"
    code = """('{"code": ' + (call.function.arguments.code | tojson) + '}')"""
    own = CHATML_TEMPLATE.replace(usual, f"({code} if call.function.name == 'run_code' else {usual})")
    assert own != CHATML_TEMPLATE
    renderer = Renderer.from_directory(CHATML.directory(tmp_path), template=own)
    parameters = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
    require_template(renderer, [{"type": "function", "function": {"name": "run_code", "parameters": parameters}}])
