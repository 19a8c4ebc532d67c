"""Commands that play or serve a policy can read its configuration without the settings of training."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.cli.env import run_config
from agentrl.cli.serve import _find
from agentrl.config import dump_config, load_config
from agentrl.config.facts import UnusedBy, effects, facts
from agentrl.config.load import load_sampling_config
from agentrl.config.schema import fields
from agentrl.errors import ConfigError
from agentrl.eval.target import find, of_env
from agentrl.run_folder.store import Checkpoint, RunStore

CALCULATOR = "env: agentrl.envs.calculator:Calculator\nmodel: {tiny: {}}\n"
FILES = "agentrl.envs.files:Files"
BETWEEN_TURNS = """algorithm: {advantage: {name: turn_level, gamma: 0.9}, observation_coef: 0.1}
rollout: {max_turns: 3}
"""
ON_RAY = """learner: {ranks: 2, lora: {rank: 4}}
engine: {kind: sglang, sync: lora}
ray: auto
algorithm: {observation_coef: 0.1}
"""
MIXTURE = f"""envs:
  one: {{use: "agentrl.envs.calculator:Calculator", rollout: {{max_turns: 4, group_size: 4}}}}
  two: {{use: "{FILES}", rollout: {{max_turns: 5}}, algorithm: {{advantage: {{name: turn_level, gamma: 0.9}}}}}}
model: {{tiny: {{}}}}
"""


@pytest.fixture(params=["tools.yaml", "config.yaml"])
def written(request: pytest.FixtureRequest, tmp_path: Path):
    """Writes the YAML file of a run, or the file in its folder."""

    def write(text: str) -> Path:
        file = tmp_path / "tools.yaml"
        file.write_text(text)
        if request.param == "config.yaml":
            resolved = dump_config(load_config(file, check_paths=False))
            file = tmp_path / "config.yaml"
            file.write_text(resolved)
        return file

    return write


@pytest.mark.parametrize("training", [BETWEEN_TURNS, ON_RAY])
def test_an_override_may_contradict_a_setting_of_training(training: str, written):
    file = written(CALCULATOR + training)
    changes = ["rollout.max_turns=1"]
    with pytest.raises(ConfigError, match=r"no effect with rollout\.max_turns 1"):
        load_config(file, changes, check_paths=False)
    config = load_sampling_config(file, changes, check_paths=False)
    assert (config.rollout.max_turns, config.env.use) == (1, "agentrl.envs.calculator:Calculator")
    assert config.engine.kind == ("sglang" if training is ON_RAY else "local")


def test_an_override_of_one_env_may_contradict_a_setting_of_its_training(written):
    file, changes = written(MIXTURE), ["envs.two.rollout.max_turns=1"]
    with pytest.raises(ConfigError, match=r"envs.two.algorithm.advantage.gamma has no effect"):
        load_config(file, changes, check_paths=False)
    by_env = load_sampling_config(file, changes, check_paths=False).by_env
    assert [view.rollout.max_turns for view in by_env.values()] == [4, 1]


def test_an_override_may_equal_the_setting_of_another_env(written):
    file, changes = written(MIXTURE.replace("rollout: {max_turns: 5}, ", "")), ["rollout.max_turns=4"]
    with pytest.raises(ConfigError, match=r"envs\.one\.rollout\.max_turns has no effect: it equals"):
        load_config(file, changes, check_paths=False)
    by_env = load_sampling_config(file, changes, check_paths=False).by_env
    assert [view.rollout.max_turns for view in by_env.values()] == [4, 4]


def test_a_run_whose_training_would_be_refused_today_can_be_played(tmp_path: Path):
    written = dump_config(load_config(_file(tmp_path, CALCULATOR + BETWEEN_TURNS), check_paths=False))
    file = tmp_path / "config.yaml"
    file.write_text(written.replace("gamma: 0.9", "gamma: 7").replace("algorithm:", "algorithm:\n  gone: 1"))
    with pytest.raises(ConfigError, match=r"algorithm\.gone"):
        load_config(file, check_paths=False)
    assert load_sampling_config(file, (), check_paths=False).rollout.max_turns == 3
    assert run_config(str(tmp_path), None, []).rollout.max_turns == 3
    file.write_text(written.replace("max_turns: 3", "max_turns: 0"))
    with pytest.raises(ConfigError, match=r"rollout\.max_turns must be greater than 0, got 0") as refused:
        load_sampling_config(file, (), check_paths=False)
    assert "gone" not in str(refused.value)


def test_what_decides_an_evaluation_is_the_same_without_overrides(written):
    file = written(CALCULATOR + BETWEEN_TURNS)
    complete = load_config(file, check_paths=False)
    assert dump_config(load_sampling_config(file, (), check_paths=False)) == dump_config(complete)


def test_mistakes_in_a_file_that_was_not_trained_with_are_errors(tmp_path: Path):
    file = _file(tmp_path, CALCULATOR + "algorithm: {advantage: nope}\n")
    with pytest.raises(ConfigError, match=r"algorithm\.advantage must be one of"):
        find(file, None, ["rollout.max_turns=1"])


def test_a_mistake_in_an_override_is_named_where_the_file_needs_another_one(tmp_path: Path):
    file = _file(tmp_path, "model: {tiny: {}}\n")
    with pytest.raises(ConfigError) as refused:
        load_sampling_config(file, ["env.use=agentrl.envs.calculator:Calculator", "steps=0"], check_paths=True)
    assert str(refused.value) == "--set steps=0: steps must be greater than 0, got 0"
    file = _file(tmp_path, CALCULATOR + "rollout: {max_turn: 3}\n")
    with pytest.raises(ConfigError, match=r"(?s)rollout\.max_turn: unknown key.*--set rollout\.max_tokens=-1"):
        load_sampling_config(file, ["rollout.max_tokens=-1"], check_paths=True)


def test_an_empty_section_of_training_is_dropped_with_what_is_around_it(tmp_path: Path):
    training = "algorithm:\n  kl:\n  advantage: {name: turn_level, gamma: 0.9}\n"
    file = _file(tmp_path, CALCULATOR + training)
    assert load_sampling_config(file, ["rollout.max_turns=1"], check_paths=False).rollout.max_turns == 1


def test_a_refused_reward_model_matters_only_to_rescoring(tmp_path: Path):
    scored = (
        CALCULATOR + "reward_model: {kind: classifier, path: /m, weight: 0.5}\nrollout: {overlong: penalise}\n"
    )
    written = dump_config(load_config(_file(tmp_path, scored), check_paths=False))
    file = tmp_path / "config.yaml"
    file.write_text(written.replace("algorithm:", "algorithm:\n  gone: 1"))
    config = load_sampling_config(file, check_paths=False, rescores=True)
    assert config.reward_model is not None
    assert (config.reward_model.weight, config.rollout.overlong) == (0.5, "penalise")
    file.write_text(written.replace("weight: 0.5", "weight: none"))
    assert load_sampling_config(file, check_paths=False).reward_model is None
    with pytest.raises(ConfigError, match=r"reward_model\.weight"):
        load_sampling_config(file, check_paths=False, rescores=True)


def test_an_evaluation_without_settings_of_training_resumes(written, tmp_path: Path):
    config = load_sampling_config(written(CALCULATOR + ON_RAY), ["rollout.max_turns=1"], check_paths=False)
    folder = tmp_path / "evaluation"
    for resumed in (False, True):
        with RunStore.open(config, folder, exact=True) as store:
            assert store.resumed == resumed
            if not resumed:
                store.write_file("eval.json", b"{}")
                store.log_metrics(1, {})
    changed = load_sampling_config(written(CALCULATOR + ON_RAY), ["rollout.max_turns=2"], check_paths=False)
    with pytest.raises(ConfigError, match=r"rollout\.max_turns: 1 -> 2"):
        RunStore.open(changed, folder, exact=True)


def test_an_evaluation_of_one_env_of_several_resumes(written, tmp_path: Path):
    file = written(MIXTURE + "rollout: {env_shares: solve_rate, compact: {how: summary}}\n")
    config = of_env(load_sampling_config(file, ["envs.two.rollout.max_turns=1"], check_paths=False), "two")
    for resumed in (False, True):
        with RunStore.open(config, tmp_path / "evaluation", exact=True) as store:
            assert store.resumed == resumed
            store.write_file("eval.json", b"{}")
            if not resumed:
                store.log_metrics(1, {})


def test_a_run_with_grammars_can_be_served_by_another_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = _file(tmp_path, CALCULATOR + "engine: {kind: sglang, server: {grammars: true}}\n")
    (tmp_path / "config.yaml").write_text(dump_config(load_config(file, check_paths=False)))
    monkeypatch.setattr("agentrl.run_folder.store.find_checkpoint", lambda *_, **__: Checkpoint(1, tmp_path))
    for name in ("load_renderer", "check_renderer"):
        monkeypatch.setattr(f"agentrl.rollout.renderer.{name}", lambda *_: None)
    monkeypatch.setattr("agentrl.cli.serve._digest", lambda *_: "")
    assert _find(tmp_path, ["engine.kind=local"]).engine.kind == "local"


def test_no_setting_of_sampling_depends_on_a_setting_of_training():
    """Else dropping those of training would make others have no effect."""
    dropped: set[tuple[str, ...]] = set()
    depends = []
    for loc, field in fields():
        if loc[:-1] in dropped or any("eval" in fact.commands for fact in facts(field, UnusedBy)):
            dropped.add(loc)
        else:
            depends += [(loc, key) for effect in effects(field) for key in effect.keys]
    assert dropped
    assert depends
    for loc, key in depends:
        around = [(*loc[:depth], *key.split(".")) for depth in range(len(loc))]
        assert not dropped.intersection(around), (loc, key)


def _file(folder: Path, text: str) -> Path:
    file = folder / "tools.yaml"
    file.write_text(text)
    return file
