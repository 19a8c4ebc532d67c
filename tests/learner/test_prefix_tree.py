"""The prefix tree of rows: every shared token once, whatever rows there are."""

from __future__ import annotations

import random
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.learner.logprobs import token_stats
from agentrl.learner.pack import micro_batches, pack, packed_size
from agentrl.learner.policy_model import load_policy
from agentrl.learner.prefix_tree import Span, Tree, TreeSize, common, prefix_tree, tree_size
from agentrl.types import Sample
from bench.families import Family, config_of
from bench.tree import nothing_shared
from tests.learner.train_models import double, gradients, make_sample, relative


def rows_of(seed: int) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(2) for _ in range(rng.randrange(1, 9))) for _ in range(rng.randrange(1, 12))]


def ancestors(tree: Tree, number: int) -> set[int]:
    found = set()
    while number >= 0:
        found.add(number)
        number = tree.spans[number].parent
    return found


@pytest.mark.parametrize("seed", range(60))
def test_it_has_each_beginning_of_a_row_once(seed: int):
    rows = rows_of(seed)
    tree = prefix_tree(rows)
    for number, row in enumerate(rows):
        assert tuple(tree.ids_T[tree.positions(number)].tolist()) == row
    beginnings = {row[:n] for row in rows for n in range(1, len(row) + 1)}
    assert len(tree.ids_T) == len(beginnings) == tree_size(rows)
    growing = TreeSize()
    for row in rows:
        growing.add(row)
    assert growing.tokens == len(beginnings)
    assert [at for s in tree.spans for at in range(s.at, s.at + s.length)] == list(range(len(tree.ids_T)))


@pytest.mark.parametrize("seed", range(60))
def test_descendants_lie_between_a_span_and_its_end(seed: int):
    tree = prefix_tree(rows_of(seed))
    for number, span in enumerate(tree.spans):
        for other, below in enumerate(tree.spans):
            assert (number in ancestors(tree, other)) == (span.at <= below.at < span.end)
        if span.parent >= 0:
            parent = tree.spans[span.parent]
            assert span.parent < number
            assert parent.prefix + parent.length == span.prefix


def test_equal_rows_and_beginnings_of_others():
    tree = prefix_tree([(1, 2), (1, 2, 3), (1, 2), (1,)])
    assert tree.ids_T.tolist() == [1, 2, 3]
    assert list(tree.spans) == [Span(-1, 0, 0, 1, 3), Span(0, 1, 1, 1, 3), Span(1, 2, 2, 1, 3)]
    assert list(tree.last) == [1, 2, 1, 0]


def forked(episode: str, turns: int, seed: int = 0) -> list[Sample]:
    """An episode of turns whose thinking (40 of 50 tokens) is dropped from the history."""
    rng = random.Random(f"{episode}/{seed}")
    history = list(range(20))
    rows = []
    for _ in range(turns):
        turn = [rng.randrange(1000) for _ in range(50)]
        rows.append(make_sample([*history, *turn], set(range(len(history), len(history) + 50)), episode=episode))
        history += [*turn[40:], *(rng.randrange(1000) for _ in range(10))]
    return rows


def test_the_rows_of_a_forked_episode_cost_little_more_than_its_turns():
    rows = forked("a", 20)
    assert sum(len(row.ids) for row in rows) > 5000
    assert packed_size(rows) == pack(rows).ids_T.numel() == 20 + 20 * 50 + 19 * 20


def test_a_group_is_cut_where_its_episodes_share_least():
    """Two families of episodes that began alike, in turns: each family stays together."""
    rows = [make_sample([7, *([n % 2] * 30), 100 + n], {31}, episode=f"e{n}") for n in range(8)]
    family = 1 + 30 + 4
    parts = micro_batches(rows, family + 5)
    assert sorted(sorted(row.episode_id for row in part) for part in parts) == [
        ["e0", "e2", "e4", "e6"],
        ["e1", "e3", "e5", "e7"],
    ]
    assert [packed_size(part) for part in parts] == [family, family]


def test_many_episodes_of_one_group_are_cut_quickly():
    """As demonstrations are, which have no groups: each row is looked at a few times, not once for each other."""
    rng = random.Random(0)
    rows = [
        make_sample([7] * 90 + [rng.randrange(300) for _ in range(60)], {100}, episode=f"e{n}") for n in range(700)
    ]
    with patch("agentrl.learner.prefix_tree.common", wraps=common) as compared:
        parts = micro_batches(rows, 4000)
    assert compared.call_count < 8 * len(rows)
    assert sum(len(part) for part in parts) == len(rows)
    assert max(packed_size(part) for part in parts) <= 4000
    assert len(parts) <= 14


def test_no_part_is_larger_than_allowed_and_none_is_lost():
    rows = [row for n in range(6) for row in forked(f"e{n}", 1 + 2 * n)]
    for room in (800, 1300, 5000):
        parts = micro_batches(rows, room)
        assert all(packed_size(part) <= room for part in parts)
        assert sorted(id(row) for part in parts for row in part) == sorted(map(id, rows))


FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 12},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
    },
    "olmo2": {},
    "granite": {},
    "seed_oss": {},
    "arcee": {},
    "hunyuan_v1_dense": {},
    "starcoder2": {"sliding_window": 9},
    "phi": {},
    "glm4": {},
    "smollm3": {},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_random_trees_are_those_of_separate_rows(family: str, tmp_path: Path):
    """In float64, and in float32 where PyTorch has no other (experts)."""
    dtype, bound = (torch.float32, 1e-5) if family == "qwen3_moe" else (torch.float64, 1e-10)
    AutoModelForCausalLM.from_config(config_of(Family(family, FAMILIES[family]))).save_pretrained(tmp_path)
    rng = random.Random(family)

    def tokens(most: int) -> list[int]:
        return [rng.randrange(2, 9) for _ in range(rng.randint(1, most))]

    rows = [tokens(4) + tokens(4)]
    for _ in range(20):  # each row leaves another one somewhere
        before = rng.choice(rows)
        rows.append([*before[: rng.randint(1, len(before))], *tokens(12)])
    samples = [
        make_sample(row, set(range(rng.randrange(1, len(row)), len(row))), episode=f"e{n}", group=n % 3)
        for n, row in enumerate(rows)
    ]
    found = []
    for make in (prefix_tree, nothing_shared):
        with patch("agentrl.learner.pack.prefix_tree", make):
            packed = pack(samples, dtype=dtype)
        model = load_policy(tmp_path, torch.device("cpu"))
        model = double(model) if dtype == torch.float64 else model
        logprobs_N = token_stats(model, packed).logprobs_N
        (logprobs_N * torch.linspace(-1, 1, len(logprobs_N))).sum().backward()
        found.append((packed.ids_T.numel(), logprobs_N.detach(), gradients(model)))
    (tokens_shared, logprobs, gradient), (tokens_apart, logprobs_apart, gradient_apart) = found
    assert tokens_shared < 0.8 * tokens_apart
    assert relative(logprobs, logprobs_apart) < bound
    assert relative(gradient, gradient_apart) < bound
