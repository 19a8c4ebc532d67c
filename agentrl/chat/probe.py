"""Determine once, at startup, how a chat template ends turns and which data format it expects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agentrl.chat.vocabulary import SENTINEL
from agentrl.errors import TemplateError
from agentrl.types import Message

if TYPE_CHECKING:
    from agentrl.chat.template import Habits, Renderer

Offered = Sequence[dict[str, Any]]

_USER = Message("user", "u")
_ASKED = "\u2060asked\u2060"
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "string", "description": "What."}},  # a few templates need one
            "required": ["x"],
        },
    },
}


def probe(renderer: Renderer, eos_ids: frozenset[int]) -> Habits:
    """Determine the properties of `renderer`'s template.

    Raises:
        TemplateError: it cannot render a user and an assistant message, or does not end the latter with a
            control token.
    """
    offered = _offered(renderer)
    json_arguments = _wants_json(renderer)
    ways: list[Offered] = [offered, [_TOOL]] if renderer.one_of_two and not offered else [offered]
    inline_think = _thinks_inline(renderer, ways, {})
    called = _with_call('{"x": "y"}' if json_arguments else {"x": "y"})
    in_content = renderer.habits.inline_calls or json_arguments is None
    habits = replace(
        renderer.habits,
        json_arguments=bool(json_arguments),
        shows_calls=renderer.habits.inline_calls or json_arguments is not None,
        inline_think=inline_think,
        inline_think_calls=inline_think if in_content else _thinks_inline(renderer, [[_TOOL]], called),
        needs_tools=bool(offered),
    )
    ends = [_closers(renderer, tools) for tools in ways]
    closers = frozenset(id for inside, _ in ends for id in inside)
    last = frozenset(id for _, newest in ends for id in newest)
    closes_itself = all(_closes(renderer, tools) for tools in ways)
    if closes_itself:
        last |= _call_end(renderer, habits.json_arguments)
    stop_ids = eos_ids | last
    if not closers:
        written = renderer.render_data([renderer.data(_USER), _assistant(), renderer.data(_USER)], offered)
        if SENTINEL not in written:
            raise TemplateError(
                "the chat template leaves out the text of assistant messages; templates of some models of images "
                "and text read it from a list of parts only: choose another template, such as "
                "model.chat_template: chatml"
            )
        after = renderer.vocabulary.unshield(written[written.rfind(SENTINEL) :])[:60]
        raise TemplateError(
            "the chat template does not end an assistant turn with a control token of this tokenizer "
            f"(after the assistant's text it writes {after!r}), so the end of a completion cannot be detected; "
            "use a template whose turns end with a special token"
        )
    opened = renderer.render([_USER], ways[-1], generation_prompt=True)
    opening, closing = renderer.parser.think
    habits = replace(
        habits,
        closers=closers | stop_ids,
        stop_ids=stop_ids,
        closes_itself=closes_itself,
        thinks=bool(opening) and opened.rfind(opening) > opened.rfind(closing),
    )
    habits = replace(habits, drops_tools=_drops_tools(renderer, habits))
    return replace(habits, numbers_calls=_numbers_calls(renderer, habits))


def _assistant(**data: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": SENTINEL, **data}


def _with_call(arguments: Any) -> dict[str, Any]:
    call = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _tool(renderer: Renderer) -> dict[str, Any]:
    return renderer.data(Message("tool", "t", tool_call_id="call00000", name="look"))


def _attempt(render: Callable[[], str]) -> str | None:
    try:
        return render()
    except TemplateError:
        return None


def _offered(renderer: Renderer) -> list[dict[str, Any]]:
    """Return no tools, or one if the template renders no conversation without any (`tool_use.jinja`)."""
    asked = [renderer.data(_USER)]
    alone = _attempt(lambda: renderer.render_data(asked, generation_prompt=True))
    return [] if alone is not None or _attempt(lambda: renderer.render_data(asked, [_TOOL])) is None else [_TOOL]


def _wants_json(renderer: Renderer) -> bool | None:
    """Whether calls need JSON text: False if objects show as JSON or XML, True if they fail or show as Python.

    None if it shows no call at all.
    """
    user = renderer.data(_USER)
    shown = _attempt(lambda: renderer.render_data([user, _with_call({"x": SENTINEL}), _tool(renderer)], [_TOOL]))
    if shown is not None and SENTINEL in shown and "{'x'" not in shown:
        return False
    text = f'{{"x": "{SENTINEL}"}}'
    shown = _attempt(lambda: renderer.render_data([user, _with_call(text), _tool(renderer)], [_TOOL]))
    return True if shown is not None and SENTINEL in shown else None


def _thinks_inline(renderer: Renderer, ways: Sequence[Offered], said: Mapping[str, Any]) -> bool:
    """Whether the newest turn shows reasoning only as a think block before the content, not in a separate field.

    False if it shows it neither way: a block that the template removes may leave traces.
    """
    thought = "r" + SENTINEL
    opening, closing = renderer.parser.think
    fields = dict.fromkeys(("reasoning_content", "thinking", "reasoning"), thought)
    block = {"content": f"{opening}\n{thought}\n{closing}\n\nc"}

    def shows(given: Mapping[str, Any]) -> bool:
        message = {**said, "role": "assistant", "content": "c", **given}
        conversation = [renderer.data(_USER), message]
        shown = [_attempt(lambda tools=tools: renderer.render_data(conversation, tools)) for tools in ways]  # type: ignore[misc]
        return all(text is not None and thought in text for text in shown)

    return not shows(fields) and shows(block)


def _closers(renderer: Renderer, offered: Offered) -> tuple[frozenset[int], frozenset[int]]:
    """Return ids of the first control token after an assistant's text: in any continuation, and in the newest
    turn.

    If the newest turn has none, the tokens that start the next turn stop it.
    """
    user, tool = renderer.data(_USER), _tool(renderer)
    base = [user, _assistant()]
    newest = _first_control(renderer, _attempt(lambda: renderer.render_data(base, offered)))
    inside = set()
    for following in (user, tool):
        shown = _attempt(lambda following=following: renderer.render_data([*base, following], offered))  # type: ignore[misc]
        inside.add(_first_control(renderer, shown))
    found = frozenset(id for id in {*inside, newest} if id is not None)
    last = found if newest is None else frozenset({newest})
    return found, last


def _closes(renderer: Renderer, offered: Offered) -> bool:
    shown = _attempt(lambda: renderer.render_data([renderer.data(_USER), _assistant()], offered))
    return _first_control(renderer, shown) is not None


def _call_end(renderer: Renderer, json_arguments: bool) -> frozenset[int]:
    """Return the token that ends a newest turn with a tool call, if it differs from other turns."""
    message = _with_call('{"x": "y"}' if json_arguments else {"x": "y"})
    shown = _attempt(lambda: renderer.render_data([renderer.data(_USER), message], [_TOOL]))
    shown = None if shown is None else shown.removesuffix(_generation_prompt(renderer))  # some always write it
    controls = list(renderer.vocabulary.split_control(shown)) if shown is not None else []
    if shown is None or not controls or shown[controls[-1][1] :].strip():
        return frozenset()
    return frozenset({controls[-1][2]})


def _generation_prompt(renderer: Renderer) -> str:
    """Return what the template adds for a generation prompt."""
    user = [renderer.data(Message("user", _ASKED))]
    asked = _attempt(lambda: renderer.render_data(user, [_TOOL], generation_prompt=True)) or ""
    before = _attempt(lambda: renderer.render_data(user, [_TOOL])) or ""
    if asked != before and asked.startswith(before):
        return asked[len(before) :]
    said = asked.rfind(_ASKED)
    ends = [end for start, end, _ in renderer.vocabulary.split_control(asked) if start > said]
    return asked[ends[0] :] if said >= 0 and len(ends) > 1 else ""


def _first_control(renderer: Renderer, shown: str | None) -> int | None:
    if shown is None or SENTINEL not in shown:
        return None
    tail = shown[shown.rfind(SENTINEL) :]
    return next((id for _, _, id in renderer.vocabulary.split_control(tail)), None)


def _drops_tools(renderer: Renderer, habits: Habits) -> bool:
    """Whether the text after a completion is the same with and without tools, so that tools can be omitted."""
    before, renderer.habits = renderer.habits, habits
    try:
        user = renderer.data(_USER)
        called = _with_call(f'{{"x": "{SENTINEL}"}}' if habits.json_arguments else {"x": SENTINEL})
        for conversation in ([user, _assistant(), user], [user, called, _tool(renderer)]):
            tails = []
            for tools in ([], [_TOOL]):
                shown = _attempt(
                    lambda c=conversation, t=tools: renderer.render_data(c, t, generation_prompt=True)  # type: ignore[misc]
                )
                tails.append(None if shown is None else shown[shown.rfind(SENTINEL) :])
            if tails[0] != tails[1]:
                return False
        return True
    finally:
        renderer.habits = before


def _numbers_calls(renderer: Renderer, habits: Habits) -> bool:
    """Whether the text after a call, with its result, depends on how many calls came before (Command R7B)."""
    before, renderer.habits = renderer.habits, replace(habits, numbers_calls=True)
    try:
        user = renderer.data(_USER)
        called = _with_call(f'{{"x": "{SENTINEL}"}}' if habits.json_arguments else {"x": SENTINEL})
        tails = []
        for calls in (0, 2):
            conversation = [user, *renderer.earlier(calls), called, _tool(renderer)]
            shown = _attempt(lambda c=conversation: renderer.render_data(c, [_TOOL], generation_prompt=True))  # type: ignore[misc]
            tails.append(None if shown is None else shown[shown.rfind(SENTINEL) :])
        return None not in tails and tails[0] != tails[1]
    finally:
        renderer.habits = before
