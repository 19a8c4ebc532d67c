"""Loggers: where a run's metrics go besides its folder."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from agentrl.config.choice import known_or_own
from agentrl.config.facts import NamesCode, NeverWhen, OnlyWhen, PathTo
from agentrl.config.section import Count, Section

LOGGERS = ("tensorboard", "wandb", "mlflow", "trackio")
"""The loggers that come with agentrl."""


class LoggerConfig(Section):
    """One logger; its name alone is short for a section with `use`."""

    use: Annotated[str, NamesCode("class", or_word=True)]
    """`tensorboard`, `wandb`, `mlflow`, `trackio`, or `module:Name` for your own."""
    series: Literal["curated", "all"] | list[str] = "curated"
    """Which metrics it gets: the few to look at first, all of them, or the names listed."""
    samples: Count = 4
    """Sample episodes per step in its table of episodes; 0 sends none."""
    project: Annotated[str, Field(min_length=1), OnlyWhen("use", "wandb", "mlflow", "trackio")] = "agentrl"
    """Project, or experiment in MLflow, that the run belongs to."""
    entity: Annotated[str | None, OnlyWhen("use", "wandb")] = None
    """Account or team on the W&B server; by default your own."""
    mode: Annotated[Literal["online", "offline"] | None, OnlyWhen("use", "wandb")] = None
    """`offline` writes files for `wandb sync`; by default, what WANDB_MODE says."""
    tracking_uri: Annotated[
        str | None, PathTo("folder", names=("databricks",), made=True), OnlyWhen("use", "mlflow")
    ] = None
    """Address or folder of the MLflow store; by default what MLFLOW_TRACKING_URI says, else a folder in the run
    folder."""
    options: Annotated[dict[str, Any], NeverWhen("use", *LOGGERS)] = Field(default_factory=dict)
    """Keyword arguments of your own logger."""

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, data: object) -> object:
        return {"use": data} if isinstance(data, str) else data

    @field_validator("use")
    @classmethod
    def _known(cls, use: str) -> str:
        return known_or_own(use, LOGGERS)
