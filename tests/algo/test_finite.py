"""Loss and gradient stay finite for log-ratios up to 50 in float32, and masked positions get exactly none."""

from __future__ import annotations

import math

import pytest
import torch

from agentrl.algo.aggregate import Totals, aggregate, aggregation_weights
from agentrl.algo.correction import Correction, correct, drift
from agentrl.algo.kl import KL_KINDS, bounded_exp, kl_per_token
from agentrl.algo.losses import POLICY_LOSSES
from agentrl.algo.losses.ppo_clip import PPOClip, ppo_clip
from agentrl.algo.metrics import metric_values
from agentrl.algo.value import value_loss
from agentrl.learner.logprobs import token_columns

LOG_RATIOS = torch.tensor([-50.0, -30.0, -20.0, -5.0, -1.0, 0.0, 1.0, 5.0, 19.9, 20.1, 30.0, 50.0])


def call(name: str, new_T, old_T, advantages_T, mask_T, sequence_T):
    entry = POLICY_LOSSES[name]
    weights_T = aggregation_weights("token-mean", mask_T, sequence_T, Totals(int(mask_T.sum()), 1))
    extra = {} if entry.select is None else {"selected_T": torch.arange(mask_T.numel()) % 3 == 0}
    return entry.fn(new_T, old_T, advantages_T, weights_T, sequence_T, mask_T, entry.config(), **extra)


@pytest.mark.parametrize("spread", [True, False], ids=["one sequence each", "one sequence"])
@pytest.mark.parametrize("advantage", [2.0, -2.0, 0.0])
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_policy_losses_are_finite_up_to_a_log_ratio_of_50(name, advantage, spread):
    size = LOG_RATIOS.numel()
    old_T = torch.full((size,), -55.0)
    new_T = (old_T + LOG_RATIOS).requires_grad_()
    sequence_T = torch.arange(size) if spread else torch.zeros(size, dtype=torch.long)
    mask_T = torch.ones(size, dtype=torch.bool)
    loss, metrics = call(name, new_T, old_T, torch.full((size,), advantage), mask_T, sequence_T)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(new_T.grad).all()
    assert torch.isfinite(new_T.grad.square().sum())  # the gradient's norm fits float32 as well
    assert all(math.isfinite(v) for v in metric_values(metrics).values())


@pytest.mark.parametrize("kind", KL_KINDS)
def test_kl_is_finite_and_its_gradient_stays_where_drift_is_large(kind):
    ref_T = torch.full_like(LOG_RATIOS, -55.0)
    new_T = (ref_T + LOG_RATIOS).requires_grad_()
    value_T = kl_per_token(kind, new_T, ref_T, torch.ones_like(ref_T, dtype=torch.bool))
    value_T.sum().backward()
    assert torch.isfinite(value_T).all()
    assert torch.isfinite(new_T.grad).all()
    far = LOG_RATIOS.abs() >= 5
    assert (new_T.grad[far].abs() > 0.99).all()
    if kind == "unbiased":
        assert torch.allclose(new_T.grad, LOG_RATIOS, atol=1e-4)


def test_exp_goes_on_with_its_tangent():
    x = torch.tensor([-50.0, 0.0, 20.0, 21.0, 50.0], dtype=torch.float64, requires_grad=True)
    y = bounded_exp(x)
    y.sum().backward()
    top = math.exp(20)
    assert y.tolist() == pytest.approx([math.exp(-50), 1.0, top, 2 * top, 31 * top])
    assert x.grad.tolist() == pytest.approx([math.exp(-50), 1.0, top, top, top])


BAD = [float("nan"), float("inf"), float("-inf"), 1e30]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_masked_positions_are_never_read(name, bad):
    good = torch.tensor([-1.0, -0.5, -2.0, -0.1])
    advantages_T = torch.tensor([1.0, bad, -1.0, bad, 0.5, -0.3])
    place = torch.tensor([0, 2, 4, 5])
    mask_T = torch.zeros(6, dtype=torch.bool)
    mask_T[place] = True
    sequence_T = torch.tensor([0, 0, 0, 1, 1, 1])
    new_T, old_T = torch.full((6,), bad), torch.full((6,), -bad)
    new_T[place], old_T[place] = good, good + torch.tensor([0.1, -0.2, 0.3, 0.05])
    new_T.requires_grad_()
    loss, _ = call(name, new_T, old_T, advantages_T, mask_T, sequence_T)
    loss.backward()
    assert torch.isfinite(loss)
    assert (new_T.grad[~mask_T] == 0).all()
    assert torch.isfinite(new_T.grad).all()
    assert (new_T.grad[mask_T] != 0).any()


@pytest.mark.parametrize("bad", BAD)
def test_masked_positions_of_the_other_terms_are_never_read(bad):
    mask_T = torch.tensor([True, False, True])
    weights_T = torch.tensor([0.5, bad, 0.5])
    for kind in KL_KINDS:
        new_T = torch.tensor([-1.0, bad, -2.0], requires_grad=True)
        kl_T = kl_per_token(kind, new_T, torch.tensor([-1.5, -bad, -2.5]), mask_T)
        aggregate(kl_T, weights_T, mask_T).backward()
        assert new_T.grad[1] == 0
        assert torch.isfinite(new_T.grad).all()
    values_T = torch.tensor([0.3, bad, -0.2], requires_grad=True)
    loss, _ = value_loss(values_T, torch.full((3,), bad), torch.tensor([1.0, bad, 1.0]), weights_T, mask_T,
                         None)  # fmt: skip
    loss.backward()
    assert torch.isfinite(loss)
    assert values_T.grad[1] == 0
    sequence_T = torch.zeros(3, dtype=torch.long)
    new_T, old_T = torch.tensor([-1.0, bad, -2.0]), torch.tensor([-1.1, -bad, -2.1])
    out = correct(new_T, old_T, sequence_T, mask_T, Correction("sequence"))
    assert torch.isfinite(out.weights_T).all()
    assert out.weights_T[1] == 0
    assert math.isfinite(drift(new_T, old_T, sequence_T, mask_T).metrics()["mean_abs"])


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_micro_batch_without_a_trained_token_gives_zero_and_can_be_differentiated(name):
    new_T = torch.full((3,), float("nan"), requires_grad=True)
    nothing_T, sequence_T = torch.zeros(3, dtype=torch.bool), torch.zeros(3, dtype=torch.long)
    loss, metrics = call(name, new_T, new_T.detach(), new_T.detach(), nothing_T, sequence_T)
    loss.backward()
    assert loss.item() == 0
    assert new_T.grad.tolist() == [0.0, 0.0, 0.0]
    assert metric_values(metrics) == {}


def test_entropy_of_a_vocabulary_with_impossible_tokens():
    logits = torch.tensor([[0.0, 0.0, float("-inf")]], requires_grad=True)
    id_0 = torch.zeros(1, dtype=torch.long)
    entropy = token_columns(logits, id_0, 1.0, frozenset({"entropy"}), entropy_gradient=True)[:, 1]
    entropy.sum().backward()
    assert entropy.item() == pytest.approx(math.log(2))
    assert torch.isfinite(logits.grad).all()


def test_without_a_dual_clip_a_runaway_token_is_still_pushed_down():
    """A clamp of the log-ratio would leave it without a gradient just where it has gone farthest."""
    new_T = torch.tensor([-1.0], requires_grad=True)
    one = torch.ones(1)
    loss, _ = ppo_clip(new_T, torch.tensor([-41.0]), -one, one, torch.zeros(1, dtype=torch.long), one.bool(),
                       PPOClip(dual_clip=None))  # fmt: skip
    loss.backward()
    assert new_T.grad.item() == pytest.approx(math.exp(20), rel=1e-5)
