"""The official client against the endpoint: everything it offers that the endpoint promises."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError
from serve_kit import TOOLS, call, serving

from agentrl.chat.template import Renderer
from agentrl.testing.engine import ScriptedEngine
from agentrl.types import Message

SCRIPT = [call(2, 3), Message("assistant", "The answer is 5.")]
ASKED: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "What is 2 plus 3?"}]},
]


def client(base_url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_a_tool_loop_ends_with_the_answer_on_the_tokens_of_one_transcript(renderer: Renderer, stream: bool):
    async with (
        serving(ScriptedEngine(renderer, SCRIPT, tools=TOOLS), renderer) as served,
        client(served.base_url) as sdk,
    ):
        messages: list[Any] = list(ASKED)
        for _ in range(2):
            if stream:
                async with sdk.chat.completions.stream(model="tiny", messages=messages, tools=TOOLS) as events:
                    completion = await events.get_final_completion()
            else:
                completion = await sdk.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
            (choice,) = completion.choices
            messages.append(choice.message)
            if choice.finish_reason != "tool_calls":
                break
            for asked in choice.message.tool_calls or ():
                arguments = json.loads(asked.function.arguments)
                result = str(arguments["a"] + arguments["b"])
                messages.append({"role": "tool", "tool_call_id": asked.id, "content": result})
        assert (choice.finish_reason, choice.message.content) == ("stop", "The answer is 5.")
        first, second = served.session.turns
        assert second.parent == first.number
        whole = tuple(second.branch.ids)
        assert whole[: len(first.branch.ids)] == tuple(first.branch.ids)


async def test_streamed_arguments_come_in_fragments_and_join_to_the_plain_answer(renderer: Renderer):
    async with (
        serving(ScriptedEngine(renderer, SCRIPT, tools=TOOLS), renderer) as served,
        client(served.base_url) as sdk,
    ):
        chunks = [
            chunk
            async for chunk in await sdk.chat.completions.create(
                model="tiny", messages=ASKED, tools=TOOLS, stream=True, stream_options={"include_usage": True}
            )
        ]
    pieces = [delta for chunk in chunks for choice in chunk.choices for delta in choice.delta.tool_calls or ()]
    assert (pieces[0].function.name, pieces[0].function.arguments) == ("add", "")
    assert pieces[0].id
    assert pieces[0].id.startswith("call_")
    assert len(pieces) > 3
    assert json.loads("".join(piece.function.arguments for piece in pieces)) == {"a": 2, "b": 3}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + chunks[-1].usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_the_responses_api_plays_the_same_loop(renderer: Renderer):
    tools: Any = [{"type": "function", "strict": True, **TOOLS[0]["function"]}]
    async with (
        serving(ScriptedEngine(renderer, SCRIPT, tools=TOOLS), renderer) as served,
        client(served.base_url) as sdk,
    ):
        items: list[Any] = [{"role": "user", "content": "What is 2 plus 3?"}]
        first = await sdk.responses.create(model="tiny", input=items, tools=tools, instructions="Be brief.")
        assert [item.type for item in first.output] == ["message", "function_call"]
        items += first.output
        called = first.output[1]
        items.append({"type": "function_call_output", "call_id": called.call_id, "output": "5"})
        async with sdk.responses.stream(
            model="tiny", input=items, tools=tools, instructions="Be brief."
        ) as events:
            numbers = [event.sequence_number async for event in events]
            second = await events.get_final_response()
        assert second.output_text == "The answer is 5."
        assert numbers == list(range(len(numbers)))
        assert served.session.turns[1].parent == served.session.turns[0].number
        assert second.usage is not None
        assert second.usage.input_tokens > first.usage.input_tokens


async def test_streamed_function_calls_of_the_responses_api_are_incremental(renderer: Renderer):
    tools: Any = [{"type": "function", "strict": True, **TOOLS[0]["function"]}]
    async with (
        serving(ScriptedEngine(renderer, SCRIPT, tools=TOOLS), renderer) as served,
        client(served.base_url) as sdk,
        sdk.responses.stream(model="tiny", input="What is 2 plus 3?", tools=tools) as stream,
    ):
        events = [event async for event in stream]
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(deltas) > 2
    assert json.loads("".join(deltas)) == {"a": 2, "b": 3}
    assert events[-1].type == "response.completed"


async def test_models_errors_and_headers_are_as_the_client_expects(renderer: Renderer):
    engine = ScriptedEngine(renderer, lambda turn: Message("assistant", "Yes."), max_context=200)
    async with serving(engine, renderer) as served, client(served.base_url) as sdk:
        assert [model.id async for model in sdk.models.list()] == ["tiny"]
        with pytest.raises(NotFoundError) as missing:
            await sdk.chat.completions.create(model="huge", messages=ASKED)
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        with pytest.raises(BadRequestError) as long:
            await sdk.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "word " * 900}])
        assert (long.value.code, long.value.param) == ("context_length_exceeded", "messages")
        with pytest.raises(BadRequestError) as penalty:
            await sdk.chat.completions.create(model="tiny", messages=ASKED, presence_penalty=1.0)
        assert (penalty.value.code, penalty.value.param) == ("unsupported_parameter", "presence_penalty")
        answer = await sdk.chat.completions.with_raw_response.create(
            model="tiny", messages=ASKED, n=2, extra_body={"store": True, "unheard_of": 1, "presence_penalty": 0}
        )
        assert answer.headers["x-request-id"].startswith("req_")
        completion = answer.parse()
        assert completion.system_fingerprint == "fp_test"
        assert [choice.message.content for choice in completion.choices] == ["Yes.", "Yes."]


async def test_text_completions_stop_at_a_stop_text(renderer: Renderer):
    engine = ScriptedEngine(renderer, lambda turn: "One. Two. Three.")
    async with serving(engine, renderer) as served, client(served.base_url) as sdk:
        answer = await sdk.completions.create(model="tiny", prompt=["a", "b"], stop=" Thr", echo=True)
        assert [choice.text for choice in answer.choices] == ["aOne. Two.", "bOne. Two."]
        assert {choice.finish_reason for choice in answer.choices} == {"stop"}
        pieces = [
            chunk.choices[0].text
            async for chunk in await sdk.completions.create(model="tiny", prompt="a", stop="Two", stream=True)
        ]
        assert "".join(pieces) == "One. "
