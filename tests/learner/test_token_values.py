"""What a step returns of each token: the policy's own numbers before its update, however the rows are split."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.run import LearnerConfig, OptimConfig
from agentrl.learner.split import StepResult
from agentrl.types import Sample
from tests.learner.direct import DirectLearner
from tests.learner.train_models import make_batch, padded_logprobs, plain_model, write_model


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("values_policy"), seed=3, layers=1)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("values_reference"), seed=4, layers=1)


def step(
    policy: Path, reference: Path, samples: list[Sample], *, tokens: int = 4096, lr: float = 1e-3, **algorithm: Any
) -> StepResult:
    driver = DirectLearner(
        policy,
        algorithm=AlgorithmConfig(kl={"coef": 0.05}, **algorithm),
        optim=OptimConfig(lr=lr, warmup_steps=0),
        config=LearnerConfig(device="cpu", tokens_per_micro_batch=tokens),
        temperature=1.0,
        total_steps=10,
        reference_dir=reference,
    )
    try:
        rows = driver.prepared(samples)
        return asyncio.run(driver.learner.step(replace(rows, record=True)))
    finally:
        driver.close()


@pytest.mark.parametrize("tokens", [4096, 60])
def test_logprobs_are_the_policys_before_the_update_on_any_split(policy: Path, reference: Path, tokens: int):
    samples = make_batch(0)
    found = step(policy, reference, samples, tokens=tokens).values
    own = padded_logprobs(plain_model(policy), samples)
    other = padded_logprobs(plain_model(reference), samples)
    assert len(found) == len(samples)
    for sample, values, wanted, ref in zip(samples, found, own, other, strict=True):
        count = sum(sample.loss_mask)
        assert {name: len(column) for name, column in values.items()} == dict.fromkeys(values, count)
        np.testing.assert_allclose(values["learner_logprobs"], wanted.detach().numpy(), atol=1e-5)
        np.testing.assert_allclose(values["ref_logprobs"], ref.detach().numpy(), atol=1e-5)
        np.testing.assert_allclose(values["ratio"], 1.0, atol=1e-4)
        assert not values["clipped"].any()
        assert (values["entropy"] > 0).all()


def test_clipped_tokens_are_those_beyond_the_clip(policy: Path, reference: Path):
    loss = {"name": "ppo_clip", "clip_low": 0.02, "clip_high": 0.03, "dual_clip": None}
    found = step(policy, reference, make_batch(1), lr=0.03, updates_per_step=3, epochs=2, loss=loss).values
    clipped = np.concatenate([values["clipped"] for values in found]) > 0
    ratio = np.concatenate([values["ratio"] for values in found]).astype(float)
    advantage = np.concatenate([values["advantages"] for values in found])
    beyond = ((advantage > 0) & (ratio > 1.03)) | ((advantage < 0) & (ratio < 0.98))
    near = (np.abs(ratio - 1.03) < 1e-4) | (np.abs(ratio - 0.98) < 1e-4)
    assert 0 < clipped.sum() < len(clipped)
    assert (clipped == beyond)[~near].all()


def test_nothing_is_returned_unless_it_is_recorded(policy: Path, reference: Path):
    driver = DirectLearner(
        policy,
        algorithm=AlgorithmConfig(),
        optim=OptimConfig(),
        config=LearnerConfig(device="cpu"),
        temperature=1.0,
        total_steps=10,
    )
    try:
        assert not driver.step(make_batch(0)).values
    finally:
        driver.close()


@pytest.mark.parametrize("loss", ["gspo", "cispo", "reinforce", "sapo", "dppo_tv"])
def test_recording_changes_no_gradient(policy: Path, reference: Path, loss: str):
    samples, norms = make_batch(2), []
    for record in (False, True):
        driver = DirectLearner(
            policy,
            algorithm=AlgorithmConfig(loss=loss, updates_per_step=2),
            optim=OptimConfig(lr=1e-2),
            config=LearnerConfig(device="cpu"),
            temperature=1.0,
            total_steps=10,
        )
        try:
            result = asyncio.run(driver.learner.step(replace(driver.prepared(samples), record=record)))
        finally:
            driver.close()
        norms.append(result.metrics)
    assert norms[0] == norms[1]
