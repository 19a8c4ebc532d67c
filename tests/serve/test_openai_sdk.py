"""The official client against the endpoint: everything it offers that the endpoint promises."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from agentrl.chat.template import Renderer
from agentrl.testing.engine import ScriptedEngine
from agentrl.types import Message
from tests.serve.serve_kit import TOOLS, call, forget_all, serving

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


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_a_malformed_call_is_the_only_one_where_one_is_allowed(renderer: Renderer, stream: bool):
    good, bad = ('{"name": "add", "arguments": {"a": ' + a + ', "b": 2}}' for a in ("1", ""))
    script = ["\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in (bad, good))]
    asked: dict[str, Any] = {"model": "tiny", "messages": ASKED, "tools": TOOLS, "parallel_tool_calls": False}
    async with (
        serving(ScriptedEngine(renderer, script, tools=TOOLS), renderer) as served,
        client(served.base_url) as sdk,
    ):
        if stream:
            chunks = [chunk async for chunk in await sdk.chat.completions.create(**asked, stream=True)]
            pieces = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
            assert {call.index for call in pieces} == {0}
            written = "".join(call.function.arguments for call in pieces)
        else:
            completion = await sdk.chat.completions.create(**asked)
            (one,) = completion.choices[0].message.tool_calls
            written = one.function.arguments
    assert written == '{"a": , "b": 2}'


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


async def test_metadata_comes_back_with_its_response(renderer: Renderer):
    sent = {str(n): "x" * 512 for n in range(15)} | {"k" * 64: ""}
    async with (
        serving(ScriptedEngine(renderer, lambda turn: SCRIPT[1]), renderer) as served,
        client(served.base_url) as sdk,
    ):
        plain = await sdk.responses.create(model="tiny", input="What?", metadata=sent)
        async with sdk.responses.stream(model="tiny", input="What?", metadata=sent) as stream:
            streamed = await stream.get_final_response()
        without = await sdk.responses.create(model="tiny", input="What?")
    assert (plain.metadata, streamed.metadata, without.metadata) == (sent, sent, {})


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


@pytest.mark.parametrize("said", ["<think>\nHm.\n</think>\n\n", "<think>\nHm.", "", "<think>\nHm.\n</think>\n\n5"])
async def test_a_streamed_response_has_the_items_of_a_plain_one(renderer: Renderer, said: str):
    engine = ScriptedEngine(renderer, lambda turn: said)
    async with serving(engine, renderer) as served, client(served.base_url) as sdk:
        plain = await sdk.responses.create(model="tiny", input="Hello?")
        async with sdk.responses.stream(model="tiny", input="Hello?") as stream:
            streamed = await stream.get_final_response()
    items = [
        [(item.type, [part.text for part in item.content]) for item in one.output] for one in (plain, streamed)
    ]
    assert items[0] == items[1]
    assert items[0][-1] == ("message", ["5" if said.endswith("5") else ""])


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


async def test_offsets_point_into_the_text_also_behind_characters_of_several_tokens(renderer: Renderer):
    text = "One 🎯 né. Two."
    engine = ScriptedEngine(renderer, lambda turn: text)
    async with serving(engine, renderer) as served, client(served.base_url) as sdk:
        (plain,) = (await sdk.completions.create(model="tiny", prompt="a", logprobs=1, max_tokens=99)).choices
        asked = sdk.completions.create(model="tiny", prompt="a", logprobs=1, max_tokens=99, stream=True)
        streamed = [c.choices[0].logprobs async for c in await asked if c.choices[0].logprobs]
    assert plain.text == text
    assert plain.logprobs is not None
    pairs = list(zip(plain.logprobs.tokens or (), plain.logprobs.text_offset or (), strict=True))
    assert any(token.startswith("bytes:") for token, _ in pairs)
    for token, at in pairs[:-1]:  # the last one ends the answer
        assert token.startswith("bytes:") or text[at:].startswith(token)
    assert [at for part in streamed for at in part.text_offset or ()] == plain.logprobs.text_offset


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_a_response_is_gone_on_from_by_its_id_with_the_tokens_that_were_sampled(
    renderer: Renderer, stream: bool
):
    tools: Any = [{"type": "function", "strict": True, **TOOLS[0]["function"]}]
    script = [*SCRIPT, Message("assistant", "Yes.")]
    async with (
        serving(ScriptedEngine(renderer, script, tools=TOOLS), renderer) as served,
        client(served.base_url) as sdk,
    ):

        async def ask(**options: Any) -> Any:
            options = {"model": "tiny", "tools": tools, "instructions": "Be brief.", **options}
            if not stream:
                return await sdk.responses.create(**options)
            async with sdk.responses.stream(**options) as events:
                return await events.get_final_response()

        first = await ask(input="What is 2 plus 3?")
        assert (first.store, first.previous_response_id) == (True, None)
        result = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "5"}
        second = await ask(input=[result], previous_response_id=first.id)
        assert (second.output_text, second.previous_response_id) == ("The answer is 5.", first.id)
        third = await ask(input="Sure?", previous_response_id=second.id)
        await ask(input="Sure?", previous_response_id=second.id, instructions="Be long.")
        turns = served.session.turns
        assert [turn.parent for turn in turns] == [None, 0, 1, None]
        assert [turn.matched for turn in turns] == ["opening", "name", "name", "fork"]
        assert [tuple(event.kind for event in turn.drift) for turn in turns[:3]] == [(), (), ()]
        assert {event.kind for event in turns[3].drift} == {"history"}
        for before, after in itertools.pairwise(turns[:3]):
            assert tuple(after.branch.ids[: len(before.branch.ids)]) == tuple(before.branch.ids)
        assert third.output_text == "Yes."


async def test_what_is_said_twice_is_told_apart_by_the_id_of_the_response(renderer: Renderer):
    engine = ScriptedEngine(renderer, lambda turn: Message("assistant", "Yes."))
    async with serving(engine, renderer) as served, client(served.base_url) as sdk:
        said = [await sdk.responses.create(model="tiny", input="Are you there?") for _ in range(2)]
        for number, one in enumerate(said):
            await sdk.responses.create(model="tiny", input="Sure?", previous_response_id=one.id)
            assert served.session.turns[-1].parent == number


async def test_a_response_that_is_not_here_is_a_400_that_says_so(renderer: Renderer):
    engine = ScriptedEngine(renderer, lambda turn: Message("assistant", "Yes."))
    async with serving(engine, renderer) as served, client(served.base_url) as sdk:
        unstored = await sdk.responses.create(model="tiny", input="Are you there?", store=False)
        stored = await sdk.responses.create(model="tiny", input="Are you there?")
        assert (unstored.store, stored.store) == (False, True)
        await sdk.responses.create(model="tiny", input="Sure?", previous_response_id=stored.id, store=False)
        forget_all(served.session)
        for id in ("resp_unknown", unstored.id, stored.id):
            with pytest.raises(BadRequestError) as missing:
                await sdk.responses.create(model="tiny", input="Sure?", previous_response_id=id)
            assert (missing.value.code, missing.value.param) == (
                "previous_response_not_found",
                "previous_response_id",
            )
            assert id in missing.value.message
        known = served.session._known
        assert not known.by_name
        assert not known.names
