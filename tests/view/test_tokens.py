"""Tokens in colour."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
from rich.console import Console
from tokenizers import Tokenizer, decoders
from tokenizers.models import Unigram

from agentrl.run_folder.records import EpisodeRecord
from agentrl.types import Segment
from agentrl.view.episode_text import step_table
from agentrl.view.pieces import span_pieces, token_pieces
from agentrl.view.tokens import tokens_text
from tests.view.runs import episode


def decode(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def trained(words: Sequence[str], *, fallback: bool) -> Tokenizer:
    """A tokenizer as sentencepiece models have: spaces in the words, bytes for what no word covers."""
    spelled = [f"<0x{byte:02X}>" for byte in range(256)] if fallback else []
    tokenizer = Tokenizer(Unigram([(word, -1.0) for word in ["<s>", *spelled, *words]], 0, fallback))
    if fallback:
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
    else:
        tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def test_bytes_that_only_together_make_a_character_belong_to_the_last():
    ids = list("aé🎉b".encode())
    assert token_pieces(ids, decode) == ["a", "", "é", "", "", "", "🎉", "b"]
    assert token_pieces([0x61, 0xF0, 0x9F], decode) == ["a", "", "�"]  # a cut character ends the segment
    broken = [0xF0, 0x9F, 0x61, 0x80, 0x80, 0x80, 0x80, 0x80, 0x62]
    assert "".join(token_pieces(broken, decode)) == decode(broken)
    replaced = list("\ufffdé".encode())  # a replacement character that the text itself has
    assert token_pieces(replaced, decode) == ["", "", "", "", "\ufffdé"]


@pytest.mark.parametrize("fallback", [False, True])
def test_words_keep_the_spaces_that_their_tokens_carry(fallback: bool):
    tokenizer = trained(["▁hello", "▁world", "s", "▁"], fallback=fallback)
    words = ["▁hello", "▁world", "s", "▁", "▁hello"] * 9
    ids = [tokenizer.token_to_id(word) for word in words]

    def text(part: Sequence[int]) -> str:
        return str(tokenizer.decode(list(part), skip_special_tokens=False))

    found = token_pieces(ids, text)
    assert found == ["hello", *(word.replace("▁", " ") for word in words[1:])]
    assert "".join(found) == text(ids)
    for low in range(12):
        assert span_pieces(ids, low, low + 3, text) == found[low : low + 3]
        assert token_pieces(ids[low:], text, ids[:low]) == found[low:]


def test_a_character_in_bytes_is_the_same_in_every_window():
    tokenizer = trained(["▁hello"], fallback=True)
    spelled = [f"<0x{byte:02X}>" for byte in "€🎉é".encode()]
    ids = [tokenizer.token_to_id(word) for word in ["▁hello", *spelled, "▁hello"]]

    def text(part: Sequence[int]) -> str:
        return str(tokenizer.decode(list(part), skip_special_tokens=False))

    whole = token_pieces(ids, text)
    assert whole == ["hello", "", "", "€", "", "", "", "🎉", "", "é", " hello"]
    family = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "👩‍🔬日本👩".encode()]  # no word between them
    for each in (ids, family):
        for size in range(1, 5):
            ends = [(low, min(low + size, len(each))) for low in range(0, len(each), size)]
            windows = [span_pieces(each, low, high, text) for low, high in ends]
            assert [piece for window in windows for piece in window] == token_pieces(each, text)


def test_a_segment_continues_the_text_of_its_parent():
    tokenizer = trained(["▁hello", "▁world"], fallback=False)
    hello, world = (tokenizer.token_to_id(word) for word in ("▁hello", "▁world"))
    segments = (
        Segment((hello,), "prompt", -1, 0),
        Segment((world, hello), "sampled", 0, 1, (0.0,) * 2, (0,) * 2),
    )
    text = tokens_text(segments, lambda ids: str(tokenizer.decode(list(ids)))).plain
    assert text.splitlines()[1::2] == ["hello", " world hello"]


def test_each_origin_is_labelled_and_sampled_tokens_take_the_colour_of_their_advantage():
    segments = (
        Segment(tuple(b"ask"), "prompt", -1, 0),
        Segment(tuple(b"yes"), "sampled", 0, 1, (0.0,) * 3, (0,) * 3),
        Segment(tuple(b"seen"), "observation", 1, 2),
        Segment(tuple(b"no"), "sampled", 2, 3, (0.0,) * 2, (0,) * 2),
    )
    text = tokens_text(segments, decode, (0.5, -0.25))
    assert text.plain.splitlines() == [
        *(" prompt: 3 tokens, not trained ", "ask", " sampled: 3 tokens, advantage +0.50 ", "yes"),
        *(" observation: 4 tokens, not trained ", "seen", " sampled: 2 tokens, advantage -0.25 ", "no"),
    ]

    def style_of(word: str) -> str:
        at = text.plain.index(word)
        return next(str(span.style) for span in text.spans if span.start <= at < span.end)

    assert "green" in style_of("yes")
    assert "red" in style_of("no\n")
    assert "blue" in style_of("ask")
    plain = tokens_text(segments, decode).plain
    assert plain.count("not trained") == 4


def test_answers_that_a_later_turn_reads_are_in_the_observation_loss():
    segments = (
        Segment(tuple(b"ask"), "prompt", -1, 0),
        Segment(tuple(b"yes"), "sampled", 0, 1, (0.0,) * 3, (0,) * 3),
        Segment(tuple(b"seen"), "observation", 1, 2),
        Segment(tuple(b"no"), "sampled", 2, 3, (0.0,) * 2, (0,) * 2),
        Segment(tuple(b"unread"), "observation", 3, 4),
    )
    labels = tokens_text(segments, decode, observed=True).plain.splitlines()[::2]
    assert labels[2] == " observation: 4 tokens, in the observation loss "
    assert labels[4] == " observation: 6 tokens, not trained "


def test_a_scored_episode_without_advantage_may_train_all_the_same():
    scored = EpisodeRecord(1, 0, episode("s1/g0/e0"))
    lost = EpisodeRecord(1, 0, episode("s1/g0/e1", None))
    shown = Console(width=200, file=io.StringIO(), record=True)
    shown.print(step_table([scored, lost]))
    first, second = shown.export_text().splitlines()[1:]
    assert " none " in first  # a KL penalty or a teacher may train it
    assert "not trained" not in first
    assert "not trained" in second
