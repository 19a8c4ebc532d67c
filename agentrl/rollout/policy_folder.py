"""The folder of a policy that a user names, and the run that trained it."""

from __future__ import annotations

from pathlib import Path

from agentrl.config.hub import cached_snapshot, how_to_get, is_hub_id
from agentrl.errors import ConfigError
from agentrl.models.folder import refuse_adapter
from agentrl.run_folder.fork import parse_source


def policy_folder(target: Path) -> Path:
    """The folder that an argument means: itself, the checkpoint of `RUN@STEP` or `RUN@best`, or the snapshot of a
    Hugging Face id in the local cache.

    Raises:
        CheckpointError: the run has no such checkpoint.
        ConfigError: the folder is neither local nor in the cache, or contains only an adapter.
    """
    text = str(target)
    if "@" in text and not target.exists() and (Path(text.rpartition("@")[0]) / "config.yaml").is_file():
        run, step = parse_source(text, "")
        return run / "checkpoints" / f"step-{step}"
    if target.exists() or not is_hub_id(text):
        trained = (target.absolute().parent / "manifest.json").is_file()
        merged = (
            f"name the checkpoint, {target.parent}, which has it merged into the model, or " if trained else ""
        )
        refuse_adapter(target, text, merged)
        return target
    if (snapshot := cached_snapshot(text)) is None:
        raise ConfigError(
            f"{text}: no such folder; give a run folder, a checkpoint or a model. If it is a Hugging Face id: "
            f"{how_to_get(text)}"
        )
    refuse_adapter(snapshot, text)
    return snapshot


def trained_by(policy: Path) -> Path | None:
    """The folder whose config.yaml says how a policy was trained: a run, or a checkpoint in one.

    None for any other model folder: its config.yaml is not read, because a configuration names code to run.
    """
    checkpoints = policy.resolve().parent
    above = checkpoints.parent
    in_run = checkpoints.name == "checkpoints" and (above / "config.yaml").is_file()
    if not in_run and (policy / "config.json").is_file():
        return None
    return next((folder for folder in (policy, above)[: 1 + in_run] if (folder / "config.yaml").is_file()), None)
