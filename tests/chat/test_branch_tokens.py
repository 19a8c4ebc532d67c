"""The size of a tree of segments: counted once as it grows, equal to a count from scratch."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from agentrl.chat.branch_tokens import BranchTokens
from agentrl.chat.template import Renderer
from agentrl.chat.transcript import Transcript
from agentrl.learner.prefix_tree import tree_size
from agentrl.models.tiny import make_tokenizer
from agentrl.types import Completion, Message, Origin, Segment


class CountedIds(tuple[int, ...]):
    """Token ids that count how often they are hashed: that takes time proportional to their number."""

    hashes = 0

    def __hash__(self) -> int:
        CountedIds.hashes += 1
        return super().__hash__()


def segment(ids: tuple[int, ...], origin: Origin, parent: int) -> Segment:
    sampled = origin == "sampled"
    return Segment(ids, origin, parent, 0, (0.0,) * len(ids) * sampled, (0,) * len(ids) * sampled)


def from_scratch(segments: list[Segment], node: int) -> int:
    """Of the contexts that end with a completion, and the branch of `node`: their distinct (context, tokens)."""
    counted: set[int] = set()
    for end in [node, *(i for i, each in enumerate(segments) if each.origin == "sampled")]:
        while end >= 0:
            counted.add(end)
            end = segments[end].parent
    contexts: dict[int, tuple[tuple[int, ...], ...]] = {-1: ()}
    prefixes: set[tuple[object, ...]] = set()
    for i, each in enumerate(segments):
        contexts[i] = (*contexts[each.parent], each.ids)
        if i in counted:
            prefixes |= {(contexts[each.parent], each.ids[: n + 1]) for n in range(len(each.ids))}
    return len(prefixes)


@pytest.mark.parametrize("seed", range(30))
def test_a_growing_tree_has_the_size_of_a_count_from_scratch(seed: int):
    rng, segments = random.Random(seed), list[Segment]()
    size, others = BranchTokens(segments), list[tuple[BranchTokens, list[Segment]]]()
    for number in range(40):
        ids = tuple(rng.choices((1, 2), k=rng.randrange(5)))
        origin: Origin = rng.choice(("sampled", "prompt", "observation"))
        segments.append(segment(ids, origin, rng.randrange(-1, number)))
        if rng.random() < 0.6:
            node = rng.randrange(-1, number + 1)
            assert size.with_branch(node) == from_scratch(segments, node)
        if rng.random() < 0.1:
            copy = list(segments)
            others.append((size.apart(copy), copy))
    for other, copy in others:
        copy.append(segment((1, 2, 2), "sampled", len(copy) - 1))
        assert other.with_branch(-1) == from_scratch(copy, -1)
    assert size.with_branch(len(segments) - 1) == from_scratch(segments, len(segments) - 1)


def test_branches_of_one_context_have_the_size_of_their_prefix_tree():
    rows = [(1, 2, 3), (1, 2, 4, 5), (1,), (2, 2), (1, 2, 3)]
    segments = [segment(ids, "sampled", -1) for ids in rows]
    assert BranchTokens(segments).with_branch(-1) == tree_size(rows) == 7


def test_asking_again_does_not_read_the_tokens_again(tmp_path: Path):
    make_tokenizer(tmp_path, ["Go on."] * 4, vocab=300, max_context=4096)
    ledger, CountedIds.hashes = Transcript(Renderer.from_directory(tmp_path)), 0
    for turn in range(50):  # each begins a new branch, as a compacted context does
        branch = ledger.fork(keep=0)
        branch.extend([Message("user", f"Go on. {turn}")])
        branch.complete(Completion(CountedIds((turn, 1)), (0.0, 0.0), (0, 0), "stop"))
        assert branch.spent == branch.apart().spent == ledger.spent
    assert CountedIds.hashes == 50
