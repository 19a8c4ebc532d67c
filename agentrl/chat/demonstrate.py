"""Convert written conversations to transcripts, with each assistant message as a completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.chat.roundtrip import calls_of
from agentrl.chat.template import Renderer
from agentrl.chat.transcript import Transcript
from agentrl.errors import TemplateError
from agentrl.types import Completion, Message


def completion_of(
    renderer: Renderer,
    message: Message,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    after: Transcript | None = None,
) -> Completion:
    """Return the ids with which a policy would have sampled `message`, stop token included; logprobs are 0.

    Args:
        after: the conversation so far; None means one user message.

    Raises:
        TemplateError: the template does not write the message after its own generation prompt, or what it writes
            parses as different calls.
    """
    [message] = with_ids(renderer, [message])
    thinking, calls = (None, 0) if after is None else (after.thinking, after.calls)
    ids = tuple(renderer.completion_ids(message, tools, thinking=thinking, calls=calls))
    read = renderer.parse(ids, tools=tools, thinking=thinking)
    if [call.name for call in read.tool_calls] != [call.name for call in message.tool_calls]:
        raise TemplateError(
            f"an assistant message calls {_names(message)}, and what the chat template writes of it reads as "
            f"{_names(read)} (by the parser {renderer.parser.name}): {renderer.decode(ids)!r}"
        )
    return Completion(ids, (0.0,) * len(ids), (0,) * len(ids), "stop")


def with_ids(renderer: Renderer, messages: Sequence[Message]) -> list[Message]:
    """Return `messages` with each call id that the parser's format does not allow replaced, in tool results too.

    Kimi K2 reads the tool's name from the id and Mistral's templates require nine letters and digits, but a
    written conversation has the ids of the program that recorded it.
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
        given.append(message)  # the same object if nothing changes: turns find their segments by identity
    return given


def _names(message: Message) -> str:
    return ", ".join(call.name for call in message.tool_calls) or "no tool"


def imitate(
    renderer: Renderer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
) -> Transcript:
    """Replay a conversation through a transcript: assistant messages become sampled segments.

    Raises:
        TemplateError: the template refuses these messages, writes calls that parse as different ones, leaves out
            reasoning, or writes it where the prompt has closed the think block; or a text holds a think block.
    """
    transcript = Transcript(renderer, tools)
    given = with_ids(renderer, messages)
    # Some templates refuse what single turns do not show: two of the policy's in a row.
    renderer.render(given, tools)
    new: list[Message] = []
    for message in given:
        if message.role == "assistant":
            transcript.extend(new)
            completion = completion_of(renderer, message, tools, after=transcript)
            read = renderer.parse(completion.ids, tools=tools, thinking=transcript.thinking)
            if calls_of(read) != calls_of(message):
                raise TemplateError(
                    f"an assistant message with the arguments {[dict(c.arguments) for c in message.tool_calls]} "
                    f"is written by the chat template as {renderer.decode(completion.ids)!r}, which reads as "
                    f"{[dict(c.arguments) for c in read.tool_calls]} (by the parser {renderer.parser.name})"
                )
            closing = renderer.parser.think[1]
            if closing in renderer.vocabulary.control and closing in str(message.content):
                raise TemplateError(
                    f"an assistant message has {closing!r} in its text, where it is not the token that ends "
                    "a policy's reasoning: move the reasoning to `reasoning` (in a file `reasoning_content`)"
                )
            if closing and closing in str(read.content) and closing not in str(message.content):
                raise TemplateError(
                    "an assistant message has reasoning, which the generation prompt leaves no room for: after "
                    f"{renderer.decode(transcript.ids[-12:])!r} it is written as "
                    f"{renderer.decode(completion.ids)[:120]!r}, which reads as text; remove the reasoning, or "
                    "let the policy think (model.template_options)"
                )
            if str(message.reasoning or "").split() not in ([], str(read.reasoning or "").split()):
                raise TemplateError(
                    "an assistant message has reasoning, which the chat template leaves out: it is written as "
                    f"{renderer.decode(completion.ids)[:120]!r}; remove the reasoning, or use a template that "
                    "shows it"
                )
            transcript.complete(completion, message=message)
            new = []
        else:
            new.append(message)
    if new:
        transcript.extend(new)
    return transcript
