"""From the wire to messages and tools, and back to JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from agentrl.chat.parsers.base import unsound
from agentrl.serve.dialects.wire import Part, WireMessage, WireTool
from agentrl.serve.errors import invalid, unsupported
from agentrl.serve.session import Incoming
from agentrl.types import Message, ToolCall


def incoming_of(messages: Sequence[WireMessage], param: str = "messages") -> list[Incoming]:
    """The messages of a request.

    Raises:
        ApiError: content that is not text, or a tool result without the id of its call.
    """
    return [_incoming(message, f"{param}[{n}]") for n, message in enumerate(messages)]


def _incoming(message: WireMessage, where: str) -> Incoming:
    content = _text(message.content, f"{where}.content")
    if message.role == "tool":
        if message.tool_call_id is None:
            raise invalid(f"{where}.tool_call_id", "is required: it names the call that this is the result of")
        return Incoming(Message("tool", content, tool_call_id=message.tool_call_id, name=message.name))
    if message.role != "assistant":
        role = "system" if message.role == "developer" else message.role
        return Incoming(Message(role, content, name=message.name))
    calls, problem = [], ""
    for n, call in enumerate(message.tool_calls or ()):
        if call.type not in (None, "function"):
            raise unsupported(f"{where}.tool_calls[{n}].type", "only function calls are known")
        arguments = _object(call.function.arguments)
        if arguments is None:
            problem = f"tool_calls[{n}].function.arguments must be a JSON object"
        calls.append(ToolCall(call.id or f"call{n:05d}", call.function.name, arguments or {}))
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    said = Message("assistant", content, tuple(calls), name=message.name, reasoning=reasoning)
    return Incoming(said, tuple(call.function.arguments for call in message.tool_calls or ()), problem)


def _text(content: str | Sequence[Part] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for n, part in enumerate(content):
        if part.type in ("text", "input_text", "output_text") and part.text is not None:
            texts.append(part.text)
        elif part.type == "refusal" and part.refusal is not None:
            texts.append(part.refusal)
        elif part.type in ("text", "input_text", "output_text", "refusal"):
            raise invalid(f"{where}[{n}]", f"a part of type {part.type!r} needs its text")
        else:
            raise unsupported(f"{where}[{n}].type", f"{part.type!r} is not known: this policy reads text only")
    return "".join(texts)


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and not unsound(value) else None


def tools_of(tools: Sequence[WireTool] | None) -> tuple[dict[str, Any], ...]:
    """The tools of a request in the shape in which envs offer theirs, so that the prompt is the same.

    Raises:
        ApiError: a tool that is no function, or two of one name.
    """
    found: dict[str, dict[str, Any]] = {}
    for n, tool in enumerate(tools or ()):
        if tool.type != "function":
            raise unsupported(f"tools[{n}].type", f"{tool.type!r} is not known: only functions are")
        function = tool.function
        if function is None:
            raise invalid(f"tools[{n}].function", "is required")
        if function.name in found:
            raise invalid(f"tools[{n}].function.name", f"{function.name!r} is there twice")
        if problem := unsound(function.parameters or {}):
            raise invalid(f"tools[{n}].function.parameters", problem)
        shape: dict[str, Any] = {"name": function.name}
        if function.description is not None:
            shape["description"] = function.description
        if function.parameters is not None:
            shape["parameters"] = function.parameters
        found[function.name] = {"type": "function", "function": shape}
    return tuple(found.values())
