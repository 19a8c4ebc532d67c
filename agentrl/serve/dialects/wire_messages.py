"""Convert messages and tools from the wire format, and back to JSON."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.chat.messages import MessageFormatError, read_message
from agentrl.chat.parsers.parser import unsound
from agentrl.serve.api_errors import invalid, unsupported
from agentrl.serve.dialects.wire import Json, WireMessage, WireTool
from agentrl.serve.turns import Incoming


def allowed_tools(tools: tuple[Json, ...], listed: object, mode: object) -> tuple[tuple[Json, ...], str]:
    """The tools that may be called, and the choice among them: `allowed_tools` names some of those offered.

    Args:
        tools: those offered.
        listed: what it lists, each as {"name": ...} or {"function": {"name": ...}}.
        mode: `auto` or `required`.

    Raises:
        ApiError: it lists none, or others than those offered.
    """
    flat = (
        [one.get("function", one) for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    )
    names = {str(one.get("name")) for one in flat if isinstance(one, dict)}
    if not names or not names <= {tool["function"]["name"] for tool in tools} or mode not in ("auto", "required"):
        text = "allowed_tools needs `mode` auto or required and `tools` that are among those offered"
        raise invalid("tool_choice", text)
    return tuple(tool for tool in tools if tool["function"]["name"] in names), str(mode)


def one_incoming(message: WireMessage, where: str, arguments: Sequence[str] = ()) -> Incoming:
    """Convert one message.

    Args:
        where: its place in the request.
        arguments: the places of its calls' arguments, if the dialect has them elsewhere.

    Raises:
        ApiError: it has no content, other content than text, or lacks the id of the call that it answers.
    """
    if message.content is None and message.role != "assistant":
        raise invalid(f"{where}.content", "is required")
    try:
        read = read_message(message.model_dump(exclude_none=True))
    except MessageFormatError as e:
        raise (unsupported if e.unsupported else invalid)(f"{where}.{e.path}", e.problem) from None
    if message.function_call is not None:
        raise unsupported(f"{where}.function_call", "was replaced by tool_calls")
    if message.role == "tool" and message.tool_call_id is None:
        raise invalid(f"{where}.tool_call_id", "is required: it names the call that this is the result of")
    for n in read.malformed:
        place = arguments[n] if arguments else f"{where}.tool_calls[{n}].function.arguments"
        return Incoming(read.message, read.raw_arguments, "must be a JSON object", place)
    return Incoming(read.message, read.raw_arguments)


def tools_of(tools: Sequence[WireTool] | None) -> tuple[Json, ...]:
    """Convert the tools of a request to the form in which envs offer theirs, so that the prompt is the same.

    Raises:
        ApiError: a tool is not a function, or two have the same name.
    """
    found: dict[str, Json] = {}
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
        shape: Json = {"name": function.name}
        if function.description is not None:
            shape["description"] = function.description
        if function.parameters is not None:
            shape["parameters"] = function.parameters
        found[function.name] = {"type": "function", "function": shape}
    return tuple(found.values())
