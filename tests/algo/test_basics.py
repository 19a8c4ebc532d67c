"""Numbers worked out by hand for the functions that every run uses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from agentrl.algo.advantages.grpo import grpo_advantages
from agentrl.algo.aggregate import AGGREGATIONS, Totals, aggregate, aggregation_weights, totals_of_tokens
from agentrl.algo.correction import drift, merge_drift
from agentrl.algo.kl import AdaptiveKL, FixedKL, kl_per_token
from agentrl.algo.losses.ppo_clip import PPOClip, ppo_clip
from agentrl.algo.metrics import Metric, max_of, mean_of, merge_metrics, metric_values, min_of, sum_of, to_host

MASK = torch.tensor([0, 1, 1, 0, 1, 1, 1, 0]).bool()
SEQUENCE = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])


def one_group(rewards: Tensor, **options: object) -> Tensor:
    return grpo_advantages(rewards, torch.zeros(len(rewards), dtype=torch.long), **options)


def test_the_advantages_of_a_group_by_hand():
    out = one_group(torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64), eps=0.0)
    assert torch.allclose(out, torch.tensor([0.5, -0.5, -0.5, 0.5], dtype=torch.float64) / math.sqrt(1 / 3))
    plain = one_group(torch.tensor([3.0, 0.0, 0.0]), std="none")
    assert plain.tolist() == [2.0, -1.0, -1.0]


@pytest.mark.parametrize("rewards", [[0.7], [0.1, 0.1, 0.1], [-2.0, -2.0], []])
def test_a_group_without_a_difference_gets_exactly_zero(rewards):
    assert one_group(torch.tensor(rewards)).tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token-mean", [1 / 5] * 5),
        ("token-sum", [1.0] * 5),
        ("seq-mean-token-sum", [1 / 2] * 5),
        ("seq-mean-token-mean", [1 / 4] * 2 + [1 / 6] * 3),
        ("seq-mean-token-sum-norm", [1 / 20] * 5),
    ],
)
def test_weights_of_two_episodes_with_two_and_three_tokens(kind, expected):
    totals = totals_of_tokens(MASK, SEQUENCE)
    assert totals == Totals(5, 2)
    weights = aggregation_weights(kind, MASK, SEQUENCE, totals, scale=10, dtype=torch.float64)
    assert weights[MASK].tolist() == pytest.approx(expected)
    assert weights[~MASK].tolist() == [0.0] * 3


def test_weights_of_an_episode_of_one_token_and_of_one_without_any():
    mask, sequence = torch.tensor([1, 1, 1, 0]).bool(), torch.tensor([0, 1, 1, 2])
    totals = totals_of_tokens(mask, sequence)
    assert totals == Totals(3, 2)
    weights = aggregation_weights("seq-mean-token-mean", mask, sequence, totals)
    assert weights.tolist() == [1 / 2, 1 / 4, 1 / 4, 0]


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_weights_of_no_trained_token_are_zero(kind):
    weights = aggregation_weights(kind, torch.zeros(2).bool(), torch.tensor([0, 1]), Totals(0, 0), scale=10)
    assert weights.tolist() == [0, 0]


def test_aggregate_reads_neither_values_nor_weights_that_are_masked():
    values, weights = torch.tensor([1.0, math.nan, 3.0, 5.0]), torch.tensor([0.5, 1.0, 0.25, math.inf])
    assert float(aggregate(values, weights, torch.tensor([1, 0, 1, 0]))) == 1.25


def test_on_policy_gradient_is_minus_advantage_per_token():
    logprobs = torch.randn(8, requires_grad=True)
    weights = aggregation_weights("token-mean", MASK, SEQUENCE, totals_of_tokens(MASK, SEQUENCE))
    advantages = torch.tensor([1.0, -1.0])[SEQUENCE]
    loss, metrics = ppo_clip(logprobs, logprobs.detach(), advantages, weights, SEQUENCE, MASK, PPOClip())
    loss.backward()
    assert torch.allclose(logprobs.grad, torch.where(MASK, -0.2 * advantages, 0.0))
    assert metric_values(metrics)["clip_fraction"] == 0


def test_ppo_clip_by_hand():
    ratios = torch.tensor([1.5, 0.5, 1.5, 5.0], dtype=torch.float64)
    advantages = torch.tensor([2.0, -2.0, -2.0, -2.0], dtype=torch.float64)
    logprobs = ratios.log().requires_grad_()
    ones, sequence = torch.ones(4, dtype=torch.float64), torch.zeros(4, dtype=torch.long)
    config = PPOClip(clip_low=0.2, clip_high=0.3, dual_clip=3.0)
    loss, metrics = ppo_clip(logprobs, torch.zeros_like(ratios), advantages, ones, sequence, ones.bool(), config)
    loss.backward()
    assert loss.item() == pytest.approx(-2 * 1.3 + 2 * 0.8 + 2 * 1.5 + 2 * 3)
    assert logprobs.grad.tolist() == pytest.approx([0, 0, 2 * 1.5, 0])
    values = metric_values(merge_metrics([metrics, metrics]))
    assert values["clip_fraction"] == pytest.approx(0.5)
    assert values["dual_clip_fraction"] == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("kind", "value", "gradient"),
    [
        ("k1", -0.5, 1.0),
        ("abs", 0.5, -1.0),
        ("k2", 0.125, -0.5),
        ("k3", math.exp(0.5) - 1.5, 1 - math.exp(0.5)),
        ("k1+", -0.5, -0.5),
        ("abs+", 0.5, -0.5),
        ("k2+", 0.125, -0.5),
        ("k3+", math.exp(0.5) - 1.5, -0.5),
        ("unbiased", math.exp(0.5) - 1.5, -0.5),
    ],
)
def test_kl_of_one_token_half_a_nat_below_the_reference(kind, value, gradient):
    logprob = torch.tensor([-1.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    out = kl_per_token(kind, logprob, reference, torch.tensor([True]))
    out.sum().backward()
    assert out.item() == pytest.approx(value)
    assert logprob.grad.item() == pytest.approx(gradient)
    assert reference.grad is None


def test_drift_by_hand_and_in_parts():
    learner = torch.tensor([-1.0, -1.0, float("nan"), -2.0])
    sampler = torch.tensor([-1.5, -1.0, 0.0, -1.0])
    sequence, mask = torch.tensor([0, 0, 0, 1]), torch.tensor([1, 1, 0, 1]).bool()
    whole = drift(learner, sampler, sequence, mask)
    got = whole.metrics()
    assert got["mean_abs"] == pytest.approx(0.5)
    assert got["max_abs"] == 1.0
    assert got["kl"] == pytest.approx((-0.5 + 1.0) / 3)
    assert got["k3"] == pytest.approx((math.exp(0.5) - 1.5 + math.exp(-1)) / 3)
    ratios = [math.exp(0.5), 1.0, math.exp(-1)]
    assert got["ess"] == pytest.approx(sum(ratios) ** 2 / (3 * sum(r * r for r in ratios)))
    assert got["ppl_ratio"] == pytest.approx((math.exp(-0.25) + math.exp(1)) / 2)
    parts = [drift(learner[s], sampler[s], sequence[s], mask[s]) for s in (slice(0, 3), slice(3, 4))]
    assert merge_drift(parts).metrics() == pytest.approx(got)
    assert merge_drift([]).metrics() == {}


def test_weights_of_several_ranks_make_up_for_the_average_of_their_gradients():
    totals = Totals(5, 2)
    one = aggregation_weights("token-mean", MASK, SEQUENCE, totals)
    four = aggregation_weights("token-mean", MASK, SEQUENCE, totals, world_size=4)
    assert torch.allclose(four, 4 * one)


def test_what_cannot_be_aggregated_is_refused():
    with pytest.raises(ValueError, match="unknown aggregation 'mean'; there are token-mean"):
        aggregation_weights("mean", MASK, SEQUENCE, Totals(5, 2))
    with pytest.raises(ValueError, match="needs a constant scale > 0, got None"):
        aggregation_weights("seq-mean-token-sum-norm", MASK, SEQUENCE, Totals(5, 2))
    with pytest.raises(ValueError, match="needs a constant scale > 0, got 0"):
        aggregation_weights("seq-mean-token-sum-norm", MASK, SEQUENCE, Totals(5, 2), scale=0)
    with pytest.raises(ValueError, match="unknown KL kind 'k4'"):
        kl_per_token("k4", torch.zeros(1), torch.zeros(1), torch.ones(1).bool())


def test_the_gradient_of_the_default_kl_is_unbiased():
    """Over all outcomes of a categorical policy the mean of the estimate's gradient is the gradient of the KL."""
    logits = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.2, 0.4, 0.1], dtype=torch.float64).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    everything = torch.ones(3, dtype=torch.bool)
    for kind, unbiased in (("unbiased", True), ("k2", True), ("k1", False), ("k3", False)):
        values = kl_per_token(kind, logprobs, reference, everything)
        (got,) = torch.autograd.grad((logprobs.detach().exp() * values).sum(), logits, retain_graph=True)
        assert torch.allclose(got, wanted) == unbiased
        if kind in ("unbiased", "k1", "k3"):
            assert torch.allclose((logprobs.exp() * values).sum(), exact)


def test_kl_controllers():
    fixed = FixedKL(0.1)
    fixed.update(5.0, 64)
    assert fixed.coef == 0.1
    adaptive = AdaptiveKL(0.1, target=0.5, horizon=1000)
    adaptive.update(5.0, 100)
    assert adaptive.coef == pytest.approx(0.1 * 1.02)
    adaptive.update(0.45, 100)
    assert adaptive.coef == pytest.approx(0.1 * 1.02 * 0.99)
    resumed = AdaptiveKL(0.1, target=0.5, horizon=1000)
    resumed.load_state_dict(adaptive.state_dict())
    assert resumed.coef == adaptive.coef
    resumed.load_state_dict({"coef": 0.3})  # of a checkpoint that does not say where it began
    assert resumed.coef == 0.3
    resumed.load_state_dict(adaptive.state_dict())
    changed = AdaptiveKL(0.7, target=0.5, horizon=1000)
    for before in (adaptive, fixed):
        changed.load_state_dict(before.state_dict())
        assert changed.coef == 0.7, "the configuration changed"
    adaptive.update(math.nan, 100)
    assert adaptive.coef == resumed.coef
    adaptive.update(0.0, 10**9)  # a step far beyond the horizon: the penalty shrinks, it does not turn around
    assert adaptive.coef == pytest.approx(resumed.coef * 0.1)
    with pytest.raises(ValueError, match="must be above 0"):
        AdaptiveKL(0.1, target=0.0, horizon=1000)
    with pytest.raises(ValueError, match="must be 0 or larger"):
        FixedKL(-0.1)


def test_metrics_merge_by_their_kind():
    def part(*values: float) -> dict[str, Metric]:
        numbers = torch.tensor(values)
        return {"a": mean_of(numbers), "b": max_of(numbers), "c": min_of(numbers), "d": sum_of(numbers)}

    merged = metric_values(merge_metrics([part(1.0, 2.0, 6.0), part(), part(5.0)]))
    assert merged == {"a": 3.5, "b": 6.0, "c": 1.0, "d": 14.0}
    assert merged == metric_values(merge_metrics([to_host(part(1.0, 2.0, 6.0)), to_host(part(5.0))]))
    assert metric_values(part()) == {"d": 0.0}
    assert math.isnan(metric_values(merge_metrics([part(1.0), part(math.nan), part(2.0)]))["b"])
    with pytest.raises(ValueError, match="metric 'a' is a mean in one part and a max in another"):
        merge_metrics([{"a": mean_of(torch.ones(1))}, {"a": max_of(torch.ones(1))}])
