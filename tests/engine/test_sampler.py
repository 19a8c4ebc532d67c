"""Draws follow the distribution that the parameters describe, and depend on seed and position only."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from agentrl.engine.checks import check_sampling
from agentrl.engine.local.sampler import ROUNDING, Draw, sample, uniforms
from agentrl.types import Sampling
from tests.engine.engine_models import assert_follows

LOGITS = torch.randn(24, generator=torch.Generator().manual_seed(5)) * 1.5


def draw_of(
    count: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 11,
) -> Draw:
    positions = np.arange(count, dtype=np.int64)
    return Draw(
        temperature=np.full(count, temperature),
        top_p=np.full(count, top_p),
        top_k=np.full(count, top_k, dtype=np.int64),
        min_p=np.full(count, min_p),
        uniform=uniforms(np.full(count, seed, dtype=np.uint64), positions),
    )


def expected(temperature: float, top_k: int, top_p: float, min_p: float = 0.0) -> np.ndarray:
    """The filtered distribution by its definition, one token at a time."""
    scaled = LOGITS.double().numpy() / temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = sorted(range(len(probs)), key=lambda token: -probs[token])[: top_k or len(probs)]
    order = [token for token in order if probs[token] >= min_p * probs.max()]
    mass = sum(probs[token] for token in order)
    kept, reached = [], 0.0
    for token in order:
        kept.append(token)
        reached += probs[token] / mass
        if reached >= top_p:
            break
    filtered = np.zeros_like(probs)
    filtered[kept] = probs[kept]
    return filtered / filtered.sum()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.6, 0, 1.0, 0.0),
        (1.7, 0, 1.0, 0.0),
        (1.0, 5, 1.0, 0.0),
        (1.0, 0, 0.7, 0.0),
        (0.8, 9, 0.8, 0.0),
        (1.0, 100, 0.999, 0.0),
        (1.0, 0, 1.0, 0.2),
        (1.3, 12, 0.9, 0.1),
    ],
)
def test_draws_follow_the_distribution(temperature: float, top_k: int, top_p: float, min_p: float):
    count = 40_000
    ids, _, _ = sample(LOGITS.expand(count, -1), draw_of(count, temperature, top_k, top_p, min_p))
    assert_follows(ids.numpy(), expected(temperature, top_k, top_p, min_p))


def test_the_check_would_notice_a_wrong_distribution():
    ids, _, _ = sample(LOGITS.expand(40_000, -1), draw_of(40_000, temperature=1.05))
    with pytest.raises(AssertionError):
        assert_follows(ids.numpy(), expected(1.0, 0, 1.0))


def test_logprobs_are_scaled_by_temperature_and_not_renormalised_by_filters():
    ids, logprobs, _ = sample(LOGITS.expand(200, -1), draw_of(200, temperature=0.5, top_k=3, top_p=0.9))
    assert torch.allclose(logprobs, torch.log_softmax(LOGITS / 0.5, -1)[ids])


def test_greedy_takes_the_largest_with_its_logprob_at_temperature_one():
    ids, logprobs, _ = sample(LOGITS.expand(3, -1), draw_of(3, temperature=0.0, top_k=2))
    assert ids.tolist() == [int(LOGITS.argmax())] * 3
    assert torch.allclose(logprobs, torch.log_softmax(LOGITS, -1).max().expand(3))


def test_rows_of_a_mixed_batch_are_drawn_as_if_alone():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(3))
    draw = Draw(
        temperature=np.array([0.0, 1.0, 0.7, 1.3, 1.0, 0.0]),
        top_p=np.array([1.0, 1.0, 0.5, 1.0, 0.9, 0.3]),
        top_k=np.array([0, 0, 0, 4, 7, 1], dtype=np.int64),
        min_p=np.array([0.0, 0.1, 0.0, 0.0, 0.2, 0.9]),
        uniform=uniforms(np.arange(6, dtype=np.uint64), np.full(6, 2, dtype=np.int64)),
    )
    ids, logprobs, _ = sample(logits, draw)
    for row in range(6):
        one_id, one_logprob, _ = sample(logits[row : row + 1], draw.of(slice(row, row + 1)))
        assert (int(ids[row]), float(logprobs[row])) == (int(one_id), float(one_logprob))


def test_a_large_vocabulary_is_worked_on_in_parts():
    logits = torch.randn(40, 150_000, generator=torch.Generator().manual_seed(3))
    ids, logprobs, _ = sample(logits, draw_of(40))
    assert torch.allclose(logprobs, torch.log_softmax(logits, -1).gather(1, ids[:, None])[:, 0])
    assert torch.equal(ids[33:34], sample(logits[33:34], draw_of(40).of(slice(33, 34))).ids)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (40, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.1)]
)
def test_draws_from_a_large_vocabulary_follow_the_distribution(top_k: int, top_p: float, min_p: float):
    """Most of its tokens are all but impossible, so that every block has some of the likely ones."""
    logits = torch.full((5_000,), -30.0)
    likely = torch.randperm(5_000, generator=torch.Generator().manual_seed(2))[: len(LOGITS)].sort().values
    logits[likely] = LOGITS
    draw = draw_of(6_000, 1.0, top_k, top_p, min_p)
    parts = [sample(logits.expand(500, -1), draw.of(slice(at, at + 500))).ids for at in range(0, 6_000, 500)]
    place = torch.full((5_000,), -1).index_copy_(0, likely, torch.arange(len(likely)))
    assert_follows(place[torch.cat(parts)].numpy(), expected(1.0, top_k, top_p, min_p))


@pytest.mark.parametrize(
    ("vocabulary", "temperature", "top_k", "top_p", "min_p"),
    [
        (600, 1.0, 0, 1.0, 0.0),
        (600, 0.3, 0, 1.0, 0.0),
        (5_000, 1.0, 0, 1.0, 0.0),
        (600, 0.0, 0, 1.0, 0.0),
        (600, 1.0, 20, 1.0, 0.0),
        (600, 1.5, 0, 0.8, 0.0),
        (600, 1.4, 0, 1.0, 0.02),
        (600, 1.0, 50, 0.9, 0.01),
    ],
)
def test_every_draw_that_rounding_changes_is_unsure(
    vocabulary: int, temperature: float, top_k: int, top_p: float, min_p: float
):
    count, noise = 8_000 if vocabulary == 600 else 400, 0.9 * ROUNDING
    random = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(count, vocabulary, generator=random) * 2
    if temperature == 0.0:  # some nearly equal ones
        logits[:100, 7] = logits[:100].amax(1) + (torch.rand(100, generator=random) - 0.5) * 4 * ROUNDING
    draw = draw_of(count, temperature, top_k, top_p, min_p)
    ids, _, unsure = sample(logits, draw)
    changed = torch.zeros(count, dtype=torch.bool)
    for _ in range(3):
        signs = torch.randint(0, 2, logits.shape, generator=random) * 2 - 1
        changed |= sample(logits + noise * signs, draw).ids != ids
    # The worst case: everything up to the drawn token gains, everything after it loses, or the other way around.
    after = torch.arange(vocabulary) > ids[:, None]
    for sign in (1, -1):
        changed |= sample(logits + noise * sign * (1 - 2 * after.float()), draw).ids != ids
    assert not changed[~unsure].any()
    assert changed.any()
    assert unsure.mean() < 0.05


def test_few_draws_of_a_trained_policy_are_unsure():
    """One token has nearly all of the mass, as after most tokens of a trained policy."""
    logits = torch.randn(20_000, 600, generator=torch.Generator().manual_seed(1))
    logits[:, 300] += 15.0
    assert sample(logits, draw_of(20_000)).unsure.sum() < 10


def test_large_logits_round_by_more():
    """Measured: logits of 58 differ by 1.2e-4 between a batch and a row alone."""
    logits = torch.tensor([[58.0, 58.0 - 1.2e-4, 0.0], [5.0, 5.0 - 1.2e-4, 0.0]])
    assert sample(logits, draw_of(2, temperature=0.0)).unsure.tolist() == [True, False]
    masked = torch.tensor([[1.0, 1.0 - 1.2e-4, -torch.inf]])
    assert not sample(masked, draw_of(1, temperature=0.0)).unsure.any(), "masked ones say nothing"


@pytest.mark.parametrize("vocabulary", [600, 5_000])
def test_few_draws_from_equally_likely_tokens_are_unsure(vocabulary: int):
    """There are about as many borders as the square root of the vocabulary."""
    assert sample(torch.zeros(2_000, vocabulary), draw_of(2_000)).unsure.mean() < 0.01


@pytest.mark.parametrize("filters", [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.1)])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("vocabulary", [1, 2, 50, 65, 300, 5_000])
def test_logits_that_are_not_finite_draw_a_token_without_a_finite_logprob(
    vocabulary: int, bad: float, filters: tuple[int, float, float]
):
    ids, logprobs, _ = sample(torch.full((64, vocabulary), bad), draw_of(64, 1.0, *filters))
    assert ids.max() < vocabulary
    assert not torch.isfinite(logprobs).any()


@pytest.mark.parametrize("top_k", [0, 2])
def test_the_ends_of_the_unit_interval_never_draw_an_impossible_token(top_k: int):
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]]).expand(2, -1)
    uniform = np.array([0.0, 1.0 - 2.0**-53])
    ids, _, _ = sample(logits, dataclasses.replace(draw_of(2, top_k=top_k), uniform=uniform))
    assert set(ids.tolist()) == {1, 2}


def test_uniform_numbers_are_uniform_over_seeds_and_over_positions():
    many = 20_000
    by_seed = uniforms(np.arange(many, dtype=np.uint64), np.zeros(many, dtype=np.int64))
    by_position = uniforms(np.full(many, 7, dtype=np.uint64), np.arange(many, dtype=np.int64))
    next_seed = uniforms(np.arange(1, many + 1, dtype=np.uint64), np.zeros(many, dtype=np.int64))
    for numbers in (by_seed, by_position):
        assert numbers.min() >= 0.0
        assert numbers.max() < 1.0
        assert_follows((numbers * 50).astype(np.int64), np.full(50, 1 / 50))
    assert abs(np.corrcoef(by_seed, next_seed)[0, 1]) < 0.04
    assert abs(np.corrcoef(by_position[:-1], by_position[1:])[0, 1]) < 0.04


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_not_finite_show_in_the_logprob(temperature: float, value: float):
    logits = torch.stack([LOGITS, torch.full_like(LOGITS, value)])
    _, logprobs, _ = sample(logits, draw_of(2, temperature))
    assert torch.isfinite(logprobs).tolist() == [True, False]


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (Sampling(temperature=-1.0), "temperature must be 0"),
        (Sampling(temperature=float("nan")), "temperature must be 0"),
        (Sampling(top_p=0.0), "top_p must be in"),
        (Sampling(top_p=1.5), "top_p must be in"),
        (Sampling(top_k=-1), "top_k must be 0"),
        (Sampling(min_p=1.0), "min_p must be in"),
        (Sampling(max_tokens=0), "max_tokens must be at least 1, got 0"),
    ],
)
def test_parameters_out_of_range_are_refused(sampling: Sampling, message: str):
    with pytest.raises(ValueError, match=message):
        check_sampling(sampling)
