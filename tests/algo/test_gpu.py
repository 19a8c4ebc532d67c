"""The same numbers on a GPU as on the CPU."""

from __future__ import annotations

import pytest
import torch

from agentrl.algo.advantages import ESTIMATORS, estimate
from agentrl.algo.correction import Correction, Reject, correct, drift
from agentrl.algo.entropy import entropy_threshold, high_entropy_mask
from agentrl.algo.kl import KL_KINDS, kl_per_token
from agentrl.algo.losses import POLICY_LOSSES
from agentrl.algo.metrics import metric_values
from agentrl.algo.step_data import StepData
from tests.algo.test_advantages import CONFIGS as ESTIMATOR_CONFIGS
from tests.algo.test_advantages import draw_step as draw_episodes
from tests.algo.test_invariance import Batch, aggregation_weights, draw_step, policy_term, totals_of_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on(device: str, thing):
    """The same dataclass with its tensors on a device."""
    fields = {name: getattr(thing, name) for name in type(thing).__dataclass_fields__}
    return type(thing)(**{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in fields.items()})


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_policy_losses(name):
    results = []
    for device in ("cpu", "cuda"):
        step = on(device, draw_step(3, 6))
        batch = Batch(torch.arange(step.episode_T.numel(), device=device), step.mask_T, step.episode_T)
        totals = totals_of_tokens(step.mask_T, step.episode_T)
        weights_T = aggregation_weights(
            "seq-mean-token-mean", step.mask_T, step.episode_T, totals, dtype=torch.float64
        )
        leaf_T = step.new_T.clone().requires_grad_()
        loss, metrics = policy_term(step, name)(leaf_T, weights_T, batch)
        loss.backward()
        results.append((loss.item(), leaf_T.grad.cpu(), metric_values(metrics)))
    (loss, gradient_T, figures), (again, again_T, again_figures) = results
    assert again == pytest.approx(loss, abs=1e-10)
    assert torch.allclose(again_T, gradient_T, atol=1e-10)
    assert again_figures == pytest.approx(figures, abs=1e-10)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators(name):
    step = draw_episodes(1, 8, 3)
    fields = {k: getattr(step, k) for k in StepData.__slots__}
    moved = StepData(**{k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in fields.items()})
    expected = estimate(name, step, ESTIMATOR_CONFIGS[name]).advantages_N
    got = estimate(name, moved, ESTIMATOR_CONFIGS[name]).advantages_N
    assert got.is_cuda
    assert torch.allclose(got.cpu(), expected, atol=1e-10)


def test_kl_corrections_and_entropy():
    step = draw_step(2, 5)
    moved = on("cuda", step)
    for kind in KL_KINDS:
        here = kl_per_token(kind, step.new_T, step.old_T, step.mask_T)
        there = kl_per_token(kind, moved.new_T, moved.old_T, moved.mask_T)
        assert torch.allclose(there.cpu(), here, atol=1e-10)
    config = Correction("sequence", reject=(Reject("seq_max_k3", 0.3), Reject("token_k1", 1.5)), veto=0.3)
    here = correct(step.new_T, step.old_T, step.episode_T, step.mask_T, config)
    there = correct(moved.new_T, moved.old_T, moved.episode_T, moved.mask_T, config)
    assert torch.allclose(there.weights_T.cpu(), here.weights_T, atol=1e-10)
    assert torch.equal(there.keep_T.cpu(), here.keep_T)
    one = drift(step.new_T, step.old_T, step.episode_T, step.mask_T).metrics()
    assert drift(moved.new_T, moved.old_T, moved.episode_T, moved.mask_T).metrics() == pytest.approx(one)
    threshold = entropy_threshold(moved.old_T[moved.mask_T], 0.3)
    kept = high_entropy_mask(moved.old_T, moved.mask_T, threshold)
    assert torch.equal(kept.cpu(), high_entropy_mask(step.old_T, step.mask_T, threshold))
