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
        ({"ray": "auto"}, {}, "rollout.workers is 0"),
        ({"ray": "auto", "workers": 2}, {"learner": {"ray": "auto", "ranks": 2}}, "learner.ray names the cluster"),
        (
            {"ray": "auto", "workers": 2},
            {"learner": {"ranks": 2}},
            "rollout.ray 'auto' has no effect while the learner",
        ),
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
    assert config({"ray": "auto", "workers": 2}).rollout.workers == 2


GAE = {"advantage": "gae"}
SCORER = {"kind": "classifier", "path": "x", "workers": 1}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"learner": {"ray": "auto"}},
            "learner.ray has no effect while learner.ranks is 1 and nothing else has ranks",
        ),
        (
            {"learner": {"reference_ranks": 1}, "algorithm": {"kl": {"coef": 0.0}}},
            "while algorithm.kl.coef is 0",
        ),
        ({"learner": {"reference_ranks": 1, "lora": {}}}, "reference_ranks has no effect while lora is given"),
        ({"critic": {"ranks": 1}}, "unless algorithm.advantage is gae"),
    ],
)
def test_ranks_of_models_that_are_not_there_are_refused(sections: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        config({}, **sections)


def test_models_with_ranks_of_their_own_put_the_learner_on_ray():
    assert not config({}).learner_on_ray
    assert config({}, learner={"reference_ranks": 1, "ray": "auto"}).ray == "auto"
    assert config({}, algorithm=GAE, critic={"ranks": 2}, learner={"ray": "auto"}).learner_on_ray
    assert config({"ray": "auto"}, reward_model=SCORER).ray == "auto"
    assert not config({"ray": "auto"}, reward_model=SCORER).learner_on_ray


@pytest.mark.parametrize(
    ("servers", "rollout", "more", "message"),
    [
        (
            "10.0.0.1:6379",
            {},
            {"learner": {"ranks": 2}},
            "learner.ray, without it a cluster is started",
        ),
        ("local", {}, {"learner": {"ranks": 2, "ray": "10.0.0.1:6379"}}, "learner.ray, which is '10.0.0.1:6379'"),
        ("auto", {}, {"reward_model": SCORER}, "rollout.ray, without it a cluster is started"),
        ("local", {"workers": 2, "ray": "auto"}, {}, "rollout.ray, which is 'auto'"),
    ],
)
def test_a_run_joins_one_ray_cluster(servers: str, rollout: dict[str, Any], more: dict[str, Any], message: str):
    with pytest.raises(
        ValidationError, match=f"engine.server.ray '{servers}' is another Ray cluster than that of {message}"
    ):
        config(rollout, engine={"kind": "sglang", "server": {"ray": servers}}, **more)


@pytest.mark.parametrize(
    ("servers", "rollout", "more"),
    [
        ("auto", {"workers": 2}, {}),
        ("local", {"workers": 2}, {"learner": {"ranks": 2}}),
        ("auto", {}, {"learner": {"ranks": 2, "ray": "10.0.0.1:6379"}}),
        ("10.0.0.1:6379", {"workers": 2, "ray": "10.0.0.1:6379"}, {"reward_model": SCORER}),
    ],
)
def test_everybody_in_one_cluster_is_taken(servers: str, rollout: dict[str, Any], more: dict[str, Any]):
    engine = {"kind": "sglang", "server": {"ray": servers}}
    assert config(rollout, engine=engine, **more).engine.server.ray == servers
