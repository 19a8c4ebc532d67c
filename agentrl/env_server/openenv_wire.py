"""OpenEnv's actions and observations as messages of an episode."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from agentrl.chat.messages import MessageFormatError, read_message, write_message
from agentrl.env.toolenv.observe import plain_text
from agentrl.env_server.served import SEND_MESSAGE, Json, JsonObject, RequestError, listed_tools
from agentrl.env_server.session import EnvSession, TurnResult
from agentrl.types import Image, Message, ToolCall

ACTION_SCHEMA: JsonObject = {
    "title": "CallToolAction",
    "description": "Call a tool. The type `list_tools` lists them; `message` sends an assistant message with "
    "`content` and `tool_calls`; `finish` ends the episode and scores it.",
    "type": "object",
    "properties": {
        "metadata": {"type": "object"},
        "type": {"const": "call_tool", "default": "call_tool"},
        "tool_name": {"type": "string"},
        "arguments": {"type": "object"},
    },
    "required": ["tool_name"],
}
OBSERVATION_SCHEMA: JsonObject = {
    "title": "CallToolObservation",
    "type": "object",
    "properties": {
        "done": {"type": "boolean"},
        "reward": {"type": "number"},
        "metadata": {"type": "object"},
        "tool_name": {"type": "string"},
        "result": {},
        "error": {},
    },
}
_KINDS = {"invalid_args": "invalid_args", "unknown_tool": "tool_not_found", "tool_timeout": "timeout"}
_TYPES = ("call_tool", "list_tools", "message", "finish")


def called(session: EnvSession, name: object, arguments: object) -> Message:
    """The assistant message of a call; `send_message` becomes one without a call.

    Raises:
        RequestError: no name, or arguments that are not an object.
    """
    given: object = {} if arguments is None else arguments
    if not isinstance(name, str) or not name:
        raise RequestError(f"tool_name {name!r}: must be the name of a tool")
    if not isinstance(given, Mapping):
        raise RequestError(f"arguments {given!r:.80}: must be an object")
    known = [tool["function"]["name"] for tool in session.tools]
    if name == SEND_MESSAGE and name not in known:
        text = given.get("text", "")
        if not isinstance(text, str):
            raise RequestError(f"{SEND_MESSAGE}: text {text!r:.80}: must be a string")
        return Message("assistant", text)
    return Message("assistant", tool_calls=(ToolCall(f"call_{session.turns}_0", name, dict(given)),))


async def step(session: EnvSession, action: JsonObject) -> JsonObject:
    """Apply an OpenEnv action.

    Raises:
        RequestError: it is not an action, or no episode is in progress.
        InfraError: the episode is lost.
    """
    kind = action.get("type", "call_tool")
    if kind not in _TYPES:
        raise RequestError(f"type {kind!r}: unknown; an action has one of the types {', '.join(_TYPES)}")
    if kind == "list_tools":
        tools = cast("list[Json]", listed_tools(session.tools, "input_schema"))
        return {"observation": {"tools": tools, "metadata": {}}, "reward": None, "done": False}
    if kind == "finish":
        return _payload({"messages": []}, await session.act(None))
    if kind == "message":
        message, unread = _message(session, action)
        return messages_payload(_with_ids(await session.act(message), unread))
    name = action.get("tool_name")
    result = await session.act(called(session, name, action.get("arguments")))
    return _payload(_call_observation(str(name), result), result)


def messages_payload(result: TurnResult) -> JsonObject:
    """A result with the env's messages: as text and in OpenAI's shape."""
    texts = {role: answer_text([m for m in result.messages if m.role == role]) for role in ("system", "user")}
    observation: JsonObject = {
        "prompt": texts["user"],
        "system": texts["system"],
        "messages": [write_message(message) for message in result.messages],
    }
    return _payload(observation, result)


def _message(session: EnvSession, action: JsonObject) -> tuple[Message, Sequence[str]]:
    """The message, and the ids of the calls whose arguments cannot be read: those are mistakes of the policy."""
    fields = {"role": "assistant", "content": action.get("content"), "tool_calls": action.get("tool_calls")}
    try:
        read = read_message(fields)
    except MessageFormatError as e:
        raise RequestError(str(e)) from None
    calls = [
        replace(call, id=f"call_{session.turns}_{number}") if call.id == f"call_{number}" else call
        for number, call in enumerate(read.message.tool_calls)
    ]
    errors = tuple(f"tool call {number}: {why}" for number, why in read.malformed.items())
    readable = tuple(call for number, call in enumerate(calls) if number not in read.malformed)
    message = Message("assistant", read.message.content, readable, parse_errors=errors)
    return message, [calls[number].id for number in read.malformed]


def _with_ids(result: TurnResult, unread: Sequence[str]) -> TurnResult:
    """The result with the answers to unreadable calls under their ids; an env does not know these."""
    ids, messages = iter(unread), []
    for message in result.messages:
        unnamed = message.role == "tool" and message.tool_call_id is None
        messages.append(replace(message, tool_call_id=next(ids, None)) if unnamed else message)
    return replace(result, messages=tuple(messages))


def _call_observation(name: str, result: TurnResult) -> JsonObject:
    text = answer_text(result.messages)
    outcome = result.calls[0].outcome if result.calls else "ok"
    content = answer_content(result.messages)
    shown: Json = text if len(content) == 1 else {"content": content}
    observation: JsonObject = {"tool_name": name, "result": shown, "error": None}
    if outcome != "ok":
        kind = _KINDS.get(outcome, "execution_error")
        message = text.removeprefix("Error: ")
        observation |= {"result": None, "error": {"error_type": kind, "message": message}}
    return observation


def answer_text(messages: Sequence[Message]) -> str:
    """The env's messages as one text."""
    return "\n\n".join(plain_text(message.content) for message in messages)


def answer_content(messages: Sequence[Message]) -> list[Json]:
    """The env's messages as MCP content: one text, then the images."""
    parts = [part for message in messages if not isinstance(message.content, str) for part in message.content]
    images: list[Json] = [
        {"type": "image", "data": base64.b64encode(part.data).decode(), "mimeType": part.mime_type}
        for part in parts
        if isinstance(part, Image)
    ]
    return [{"type": "text", "text": answer_text(messages)}, *images]


def _payload(observation: JsonObject, result: TurnResult) -> JsonObject:
    about = about_end(result)
    payload: JsonObject = {
        "observation": observation | {"metadata": about},
        "reward": result.reward,
        "done": result.done,
    }
    if about:
        payload["metadata"] = about
    return payload


def about_end(result: TurnResult) -> JsonObject:
    """The rewards by name, the total, and why the episode ended; empty before its end."""
    episode = result.episode
    if episode is None:
        return {}
    found: JsonObject = {
        "episode_reward": episode.reward,
        "rewards": dict(episode.rewards),
        "stop_reason": str(episode.stop_reason),
    }
    if episode.solved is not None:
        found["solved"] = episode.solved
    if episode.faults:
        found["faults"] = {name: text.partition("\n")[0] for name, text in episode.faults.items()}
    return found
