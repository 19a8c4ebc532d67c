"""What the settings of `rollout` rule out together."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from agentrl.config.run import RunConfig


def config(rollout: dict[str, Any], **more: Any) -> RunConfig:
    return RunConfig.model_validate({"env": "a:B", "model": {"tiny": {}}, "rollout": rollout, **more})


@pytest.mark.parametrize(
    ("rollout", "more", "message"),
    [
        ({"groups_ahead": 1}, {}, "groups_ahead has no effect while max_staleness is 0"),
        ({"groups_ahead": 65, "max_staleness": 2}, {}, "groups_ahead is 65"),
        ({}, {"ray": "auto"}, "ray has no effect while nothing runs on Ray"),
        ({"workers": 2}, {"agent": {"use": "a:f"}}, "rollout.workers has no effect"),
        ({"max_staleness": -1}, {}, "greater than or equal to 0"),
    ],
)
def test_what_has_no_effect_or_cannot_be_kept_is_refused(
    rollout: dict[str, Any], more: dict[str, Any], message: str
):
    with pytest.raises(ValidationError, match=message):
        config(rollout, **more)


def test_what_fits_is_taken():
    assert config({"groups_ahead": 64, "max_staleness": 2}).rollout.groups_ahead == 64
    assert config({"groups_ahead": 0, "max_staleness": 2}).rollout.groups_ahead == 0


@pytest.mark.parametrize(
    ("rollout", "more", "message"),
    [
        ({"temperature": 0.005}, {}, "rollout.temperature is 0.005, and vLLM samples with 0.01 to 2"),
        ({"temperature": 2.5}, {}, "rollout.temperature is 2.5"),
        ({}, {"eval": {"temperature": 0.001}}, "eval.temperature is 0.001"),
        ({}, {"eval": {"sets": {"hot": {"temperature": 3.0}}}}, r"eval\.sets\.hot\.temperature is 3,"),
        (
            {},
            {"env": None, "envs": {"a": {"use": "a:B", "eval": {"temperature": 3.0}}, "b": {"use": "b:B"}}},
            r"envs\.a\.eval\.temperature is 3,",
        ),
    ],
)
def test_temperatures_that_vllm_would_replace_are_refused(
    rollout: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        config(rollout, engine={"kind": "vllm"}, **more)
    config(rollout, engine={"kind": "sglang"}, **more)


GAE = {"advantage": "gae"}
SCORER = {"kind": "classifier", "path": "x", "workers": 1}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"learner": {"reference_ranks": 1}, "algorithm": {"kl": {"coef": 0.0}}},
            "while algorithm.kl.coef is 0",
        ),
        ({"learner": {"reference_ranks": 1, "lora": {}}}, "reference_ranks has no effect with learner.lora"),
        ({"critic": {"ranks": 1}}, "unless algorithm.advantage is gae"),
    ],
)
def test_ranks_of_models_that_are_not_there_are_refused(sections: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        config({}, **sections)


def test_models_with_ranks_of_their_own_put_the_learner_on_ray():
    assert not config({}).learner_on_ray
    assert config({}, learner={"reference_ranks": 1}).learner_on_ray
    assert config({}, algorithm=GAE, critic={"ranks": 2}).learner_on_ray
    assert not config({}, reward_model=SCORER).learner_on_ray


@pytest.mark.parametrize(
    "chosen",
    [
        {"learner": {"ranks": 2}},
        {"learner": {"reference_ranks": 1}},
        {"algorithm": GAE, "critic": {"ranks": 1}},
        {"rollout": {"workers": 2}},
        {"reward_model": SCORER},
        {"engine": {"kind": "sglang", "server": {"launch": "ray"}}},
    ],
)
def test_one_key_names_the_cluster_of_whatever_runs_on_ray(chosen: dict[str, Any]):
    made = config(**{"rollout": {}, "ray": "10.0.0.1:6379"} | chosen)
    assert (made.ray, made.uses_ray) == ("10.0.0.1:6379", True)
    assert not config({}).uses_ray


def test_servers_that_run_already_are_not_launched():
    server = {"urls": ["http://127.0.0.1:1"], "launch": "process"}
    with pytest.raises(ValidationError, match="launch has no effect while urls is given"):
        config({}, engine={"kind": "sglang", "server": server})
