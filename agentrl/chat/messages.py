"""OpenAI's chat format, from JSON to `Message` and back: the only module that reads or writes it."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.chat.parsers.parser import unsound
from agentrl.types import Image, Message, Role, ToolCall

_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_TEXT = ("text", "input_text", "output_text")


class MessageFormatError(ValueError):
    """JSON that is not a chat message.

    Attributes:
        path: the field inside the message, such as `content[0].type`; empty for the message itself.
        problem: what is wrong with it.
        unsupported: the field is valid, but agentrl cannot read this kind of it.
    """

    def __init__(self, path: str, problem: str, *, unsupported: bool = False) -> None:
        super().__init__(f"{path}: {problem}" if path else problem)
        self.path, self.problem, self.unsupported = path, problem, unsupported


@dataclass(frozen=True, slots=True)
class ReadMessage:
    """A message as received.

    Attributes:
        message: its content; a call listed in `malformed` has no arguments here.
        raw_arguments: the JSON text of each call's arguments as sent.
        malformed: by position, why a call's arguments cannot be parsed.
    """

    message: Message
    raw_arguments: tuple[str, ...] = ()
    malformed: Mapping[int, str] = field(default_factory=dict)


def read_message(data: object) -> ReadMessage:
    """Read one message of the chat format.

    Content may be text or text parts. A call's arguments may be JSON text or an object; a call without an id gets
    one based on its position.

    Raises:
        MessageFormatError: a field is missing, of the wrong type, or not text.
    """
    if not isinstance(data, Mapping):
        raise MessageFormatError("", f"a message must be an object, got {data!r:.80}")
    role = _ROLES.get(str(data.get("role")))
    if role is None:
        raise MessageFormatError("role", f"must be one of {', '.join(_ROLES)}, got {data.get('role')!r:.80}")
    content, name = _text(data.get("content")), _optional(data, "name")
    listed = data.get("tool_calls") or ()
    if not isinstance(listed, list | tuple) or (listed and role != "assistant"):
        raise MessageFormatError("tool_calls", "must be a list in an assistant message")
    if role != "assistant":
        answered = _optional(data, "tool_call_id") if role == "tool" else None
        return ReadMessage(Message(role, content, tool_call_id=answered, name=name))
    calls: list[ToolCall] = []
    raw: list[str] = []
    malformed: dict[int, str] = {}
    for number, item in enumerate(listed):
        call, text, problem = _call(item, number)
        calls.append(call)
        raw.append(text)
        if problem:
            malformed[number] = problem
    content = content or _optional(data, "refusal") or ""
    reasoning = _optional(data, "reasoning_content")
    reasoning = reasoning if reasoning is not None else _optional(data, "reasoning")
    message = Message("assistant", content, tuple(calls), name=name, reasoning=reasoning)
    return ReadMessage(message, tuple(raw), malformed)


def read_well_formed(data: object) -> Message:
    """Read one message, raising for unreadable arguments as well.

    Raises:
        MessageFormatError: same as `read_message`, or a call's arguments are not a JSON object.
    """
    read = read_message(data)
    for number, problem in read.malformed.items():
        raise MessageFormatError(f"tool_calls[{number}]", problem)
    return read.message


def write_message(message: Message, *, extended: bool = False) -> dict[str, Any]:
    """Convert a message to the JSON of OpenAI's chat API.

    Args:
        message: any message; image parts become data URLs.
        extended: include `name` and `reasoning_content`, which not every endpoint accepts.
    """
    content: Any = message.content
    if not isinstance(content, str):
        content = [_part(part) for part in content]
    data: dict[str, Any] = {"role": message.role, "content": content}
    if message.tool_calls:
        data["content"] = content or None
        data["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        data["tool_call_id"] = message.tool_call_id
    if extended and message.name is not None:
        data["name"] = message.name
    if extended and message.reasoning is not None:
        data["reasoning_content"] = message.reasoning
    return data


def _text(content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise MessageFormatError("content", f"must be text or a list of text parts, got {content!r:.80}")
    texts: list[str] = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        field = "refusal" if kind == "refusal" else "text"
        if kind not in (*_TEXT, "refusal"):
            problem = f"{kind!r} is not supported: this policy reads text only"
            raise MessageFormatError(f"content[{number}].type", problem, unsupported=True)
        if not isinstance(part.get(field), str):
            raise MessageFormatError(f"content[{number}]", f"a part of type {kind!r} needs its text")
        texts.append(part[field])
    return "".join(texts)


def _optional(data: Mapping[str, Any], name: str) -> str | None:
    value = data.get(name)
    if value is None or isinstance(value, str):
        return value
    raise MessageFormatError(name, f"must be text, got {value!r:.80}")


def _call(data: object, number: int) -> tuple[ToolCall, str, str]:
    """Return a call, the text of its arguments, and why they cannot be parsed."""
    where = f"tool_calls[{number}]"
    kind = data.get("type") if isinstance(data, Mapping) else None
    if kind not in (None, "function"):
        raise MessageFormatError(f"{where}.type", "only function calls are supported", unsupported=True)
    function = data.get("function", data) if isinstance(data, Mapping) else None
    if not isinstance(data, Mapping) or not isinstance(function, Mapping):
        raise MessageFormatError(
            where, f'must be {{"function": {{"name": ..., "arguments": ...}}}}, got {data!r:.80}'
        )
    if not isinstance(function.get("name"), str):
        raise MessageFormatError(f"{where}.function.name", f"must be text, got {function.get('name')!r:.80}")
    sent = function.get("arguments")
    sent = {} if sent is None else sent
    text = sent if isinstance(sent, str) else json.dumps(sent, ensure_ascii=False, default=repr)
    value, problem = _arguments(sent)
    return ToolCall(str(data.get("id") or f"call{number:05d}"), function["name"], value), text, problem


def _arguments(sent: object) -> tuple[dict[str, Any], str]:
    """Parse the arguments; return empty arguments and the problem if they are invalid."""
    value = sent
    if isinstance(sent, str):
        try:
            value = json.loads(sent) if sent.strip() else {}
        except RecursionError:
            return {}, "the arguments are nested too deeply"
        except ValueError as e:
            return {}, f"the arguments are not JSON: {e}"
    if not isinstance(value, Mapping):
        return {}, f"the arguments must be a JSON object, got {str(sent)[:80]}"
    problem = unsound(value)
    return ({}, f"the arguments cannot be used: {problem}") if problem else (dict(value), "")


def _part(part: str | Image) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    url = f"data:{part.mime_type};base64,{base64.b64encode(part.data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}
