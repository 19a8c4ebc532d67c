"""Folders of Hugging Face models: whether one is there, and the causal language model in it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.errors import ConfigError

if TYPE_CHECKING:
    pass


def check_model_folder(directory: str | Path, where: str) -> None:
    """See that a folder holds a model; `where` names it in errors.

    Raises:
        ConfigError: there is no such folder, or it has no config.json.
    """
    if not Path(directory).is_dir():
        raise ConfigError(
            f"{where} does not exist; give the path of a Hugging Face model directory (config.json, "
            "model.safetensors, tokenizer files); agentrl.models.tiny makes a small one"
        )
    if not (Path(directory) / "config.json").is_file():
        raise ConfigError(
            f"{where}: has no config.json, so it is not a Hugging Face model directory; give the folder of a model"
        )
