"""Servers with other weights than the learner's are found out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from agentrl.config.run import AlgorithmConfig, LearnerConfig, OptimConfig
from agentrl.errors import AgentRLError
from agentrl.trainer.verify import WeightCheck
from agentrl.types import Sample
from tests.engine.test_served import engine_over, model, servers
from tests.learner.direct import DirectLearner
from tests.learner.train_models import VOCABULARY, make_sample, plain_model

__all__ = ["model"]

ROWS = [[5, 3, 96, 1, 40, 12], [7, 8]]


class Server:
    """What servers would answer that have the weights of these directories."""

    def __init__(self, *folders: Path) -> None:
        self.models = [plain_model(folder) for folder in folders]

    async def logprobs_by_server(self, rows: Sequence[Sequence[int]]) -> dict[str, list[list[float]]]:
        found = {}
        for number, policy in enumerate(self.models):
            with torch.no_grad():
                tables = [torch.log_softmax(policy(torch.tensor([list(row)])).logits[0], -1) for row in rows]
            found[f"server {number}"] = [
                [float(table[t - 1, row[t]]) for t in range(1, len(row))]
                for row, table in zip(rows, tables, strict=True)
            ]
        return found


def check(policy_dir: Path, *servers: Path, tolerance: float = 1e-3) -> WeightCheck:
    learner = DirectLearner(
        policy_dir,
        algorithm=AlgorithmConfig(),
        optim=OptimConfig(),
        config=LearnerConfig(device="cpu"),
        temperature=0.7,
        total_steps=1,
    )
    return WeightCheck(Server(*servers), learner.learner.probe, ROWS, tolerance)


async def test_equal_weights_agree_to_rounding_whatever_the_sampling_temperature(policy_dir: Path) -> None:
    assert await check(policy_dir, policy_dir, policy_dir).gap(1) < 1e-5


async def test_one_server_with_other_weights_stops_the_run(policy_dir: Path, reference_dir: Path) -> None:
    with pytest.raises(AgentRLError, match=r"version 4: server 1 .* above engine.sync_tolerance \(0.001\)"):
        await check(policy_dir, policy_dir, reference_dir).gap(4)


async def test_the_server_that_differs_is_named_though_one_before_it_is_lost(model: Path) -> None:
    async with servers(2) as (a, b), engine_over(model, a, b, health_every_s=60.0) as engine:
        await a.die()

        async def learner(samples: Sequence[Sample]) -> list[list[float]]:
            return [[-2.0] * (len(sample.ids) - 1) for sample in samples]

        with pytest.raises(AgentRLError, match=f"version 4: {b.url} and the learner differ by"):
            await WeightCheck(engine, learner, ROWS, 0.1).gap(4)


async def test_a_gap_that_is_no_number_stops_the_run(policy_dir: Path) -> None:
    gate = check(policy_dir, policy_dir)

    async def broken(samples: Sequence[Sample]) -> list[list[float]]:
        return [[math.nan] * (len(sample.ids) - 1) for sample in samples]

    gate._learner = broken
    with pytest.raises(AgentRLError, match="sync_tolerance"):
        await gate.gap(1)


def test_probes_do_not_depend_on_the_sampling_temperature(policy_dir: Path) -> None:
    sample = make_sample([1, 2, VOCABULARY - 1], [1, 2])
    found = []
    for temperature in (0.5, 1.0):
        learner = DirectLearner(
            policy_dir,
            algorithm=AlgorithmConfig(),
            optim=OptimConfig(),
            config=LearnerConfig(device="cpu"),
            temperature=temperature,
            total_steps=1,
        )
        found.append(learner.probe([sample]))
    assert found[0] == found[1]
