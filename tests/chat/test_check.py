"""The run-time check puts each kind of drift into its class, and the modes judge them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.chat.demonstrate import completion_of
from agentrl.chat.proof import TOOLS
from agentrl.chat.template import CHATML_TEMPLATE, Renderer
from agentrl.chat.token_check import TokenCheckBudget, TokenDifference, TokenDrift, TokenReport, check_tokens
from agentrl.chat.transcript import Transcript
from agentrl.errors import TemplateError
from agentrl.types import Completion, Message, ToolCall
from tests.chat.chat_tokenizers import CHATML_MARKERS, CHATML_SPECIAL, make, needs_qwen3, qwen3
from tests.chat.families import GEMMA, LLAMA3_JSON, MUSE_GLIMMER, Family

DROPS_THINKING = CHATML_TEMPLATE.replace(
    "{%- if message.reasoning_content %}", "{%- if message.reasoning_content and loop.index0 > last.user %}"
).replace(
    "{%- for message in messages %}",
    "{%- set last = namespace(user=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}{%- for message in messages %}",
    1,
)
"""As Qwen3 and many after it do: thinking before the newest user message is dropped."""

CALL = '<tool_call>\n{"name": "add", "arguments": {"terms": [1, 2]}}\n</tool_call>'


def build(template: str, folder: Path) -> Renderer:
    return Renderer.from_directory(make(folder, template, CHATML_SPECIAL, CHATML_MARKERS))


@pytest.fixture(scope="module")
def appending(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return build(CHATML_TEMPLATE, tmp_path_factory.mktemp("appending"))


@pytest.fixture(scope="module")
def rewriting(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return build(DROPS_THINKING, tmp_path_factory.mktemp("rewriting"))


def sample(
    renderer: Renderer, transcript: Transcript, text: str, *, spelled: bool = False, stop: bool = True
) -> None:
    """Complete with `text`; `spelled` gives one character a token, as a policy may and an encoder does not."""
    vocabulary = renderer.vocabulary
    ids = [id for c in text for id in vocabulary.encode(c)] if spelled else vocabulary.encode(text)
    ids = [*ids, min(renderer.stop_ids)] if stop else ids
    transcript.complete(Completion(tuple(ids), (0.0,) * len(ids), (0,) * len(ids), "stop"))


def conversation(renderer: Renderer, *said: str, spelled: bool = False) -> Transcript:
    """User, completion, tool or user, completion, ..."""
    transcript = Transcript(renderer, TOOLS)
    transcript.extend([Message("system", "Be brief."), Message("user", "Go.")])
    for n, text in enumerate(said):
        sample(renderer, transcript, text, spelled=spelled)
        if n + 1 < len(said):
            calls = transcript.context[-1].tool_calls
            answer = [Message("tool", "3", tool_call_id=c.id) for c in calls] or [Message("user", "And?")]
            transcript.extend(answer)
    return transcript


def tampered(transcript: Transcript, change: Callable[[Message], Message], at: int) -> Transcript:
    """The same ledger over messages that somebody changed."""
    transcript._messages[at] = change(transcript._messages[at])
    return transcript


def without_newline(transcript: Transcript) -> Transcript:
    """The ledger as if the line break after the stop token had been forgotten (a well-known bug elsewhere)."""
    for n, segment in enumerate(transcript._segments):
        if segment.origin == "glue" and transcript.renderer.decode(segment.ids) == "\n":
            transcript._segments[n] = type(segment)((), "glue", segment.parent)
    transcript._move(transcript._node, transcript._context)
    return transcript


def drop_calls(message: Message) -> Message:
    return Message("assistant", message.content)


def waiting(renderer: Renderer) -> Transcript:
    transcript = conversation(renderer, "a")
    transcript.extend([Message("user", "b")])
    return transcript


def cut(renderer: Renderer) -> Transcript:
    transcript = waiting(renderer)
    sample(renderer, transcript, "cut", stop=False)
    return transcript


def changed_answer(message: Message) -> Message:
    return Message("tool", "4", tool_call_id=message.tool_call_id)


COMPACT = '<tool_call>{"name":"add","arguments":{"terms":[1,2]}}</tool_call>'
WITH_CALL = (f"Let me see.\n{CALL}", "It is 3.")

DRIFTS: dict[str, tuple[TokenDrift, Callable[[Renderer], Transcript]]] = {
    "nothing": (TokenDrift.IDENTICAL, lambda r: conversation(r, *WITH_CALL)),
    "ends with a prompt": (TokenDrift.IDENTICAL, waiting),
    "cut by length": (TokenDrift.IDENTICAL, cut),
    "other ids": (TokenDrift.RETOKENISED, lambda r: conversation(r, "the answer", "the number", spelled=True)),
    "control spelled": (TokenDrift.RETOKENISED, lambda r: conversation(r, "a <|im_start|> b", "c")),
    "other JSON spacing": (TokenDrift.RESERIALISED, lambda r: conversation(r, COMPACT, "It is 3.")),
    "other white space": (TokenDrift.RESERIALISED, lambda r: conversation(r, f"So: \n\n\n{CALL}\n", "3")),
    "malformed": (
        TokenDrift.RESERIALISED,
        lambda r: conversation(r, f"{CALL}\n<tool_call>x</tool_call>\nwell", "3"),
    ),
    "line break lost": (TokenDrift.BOUNDARY, lambda r: without_newline(conversation(r, *WITH_CALL))),
    "calls cleared": (TokenDrift.CONTENT, lambda r: tampered(conversation(r, *WITH_CALL), drop_calls, 2)),
    "answer changed": (TokenDrift.CONTENT, lambda r: tampered(conversation(r, CALL, "3"), changed_answer, 3)),
}


@pytest.mark.parametrize("name", DRIFTS)
def test_each_drift_has_its_class(name: str, appending: Renderer):
    expected, make_transcript = DRIFTS[name]
    report = check_tokens(make_transcript(appending))
    assert {d.drift for d in report.differences} <= {expected}, [str(d) for d in report.differences]
    assert report.worst is expected
    assert report.failed == (expected in (TokenDrift.BOUNDARY, TokenDrift.CONTENT))


@pytest.mark.parametrize("name", ["nothing", "other ids", "other JSON spacing"])
@needs_qwen3
def test_qwen3_in_a_tool_loop_makes_no_noise(name: str):
    renderer = qwen3()
    report = check_tokens(DRIFTS[name][1](renderer), "ignore_strippable")
    assert report.worst in (TokenDrift.IDENTICAL, TokenDrift.RETOKENISED, TokenDrift.RESERIALISED)
    assert not report.failed


def test_a_difference_names_message_token_and_both_texts(appending: Renderer):
    transcript = tampered(conversation(appending, CALL, "3"), lambda m: Message("tool", "4"), 3)
    [difference] = check_tokens(transcript).differences
    assert "'3' became '4'" in str(difference)
    token = transcript.ids[difference.at]
    assert appending.decode([token]) == "3"


def test_a_rewritten_history_is_found_and_the_choice_to_keep_it_is_respected(rewriting: Renderer):
    transcript = conversation(rewriting, "<think>\nHm.\n</think>\n\nFour.", "<think>\nSo.\n</think>\n\nFive.")
    report = check_tokens(transcript)
    assert [d.drift for d in report.differences] == [TokenDrift.HISTORY_REWRITE]
    assert report.differences[0].message == 2
    assert "Hm." in report.differences[0].ledger
    assert report.failed
    assert not check_tokens(transcript, "ignore_strippable").failed
    assert check_tokens(transcript, "disable") == TokenReport("disable")


def test_the_border_of_a_generation_prompt_is_no_drift_of_content(tmp_path: Path):
    renderer = Renderer.from_directory(LLAMA3_JSON.directory(tmp_path))
    transcript = conversation(renderer, '{"name":"add", "parameters": {"terms": [1]}}', "\n\nIt is 1.")
    report = check_tokens(transcript)
    assert report.worst <= TokenDrift.RETOKENISED or not report.failed
    assert not report.failed, [str(d) for d in report.differences]


def test_messages_that_the_template_refuses_are_a_difference_not_a_crash(tmp_path: Path):
    refusing = CHATML_TEMPLATE + "{% if messages | length > 3 %}{{ raise_exception('too long') }}{% endif %}"
    renderer = build(refusing, tmp_path)
    [difference] = check_tokens(conversation(renderer, "a", "b")).differences
    assert difference.drift is TokenDrift.CONTENT
    assert "too long" in difference.fresh


@pytest.mark.parametrize("family", [GEMMA, MUSE_GLIMMER], ids=lambda f: f.name)
def test_a_result_without_a_name_has_that_of_its_call(family: Family, tmp_path: Path):
    """As OpenAI's clients send it; these templates write the name."""
    renderer = Renderer.from_directory(family.directory(tmp_path))
    asked, called = Message("user", "Go."), Message("assistant", "", (ToolCall("c00000001", "look_up", {"x": 1}),))
    transcript = Transcript(renderer, TOOLS)
    transcript.extend([asked])
    call = transcript.complete(completion_of(renderer, called, TOOLS)).tool_calls[0]
    transcript.extend([Message("tool", "42", tool_call_id=call.id)])
    assert check_tokens(transcript).worst is TokenDrift.IDENTICAL
    prompt = Transcript(renderer, TOOLS)
    prompt.extend([asked, called, Message("tool", "42", tool_call_id="c00000001")])
    assert renderer.decode(prompt.ids).count("look_up") == renderer.decode(transcript.ids).count("look_up")


def test_a_mode_that_is_none_is_refused(appending: Renderer):
    with pytest.raises(ValueError, match="strict, ignore_strippable, disable, got 'loose'"):
        check_tokens(conversation(appending, "a"), "loose")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("drift", "strict", "ignoring", "keeping"),
    [
        (TokenDrift.RETOKENISED, False, False, False),
        (TokenDrift.RESERIALISED, False, False, False),
        (TokenDrift.BOUNDARY, True, False, False),
        (TokenDrift.HISTORY_REWRITE, True, True, False),
        (TokenDrift.CONTENT, True, True, True),
    ],
)
def test_each_mode_refuses_what_it_says(drift: TokenDrift, strict: bool, ignoring: bool, keeping: bool):
    found = (TokenDifference(TokenDrift.RETOKENISED, 2, 1, "a", "b"), TokenDifference(drift, 2, 7, "a", "b"))
    assert TokenReport("strict", found).failed == strict
    assert TokenReport("strict", found, tolerates_rewrites=True).failed == strict
    assert TokenReport("ignore_strippable", found).failed == ignoring
    assert TokenReport("ignore_strippable", found, tolerates_rewrites=True).failed == keeping
    assert not TokenReport("disable", found).failed
    assert TokenReport("strict", found).worst == drift


def test_a_run_that_stops_names_a_difference_that_fails():
    kinds = (TokenDrift.RESERIALISED, TokenDrift.BOUNDARY, TokenDrift.RETOKENISED)
    found = tuple(TokenDifference(drift, None, at, "a", "b") for at, drift in enumerate(kinds))
    with pytest.raises(TemplateError, match=r"the last one, e: boundary_whitespace at token 1"):
        TokenCheckBudget(stop_above=0.0, at_least=1).add(TokenReport("strict", found), "e")


def test_a_rate_that_is_allowed_stops_nothing():
    fine, bad = (
        TokenReport("strict", found) for found in ((), (TokenDifference(TokenDrift.CONTENT, 2, 7, "a", "b"),))
    )
    watch = TokenCheckBudget(stop_above=0.25, at_least=4)
    assert [watch.add(r, "e") for r in (fine, fine, fine, bad)] == [True, True, True, False]
    assert watch.metrics()["identical"] == 0.75


def test_a_watch_counts_masks_and_stops_above_its_rate():
    fine = TokenReport("strict")
    bad = TokenReport("strict", (TokenDifference(TokenDrift.CONTENT, 2, 7, "a", "b"),))
    watch = TokenCheckBudget(stop_above=0.25, at_least=4)
    assert [watch.add(r, "e") for r in (bad, fine, fine, fine)] == [False, True, True, True]
    assert watch.metrics()["failed"] == 0.25
    assert watch.metrics()["content"] == 0.25
    with pytest.raises(TemplateError, match=r"2 of 5 transcripts differ.*allowed 25%.*g3/e1: content at token 7"):
        watch.add(bad, "g3/e1")


@pytest.mark.parametrize(
    ("keeps", "way"), [(True, "appends, history: fork, or a milder"), (False, "appends or a milder")]
)
def test_a_run_that_forks_is_not_told_to_fork(keeps: bool, way: str):
    difference = TokenDifference(TokenDrift.CONTENT, 2, 7, "a", "b")
    watch = TokenCheckBudget(stop_above=0.0, at_least=1)
    with pytest.raises(TemplateError, match=way):
        watch.add(TokenReport("strict", (difference,), tolerates_rewrites=keeps), "g3/e1")


def test_the_check_is_linear_in_the_conversation(appending: Renderer):
    import time

    def seconds(turns: int) -> float:
        said = [f'<tool_call>{{"name":"add","arguments":{{"terms":[{n}]}}}}</tool_call>' for n in range(turns)]
        transcript = conversation(appending, *said, "done")
        started = time.process_time()
        report = check_tokens(transcript)
        assert report.counts[TokenDrift.RESERIALISED] == turns
        return time.process_time() - started

    short, long = min(seconds(40) for _ in range(3)), min(seconds(320) for _ in range(3))
    assert long < 0.2 or long / short < 24  # linear: 8, quadratic: 64
