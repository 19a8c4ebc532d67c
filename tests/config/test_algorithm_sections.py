"""The names and parameters of the configuration are those of the functions."""

from __future__ import annotations

import dataclasses

import pytest

from agentrl.algo.advantages import ESTIMATORS
from agentrl.algo.aggregate import AGGREGATIONS
from agentrl.algo.correction import STATISTICS as MEASURED
from agentrl.algo.correction import Correction, DriftGate
from agentrl.algo.kl import KL_KINDS
from agentrl.algo.losses import POLICY_LOSSES
from agentrl.config.algorithm import (
    ADVANTAGES,
    LOSSES,
    STATISTICS,
    AlgorithmConfig,
    CorrectionConfig,
    DriftGateConfig,
)
from agentrl.train.algorithm import Algorithm


def test_every_name_is_there():
    assert set(ADVANTAGES) == set(ESTIMATORS)
    assert set(LOSSES) == set(POLICY_LOSSES)
    assert set(STATISTICS) == set(MEASURED)
    described = AlgorithmConfig.model_fields
    assert set(described["aggregation"].annotation.__args__) == set(AGGREGATIONS)
    for key, names in (("advantage", ADVANTAGES), ("loss", LOSSES)):
        assert all(name in (described[key].description or "") for name in names)
    kinds = AlgorithmConfig().kl.__class__.model_fields["kind"].annotation.__args__
    assert set(kinds) == {"auto", *KL_KINDS}


@pytest.mark.parametrize(("key", "name"), [("advantage", n) for n in ADVANTAGES] + [("loss", n) for n in LOSSES])
def test_every_parameter_has_its_name_and_default(key: str, name: str):
    config = AlgorithmConfig(**{key: name})
    section = config.advantage_section if key == "advantage" else config.loss_section
    parameters = (ESTIMATORS[name] if key == "advantage" else POLICY_LOSSES[name]).config
    theirs = parameters().model_dump(exclude={"name"})
    ours = {} if section is None else section.model_dump()
    assert ours.keys() == theirs.keys()
    for parameter, value in ours.items():
        assert value == theirs[parameter], parameter
    Algorithm(config)


def test_corrections_and_the_gate_have_the_same_fields():
    assert {f.name for f in dataclasses.fields(Correction)} | {"off_policy"} == set(CorrectionConfig.model_fields)
    assert {f.name for f in dataclasses.fields(DriftGate)} == set(DriftGateConfig.model_fields)
