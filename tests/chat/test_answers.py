"""Which tokens of an episode are answers of the env, for the observation loss."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.chat.template import CHATML_TEMPLATE, Renderer
from agentrl.chat.transcript import Transcript
from agentrl.types import Message
from tests.chat.chat_tokenizers import make
from tests.chat.test_check import DROPS_THINKING
from tests.chat.test_forks import build, exactly, say

ROLES_AS_TEXT = (
    "{%- for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
"""Like Zephyr's template: only the end of a turn has a control token."""


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return build(tmp_path_factory.mktemp("chatml"), CHATML_TEMPLATE)


def answers(transcript: Transcript) -> list[str]:
    """The text that each row observes."""
    decode = transcript.renderer.decode
    return [decode([i for i, on in zip(row.ids, row.observed, strict=True) if on]) for row in transcript.rows()]


def user(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n"


def test_a_template_that_rewrites_earlier_turns_leaves_the_answers_to_them(tmp_path: Path):
    transcript = Transcript(build(tmp_path, DROPS_THINKING, "fork"))
    transcript.extend([Message("user", "One?")])
    said = [say(transcript, "<think>\nhm\n</think>\n\none")]
    for number in range(2):
        transcript.extend([Message("user", f"ANSWER {number}")])
        said.append(say(transcript, "<think>\nhm\n</think>\n\nmore"))
    exactly(transcript.rows(), said)
    assert answers(transcript) == ["", user("ANSWER 0"), user("ANSWER 1")]


def test_what_is_written_again_belongs_to_the_message_after_it(tmp_path: Path):
    transcript = Transcript(build(tmp_path, DROPS_THINKING, "fork"))
    transcript.extend([Message("user", "One?")])
    say(transcript, "<think>\nhm\n</think>\n\none")
    transcript.extend([Message("user", "A"), Message("user", "B")])
    decode = transcript.renderer.decode
    new = [(s.origin, s.message, decode(s.ids)) for s in transcript.segments[3:-1]]
    assert new == [
        ("prompt", 2, "one<|im_end|>\n"),
        ("observation", 2, user("A")),
        ("observation", 3, user("B")),
    ]


def test_an_answer_is_observed_once_however_often_the_policy_continues_from_it(renderer: Renderer):
    first = Transcript(renderer)
    first.extend([Message("user", "Go.")])
    say(first, "one")
    for text in ("two", "three"):
        branch = first.fork()
        branch.extend([Message("user", "ANSWER")])  # a segment in each branch
        say(branch, text)
    other = first.fork()
    other.extend([Message("user", "ANOTHER")])
    say(other, "two")
    assert answers(first) == [user("ANSWER"), "", user("ANOTHER")]


def test_turns_of_the_policy_that_a_client_wrote_again_are_no_answers(renderer: Renderer):
    transcript = Transcript(renderer)
    transcript.extend([Message("user", "Go.")])
    say(transcript, "one")
    transcript.extend([Message("user", "A"), Message("assistant", "one, REWORDED"), Message("user", "B")])
    say(transcript, "two")
    assert answers(transcript) == [user("A") + user("B")]


def test_what_a_run_asks_itself_is_no_answer(renderer: Renderer):
    transcript = Transcript(renderer)
    transcript.extend([Message("user", "Go.")])
    say(transcript, "one")
    transcript.extend([Message("user", "ANSWER")])
    branch = transcript.fork()
    branch.extend([Message("user", "Summarize.")], answers=0)
    say(branch, "a summary")
    assert answers(transcript) == ["", user("ANSWER")]


def test_an_answer_that_no_special_token_begins_is_observed(tmp_path: Path):
    transcript = Transcript(Renderer.from_directory(make(tmp_path, ROLES_AS_TEXT, ("</s>",), (), eos="</s>")))
    transcript.extend([Message("user", "Go.")])
    say(transcript, "one")
    transcript.extend([Message("user", "ANSWER")])
    say(transcript, "two")
    assert answers(transcript) == ["\n<|user|>\nANSWER</s>\n<|assistant|>\n"]


def test_what_begins_a_context_is_no_answer(renderer: Renderer):
    """`rollout.compact.use` may keep nothing but the last answer: behind it is only the system prompt."""
    transcript = Transcript(renderer)
    transcript.extend([Message("user", "Go.")])
    say(transcript, "one")
    branch = transcript.fork(keep=0)
    branch.extend([Message("user", "A"), Message("user", "B")], answers=2)
    say(branch, "two")
    assert answers(transcript) == ["", user("B")]
