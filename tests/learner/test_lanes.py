"""Parts of a micro-batch side by side: the same gradient, the same records, the same bits each time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.run import LearnerConfig, OptimConfig
from agentrl.learner.lanes import Backward, Lanes, num_lanes
from agentrl.learner.logprobs import token_stats
from agentrl.learner.pack import pack
from agentrl.learner.shard import World
from agentrl.learner.split import StepResult
from agentrl.types import Sample
from tests.learner.direct import DirectLearner
from tests.learner.train_models import gradients, make_batch, plain_model, relative, write_model


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("lanes_policy"), seed=5)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("lanes_reference"), seed=6)


@pytest.fixture
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def step(
    threads: int, policy: Path, reference: Path, samples: list[Sample], **algorithm: Any
) -> tuple[StepResult, dict[str, Tensor]]:
    """A recorded step of as many lanes, and the weights after it."""
    torch.set_num_threads(threads)
    driver = DirectLearner(
        policy,
        algorithm=AlgorithmConfig(kl={"coef": 0.05}, entropy_coef=0.01, **algorithm),
        optim=OptimConfig(lr=1e-3, warmup_steps=0),
        config=LearnerConfig(device="cpu", logits_at_once=16),
        temperature=1.0,
        total_steps=10,
        reference_dir=reference,
    )
    try:
        rows = replace(driver.prepared(samples), record=True)
        result = asyncio.run(driver.learner.step(rows))
        return result, {name: value.clone() for name, value in driver.policy.state_dict().items()}
    finally:
        driver.close()


@pytest.mark.usefixtures("torch_threads")
@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {"loss": {"name": "gspo"}, "aggregation": "seq-mean-token-mean"},
        {"updates_per_step": 2, "epochs": 2},
        {"correction": {"importance": "sequence"}},
    ],
)
def test_a_step_does_not_depend_on_the_number_of_lanes(policy: Path, reference: Path, algorithm: dict[str, Any]):
    samples = make_batch(2)
    start = plain_model(policy).state_dict()
    alone, weights = step(1, policy, reference, samples, **algorithm)
    for threads in (2, 5, 40):  # more than groups, and more than episodes
        result, found = step(threads, policy, reference, samples, **algorithm)
        assert result.metrics == pytest.approx(alone.metrics, rel=1e-4, abs=1e-6)
        moved = torch.cat([(weights[name] - start[name]).flatten() for name in start])
        apart = torch.cat([(found[name] - weights[name]).flatten() for name in start])
        assert apart.norm() < 0.005 * moved.norm()  # AdamW moves by the sign where a gradient is all rounding
        for values, wanted in zip(result.values, alone.values, strict=True):
            assert values.keys() == wanted.keys()
            for name, column in wanted.items():
                np.testing.assert_allclose(values[name], column, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.usefixtures("torch_threads")
def test_two_steps_with_as_many_lanes_have_the_same_bits(policy: Path, reference: Path):
    samples = make_batch(3)
    first, second = (step(3, policy, reference, samples)[1] for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def negative_log_likelihood(model: nn.Module) -> Any:
    def train(rows: tuple[Sample, ...], backward: Backward) -> float:
        loss = -token_stats(model, pack(rows), chunk=8).logprobs_N.sum()  # type: ignore[arg-type]
        backward(loss)
        return float(loss.detach())

    return train


def test_gradients_add_to_those_that_are_there(policy: Path):
    samples = tuple(make_batch(4))
    model, other = (DirectLearner(policy, **PLAIN).policy for _ in range(2))
    for lanes in (Lanes(model.parameters(), 1), Lanes(other.parameters(), 3)):
        trained = model if lanes.size == 1 else other
        for rows in (samples[:5], samples[5:]):
            parts = lanes.run(rows, negative_log_likelihood(trained))
            assert sorted(map(id, rows)) == sorted(id(row) for part, _ in parts for row in part)
        lanes.close()
    assert relative(gradients(other), gradients(model)) < 1e-6


PLAIN: dict[str, Any] = {
    "algorithm": AlgorithmConfig(kl={"coef": 0.0}),
    "optim": OptimConfig(),
    "config": LearnerConfig(device="cpu"),
    "temperature": 1.0,
    "total_steps": 10,
}


def test_an_error_in_a_lane_is_raised_and_the_lanes_go_on(policy: Path):
    model = DirectLearner(policy, **PLAIN).policy
    lanes, samples = Lanes(model.parameters(), 2), tuple(make_batch(5))

    def fail(rows: tuple[Sample, ...], backward: Backward) -> None:
        raise ArithmeticError(f"{len(rows)} rows")

    with pytest.raises(ArithmeticError, match="rows"):
        lanes.run(samples, fail)
    assert len(lanes.run(samples, negative_log_likelihood(model))) == 2
    lanes.close()


@pytest.mark.usefixtures("torch_threads")
def test_lanes_are_for_small_models_that_nothing_else_splits(policy: Path):
    torch.set_num_threads(3)
    model, config = plain_model(policy), LearnerConfig(device="cpu")
    assert num_lanes(model, World(), config) == 3
    for other in ({"lora": {"rank": 2}}, {"checkpoint_activations": True}):
        assert num_lanes(model, World(), LearnerConfig(device="cpu", **other)) == 1
    assert num_lanes(model, replace(World(), size=2), config) == 1
    large = torch.nn.Linear(5_000, 5_000, device="meta")
    large.__class__ = type("Qwen3ForCausalLM", (torch.nn.Linear,), {})
    assert num_lanes(large, World(), config) == 1  # type: ignore[arg-type]
    torch.set_num_threads(1)
    assert num_lanes(model, World(), config) == 1


def test_threads_of_others_keep_their_number(policy: Path):
    before = torch.get_num_threads()
    lanes = Lanes(plain_model(policy).parameters(), before + 1)
    assert torch.get_num_threads() == before
    lanes.close()
