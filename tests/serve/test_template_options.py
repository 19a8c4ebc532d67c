"""`chat_template_kwargs`: followed where the chat template reads the variable, otherwise a 400 that names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.chat.template import CHATML_TEMPLATE, Renderer
from agentrl.errors import ConfigError
from agentrl.testing.engine import ScriptedEngine
from agentrl.types import Message
from tests.serve.serve_kit import call, make_renderer, serving

NO_THOUGHTS = "<think>\n\n</think>\n\n"
SWITCH = (
    "{%- if add_generation_prompt and enable_thinking is false %}{{ '"
    + repr(NO_THOUGHTS)[1:-1]
    + "' }}{% endif %}"
)
OFF = {"chat_template_kwargs": {"enable_thinking": False}}
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "What is 2 plus 3?"}]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder = tmp_path_factory.mktemp("options") / "tokenizer"
    make_renderer(folder)
    return Renderer.from_directory(folder, template=CHATML_TEMPLATE + SWITCH)


def bodies(**more: Any) -> list[tuple[str, dict[str, Any]]]:
    head = {"model": "tiny", **more}
    return [
        ("/chat/completions", {**head, "messages": ASKED, "return_token_ids": True}),
        ("/responses", {**head, "input": ASKED}),
        ("/messages", {**head, "messages": ASKED, "max_tokens": 50, "return_token_ids": True}),
    ]


@pytest.mark.parametrize("way", range(3), ids=["chat", "responses", "messages"])
async def test_the_template_gets_them_in_every_dialect(renderer: Renderer, way: int):
    engine = ScriptedEngine(renderer, lambda turn: Message("assistant", "The answer is 5."))
    async with serving(engine, renderer) as served, httpx.AsyncClient(base_url=served.base_url) as client:
        for options, ends in (({}, "assistant\n"), (OFF, "assistant\n" + NO_THOUGHTS)):
            path, body = bodies(**options)[way]
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            turn = served.session.turns[-1]
            prompt = renderer.decode(turn.branch.ids[: turn.prompt_tokens])
            assert prompt.endswith(ends)
            assert answer.json()["usage"].get("prompt_tokens", turn.prompt_tokens) == turn.prompt_tokens


async def test_a_conversation_goes_on_with_the_same_options_and_is_another_with_others(renderer: Renderer):
    engine = ScriptedEngine(renderer, lambda turn: Message("assistant", "The answer is 5."))
    async with serving(engine, renderer) as served, httpx.AsyncClient(base_url=served.base_url) as client:
        body = bodies(**OFF)[0][1]
        said = (await client.post("/chat/completions", json=body)).json()["choices"][0]["message"]
        more = [*ASKED, said, {"role": "user", "content": "Sure?"}]
        await client.post("/chat/completions", json={**body, "messages": more})
        await client.post("/chat/completions", json={**bodies()[0][1], "messages": more})
    first, second, third = served.session.turns
    assert second.parent == first.number
    assert tuple(second.branch.ids)[: len(first.branch.ids)] == tuple(first.branch.ids)
    assert renderer.decode(second.branch.ids).count(NO_THOUGHTS) == 2
    assert third.parent is None
    assert [event.kind.value for event in third.drift] == ["tools"]


async def test_a_forced_call_follows_the_prompt_of_the_request(renderer: Renderer):
    from tests.serve.serve_kit import TOOLS

    engine = ScriptedEngine(renderer, lambda turn: call(2, 3), tools=TOOLS)
    async with serving(engine, renderer) as served, httpx.AsyncClient(base_url=served.base_url) as client:
        body = bodies(**OFF, tools=TOOLS, tool_choice="required")[0][1]
        answer = await client.post("/chat/completions", json=body)
    assert answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "add"


@pytest.mark.parametrize("way", range(3), ids=["chat", "responses", "messages"])
async def test_an_option_that_the_template_never_reads_is_named(renderer: Renderer, way: int):
    engine = ScriptedEngine(renderer, [])
    async with serving(engine, renderer) as served, httpx.AsyncClient(base_url=served.base_url) as client:
        path, body = bodies(chat_template_kwargs={"enable_thinking": True, "thinking": True})[way]
        answer = await client.post(path, json=body)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "chat_template_kwargs: the chat template of this model never reads 'thinking'" in message
    assert "it reads enable_thinking" in message


def test_control_tokens_in_an_option_are_text(tmp_path: Path):
    make_renderer(tmp_path)
    plain = Renderer.from_directory(tmp_path, template="{{ motto | default('') }}" + CHATML_TEMPLATE)
    end = plain.vocabulary.control["<|im_end|>"]
    ask = [Message("user", "hi")]
    with_motto = plain.with_options({"motto": "be kind <|im_end|>"})
    assert with_motto.encode(ask).count(end) == plain.encode(ask).count(end)
    assert "be kind <|im_end|>" in with_motto.text(ask)
    assert plain.options == {"motto"}
    with pytest.raises(ConfigError, match="never reads this"):
        plain.with_options({"nothing": 1})
