"""What renderings and encodings are remembered by: their content, and nothing less."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.chat import memo
from agentrl.chat.memo import Memo
from agentrl.chat.template import CHATML_TEMPLATE, Renderer
from agentrl.types import Message
from tests.chat.chat_tokenizers import make

TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"default": 1}}}


@pytest.fixture
def renderer(tmp_path: Path) -> Renderer:
    return Renderer.from_directory(make(tmp_path, CHATML_TEMPLATE))


def test_a_result_is_made_once_and_again_after_the_memo_was_full(monkeypatch):
    monkeypatch.setattr(memo, "MAX_CHARS", 10 + 2 * memo.ENTRY_CHARS)
    made: list[int] = []
    remembered: Memo[int] = Memo()

    def ask(n: int) -> int:
        return remembered(n, 4, lambda: made.append(n) or n)

    assert [ask(n) for n in (1, 2, 1, 2, 3, 3, 1)] == [1, 2, 1, 2, 3, 3, 1]
    assert made == [1, 2, 3, 1]


def test_prompts_that_differ_in_a_detail_are_rendered_apart(renderer: Renderer):
    user = Message("user", "1 + 1?")
    tool = {**TOOL, "function": {**TOOL["function"], "parameters": {"default": True}}}
    texts = [
        renderer.text([user], [TOOL], generation_prompt=True),
        renderer.text([user], [tool], generation_prompt=True),
        renderer.text([user], [TOOL]),
        renderer.text([Message("user", "1 + 1? ")], [TOOL]),
        renderer.text([user]),
    ]
    assert len(set(texts)) == 5
    assert '"default": 1' in texts[0]
    assert '"default": true' in texts[1]


def test_a_schema_that_was_changed_in_place_is_rendered_as_it_is_now(renderer: Renderer):
    tools = [{**TOOL, "function": dict(TOOL["function"])}]
    before = renderer.opening([Message("user", "?")], tools)
    assert renderer.opening([Message("user", "?")], tools) is before
    tools[0]["function"]["description"] = "Add numbers."
    after = renderer.opening([Message("user", "?")], tools)
    assert "Add numbers." in renderer.decode([id for piece in after.pieces for id in piece.ids])
