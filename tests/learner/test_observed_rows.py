"""The observation loss: which tokens it is over, and its gradient against a plain computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.chat.transcript import rows_of
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.run import LearnerConfig, OptimConfig
from agentrl.learner.pack import as_taught, pack
from agentrl.types import HintedOpening, Sample, Segment
from tests.learner.direct import DirectLearner
from tests.learner.train_models import gradients, make_batch, make_sample, observed, padded_logprobs, plain_model

COEF = 0.3


def answers_as_trained(samples: Sequence[Sample]) -> list[Sample]:
    """Rows that train what the env said, and nothing else; rows without any are left out."""
    return [replace(s, loss_mask=s.observed) for s in samples if any(s.observed)]


def wanted(
    policy_dir: Path, samples: Sequence[Sample], *, temperature: float = 1.0, policy_gradient: bool = True
) -> tuple[Tensor, float]:
    """The gradient of a step of one update, and its observation loss."""
    policy = plain_model(policy_dir)
    loss = torch.zeros(())
    if policy_gradient:  # the ratio is 1 everywhere
        own = padded_logprobs(policy, samples, temperature)
        pulls = [torch.tensor([a for a, on in zip(s.advantages, s.loss_mask, strict=True) if on]) for s in samples]
        count = sum(len(pull) for pull in pulls)
        loss = -sum((pull * logprobs).sum() for pull, logprobs in zip(pulls, own, strict=True)) / count
    answers = -torch.cat(padded_logprobs(policy, answers_as_trained(samples), temperature)).mean()
    policy.zero_grad()
    (loss + COEF * answers).backward()
    return gradients(policy), float(answers.detach())


def found(
    policy_dir: Path, samples: Sequence[Sample], *, temperature: float = 1.0, reference: Path | None = None,
    algorithm: dict[str, Any] | None = None, **config: Any,
) -> tuple[Tensor, dict[str, float]]:  # fmt: skip
    learner = DirectLearner(
        policy_dir,
        algorithm=AlgorithmConfig(**{"kl": {"coef": 0}, "observation_coef": COEF} | (algorithm or {})),
        optim=OptimConfig(lr=1e-3, warmup_steps=0, max_grad_norm=1e9),
        config=LearnerConfig(**{"device": "cpu", "tokens_per_micro_batch": 120, "logits_at_once": 16} | config),
        temperature=temperature,
        total_steps=10,
        reference_dir=reference,
    )
    seen: list[Tensor] = []
    learner.optimizer.register_step_pre_hook(lambda *_: seen.append(gradients(learner.policy)))
    metrics = dict(learner.step(samples).metrics)
    learner.close()
    return seen[0], metrics


def close(gradient: Tensor, other: Tensor) -> bool:
    return float((gradient - other).norm() / other.norm()) < 1e-4


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"tokens_per_micro_batch": 5000},
        {"logits_at_once": 0},
        {"logits_at_once": 3, "checkpoint_activations": True},
    ],
)
def test_the_gradient_is_that_of_the_policy_loss_and_the_mean_cross_entropy(
    policy_dir: Path, config: dict[str, Any]
):
    samples = observed(make_batch(3))
    gradient, metrics = found(policy_dir, samples, **config)
    plain, loss = wanted(policy_dir, samples)
    assert metrics["observation_loss"] == pytest.approx(loss, rel=1e-4)
    assert close(gradient, plain)
    without, _ = found(policy_dir, samples, algorithm={"observation_coef": 0})
    assert not close(without, plain)


def test_it_has_the_temperature_of_the_rollouts(policy_dir: Path):
    samples = observed(make_batch(4))
    gradient, metrics = found(policy_dir, samples, temperature=0.7)
    plain, loss = wanted(policy_dir, samples, temperature=0.7)
    assert metrics["observation_loss"] == pytest.approx(loss, rel=1e-4)
    assert close(gradient, plain)


def test_episodes_without_an_advantage_learn_from_the_env_all_the_same(policy_dir: Path):
    samples = [replace(s, advantages=(0.0,) * len(s.ids)) for s in observed(make_batch(5))]
    gradient, metrics = found(policy_dir, samples)
    plain, loss = wanted(policy_dir, samples, policy_gradient=False)
    assert metrics["observation_loss"] == pytest.approx(loss, rel=1e-4)
    assert metrics["episodes_without_advantage"] > 0
    assert close(gradient, plain)


def test_a_penalty_over_whole_distributions_is_over_sampled_tokens_alone(policy_dir: Path, reference_dir: Path):
    samples = observed(make_batch(6))
    kl = {"kl": {"coef": 0.5, "kind": "full", "top": 0}}
    penalized, metrics = found(policy_dir, samples, reference=reference_dir, algorithm=kl)
    alone, others = found(policy_dir, samples, reference=reference_dir, algorithm=kl | {"observation_coef": 0})
    both, _ = wanted(policy_dir, samples)
    policy_only, _ = found(policy_dir, samples, algorithm={"observation_coef": 0})
    assert metrics["kl"] == pytest.approx(others["kl"], rel=1e-5)
    assert close(penalized - alone, both - policy_only)


def test_every_update_of_a_step_has_the_mean_of_its_own_answers(policy_dir: Path):
    samples = observed(make_batch(7))
    episodes = list(dict.fromkeys(s.episode_id for s in samples))
    gradient, _ = found(policy_dir, samples, algorithm={"updates_per_step": 2})
    first = [s for s in samples if s.episode_id in episodes[::2]]
    plain, _ = wanted(policy_dir, first)
    assert close(gradient, plain)


def test_a_step_without_answers_has_no_observation_loss(policy_dir: Path):
    samples = make_batch(8)
    gradient, metrics = found(policy_dir, samples)
    plain, others = found(policy_dir, samples, algorithm={"observation_coef": 0})
    assert "observation_loss" not in metrics
    assert gradient.equal(plain)
    assert metrics == others


def test_shared_answers_are_computed_once_and_count_once():
    """Two rows of an episode have an answer in common; the first of them trains it."""

    def sampled(ids: tuple[int, ...], parent: int) -> Segment:
        return Segment(ids, "sampled", parent, 1, (-1.0,) * len(ids), (0,) * len(ids))

    segments = [
        Segment((1, 2, 3), "prompt", -1, 0),
        sampled((4, 5), 0),
        Segment((6,), "glue", 1),
        Segment((7, 8), "observation", 2, 2),
        Segment((9,), "glue", 3),
        sampled((10,), 4),  # a leaf
        sampled((11, 12), 4),  # its sibling
        Segment((13,), "observation", 6, 3),
        sampled((14,), 7),
        Segment((15,), "observation", 8, 4),  # nothing is sampled after it
    ]
    first, second = rows_of(segments)
    assert first.ids == (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    assert [i for i, on in zip(first.ids, first.observed, strict=True) if on] == [7, 8]
    assert second.ids == (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14)
    assert [i for i, on in zip(second.ids, second.observed, strict=True) if on] == [13]
    rows = [
        Sample(r.ids, r.loss_mask, r.logprobs, (1.0,) * len(r.ids), r.versions, "e", observed=r.observed)
        for r in (first, second)
    ]
    packed = pack(rows)
    assert packed.observed_ids_O.tolist() == [7, 8, 13]
    assert packed.ids_T[packed.observed_source_O].tolist() == [6, 7, 12]
    both = packed.with_observed()
    assert both.ids_N.tolist() == [*packed.ids_N.tolist(), 7, 8, 13]
    assert len(both.ids_T) == len(packed.ids_T)


def test_a_teacher_does_not_predict_the_env():
    [row] = observed([make_sample(range(10), {3, 4, 8})])
    taught = as_taught(replace(row, hinted=HintedOpening(2, (7, 7, 7))))
    assert pack([row]).observed_ids_O.tolist() == [5, 6, 7, 9]
    assert pack([taught]).observed_ids_O.tolist() == []
