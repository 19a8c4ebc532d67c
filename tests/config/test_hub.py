"""Hugging Face ids are looked up in the local cache, and nothing is downloaded."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from agentrl.config import load_config
from agentrl.errors import ConfigError
from agentrl.eval.target import find
from agentrl.rollout.policy_folder import policy_folder

ID = "Acme/Small-1.5"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))

    def refuse(*_: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return tmp_path / "hf" / "hub"


def fill(cache: Path, revision: str = "main", *, commit: str = "abc", name: str = "config.json") -> Path:
    """As huggingface_hub lays it out: links into blobs."""
    repo = cache / "models--Acme--Small-1.5"
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir(exist_ok=True)
    for file in (name, "model.safetensors"):
        (repo / "blobs" / f"{commit}-{file}").write_text("{}")
        (snapshot / file).symlink_to(f"../../blobs/{commit}-{file}")
    (repo / "refs").mkdir(exist_ok=True)
    (repo / "refs" / revision).write_text(commit)
    return snapshot


def load(folder: Path, text: str) -> object:
    file = folder / "run.yaml"
    file.write_text(f"env: agentrl.envs.calculator:Calculator\n{text}\n")
    return load_config(file)


@pytest.mark.parametrize("revision", ["", "@main", "@v1", "@def"])
def test_an_id_means_the_snapshot_in_the_cache(cache: Path, tmp_path: Path, revision: str):
    main, other = fill(cache), fill(cache, "v1", commit="def")
    config = load(tmp_path, f"model: {{path: {ID}{revision}}}")
    assert config.model.path == str(main if revision in ("", "@main") else other)


def test_critic_and_reward_model_and_adapter_are_found_too(cache: Path, tmp_path: Path):
    snapshot = str(fill(cache))
    model = tmp_path / "model"
    model.mkdir()
    more = f"critic: {{path: {ID}}}\nreward_model: {{kind: classifier, path: {ID}}}"
    config = load(tmp_path, f"model: {{path: model}}\nalgorithm: {{advantage: gae}}\n{more}")
    assert (config.model.path, config.critic.path, config.reward_model.path) == (str(model), snapshot, snapshot)
    config = load(tmp_path, f"model: {{path: model}}\nlearner: {{lora: {{adapter: {ID}}}}}")
    assert config.learner.lora.adapter == snapshot


def test_a_folder_of_that_name_comes_first(cache: Path, tmp_path: Path):
    fill(cache)
    (tmp_path / ID).mkdir(parents=True)
    assert load(tmp_path, f"model: {{path: {ID}}}").model.path == str(tmp_path / ID)


@pytest.mark.usefixtures("no_home")
def test_a_user_without_a_home_gets_the_same_error(tmp_path: Path):
    with pytest.raises(ConfigError, match=f"there is no folder .*{ID}.*cache/huggingface/hub has no complete"):
        load(tmp_path, f"model: {{path: {ID}}}")


@pytest.mark.parametrize("damage", ["nothing", "only the config", "a blob is missing", "another revision"])
def test_what_is_not_there_is_one_line_with_the_command(cache: Path, tmp_path: Path, damage: str):
    name = f"{ID}@v2" if damage == "another revision" else ID
    if damage != "nothing":
        snapshot = fill(cache)
    if damage == "only the config":
        (snapshot / "model.safetensors").unlink()
    if damage == "a blob is missing":
        (snapshot / "model.safetensors").resolve().unlink()
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, f"model: {{path: {name}}}")
    command = f"`hf download {ID}{' --revision v2' if '@' in name else ''}`"
    assert f"has no complete {ID}; agentrl downloads nothing, so run {command} first" in str(caught.value)


def test_a_path_is_no_id(tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "model: {path: ./models/nothing}")
    assert "hf download" not in str(caught.value)


def test_an_id_names_the_policy_of_serve_and_eval(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    snapshot = fill(cache)
    monkeypatch.chdir(tmp_path)
    assert policy_folder(Path(ID)) == snapshot
    subject, _, _ = find(Path(ID), "agentrl.envs.calculator:Calculator", [])
    assert subject.checkpoint == snapshot
    with pytest.raises(ConfigError, match=r"Acme/Other: no such folder; .*run `hf download Acme/Other` first"):
        find(Path("Acme/Other"), "agentrl.envs.calculator:Calculator", [])
    (tmp_path / ID).mkdir(parents=True)
    assert policy_folder(Path(ID)) == Path(ID), "a folder of that name comes first"
