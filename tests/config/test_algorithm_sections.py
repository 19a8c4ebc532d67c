"""Losses and estimators are chosen by name, with their parameters next to it; `algo` holds the only defaults."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.algo.advantages import ESTIMATORS
from agentrl.algo.correction import Correction, DriftGate
from agentrl.algo.losses import POLICY_LOSSES
from agentrl.config import config_diff, dump_config, load_config
from agentrl.config.algorithm import AlgorithmConfig, CorrectionConfig, CriticConfig, DriftGateConfig
from agentrl.config.choice import choice_of
from agentrl.config.describe import json_schema
from agentrl.errors import ConfigError
from agentrl.trainer.algorithm import Algorithm

HEAD = "env: agentrl.envs.calculator:Calculator\nmodel: {tiny: {}}\n"
CHOICES = [("advantage", n, e.config) for n, e in ESTIMATORS.items()] + [
    ("loss", n, e.config) for n, e in POLICY_LOSSES.items()
]


def write(folder: Path, algorithm: str) -> Path:
    path = folder / "tools.yaml"
    path.write_text(f"{HEAD}algorithm: {algorithm}\n")
    return path


def complaint(folder: Path, algorithm: str, *flags: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(write(folder, algorithm), flags)
    return str(error.value)


def test_every_name_is_there():
    described = AlgorithmConfig.model_fields
    for key, known in (("advantage", ESTIMATORS), ("loss", POLICY_LOSSES)):
        choice = choice_of(described[key])
        assert choice is not None
        assert choice.names == tuple(known)


@pytest.mark.parametrize(("key", "name", "parameters"), CHOICES)
def test_a_name_stands_for_its_parameters(key: str, name: str, parameters: type):
    short, long = AlgorithmConfig(**{key: name}), AlgorithmConfig(**{key: {"name": name}})
    assert short == long
    assert getattr(short, key) == parameters(name=name)
    Algorithm(short)


@pytest.mark.parametrize(("key", "name", "parameters"), CHOICES)
def test_every_kind_survives_a_dump(tmp_path: Path, key: str, name: str, parameters: type):
    critic = "critic: {}\n" if name == "gae" else ""
    section = f"{{{key}: {name}, kl: {{coef: 1}}}}" if name == "none" else f"{{{key}: {name}}}"
    teacher = f"teacher: {{path: {tmp_path}}}\n" if name == "none" else ""
    path = write(tmp_path, f"{section}\n{critic}{teacher}")
    config = load_config(path)
    path.write_text(dump_config(config))
    again = load_config(path)
    assert again == config
    assert config_diff(again, config) == ""


def test_parameters_come_with_the_name_or_from_a_flag(tmp_path: Path):
    path = write(tmp_path, "{loss: {name: gspo, clip_low: 1.0e-3}}")
    loss = load_config(path).algorithm.loss
    assert loss.model_dump() == {"name": "gspo", "clip_low": 1e-3, "clip_high": 4e-4, "dual_clip": None}
    assert load_config(path, ["algorithm.loss.clip_low=2e-3"]).algorithm.loss.clip_low == 2e-3
    assert load_config(path, ["algorithm.loss=cispo"]).algorithm.loss.name == "cispo"
    short = write(tmp_path, "{loss: gspo}")
    assert load_config(short, ["algorithm.loss.dual_clip=4"]).algorithm.loss.dual_clip == 4
    bare = write(tmp_path, "{}")
    assert load_config(bare, ["algorithm.loss.clip_low=0.1"]).algorithm.loss.model_dump() == {
        **{"name": "ppo_clip", "clip_low": 0.1, "clip_high": 0.28, "dual_clip": 3.0}
    }
    diff = config_diff(load_config(bare), load_config(bare, ["algorithm.loss=gspo"]))
    assert "algorithm.loss.name: 'ppo_clip' -> 'gspo'" in diff.splitlines()


def test_your_own_function_takes_options(tmp_path: Path):
    (tmp_path / "own.py").write_text("def plain(): ...\n")
    path = write(tmp_path, "{loss: {use: own.py:plain, options: {power: 2}}, advantage: own.py:plain}")
    config = load_config(path)
    assert config.algorithm.loss.model_dump() == {"use": f"{tmp_path}/own.py:plain", "options": {"power": 2}}
    assert config.algorithm.advantage.use == f"{tmp_path}/own.py:plain"
    changed = load_config(path, ["algorithm.advantage.options.scale=2"]).algorithm.advantage
    assert changed.options == {"scale": 2}


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ("{loss: gsop}", "3:13: algorithm.loss must be one of cispo, clip_cov"),
        ("{loss: {name: gsop}}", "got 'gsop'; did you mean 'gspo'?"),
        ("{loss:  }", "algorithm.loss must be a name or a section with `name`, got nothing"),
        ("{loss: 3}", "algorithm.loss must be a name or a section with `name`, got 3"),
        (
            "{loss: {name: gspo, clip_lwo: 1}}",
            "3:32: algorithm.loss.clip_lwo: unknown key; did you mean 'clip_low'?",
        ),
        ("{loss: {clip_low: 2.0}}", "3:30: algorithm.loss.clip_low must be in (0, 1), got 2.0"),
        ("{loss: {clip_low: '0.1'}}", "3:30: algorithm.loss.clip_low must be a number, got '0.1'"),
        ("{loss: {clip_low: true}}", "3:30: algorithm.loss.clip_low must be a number, got true"),
        ("{loss: {name: sapo, level: turn}}", "must be 'token' or 'sequence', got 'turn'"),
        ("{loss: {name: cispo, ratio_min: 9}}", "ratio_min = 9.0 must be below ratio_max = 5.0"),
        ("{loss: gspo, clip_low: 1}", "unknown key; `clip_low` belongs under `algorithm.loss:`"),
        ("{loss: {use: own.py:f}}", "algorithm.loss.use: there is no file"),
        ("{loss: {use: plain}}", "or `path/to/file.py:function`, got 'plain'"),
        (
            "{loss: gspo, gspo: {clip_low: 0.1}}",
            "algorithm.gspo: unknown key; parameters belong to the name: write `loss: {name: gspo, clip_low: 0.1",
        ),
        ("{dppo: {ratio_max: 3}}", "write `loss: {name: dppo_tv, ratio_max: 3}`"),
        (
            "{gae: {lam: 0.9}}",
            "3:13: algorithm.gae: unknown key; parameters belong to the name: write `advantage: ",
        ),
        (
            "{loss: a:b, loss_options: {power: 2}}",
            "write `loss: {use: module:function, options: {power: 2}}`",
        ),
        (
            "{loss: {name: gspo, ratio_min: 1}}",
            "unknown key; gspo takes clip_low, clip_high, dual_clip (`ratio_min` is a parameter of cispo)",
        ),
        ("{loss: {name: gpg, clip_low: 0.1}}", "clip_low: unknown key; gpg has no parameters (`clip_low` is a"),
        ("{loss: {options: {a: 1}}}", "options are for a function of your own: name it as `use: module:function`"),
        ("{loss: {use: a:b, clip_low: 1}}", "takes its arguments under `algorithm.loss.options`"),
        ("{loss: {use: a:b, name: gspo}}", "algorithm.loss: gives both `name` and `use`: remove one of them"),
        ("{loss: {name: 'a:b'}}", "name is for the kinds that come with agentrl: write `use: a:b`"),
        ("{loss: {name: null}}", "algorithm.loss: name must be text, got nothing"),
        ("{loss: true}", "must be a name or a section with `name`, got true"),
        ("{loss: GSPO}", "got 'GSPO'; did you mean 'gspo'?"),
        (
            "{advantage: {name: gdpo, weights: {a: '1'}}}",
            "algorithm.advantage.weights.a must be a number, got '1'",
        ),
        ("{advantage: {name: gdpo, weights: {a: true}}}", "advantage.weights.a must be a number, got true"),
        ("{loss: {name: reinforce, high: 2.0}}", "high has no effect while importance is none: remove it"),
        ("{kl: {coef: 0, where: loss}}", "algorithm.kl.where has no effect while algorithm.kl.coef is 0"),
        ("{kl: {coef: 0, control: fixed}}", "algorithm.kl.control has no effect while algorithm.kl.coef is 0"),
        ("{kl: {target: 0.1}}", "kl.target has no effect unless algorithm.kl.control is adaptive (it is fixed)"),
        ("{correction: {high: 2.0}}", "correction.high has no effect unless algorithm.correction.importance is"),
    ],
)
def test_what_is_wrong_is_shown_with_its_place(tmp_path: Path, algorithm: str, said: str):
    assert said in complaint(tmp_path, algorithm)


def test_a_flag_for_a_parameter_of_another_loss_is_refused(tmp_path: Path):
    said = complaint(tmp_path, "{loss: gspo}", "algorithm.loss.ratio_max=3")
    assert "--set algorithm.loss.ratio_max=3: algorithm.loss.ratio_max: unknown key" in said


def test_the_json_schema_knows_every_loss():
    schema = json_schema()
    options = schema["$defs"]["AlgorithmConfig"]["properties"]["loss"]["anyOf"]
    assert options[0]["type"] == "string"
    assert {"$ref": "#/$defs/GSPO"} in options
    assert json.loads(json.dumps(schema)) == schema


def test_the_configuration_loads_without_torch():
    code = (
        "import sys, agentrl.config.load; print(sorted({'torch', 'numpy', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_corrections_and_the_gate_have_the_same_fields():
    assert {f.name for f in dataclasses.fields(Correction)} | {"off_policy"} == set(CorrectionConfig.model_fields)
    assert {f.name for f in dataclasses.fields(DriftGate)} == set(DriftGateConfig.model_fields)
    assert dataclasses.asdict(DriftGate()) == DriftGateConfig().model_dump()


@pytest.mark.parametrize(
    ("kl", "reason"),
    [
        ({"kind": "k1"}, "on average it is 0, so nothing is penalized"),
        ({"kind": "abs"}, "it ignores how far the policy is"),
        ({"kind": "k1", "where": "both"}, "on average it is 0"),
        *[({"kind": kind}, None) for kind in ("auto", "unbiased", "k2", "k3", "k1+", "abs+", "k2+", "k3+")],
        *[({"kind": kind, "where": "reward"}, None) for kind in ("k1", "abs")],
    ],
)
def test_an_estimate_whose_gradient_penalizes_nothing_is_noted(
    tmp_path: Path, kl: dict[str, str], reason: str | None
):
    config = load_config(write(tmp_path, json.dumps({"kl": kl})))
    found = [note for note in config.algorithm.notes(config.rollout.max_staleness) if "kl" in note]
    if reason is None:
        assert found == []
    else:
        [note] = found
        assert f"algorithm.kl.kind {kl['kind']} in the loss: its gradient is not that of the KL divergence" in note
        assert reason in note
        instead = load_config(write(tmp_path, json.dumps({"kl": kl | {"kind": f"{kl['kind']}+"}})))
        assert f"or {instead.algorithm.kl.kind} to keep the reported value" in note


@pytest.mark.parametrize(
    ("critic", "algorithm", "noted"),
    [
        ({"value_clip": 0.1}, {}, True),
        ({}, {}, False),
        ({"value_clip": None}, {}, False),
        ({"value_clip": 0.1}, {"epochs": 2}, False),
        ({"value_clip": 0.1, "updates_per_step": 2}, {}, False),
        ({"value_clip": 0.1, "epochs": 1, "updates_per_step": 1}, {"epochs": 2, "updates_per_step": 2}, True),
    ],
)
def test_a_value_clip_that_clips_nothing_is_noted(critic: dict[str, Any], algorithm: dict[str, Any], noted: bool):
    config = AlgorithmConfig(advantage="gae", **algorithm)
    found = [note for note in config.notes(0, CriticConfig(**critic)) if "critic.value_clip" in note]
    assert len(found) == noted
