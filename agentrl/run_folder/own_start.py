"""The weights that a run folder brings along to start with: those that a fork took from another run."""

from __future__ import annotations

from pathlib import Path

from agentrl.config import RunConfig
from agentrl.config.run import ModelConfig

WEIGHTS = "from"
"""Folder of a forked run with the weights that it, or the run it comes from, started with."""


def with_own_start(config: RunConfig, run: Path) -> RunConfig:
    """The configuration with the weights in the run folder as its model, if there are any, wherever it is now."""
    return starting_with(config, run.absolute() / WEIGHTS) if (run / WEIGHTS).is_dir() else config


def starting_with(config: RunConfig, folder: Path) -> RunConfig:
    """The configuration with another model, and without a cold start."""
    kept = {key: value for key, value in config.model if key not in ("path", "tiny")}
    model = ModelConfig.model_validate({**kept, "path": str(folder), "tiny": None})
    return config.model_copy(update={"model": model, "warmup": None})
