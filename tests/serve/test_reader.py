"""What is told piece by piece is what is told at once, whatever bytes a policy samples."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers.decoders import ByteFallback, Fuse, Metaspace
from tokenizers.decoders import Sequence as Decoders

from agentrl.chat.detokenizer import Detokenizer
from agentrl.chat.template import Renderer
from agentrl.serve.reader import CallBegun, ContentDelta, MessageReader, TextReader
from agentrl.serve.turns import Incoming
from agentrl.types import Message, ToolCall
from tests.chat.families import FAMILIES
from tests.serve.serve_kit import TOOLS

PIECES = st.one_of(st.text(max_size=3).map(str.encode), st.binary(max_size=5))
BYTES = st.lists(PIECES, max_size=40).map(b"".join)
FALLBACK = Decoders([ByteFallback(), Fuse()])


def streamed(decode: Callable[[Iterable[int]], str], ids: Sequence[int]) -> str:
    detokenizer = Detokenizer(decode)
    return "".join([*(detokenizer.feed(id) for id in ids), detokenizer.close()])


def byte_ids(renderer: Renderer) -> dict[int, int]:
    """The id of each byte."""
    vocabulary = renderer.vocabulary
    tokens = {id: vocabulary.token_bytes(id) for id in range(vocabulary.size)}
    return {token[0]: id for id, token in tokens.items() if len(token) == 1}


@settings(deadline=None, max_examples=300)
@given(data=BYTES)
@example(data=b"\xff\xff\xff\xc3\xa9")
@example(data=b"\xff" * 70 + "\U0001f600".encode() + b"\xf0\x9f\x98")
@example(data=b"\xf0\x9f\x98" * 30 + "\U0001f600".encode())
def test_streamed_text_of_any_bytes_is_their_plain_text(renderer: Renderer, data: bytes):
    id_of = byte_ids(renderer)
    ids = [id_of[byte] for byte in data]
    assert renderer.decode(ids) == data.decode("utf-8", "replace")
    assert streamed(renderer.decode, ids) == renderer.decode(ids)
    plain, stream = TextReader(renderer), TextReader(renderer)
    told = [delta for id in ids for delta in stream.feed(id)] + stream.close()
    assert "".join(delta.text for delta in told if isinstance(delta, ContentDelta)) == renderer.decode(ids)
    plain.feed_all(ids)
    assert stream.text == plain.text


@settings(deadline=None)
@given(seed=st.lists(st.integers(0, 10**6), max_size=60))
def test_streamed_text_of_any_tokens_is_their_plain_text(renderer: Renderer, seed: list[int]):
    ids = [number % renderer.vocabulary.size for number in seed]
    assert streamed(renderer.decode, ids) == renderer.decode(ids)


@settings(deadline=None)
@given(text=st.text(max_size=20))
def test_a_decoder_that_writes_a_mark_for_each_byte_streams_whole_characters(text: str):
    def decode(ids: Iterable[int]) -> str:
        return FALLBACK.decode([f"<0x{id:02X}>" for id in ids])

    assert streamed(decode, list(text.encode())) == text


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 5), max_size=12))
@example(ids=[0, 5, 1])
def test_ids_without_text_change_nothing_around_them(ids: list[int]):
    """Models pad their vocabulary; a decoder drops the space of the first word only."""
    pieces = ["▁a", "▁b", "▁", "c", "d▁"]

    def decode(ids: Iterable[int]) -> str:
        return Metaspace().decode([pieces[id] for id in ids if id < len(pieces)])

    assert streamed(decode, ids) == decode(ids)


def test_what_makes_no_character_is_given_out_and_not_decoded_for_ever(renderer: Renderer):
    lengths: list[int] = []

    def decode(ids: Iterable[int]) -> str:
        lengths.append(len(list(ids)))
        return renderer.decode(ids)

    id = byte_ids(renderer)[0xFF]
    detokenizer = Detokenizer(decode)
    text = "".join(detokenizer.feed(id) for _ in range(500))
    assert len(text) == 497, "three may be a character yet"
    assert detokenizer.close() == "\ufffd" * 3
    assert max(lengths) < 100


WRITTEN = 'Let me see.<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


@settings(deadline=None)
@given(cut=st.integers(1, len(WRITTEN) - 1), size=st.integers(1, 20), tools=st.booleans(), one_call=st.booleans())
@example(cut=WRITTEN.index("add"), size=3, tools=False, one_call=False)
@example(cut=WRITTEN.index("name"), size=4, tools=True, one_call=True)
def test_a_stop_text_ends_an_answer_as_if_nothing_came_after_it(
    renderer: Renderer, cut: int, size: int, tools: bool, one_call: bool
):
    def read(text: str, *stops: str) -> Incoming:
        reader = MessageReader(
            renderer,
            tools=TOOLS if tools else (),
            stops=stops,
            read_calls=tools,
            one_call=one_call and tools,
            call_id=lambda index: f"call_{index}",
        )
        for id in renderer.vocabulary.encode_raw(text):
            reader.feed(id)
        reader.close()
        return reader.sent()

    stop = WRITTEN[cut : cut + size]
    assert read(WRITTEN, stop) == read(WRITTEN[: WRITTEN.index(stop)])


A, B = '{"name": "add", "arguments": {"a": 1}}', '{"name": "sub", "arguments": {"b": 2}}'
FORMS = [
    '{"arguments": {"a": 1}, "name": "add"}',
    '{"name": "add", "arguments": "{\\"a\\": 1}"}',
    '{"arguments": {"a": [1, {"name": "inner", "arguments": {}}]}, "name": "add"}',
    '{"name": 5, "arguments": {"a": 1}}',
    "null",
]
"""What may stand in a list of calls in place of A; the last two are no calls."""
MIXED = {
    "hunyuan": [f"<tool_calls>[{before}{form}, {B}]</tool_calls>" for form in FORMS for before in ("", f"{A}, ")],
    "mistral": [f"[TOOL_CALLS][{form}, {B}]" for form in FORMS],
    "llama3_json": [f"{form}; {B}".replace("arguments", "parameters") for form in FORMS[:4]],
    "deepseek_v31": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁call▁end｜>"
        '<｜tool▁call▁begin｜>sub<｜tool▁sep｜>{"b": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ],
    "deepseek_v3": [
        "<｜tool▁calls▁begin｜>"
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>'
        'function<｜tool▁sep｜>sub\n```json\n{"b": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ],
    "xlam": [f"[{A}, {B}]", f"[1, 2] is a list, and so is [{A}]", f"[5, {A}]"],
}
"""Well-formed calls next to others, by family."""


@pytest.mark.parametrize("name", MIXED)
def test_calls_next_to_one_in_another_form_come_once_and_in_their_order(name: str, tmp_path: Path):
    family = next(family for family in FAMILIES if family.name == name)
    renderer = Renderer.from_directory(family.directory(tmp_path))
    for text in MIXED[name]:
        ids = renderer.vocabulary.encode_raw(text)
        plain, stream = (MessageReader(renderer, tools=TOOLS, call_id=lambda index: f"call_{index}") for _ in "12")
        plain.feed_all(ids)
        for id in ids:
            stream.feed(id)
        for reader in (plain, stream):
            reader.close()
            sent = reader.sent()
            told = [
                (call.name, json.loads(raw))
                for call, raw in zip(sent.message.tool_calls, sent.raw_arguments, strict=True)
            ]
            parsed = renderer.parse(ids, tools=TOOLS, thinking=False, number=0)
            assert told == [(call.name, call.arguments) for call in parsed.tool_calls], text


@pytest.mark.parametrize("name", ["hunyuan", "mistral", "mistral_args", "deepseek_v31", "llama3_json", "granite"])
def test_a_client_that_wants_one_call_gets_the_first_one_of_a_list(name: str, tmp_path: Path):
    family = next(family for family in FAMILIES if family.name == name)
    renderer = Renderer.from_directory(family.directory(tmp_path))
    said = Message("assistant", "", tuple(ToolCall(f"c0000000{n}", "add", {"a": n, "b": 2}) for n in range(2)))
    ids = renderer.completion_ids(said, TOOLS)
    reader = MessageReader(renderer, tools=TOOLS, one_call=True, call_id=lambda index: f"call_{index}")
    told = [delta for id in ids for delta in reader.feed(id)] + reader.close()
    assert [delta.index for delta in told if isinstance(delta, CallBegun)] == [0]
    assert [json.loads(raw) for raw in reader.sent().raw_arguments] == [{"a": 0, "b": 2}]
    message = reader.message(0)
    assert message is not None
    assert [call.arguments for call in message.tool_calls] == [{"a": 0, "b": 2}]


def test_what_comes_after_the_only_call_is_not_in_its_message(tmp_path: Path):
    family = next(family for family in FAMILIES if family.name == "mistral_args")
    renderer = Renderer.from_directory(family.directory(tmp_path))
    text = '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]sub[ARGS]{"b": 2}[TOOL_CALLS]add[ARGS]{"a"'
    reader = MessageReader(renderer, tools=TOOLS, one_call=True, call_id=lambda index: f"call_{index}")
    for id in renderer.vocabulary.encode_raw(text):
        reader.feed(id)
    reader.close()
    message = reader.message(0)
    assert message is not None
    assert [call.name for call in message.tool_calls] == [call.name for call in reader.sent().message.tool_calls]
    assert message.parse_errors == ()
