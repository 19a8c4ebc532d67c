"""Turns sampled here are recognised however a client writes them back; all else is a branch of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.chat.template import CHATML_TEMPLATE, Renderer
from agentrl.chat.transcript import Transcript
from agentrl.serve.conversations import Conversations
from agentrl.serve.turns import DriftKind, Incoming, Matched, UnrenderableError
from agentrl.types import Message
from tests.serve.serve_kit import TOOLS, call, forget_all, incoming, make_renderer, said

OPENING = [incoming("system", "Be brief."), incoming("user", "What is 2 plus 3?")]


def echo(session: Conversations, **changes: object) -> tuple[list[Incoming], tuple[int, ...]]:
    """One call answered by its result: the second request, and the ids that training would continue."""
    prompt = session.prompt(OPENING, TOOLS)
    turn = session.add(prompt, said(session.renderer, call(2, 3)))
    (sent,) = turn.sent.tool_calls
    back = incoming(
        "assistant",
        str(changes.get("content", turn.sent.content)),
        (
            str(changes.get("id", sent.id)),
            "add",
            str(changes.get("arguments", json.dumps(dict(sent.arguments)))),
        ),
    )
    result = incoming("tool", "5", id=back.message.tool_calls[0].id)
    trained = Transcript(session.renderer, TOOLS)
    trained.extend([one.message for one in OPENING])
    trained.complete(said(session.renderer, call(2, 3)))
    trained.extend([Message("tool", "5", tool_call_id=turn.message.tool_calls[0].id)])
    return [*OPENING, back, result], tuple(trained.ids)


def reworded(turn: Incoming) -> Incoming:
    """The same call with another argument."""
    return incoming("assistant", "I will call.", (turn.message.tool_calls[0].id, "add", '{"a": 2, "b": 4}'))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"content": "\n" + "I will call.  "},
        {"arguments": '{"b":3,  "a" : 2}'},
        {"id": "renamed-by-the-client"},
    ],
)
def test_an_echoed_turn_keeps_its_ids_however_it_is_written(renderer: Renderer, changes: dict[str, object]):
    session = Conversations(renderer)
    request, trained = echo(session, **changes)
    prompt = session.prompt(request, TOOLS)
    assert tuple(prompt.ids) == trained
    assert prompt.matched is (Matched.FORM if "id" in changes else Matched.CALL_ID)
    assert [event.kind for event in prompt.drift] == ([DriftKind.ECHO] if changes else [])


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (lambda r: [r[0], r[1], *r[3:]], None),  # the turn is gone
        (lambda r: [incoming("system", "Be long."), *r[1:]], DriftKind.HISTORY),
        (lambda r: [*r[:2], reworded(r[2]), r[3]], DriftKind.REWORDED),
        (lambda r: [*r[:2], incoming("assistant", "5 it is."), incoming("user", "Sure?")], DriftKind.FOREIGN),
    ],
)
def test_what_was_not_sampled_here_is_a_branch_from_an_empty_context(renderer: Renderer, spoil, kind):
    session = Conversations(renderer)
    request, _ = echo(session)
    changed = spoil(request)
    prompt = session.prompt(changed, TOOLS)
    assert prompt.parent is None
    assert prompt.matched is (Matched.OPENING if kind is None else Matched.FORK)
    assert [event.kind for event in prompt.drift] == ([] if kind is None else [kind])
    fresh = renderer.encode(
        [session._with_own_ids(one.message, {}) for one in changed], TOOLS, generation_prompt=True
    )
    assert list(prompt.ids) == fresh


def test_other_tools_are_another_branch(renderer: Renderer):
    session = Conversations(renderer)
    request, _ = echo(session)
    prompt = session.prompt(request, [])
    assert prompt.parent is None
    assert [event.kind for event in prompt.drift] == [DriftKind.TOOLS]
    assert session.drift == {DriftKind.TOOLS: 1}


def test_the_same_words_sampled_twice_are_told_apart_by_their_call_ids(renderer: Renderer):
    session = Conversations(renderer)
    prompt = session.prompt(OPENING, TOOLS)
    first = session.add(prompt, said(renderer, call(2, 3)))
    second = session.add(prompt, said(renderer, call(2, 3)))
    for turn in (first, second):
        (sent,) = turn.sent.tool_calls
        back = incoming("assistant", "I will call.", (sent.id, "add", '{"a": 2, "b": 3}'))
        again = session.prompt([*OPENING, back, incoming("tool", "5", id=sent.id)], TOOLS)
        assert again.parent == turn.number


def test_a_ledger_holds_every_branch_and_trains_each_sampled_token_once(renderer: Renderer):
    session = Conversations(renderer, ledger=Transcript(renderer))
    request, _ = echo(session)
    one = session.add(session.prompt(request, TOOLS), said(renderer, Message("assistant", "It is 5.")))
    two = session.add(session.prompt(request, TOOLS), said(renderer, Message("assistant", "The answer is 5.")))
    assert one.parent == two.parent == 0
    rows = session.ledger.rows()
    sampled = sum(len(turn.completion.ids) for turn in session.turns)
    assert sum(sum(row.loss_mask) for row in rows) == sampled
    assert len(session.turns) == 3


def test_old_turns_are_forgotten_and_their_conversations_told(renderer: Renderer):
    gone: list[str] = []
    session = Conversations(renderer, max_tokens=400, on_forgotten=gone.append)
    for number in range(50):
        prompt = session.prompt([incoming("user", f"What is {number} plus 3?")])
        session.add(prompt, said(renderer, Message("assistant", "The answer is 5.")))
    assert sum(len(turn.branch.ids) for turn in session.turns) <= 400
    assert len(gone) == 50 - len(session.turns)
    forget_all(session)
    assert len(gone) == 50


def test_arguments_that_are_no_object_are_refused_only_where_they_must_be_rendered(renderer: Renderer):
    session = Conversations(renderer)
    request, _ = echo(session)
    broken = replace(request[2], raw_arguments=("{",), problem="arguments are no JSON object", place="messages[2]")
    with pytest.raises(UnrenderableError) as caught:
        session.prompt([*request[:2], broken, request[3]], TOOLS)
    assert caught.value.place == "messages[2]"


def test_what_only_the_template_leaves_out_is_recognised_by_its_tokens(renderer: Renderer):
    session = Conversations(renderer)
    opening = [incoming("user", "What is 2 plus 3?")]
    turn = session.add(session.prompt(opening), said(renderer, Message("assistant", "The answer is 5.")))
    named = replace(opening[0], message=replace(opening[0].message, name="bob"))
    request = [named, incoming("assistant", "The answer is 5."), incoming("user", "Sure?")]
    prompt = session.prompt(request)
    assert (prompt.matched, prompt.parent, prompt.drift) == (Matched.TOKENS, turn.number, ())
    assert tuple(prompt.ids) == tuple(renderer.encode([one.message for one in request], generation_prompt=True))
    assert tuple(prompt.branch.branch[-2].ids) == turn.completion.ids
    again = session.add(prompt, said(renderer, Message("assistant", "Yes.")))
    assert again.parent == turn.number


@pytest.mark.parametrize("kept", [True, False], ids=["ledger", "no ledger"])
def test_a_think_block_that_a_prompt_opens_is_known_behind_a_turn_recognised_by_its_tokens(
    renderer: Renderer, tmp_path: Path, kept: bool
):
    make_renderer(tmp_path)
    before, head, after = CHATML_TEMPLATE.rpartition("<|im_start|>assistant\\n")
    opens = "' + ('<think>\\n' if messages[-1].role == 'tool' else '') + '"  # as Gemma 4 does
    changed = Renderer.from_directory(tmp_path, template=before + head + opens + after)
    assert not changed.habits.thinks
    session = Conversations(changed, ledger=Transcript(changed) if kept else None)
    request, _ = echo(session)
    named = replace(request[1], message=replace(request[1].message, name="bob"))
    prompt = session.prompt([request[0], named, *request[2:]], TOOLS)
    assert prompt.matched is Matched.TOKENS
    assert changed.decode(prompt.ids).endswith("<|im_start|>assistant\n<think>\n")
    assert prompt.branch.thinking


def test_of_several_turns_that_a_request_begins_with_the_longest_is_gone_on_from(renderer: Renderer):
    session = Conversations(renderer, max_tokens=10_000)
    ask = [incoming("user", "What is 2 plus 3?")]
    first = session.add(session.prompt(ask), said(renderer, Message("assistant", "The answer is 5.")))
    more = [*ask, incoming("assistant", "The answer is 5."), incoming("user", "Sure?")]
    second = session.add(session.prompt(more), said(renderer, Message("assistant", "Yes.")))
    session.prompt(more)  # the shorter turn is the one used last
    assert second.parent == first.number
    named = replace(ask[0], message=replace(ask[0].message, name="bob"))
    longer = [named, *more[1:], incoming("assistant", "Yes."), incoming("user", "Really?")]
    assert (session.prompt(longer).matched, session.prompt(longer).parent) == (Matched.TOKENS, second.number)
    forget_all(session)
    assert session.prompt(longer).matched is Matched.FORK
    known = session._known
    left = [known.by_tokens, known.by_chain, known.by_call, known.ends, known.turns]
    assert not any(left)
    assert known.tokens == 0


@pytest.mark.parametrize(
    "opens", ["", "<think>\n", "<think>\n\n</think>\n\n"], ids=["plain", "thinking", "thought"]
)
def test_a_first_prompt_is_the_same_with_and_without_a_ledger(renderer: Renderer, tmp_path: Path, opens: str):
    make_renderer(tmp_path)
    before, head, after = CHATML_TEMPLATE.rpartition("<|im_start|>assistant\\n")
    changed = Renderer.from_directory(tmp_path, template=before + head + opens.replace("\n", "\\n") + after)
    request = [*OPENING, incoming("assistant", "5 it <think> is."), incoming("user", "Sure? <think>")]
    kept, bare = (Conversations(changed, ledger=ledger) for ledger in (Transcript(changed), None))
    prompts = [session.prompt(request, TOOLS) for session in (kept, bare)]
    assert tuple(prompts[0].ids) == tuple(prompts[1].ids)
    assert [prompt.branch.thinking for prompt in prompts] == [opens == "<think>\n"] * 2
    assert changed.decode(prompts[1].ids).endswith(f"<|im_start|>assistant\n{opens}")
