"""Tokens in colour."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.types import Segment
from agentrl.view.tokens import pieces, tokens_text


def decode(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def test_bytes_that_only_together_make_a_character_are_one_piece():
    ids = list("aé🎉b".encode())
    assert pieces(ids, decode) == ["a", "é", "🎉", "b"]
    assert "".join(pieces([0x61, 0xF0, 0x9F], decode)) == "a�"  # a cut character ends the segment


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
