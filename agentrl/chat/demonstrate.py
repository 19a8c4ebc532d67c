"""Written conversations as transcripts: each assistant message as the completion it would have been."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.chat.template import Renderer
from agentrl.chat.transcript import Transcript
from agentrl.types import Completion, Message


def completion_of(renderer: Renderer, message: Message, tools: Sequence[Mapping[str, Any]] = ()) -> Completion:
    """The ids with which a policy would have said `message`, the stop token included; log-probabilities are 0.

    Raises:
        TemplateError: the template does not write the message behind its own generation prompt.
    """
    ids = tuple(renderer.completion_ids(message, tools))
    return Completion(ids, (0.0,) * len(ids), (0,) * len(ids), "stop")


def imitate(
    renderer: Renderer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
) -> Transcript:
    """Replay a conversation through a transcript: assistant messages become sampled segments.

    Raises:
        TemplateError: the template refuses these messages.
    """
    transcript = Transcript(renderer, tools)
    new: list[Message] = []
    for message in messages:
        if message.role == "assistant":
            transcript.extend(new)
            transcript.complete(completion_of(renderer, message, tools), message=message)
            new = []
        else:
            new.append(message)
    if new:
        transcript.extend(new)
    return transcript
