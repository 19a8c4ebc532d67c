"""Routes follow the tokens of a transcript into its rows."""

from __future__ import annotations

import pytest

from agentrl.chat.template import CHATML_TEMPLATE, Renderer
from agentrl.chat.transcript import Transcript
from agentrl.run_folder.records import EpisodeRecord, decode, encode
from agentrl.trainer.samples import episode_samples
from agentrl.types import Completion, Episode, Message, Routes, StopReason, Task
from tests.chat.test_forks import build

LAYERS, TOP_K, NONE = 2, 3, 255


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return build(tmp_path_factory.mktemp("chatml"), CHATML_TEMPLATE)


def say(transcript: Transcript, call: int, text: str = "yes", cut: int = 0, start: int = 0) -> int:
    """Complete with routes that are the number of the call; the context's last `1 + cut` tokens have none."""
    ids = (*transcript.renderer.vocabulary.encode(text), min(transcript.renderer.stop_ids))
    whole = len(transcript.ids) + len(ids)
    routes = Routes(bytes([call] * (whole - 1 - cut - start) * LAYERS * TOP_K), LAYERS, TOP_K, 1, start)
    transcript.complete(Completion(ids, (-1.0,) * len(ids), (0,) * len(ids), "stop", routes=routes))
    return whole


def calls(routes: Routes | None) -> list[int]:
    """The call that each token has its route from."""
    assert routes is not None
    assert len(set(routes.data[: LAYERS * TOP_K])) == 1
    return list(routes.data[:: LAYERS * TOP_K])


def test_a_token_keeps_its_first_route_and_the_last_one_gets_the_next_turns(renderer: Renderer):
    transcript = Transcript(renderer)
    transcript.extend([Message("user", "Go.")])
    first = say(transcript, 1)
    transcript.extend([Message("user", "Go on, please.")])
    second = say(transcript, 2)
    [row] = transcript.rows()
    assert len(row.ids) == second
    assert calls(row.routes) == [1] * (first - 1) + [2] * (second - first) + [NONE]


@pytest.mark.parametrize("before", [0, 1, 5])
def test_routes_may_begin_where_earlier_ones_end(renderer: Renderer, before: int):
    """Or earlier, and then the tokens keep their first routes."""
    transcript = Transcript(renderer)
    transcript.extend([Message("user", "Go.")])
    first = say(transcript, 1)
    transcript.extend([Message("user", "Go on, please.")])
    second = say(transcript, 2, start=first - 1 - before)
    transcript.extend([Message("user", "And once more.")])
    third = say(transcript, 3, start=second - 1 - before)
    [row] = transcript.rows()
    assert len(row.ids) == third
    assert calls(row.routes) == [1] * (first - 1) + [2] * (second - first) + [3] * (third - second) + [NONE]


def test_tokens_before_the_first_routes_have_none(renderer: Renderer):
    transcript = Transcript(renderer)
    transcript.extend([Message("user", "Go.")])
    first = say(transcript, 1, cut=2)
    transcript.extend([Message("user", "Go on, please.")])
    second = say(transcript, 2, start=first + 4)
    [row] = transcript.rows()
    assert calls(row.routes) == [1] * (first - 3) + [NONE] * 7 + [2] * (second - first - 5) + [NONE]


def test_branches_have_routes_of_their_own_and_share_those_of_what_they_share(renderer: Renderer):
    transcript = Transcript(renderer)
    transcript.extend([Message("user", "Go.")])
    first = say(transcript, 1)
    other = transcript.fork()
    transcript.extend([Message("user", "Left.")])
    left = say(transcript, 2)
    other.extend([Message("user", "To the right.")])
    right = say(other, 3)
    rows = transcript.rows()
    assert calls(rows[0].routes) == [1] * (first - 1) + [2] * (left - first) + [NONE]
    assert calls(rows[1].routes) == [1] * (first - 1) + [2] + [3] * (right - first - 1) + [NONE]


def test_routes_that_end_early_are_filled_by_the_next_turn(renderer: Renderer):
    transcript = Transcript(renderer)
    transcript.extend([Message("user", "Go.")])
    first = say(transcript, 1, "one two three", cut=2)
    [row] = transcript.rows()
    assert calls(row.routes) == [1] * (first - 3) + [NONE] * 3
    transcript.extend([Message("user", "Go on.")])
    second = say(transcript, 2)
    [row] = transcript.rows()
    assert calls(row.routes) == [1] * (first - 3) + [2] * (second - first + 2) + [NONE]


def test_samples_have_them_and_records_do_not(renderer: Renderer):
    transcript = Transcript(renderer)
    transcript.extend([Message("user", "Go.")])
    say(transcript, 1)
    episode = Episode(
        "e", Task("t"), transcript.messages, (), transcript.segments, StopReason.ANSWERED, reward=1.0
    )
    (sample,) = episode_samples(episode)
    assert calls(sample.routes) == [1] * (len(sample.ids) - 1) + [NONE]
    odd = Episode("e", Task("t", {"x": {"\ud800": 1}}), (), (), transcript.segments, StopReason.ANSWERED, 1.0)
    for written in (episode, odd):
        line = encode(EpisodeRecord(1, 0, written))
        assert b"routes" not in line
        assert [segment.routes for segment in decode(line).episode.segments] == [None] * len(transcript.segments)


def test_without_routes_there_are_none(renderer: Renderer):
    transcript = Transcript(renderer)
    transcript.extend([Message("user", "Go.")])
    ids = (*renderer.vocabulary.encode("yes"), min(renderer.stop_ids))
    transcript.complete(Completion(ids, (-1.0,) * len(ids), (0,) * len(ids), "stop"))
    assert transcript.rows()[0].routes is None
