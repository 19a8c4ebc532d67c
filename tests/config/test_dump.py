"""Resolved YAML: what is saved with a run reads back equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.config import RunConfig, config_diff, dump_config, load_config

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


def config(**changes: Any) -> RunConfig:
    return RunConfig.model_validate({"name": "r", "env": "m:E", "model": {"tiny": {}}} | changes)


@given(
    options=st.dictionaries(TEXT, PLAIN, max_size=4),
    weights=st.dictionaries(TEXT, st.floats(allow_nan=False, allow_infinity=False), max_size=3),
    lr=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    seed=st.integers(-(2**63), 2**63 - 1),
    kl_coef=st.sampled_from([0.0, 0.01]),
    warmup=st.sampled_from([None, {}, {"num": 7}]),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_dump_reads_back_equal(tmp_path: Path, **drawn: Any):
    changes = {
        "env": {"use": "m:E", "options": drawn["options"], "reward_weights": drawn["weights"]},
        "optim": {"lr": drawn["lr"]},
        "seed": drawn["seed"],
        "algorithm": {"kl": {"coef": drawn["kl_coef"]}},
        "warmup": drawn["warmup"],
    }
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config(**changes)), encoding="utf-8")
    assert load_config(path, check_paths=False) == config(**changes)


def test_a_dump_names_every_key_in_the_order_of_the_schema(tmp_path: Path):
    lines = dump_config(config()).splitlines()
    top = [line.split(":")[0] for line in lines if not line.startswith((" ", "-", "#"))]
    assert top == list(RunConfig.model_fields)
    assert "  lr: 1e-06" in lines


def test_without_advanced_defaults_a_dump_is_shorter_and_reads_back_equal(tmp_path: Path):
    changed = config(rollout={"infra_retries": 7}, algorithm={"drift_gate": {"k3": 0.5}})
    text = dump_config(changed, everything=False)
    assert "infra_retries: 7" in text
    assert "k3: 0.5" in text
    assert "redrawn_stop_above" not in text
    assert "mean_abs" not in text
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    assert load_config(path, check_paths=False) == changed


def test_a_diff_has_a_line_for_each_key_that_changed():
    old = config(warmup=None, env={"use": "m:E", "options": {"a": 1, "b": {"c": True}}})
    new = config(warmup={"num": 5}, env={"use": "m:E", "options": {"b": {"c": False}, "d": "x"}}, seed=4)
    assert config_diff(old, old) == ""
    *lines, section = config_diff(old, new).splitlines()
    assert lines == [
        *("seed: 0 -> 4", "env.options.a: 1 -> (absent)", "env.options.b.c: true -> false"),
        "env.options.d: (absent) -> 'x'",
    ]
    assert section.startswith("warmup: null -> {use: null, demonstrations: null, options: {}, num: 5, ")
    empty = config(env={"use": "m:E"})
    assert config_diff(empty, new).splitlines()[1:3] == [
        *("env.options.b: (absent) -> {c: false}", "env.options.d: (absent) -> 'x'")
    ]
    agent = config(agent={"command": ["a"], "sandbox": {"environment": {"TOKEN": "secret"}}})
    assert "sandbox: {...}" in config_diff(empty, agent)


def test_a_config_that_was_written_with_its_defaults_loads_again(tmp_path: Path):
    path = tmp_path / "config.yaml"
    for changes in ({}, {"engine": {"kind": "sglang", "server": {"urls": ["http://127.0.0.1:1"]}}}, {"steps": 3}):
        made = config(**changes)
        assert RunConfig.model_validate_json(made.model_dump_json()) == made
        path.write_text(dump_config(made), encoding="utf-8")
        assert load_config(path, check_paths=False) == made
    # Its defaults are not what a user has written: another engine may be chosen.
    path.write_text(dump_config(config(engine={"kind": "sglang"})), encoding="utf-8")
    assert load_config(path, ["engine.kind=local"], check_paths=False) == config()
