"""The proof finds what a template does to earlier turns, for every family, and names the place."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.chat.proof import ProbeConversation, prove, shapes
from agentrl.chat.template import CHATML_TEMPLATE, Renderer
from agentrl.errors import TemplateError
from agentrl.types import Message
from tests.chat.chat_tokenizers import CHATML_MARKERS, CHATML_SPECIAL, make, needs_qwen3, qwen3
from tests.chat.families import CHATML, FAMILIES, GLM, HARMONY, Family
from tests.chat.test_check import DROPS_THINKING

ONE_WAY = {
    "harmony": "continues an assistant message after <|call|>",
    "functools": "reads as no tool",
    "xlam": "reads as no tool",
    "pythonic": "reads as no tool",
    "llama3_json": "reads as no tool",
}
"""Formats in which some messages cannot be said: two calls, or text and a call."""


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_what_each_family_appends_is_derived(family: Family, tmp_path: Path):
    renderer = Renderer.from_directory(family.directory(tmp_path))
    proof = prove(renderer)
    assert proof.wrong == ()
    refused = {f.shape for f in proof.refused}
    assert bool(proof.rewrites) != family.appends
    assert renderer.appends_only == family.appends
    if family.parser in ONE_WAY:
        assert all(ONE_WAY[family.parser] in f.became for f in proof.refused), refused
    else:
        assert refused == set()
        assert proof.turns == sum(m.role == "assistant" for s in (0, 1) for c in shapes(s) for m in c.messages)
    proof.require(tools=True)


def test_equal_renderers_share_a_proof_and_others_do_not(tmp_path: Path):
    folder = make(tmp_path, CHATML_TEMPLATE, CHATML_SPECIAL)
    one, other = Renderer.from_directory(folder), Renderer.from_directory(folder)
    proof = prove(one)
    assert prove(other) is proof
    assert one.appends_only
    assert other.appends_only
    (folder / "chat_template.jinja").write_text(DROPS_THINKING)
    changed = Renderer.from_directory(folder)
    assert prove(changed) is not proof
    assert not changed.appends_only
    chosen = Renderer.from_directory(folder, template="chatml", parser=one.parser.name)
    assert "(model.parser)" in str(prove(chosen)), "a chosen parser gets its own proof"


def test_the_shapes_are_all_there():
    names = " ".join(c.shape for c in shapes(0))
    for word in ("system", "tools", "parallel", "empty content", "unicode", "thinking", "error", "long", "users"):
        assert word in names


def test_a_rewrite_is_reported_with_message_and_token(tmp_path: Path):
    renderer = Renderer.from_directory(make(tmp_path, DROPS_THINKING, CHATML_SPECIAL, CHATML_MARKERS))
    thought = Message("assistant", "Four.", reasoning="Two and two.")
    messages = (Message("user", "2+2?"), thought, Message("user", "Sure?"), Message("assistant", "Yes."))
    proof = prove(renderer, [ProbeConversation("asked twice", messages)])
    [finding] = proof.rewrites
    assert (finding.message, finding.role) == (1, "assistant")
    start = renderer.decode(renderer.encode(messages)[: finding.token])
    assert start.endswith("<|im_start|>assistant\n")
    assert finding.was.startswith("<think>")
    assert finding.became.startswith("Four")
    assert "the template rewrites message 1 (assistant) from token" in proof.summary()
    assert "history: fork" in proof.summary()
    proof.require()
    assert prove(renderer).rewrites
    assert not renderer.appends_only


def test_a_template_without_closing_tokens_that_drops_thinking(tmp_path: Path):
    """As GLM-4.6 does: the next turn's first token ends a turn, and earlier thinking goes when the user speaks."""
    folder = GLM.directory(tmp_path)
    dropping = "{%- set last = namespace(user=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    dropping += "{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}" + GLM.template.replace(
        "(m.reasoning_content or '')",
        "(m.reasoning_content if m.reasoning_content and loop.index0 > last.user else '')",
    )
    proof = prove(Renderer.from_directory(folder, template=dropping))
    assert proof.wrong == proof.refused == ()
    assert {f.shape for f in proof.rewrites} == {"thinking, then the user again", "the same user turn twice"}


@needs_qwen3
def test_qwen3_rewrites_thinking_and_appends_otherwise():
    proof = prove(qwen3())
    assert proof.wrong == ()
    assert proof.refused == ()
    assert any(f.shape == "thinking, then the user again" for f in proof.rewrites)
    assert not any(f.shape == "thinking and tools" for f in proof.rewrites)
    assert prove(qwen3("chatml")).findings == ()


def test_the_project_template_only_appends(tmp_path: Path):
    proof = prove(Renderer.from_directory(CHATML.directory(tmp_path)))
    assert proof.findings == ()
    assert "the template only appends" in proof.summary()


def test_a_refused_conversation_is_told_from_a_wrong_one(tmp_path: Path):
    strict = CHATML_TEMPLATE + (
        "{%- for m in messages %}"
        "{%- if m.role == 'user' and loop.index0 > 0 and messages[loop.index0 - 1].role == 'user' %}"
        "{{ raise_exception('roles must alternate') }}{%- endif %}{%- endfor %}"
    )
    proof = prove(Renderer.from_directory(make(tmp_path, strict)))
    assert {f.shape for f in proof.findings} == {"consecutive users"}
    assert proof.refused[0].became.endswith("roles must alternate")
    proof.require()


def test_a_template_that_counts_turns_is_wrong_and_stops_the_run(tmp_path: Path):
    counting = CHATML_TEMPLATE.replace(
        "'<|im_start|>' + message.role", "'<|im_start|>' + message.role + ' ' + (loop.index | string)"
    )
    proof = prove(Renderer.from_directory(make(tmp_path, counting)))
    assert proof.wrong
    with pytest.raises(TemplateError, match=r"cannot be derived: .* message \d+ \(user\) from token \d+ on"):
        proof.require()


def test_a_template_that_ignores_tools_stops_a_run_that_offers_them(tmp_path: Path):
    silent = CHATML_TEMPLATE.replace("{%- if tools %}", "{%- if false %}")
    proof = prove(Renderer.from_directory(make(tmp_path, silent)))
    proof.require()
    with pytest.raises(TemplateError, match="ignores tools"):
        proof.require(tools=True)


def test_a_template_without_a_closing_token_stops_at_start(tmp_path: Path):
    plain = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
    with pytest.raises(TemplateError, match="does not end an assistant turn with a control token"):
        Renderer.from_directory(make(tmp_path, plain))


def test_a_template_that_reads_text_from_parts_only_is_named_as_such(tmp_path: Path):
    """Templates of LLaVA and SmolVLM show nothing of plain text."""
    parts = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% for part in m.content %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
        "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    with pytest.raises(TemplateError, match=r"leaves out the text of assistant messages; .* list of parts only"):
        Renderer.from_directory(make(tmp_path, parts))


def test_the_stop_tokens_of_gpt_oss_are_found_without_being_told(tmp_path: Path):
    renderer = Renderer.from_directory(HARMONY.directory(tmp_path))
    assert {renderer.vocabulary.token(id) for id in renderer.stop_ids} == {"<|return|>", "<|call|>"}
