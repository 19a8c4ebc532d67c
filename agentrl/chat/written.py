"""A written assistant message as the completion that a policy would have sampled after the generation prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agentrl.chat.vocabulary import SENTINEL
from agentrl.errors import TemplateError
from agentrl.types import Message

if TYPE_CHECKING:
    from agentrl.chat.template import Renderer

_USER = Message("user", "u")
_THOUGHT = "\u2060thought\u2060"


def completion_ids(
    renderer: Renderer,
    message: Message,
    tools: Sequence[Mapping[str, Any]],
    *,
    thinking: bool | None = None,
    calls: int = 0,
) -> list[int]:
    """Return the ids from the end of the generation prompt to the first stop token, which ends what can be
    sampled.

    Args:
        thinking: whether the prompt has opened a think block; None means the template's default.
        calls: number of tool calls before the message in its conversation.

    Raises:
        TemplateError: the template does not write this message after its own generation prompt, or continues it
            after a stop token.
    """
    text = _after_prompt(renderer, message, tools, [renderer.data(_USER), *renderer.earlier(calls)])
    if thinking and not renderer.habits.thinks:  # Gemma 4 opens the block only behind a tool's result
        opening, closing = renderer.parser.think
        text = text.removeprefix(opening) if text.startswith(opening) else closing + text
    if not renderer.habits.closes_itself:
        answer = Message("tool", "t", tool_call_id=message.tool_calls[0].id) if message.tool_calls else None
        text += _next_turn(renderer, message, answer or _USER, tools)
    vocabulary, stop_ids = renderer.vocabulary, renderer.stop_ids
    for _, end, id in vocabulary.split_control(text):
        if id in stop_ids:
            if renderer.habits.closes_itself and _says_more(renderer, text[end:], tools):
                raise TemplateError(
                    f"the chat template continues an assistant message after {vocabulary.token(id)}, which ends a "
                    f"completion (it writes {vocabulary.unshield(text[end:])[:80]!r} there): a policy cannot "
                    "sample this message in one turn"
                )
            return vocabulary.encode(text[:end])
    raise TemplateError("the chat template does not end an assistant message with one of its stop tokens")


def _says_more(renderer: Renderer, text: str, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether `text`, which follows a stop token, is more than what the template writes after any message."""
    shown = renderer.render_data([renderer.data(_USER), {"role": "assistant", "content": SENTINEL}], tools)
    ends = (e for _, e, id in renderer.vocabulary.split_control(shown) if id in renderer.stop_ids)
    usual = next((shown[end:] for end in ends if end > shown.rfind(SENTINEL)), "")
    at, said = 0, ""
    for start, end, _ in renderer.vocabulary.split_control(text):
        said, at = said + text[at:start], end
    return text.strip() != usual.strip() and bool((said + text[at:]).strip())


def _next_turn(renderer: Renderer, message: Message, answer: Message, tools: Sequence[Mapping[str, Any]]) -> str:
    user = renderer.data(_USER)
    shown = renderer.render_data([user, renderer.stand_in(message, [answer]), renderer.data(answer)], tools)
    return renderer.after_sentinel(shown)[1][0]


def _after_prompt(
    renderer: Renderer,
    message: Message,
    tools: Sequence[Mapping[str, Any]],
    before: Sequence[Mapping[str, object]],
) -> str:
    """Return what the template writes for `message` after the generation prompt that follows `before`."""
    prompt = renderer.render_data(before, tools, generation_prompt=True)

    def whole(said: Message) -> str:
        return renderer.render_data([*before, renderer.data(said)], tools)

    written = whole(message)
    if written.startswith(prompt):
        return written[len(prompt) :]
    if not message.reasoning:
        # The prompt opens a think block that the template omits if there is no reasoning: write the block without
        # any.
        shown = whole(replace(message, reasoning=_THOUGHT))
        if shown.startswith(prompt) and shown.count(_THOUGHT) == 1:
            return shown[len(prompt) :].replace(_THOUGHT, "")
    common = _common(renderer, prompt, written)
    opening, closing = renderer.parser.think
    left_out = prompt[common:]
    if left_out.replace(opening, "").replace(closing, "").strip():
        if (start := _behind_same_end(renderer, prompt, written, tools)) is not None:
            return written[start:]
        raise TemplateError(
            "the chat template does not write an assistant message after its own generation prompt "
            f"{renderer.vocabulary.unshield(prompt[-60:])!r}; demonstrations cannot be rendered with it"
        )
    rest = written[common:]
    if renderer.habits.thinks and opening not in left_out and closing in rest:  # both open it, one with more space
        rest = rest[rest.find(closing) :]
    rest = _without_thought(rest, opening, closing)
    if not renderer.habits.thinks:
        return rest
    thought = renderer.vocabulary.shield(message.reasoning or "")
    return f"{thought}\n{closing}\n\n{rest}"


def _behind_same_end(
    renderer: Renderer, prompt: str, written: str, tools: Sequence[Mapping[str, Any]]
) -> int | None:
    """Return where the message starts in `written`, whose beginning was rewritten: after the end of the prompt
    too."""
    shown = renderer.render_data([renderer.data(_USER), {"role": "assistant", "content": SENTINEL}], tools)
    last = max((at for at, _, _ in renderer.vocabulary.split_control(prompt)), default=len(prompt))
    end = prompt[last:].strip()
    start = shown.rfind(end, 0, max(shown.find(SENTINEL), 0)) + len(end)
    if not end or start < len(end) or shown[start : shown.find(SENTINEL)].strip():
        return None
    return start if written.startswith(shown[:start]) else None


def _without_thought(text: str, opening: str, closing: str) -> str:
    """Return `text` without the think block, or the end of one, that it starts with."""
    body = text.lstrip("\n")
    if opening and body.startswith(opening) and closing in body:
        return body[body.find(closing) + len(closing) :].lstrip("\n")
    return body[len(closing) :].lstrip("\n") if closing and body.startswith(closing) else text


def _common(renderer: Renderer, prompt: str, written: str) -> int:
    """Return the length of the common prefix, not ending inside a control token of either."""
    n = next((i for i, (a, b) in enumerate(zip(prompt, written, strict=False)) if a != b), len(prompt))
    n = min(n, len(written))
    for text in (prompt, written):
        for start, end, _ in renderer.vocabulary.split_control(text):
            if start < n < end:
                n = start
    return n
