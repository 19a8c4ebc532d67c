"""How tokens are laid out cannot change the gradient: for every loss with every aggregation, to 1e-6 in float64.

A step is drawn at random: episodes of several turns with observations between them. It is then laid out in one
micro-batch as it came, and once more in the hardest way that is allowed: rows forked (a part of an episode
becomes a row of its own, with masked copies of its context), padded with nan and inf, shuffled token by token,
split over micro-batches and over ranks whose gradients are averaged.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl.algo.aggregate import (
    AGGREGATIONS,
    Totals,
    aggregate,
    aggregation_weights,
    totals_of_lengths,
    totals_of_tokens,
)
from agentrl.algo.correction import Correction, Reject, correct, drift, merge_drift, normalizer, weight_sums
from agentrl.algo.kl import KL_KINDS, kl_per_token
from agentrl.algo.losses import POLICY_LOSSES
from agentrl.algo.losses.reinforce import Reinforce
from agentrl.algo.metrics import merge_metrics, metric_values
from agentrl.algo.value import value_loss
from agentrl.learner.policy_loss import OF_LOSSES

KNOWN = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
CONFIGS = {name: entry.config() for name, entry in POLICY_LOSSES.items()}
CONFIGS["clip_cov"] = POLICY_LOSSES["clip_cov"].config(fraction=0.3, cov_low=-0.5, cov_high=0.5)
CONFIGS["kl_cov"] = POLICY_LOSSES["kl_cov"].config(fraction=0.3)
CONFIGS["reinforce"] = Reinforce(importance="sequence", high=1.5)


@dataclass(frozen=True)
class Step:
    """All tokens of a step, trained or not, one entry each; `source` of a copy or of padding is -1."""

    episode_T: Tensor
    mask_T: Tensor
    new_T: Tensor
    old_T: Tensor
    advantage_T: Tensor
    num_episodes: int


@dataclass(frozen=True)
class Batch:
    """One micro-batch: indices into the step's tokens; -1 stands for padding, masked copies are untrained."""

    index_T: Tensor
    trained_T: Tensor
    sequence_T: Tensor


def draw_step(seed: int, num_episodes: int) -> Step:
    g = torch.Generator().manual_seed(seed)
    episodes, masks = [], []
    for episode in range(num_episodes):
        for turn in range(int(torch.randint(1, 4, (), generator=g))):
            sampled = int(torch.randint(0 if turn else 1, 5, (), generator=g))
            seen = int(torch.randint(0, 3, (), generator=g))
            episodes += [episode] * (seen + sampled)
            masks += [False] * seen + [True] * sampled
    size = len(episodes)
    old_T = -3 * torch.rand(size, generator=g, dtype=torch.float64)
    new_T = old_T + 0.4 * torch.randn(size, generator=g, dtype=torch.float64)
    advantage_T = torch.randn(size, generator=g, dtype=torch.float64)
    return Step(torch.tensor(episodes), torch.tensor(masks), new_T, old_T, advantage_T, num_episodes)


def one_batch(step: Step) -> list[list[Batch]]:
    everything = torch.arange(step.episode_T.numel())
    return [[Batch(everything, step.mask_T, step.episode_T)]]


def hard_layout(step: Step, seed: int, ranks: int, batches: int) -> list[list[Batch]]:
    """Ranks of micro-batches; an episode's tokens all lie in one of them."""
    g = torch.Generator().manual_seed(seed)
    home_E = torch.randint(0, ranks * batches, (step.num_episodes,), generator=g)
    layout: list[list[Batch]] = [[] for _ in range(ranks)]
    for place in range(ranks * batches):
        members = (home_E == place).nonzero().squeeze(-1).tolist()
        index, trained, sequence = [], [], []
        for local, episode in enumerate(members):
            own = (step.episode_T == episode).nonzero().squeeze(-1)
            cut = int(torch.randint(0, own.numel() + 1, (), generator=g))
            index += own.tolist() + own[:cut].tolist()  # the second row: its context is a masked copy
            trained += step.mask_T[own].tolist() + [False] * cut
            sequence += [2 * local + 1] * (own.numel() + cut)  # numbers may have gaps
        padding = int(torch.randint(0, 4, (), generator=g))
        index, trained = index + [-1] * padding, trained + [False] * padding
        sequence += [0] * padding
        order = torch.randperm(len(index), generator=g)
        tensors = torch.tensor(index, dtype=torch.long), torch.tensor(trained, dtype=torch.bool)
        numbers = torch.tensor(sequence, dtype=torch.long)
        layout[place % ranks].append(Batch(tensors[0][order], tensors[1][order], numbers[order]))
    return layout


def pick(values_T: Tensor, batch: Batch, untrained: float) -> Tensor:
    """The values of a micro-batch's tokens; copies and padding hold something that must never be read."""
    padded = torch.cat([values_T, values_T.new_tensor([untrained])])[batch.index_T]
    return torch.where(batch.trained_T, padded, untrained)


def update(step: Step, layout: list[list[Batch]], kind: str, term) -> tuple[Tensor, Tensor, dict[str, float]]:
    """(loss, gradient by the step's tokens, metrics) of an update: averaged over ranks, summed over batches."""
    parts = [totals_of_tokens(b.trained_T, b.sequence_T) for rank in layout for b in rank]
    totals = Totals(*map(sum, zip(*parts, strict=True)))
    gradient_T, loss, metrics = torch.zeros_like(step.new_T), torch.zeros((), dtype=torch.float64), []
    for rank in layout:
        for batch in rank:
            leaf_T = pick(step.new_T, batch, float("nan")).requires_grad_()
            weights_T = aggregation_weights(
                kind,
                batch.trained_T,
                batch.sequence_T,
                totals,
                world_size=len(layout),
                scale=7.0,
                dtype=torch.float64,
            )
            out, figures = term(leaf_T, weights_T, batch)
            out.backward()
            assert (leaf_T.grad[~batch.trained_T] == 0).all()
            own = batch.trained_T
            gradient_T.index_add_(0, batch.index_T[own], leaf_T.grad[own] / len(layout))
            loss = loss + out.detach() / len(layout)
            metrics.append(figures)
    return loss, gradient_T, metric_values(merge_metrics(metrics))


def policy_term(step: Step, name: str):
    entry, config = POLICY_LOSSES[name], CONFIGS[name]
    selected_T = torch.zeros_like(step.mask_T)
    if entry.select is not None:
        keys_N = torch.arange(step.mask_T.numel(), device=step.mask_T.device)[step.mask_T]
        chosen_N = entry.select(step.advantage_T[step.mask_T], step.old_T[step.mask_T], keys_N, config)
        selected_T[step.mask_T] = chosen_N

    def term(leaf_T: Tensor, weights_T: Tensor, batch: Batch):
        old_T, advantage_T = pick(step.old_T, batch, float("-inf")), pick(step.advantage_T, batch, float("nan"))
        extra = {}
        if entry.select is not None:
            extra["selected_T"] = pick(selected_T.double(), batch, 0.0).bool()
        return entry.fn(leaf_T, old_T, advantage_T, weights_T, batch.sequence_T, batch.trained_T, config, **extra)

    return term


def assert_same(step: Step, kind: str, term, layout: list[list[Batch]]) -> None:
    loss, gradient_T, metrics = update(step, one_batch(step), kind, term)
    again, again_T, again_metrics = update(step, layout, kind, term)
    assert torch.allclose(again, loss, rtol=1e-9, atol=1e-9)
    assert torch.allclose(again_T, gradient_T, rtol=1e-9, atol=1e-9)
    assert again_metrics == pytest.approx(metrics, rel=1e-9, abs=1e-9)


draws = {
    "seed": st.integers(0, 2**30),
    "num_episodes": st.integers(1, 6),
    "ranks": st.integers(1, 4),
    "batches": st.integers(1, 3),
}


@pytest.mark.parametrize("kind", AGGREGATIONS)
@pytest.mark.parametrize("name", POLICY_LOSSES)
@KNOWN
@given(**draws)
def test_policy_losses_do_not_see_the_layout(name, kind, seed, num_episodes, ranks, batches):
    step = draw_step(seed, num_episodes)
    assert_same(step, kind, policy_term(step, name), hard_layout(step, seed + 1, ranks, batches))


def test_the_comparison_notices_a_mean_per_micro_batch():
    """What verl's geo_mean does, a mean over the rows of each micro-batch, is found by the test above."""
    step = draw_step(3, 6)
    good = policy_term(step, "geo_mean")

    def term(leaf_T: Tensor, weights_T: Tensor, batch: Batch):
        local_T = aggregation_weights(
            "seq-mean-token-mean",
            batch.trained_T,
            batch.sequence_T,
            totals_of_tokens(batch.trained_T, batch.sequence_T),
            dtype=torch.float64,
        )
        return good(leaf_T, local_T, batch)

    layout = hard_layout(step, 4, ranks=1, batches=3)
    assert update(step, one_batch(step), "token-mean", term)[1].abs().max() > 0
    with pytest.raises(AssertionError):
        assert_same(step, "token-mean", term, layout)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_the_gradient_that_is_compared_is_not_zero(name):
    step = draw_step(0, 6)
    _, gradient_T, metrics = update(step, one_batch(step), "token-mean", policy_term(step, name))
    assert (gradient_T != 0)[step.mask_T].double().mean() > 0.3
    assert metrics.keys() <= OF_LOSSES, "a loss of the user's own may report the same"


@pytest.mark.parametrize("kl", KL_KINDS)
@KNOWN
@given(**draws)
def test_the_kl_term_does_not_see_the_layout(kl, seed, num_episodes, ranks, batches):
    step = draw_step(seed, num_episodes)

    def term(leaf_T: Tensor, weights_T: Tensor, batch: Batch):
        kl_T = kl_per_token(kl, leaf_T, pick(step.old_T, batch, float("inf")), batch.trained_T)
        return aggregate(kl_T, weights_T, batch.trained_T), {}

    assert_same(step, "seq-mean-token-mean", term, hard_layout(step, seed + 1, ranks, batches))


@KNOWN
@given(**draws)
def test_the_value_loss_does_not_see_the_layout(seed, num_episodes, ranks, batches):
    step = draw_step(seed, num_episodes)

    def term(leaf_T: Tensor, weights_T: Tensor, batch: Batch):
        old_T, returns_T = pick(step.old_T, batch, float("nan")), pick(step.advantage_T, batch, float("inf"))
        return value_loss(leaf_T, old_T, returns_T, weights_T, batch.trained_T, 0.2)

    assert_same(step, "token-mean", term, hard_layout(step, seed + 1, ranks, batches))


@pytest.mark.parametrize("level", ["token", "sequence"])
@KNOWN
@given(**draws)
def test_corrections_do_not_see_the_layout(level, seed, num_episodes, ranks, batches):
    step = draw_step(seed, num_episodes)
    config = Correction(
        level,
        high=1.3,
        low=0.6,
        normalize=True,
        reject=(Reject("seq_mean_k3", 0.1), Reject("token_k1", 2.0), Reject("seq_max_k2", 0.5)),
        veto=0.3,
    )

    def run(layout: list[list[Batch]]):
        weights_T, keep_T = torch.zeros_like(step.new_T), torch.zeros_like(step.mask_T)
        sums, metrics, drifts = [], [], []
        for batch in (b for rank in layout for b in rank):
            learner_T, sampler_T = pick(step.new_T, batch, float("nan")), pick(step.old_T, batch, float("inf"))
            out = correct(learner_T, sampler_T, batch.sequence_T, batch.trained_T, config)
            own = batch.trained_T
            assert not out.keep_T[~own].any()
            assert (out.weights_T[~own] == 0).all()
            weights_T[batch.index_T[own]] = out.weights_T[own]
            keep_T[batch.index_T[own]] = out.keep_T[own]
            sums.append(weight_sums(out.weights_T, batch.sequence_T, own, level=level))
            metrics.append(out.metrics)
            drifts.append(drift(learner_T, sampler_T, batch.sequence_T, own))
        figures = metric_values(merge_metrics(metrics)) | merge_drift(drifts).metrics()
        return weights_T * normalizer(sums), keep_T, figures

    weights_T, keep_T, figures = run(one_batch(step))
    again_T, again_keep_T, again = run(hard_layout(step, seed + 1, ranks, batches))
    assert torch.allclose(again_T, weights_T, rtol=1e-9, atol=1e-12)
    assert torch.equal(again_keep_T, keep_T)
    assert again == pytest.approx(figures, rel=1e-9, abs=1e-9)


@KNOWN
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=8), seed=st.integers(0, 2**30))
def test_totals_are_the_same_from_lengths_and_from_tokens(lengths, seed):
    sequence_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths) + 1)
    mask_T = torch.ones_like(sequence_T, dtype=torch.bool)
    mask_T[torch.tensor(lengths).add(1).cumsum(0) - 1] = False
    order = torch.randperm(mask_T.numel(), generator=torch.Generator().manual_seed(seed))
    assert totals_of_tokens(mask_T[order], sequence_T[order]) == totals_of_lengths(lengths)
    assert totals_of_lengths(lengths) == Totals(sum(lengths), sum(n > 0 for n in lengths))


@pytest.mark.parametrize("kind", ["token-mean", "seq-mean-token-mean"])
def test_rows_of_an_episode_may_be_spread_when_their_lengths_are_given(kind):
    """Losses of single tokens need no whole episodes in a micro-batch: the lengths of the update are enough."""
    step = draw_step(5, 4)
    totals = totals_of_tokens(step.mask_T, step.episode_T)
    lengths = [int((step.mask_T & (step.episode_T == e)).sum()) for e in range(4)]
    whole_T = aggregation_weights(kind, step.mask_T, step.episode_T, totals, dtype=torch.float64)
    for s in (slice(0, 3), slice(3, None)):  # in the midst of the first episode's trained tokens
        part_T = aggregation_weights(
            kind, step.mask_T[s], step.episode_T[s], totals, lengths_S=lengths, dtype=torch.float64
        )
        assert torch.allclose(part_T, whole_T[s])
