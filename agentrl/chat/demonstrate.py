"""Written conversations as transcripts: each assistant message as the completion it would have been."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.chat.roundtrip import calls_of
from agentrl.chat.template import Renderer
from agentrl.chat.transcript import Transcript
from agentrl.errors import TemplateError
from agentrl.types import Completion, Message


def completion_of(renderer: Renderer, message: Message, tools: Sequence[Mapping[str, Any]] = ()) -> Completion:
    """The ids with which a policy would have said `message`, the stop token included; log-probabilities are 0.

    Raises:
        TemplateError: the template does not write the message behind its own generation prompt, or what it writes
            reads as other calls.
    """
    [message] = with_ids(renderer, [message])
    ids = tuple(renderer.completion_ids(message, tools))
    read = renderer.parse(ids, tools=tools)
    if [call.name for call in read.tool_calls] != [call.name for call in message.tool_calls]:
        raise TemplateError(
            f"an assistant message calls {_names(message)}, and what the chat template writes of it reads as "
            f"{_names(read)} (by the parser {renderer.parser.name}): {renderer.decode(ids)!r}"
        )
    return Completion(ids, (0.0,) * len(ids), (0,) * len(ids), "stop")


def with_ids(renderer: Renderer, messages: Sequence[Message]) -> list[Message]:
    """`messages` with each call id that the parser's format does not allow replaced, in the tool's answer as well.

    Kimi K2 reads the tool's name in the id, Mistral's templates want nine letters and digits; a written
    conversation has the ids of the program that recorded it.
    """
    parser = renderer.parser
    new_ids: dict[str, str] = {}
    given = []
    count = 0
    for message in messages:
        calls = []
        for call in message.tool_calls:
            id = call.id if parser.takes_id(call.id, call.name) else parser.call_id(call.name, count)
            new_ids[call.id] = id
            calls.append(replace(call, id=id))
            count += 1
        answered = message.tool_call_id
        answered = new_ids.get(answered, answered) if answered is not None else None
        if tuple(calls) != message.tool_calls or answered != message.tool_call_id:
            message = replace(message, tool_calls=tuple(calls), tool_call_id=answered)
        given.append(message)  # the same object where nothing changes: turns find their segments by it
    return given


def _names(message: Message) -> str:
    return ", ".join(call.name for call in message.tool_calls) or "no tool"


def imitate(
    renderer: Renderer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
) -> Transcript:
    """Replay a conversation through a transcript: assistant messages become sampled segments.

    Raises:
        TemplateError: the template refuses these messages, or writes calls that read as others.
    """
    transcript = Transcript(renderer, tools)
    new: list[Message] = []
    for message in with_ids(renderer, messages):
        if message.role == "assistant":
            transcript.extend(new)
            completion = completion_of(renderer, message, tools)
            read = renderer.parse(completion.ids, tools=tools, thinking=transcript.thinking)
            if calls_of(read) != calls_of(message):
                raise TemplateError(
                    f"an assistant message with the arguments {[dict(c.arguments) for c in message.tool_calls]} "
                    f"is written by the chat template as {renderer.decode(completion.ids)!r}, which reads as "
                    f"{[dict(c.arguments) for c in read.tool_calls]} (by the parser {renderer.parser.name})"
                )
            transcript.complete(completion, message=message)
            new = []
        else:
            new.append(message)
    if new:
        transcript.extend(new)
    return transcript
