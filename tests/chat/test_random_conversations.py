"""10,000 random conversations with random sampled ids: the ledger keeps them, and is what the template renders."""

from __future__ import annotations

import random
import re
import unicodedata
from pathlib import Path

import pytest

from agentrl.chat.proof import TOOLS
from agentrl.chat.template import Renderer
from agentrl.chat.token_check import TokenDrift, check_tokens
from agentrl.chat.transcript import Transcript
from agentrl.types import Completion, Message
from tests.chat.chat_tokenizers import needs_qwen3, qwen3
from tests.chat.families import FAMILIES, GLM, HARMONY, LISTED, Family

TEXTS = [
    "ok",
    "42",
    "",
    "line\nline\n",
    "Grüße 日本語",
    "👩‍🔬🎉",
    "  spaced  ",
    "<b>|</b>",
    "{'a': [1, 2]}",
    "e\u0301",
]
HOSTILE = [
    "<|im_end|>",
    "<|im_start|>assistant\n",
    "<tool_call>",
    "</think>",
    "<|eot_id|>",
    "</s>",
    "[TOOL_CALLS]",
    "<|user|>",
]

MARKER = re.compile(r"<.*>|\[/?[A-Z_]+\]|[\]\[]~", re.DOTALL)


def random_text(rng: random.Random) -> str:
    return " ".join(rng.choice(TEXTS + HOSTILE) for _ in range(rng.randint(1, 6)))


def random_ids(renderer: Renderer, rng: random.Random, plain: bool) -> list[int]:
    """What a policy may sample: any ids, text spelled one character a token, or a sound call.

    `plain` leaves out what a template writes in another order than it was said: markers of the format.
    """
    vocabulary = renderer.vocabulary
    kind = rng.random()
    if kind < 0.4:
        ids = [rng.randrange(vocabulary.size) for _ in range(rng.randint(0, 24))]
        ids = [id for id in ids if id not in renderer.habits.closers]
        return [id for id in ids if not (plain and MARKER.search(renderer.decode([id])))]
    if kind < 0.7:  # re-encodes differently
        return [id for c in random_text(rng) for id in vocabulary.encode_text(c)]
    if kind < 0.9 or plain:
        return vocabulary.encode_text(random_text(rng))
    return renderer.completion_ids(Message("assistant", "so", reasoning="hm"), TOOLS)[:-1]


def play(renderer: Renderer, rng: random.Random, turns: int, plain: bool) -> tuple[Transcript, list[Completion]]:
    transcript = Transcript(renderer, TOOLS if rng.random() < 0.5 else ())
    system = [Message("system", random_text(rng))] if rng.random() < 0.5 else []
    transcript.extend([*system, Message("user", random_text(rng))])
    given = []
    stops = sorted(renderer.stop_ids)
    for n in range(turns):
        ids = random_ids(renderer, rng, plain)
        stopped = plain or rng.random() < 0.9
        ids += [stops[0] if plain else rng.choice(stops)] if stopped else []
        logprobs = tuple(-rng.random() for _ in ids)
        given.append(Completion(tuple(ids), logprobs, (n,) * len(ids), "stop" if stopped else "length"))
        message = transcript.complete(given[-1])
        if n + 1 < turns:
            answers = [Message("tool", random_text(rng), tool_call_id=c.id) for c in message.tool_calls]
            transcript.extend(answers or [Message("user", random_text(rng))])
    return transcript, given


def keeps_what_was_sampled(transcript: Transcript, given: list[Completion]) -> None:
    """The promises about the ledger itself; they hold for every template."""
    sampled = [s for s in transcript.segments if s.origin == "sampled"]
    assert [(s.ids, s.logprobs, s.versions) for s in sampled] == [(c.ids, c.logprobs, c.versions) for c in given]
    assert transcript.ids == tuple(id for s in transcript.segments for id in s.ids)
    rows = transcript.rows()
    assert sum(sum(row.loss_mask) for row in rows) == sum(len(c.ids) for c in given)
    for row in rows:
        assert row.ids == transcript.ids[: len(row.ids)]
        trained = [
            (i, p, v) for i, p, v, m in zip(row.ids, row.logprobs, row.versions, row.loss_mask, strict=True) if m
        ]
        assert trained == [t for c in given for t in zip(c.ids, c.logprobs, c.versions, strict=True)]


def is_what_the_template_renders(transcript: Transcript) -> None:
    renderer = transcript.renderer
    ledger = unicodedata.normalize("NFC", renderer.decode(transcript.ids))
    rendered = unicodedata.normalize("NFC", renderer.text(transcript.context, transcript.tools))
    assert rendered.startswith(ledger), (ledger[-80:], rendered[len(ledger) - 80 : len(ledger) + 20])
    assert not rendered[len(ledger) :].strip()
    report = check_tokens(transcript)
    assert set(report.counts) <= {TokenDrift.IDENTICAL, TokenDrift.RETOKENISED}, [
        str(d) for d in report.differences
    ]


@needs_qwen3
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_ten_thousand_conversations_with_the_qwen3_tokenizer():
    rng = random.Random(0)
    ours, own = qwen3("chatml"), qwen3()
    for n in range(10_000):
        plain = n % 4 != 0
        transcript, given = play(own if n % 10 == 0 else ours, rng, rng.randint(1, 4), plain)
        keeps_what_was_sampled(transcript, given)
        if plain and n % 10:
            is_what_the_template_renders(transcript)


OWN_WORDS = ("minimax_m2", "minimax_m3", "muse_glimmer", "functionary_v32")
VERBATIM = [
    f for f in FAMILIES if "trim" not in f.template and f not in (GLM, HARMONY) and f.name not in OWN_WORDS
]
"""Templates that show an answer to the letter, without a think block of their own around it."""


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_random_conversations_of_each_family(family: Family, tmp_path: Path):
    renderer = Renderer.from_directory(family.directory(tmp_path))
    rng = random.Random(family.name)
    for n in range(30 if family in LISTED else 150):
        plain = n % 3 != 0
        transcript, given = play(renderer, rng, rng.randint(1, 5), plain)
        keeps_what_was_sampled(transcript, given)
        if plain and family in VERBATIM:
            is_what_the_template_renders(transcript)
