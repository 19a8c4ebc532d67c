"""OpenAI's chat format, read and written in one place."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.chat.messages import MessageFormatError, read_message, read_well_formed, write_message
from agentrl.types import Image, Message, ToolCall

CALL = ToolCall("c1", "add", {"a": 1, "b": [True, None, "é"]})
MESSAGES = [
    Message("system", "Be brief."),
    Message("user", "1 + 1?", name="ann"),
    Message("assistant", "", (CALL,), reasoning="think"),
    Message("assistant", "so", (CALL, ToolCall("c2", "stop", {}))),
    Message("tool", "2", tool_call_id="c1", name="add"),
    Message("tool", "Error: not JSON"),
    Message("assistant", "2"),
]


@pytest.mark.parametrize("message", MESSAGES)
def test_what_is_written_is_read_back(message: Message):
    assert read_well_formed(write_message(message, extended=True)) == message


def test_only_extended_messages_have_fields_that_endpoints_may_refuse():
    assert write_message(MESSAGES[1]) == {"role": "user", "content": "1 + 1?"}
    assert "reasoning_content" not in write_message(MESSAGES[2])


def test_images_become_data_urls():
    written = write_message(Message("user", ("see", Image(b"abc"))))
    assert written["content"][0] == {"type": "text", "text": "see"}
    assert written["content"][1]["image_url"]["url"] == "data:image/png;base64,YWJj"


def test_other_spellings_are_read():
    parts = [{"type": "input_text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    assert read_message({"role": "developer", "content": parts}).message == Message("system", "ab")
    bare = {"role": "assistant", "tool_calls": [{"name": "add", "arguments": {"a": 1}}], "reasoning": "r"}
    assert read_message(bare).message == Message(
        "assistant", "", (ToolCall("call00000", "add", {"a": 1}),), reasoning="r"
    )
    assert read_message(bare).raw_arguments == ('{"a": 1}',)
    refused = {"role": "assistant", "content": None, "refusal": "I will not."}
    assert read_message(refused).message == Message("assistant", "I will not.")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("{", "are not JSON"),
        ("3", "must be a JSON object, got 3"),
        ([1], "must be a JSON object"),
        ('{"a":' * 100_000, "nested too deeply"),
        ('{"a": "\\ud83d"}', "surrogate"),
        ('{"a": NaN}', "not finite"),
    ],
)
def test_arguments_that_cannot_be_read_are_named_by_position(arguments: Any, problem: str):
    good = {"function": {"name": "a", "arguments": "{}"}}
    bad = {"id": "x", "function": {"name": "b", "arguments": arguments}}
    read = read_message({"role": "assistant", "tool_calls": [good, bad]})
    assert [call.name for call in read.message.tool_calls] == ["a", "b"]
    assert list(read.malformed) == [1]
    assert problem in read.malformed[1]
    with pytest.raises(MessageFormatError, match=r"tool_calls\[1\]: the arguments"):
        read_well_formed({"role": "assistant", "tool_calls": [good, bad]})


@pytest.mark.parametrize(
    ("data", "path", "unsupported"),
    [
        (3, "", False),
        ({"content": "x"}, "role", False),
        ({"role": ["user"]}, "role", False),
        ({"role": "user", "content": 3}, "content", False),
        ({"role": "user", "content": [{"type": "image_url"}]}, "content[0].type", True),
        ({"role": "user", "content": [{"type": "text"}]}, "content[0]", False),
        ({"role": "user", "name": 3}, "name", False),
        ({"role": "user", "tool_calls": [{"name": "a"}]}, "tool_calls", False),
        ({"role": "assistant", "tool_calls": "a"}, "tool_calls", False),
        ({"role": "assistant", "tool_calls": [{"type": "custom"}]}, "tool_calls[0].type", True),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "tool_calls[0].function.name", False),
        ({"role": "tool", "tool_call_id": 3}, "tool_call_id", False),
    ],
)
def test_an_error_names_the_field(data: Any, path: str, unsupported: bool):
    with pytest.raises(MessageFormatError) as caught:
        read_message(data)
    assert (caught.value.path, caught.value.unsupported) == (path, unsupported)
