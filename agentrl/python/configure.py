"""A configuration from Python data, in which classes and functions may stand for their names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentrl.config.load import load_config, make_config
from agentrl.config.run import RunConfig
from agentrl.errors import ConfigError
from agentrl.importing import name_object
from agentrl.reporting.loggers.protocol import LOGGER_METHODS, Logger


def configure(
    config: RunConfig | Mapping[str, object] | str | os.PathLike[str], overrides: Sequence[str] = ()
) -> RunConfig:
    """The configuration of a run: checked like a YAML file, with the same errors.

    Args:
        config: what a YAML file would hold, as nested mappings, or the path of a YAML file, or a finished
            configuration. In a mapping, an env class, an advantage or loss function, an agent, a parser, an engine
            or a logger (a class or an instance) may stand where the file has `module:Name`. Relative paths count
            from the current folder.
        overrides: `a.b=c` each, as given to `--set`.

    Raises:
        ConfigError: all mistakes, one to a paragraph.
    """
    if isinstance(config, RunConfig):
        if overrides:
            raise ConfigError("a finished configuration takes no overrides: apply them to the mapping or file")
        return config
    if isinstance(config, str | os.PathLike):
        return load_config(config, overrides)
    given = config.get("loggers")
    data = _named({**config, "loggers": [*map(_logger, given)]} if isinstance(given, list | tuple) else config)
    assert isinstance(data, dict)
    made = make_config(data, overrides, "the configuration")
    named = "name" in data or any(text.partition("=")[0].strip() == "name" for text in overrides)
    return made if named else made.model_copy(update={"name": ""})  # not the current folder's name


def _logger(given: object) -> object:
    """The name of an object that is to be a logger and may lack some of its methods; other values as they are."""
    is_object = any(hasattr(given, name) for name in LOGGER_METHODS) and not callable(given)
    return name_object(given, factory=True) if is_object else given


def _named(value: object) -> object:
    """The same data with names in place of objects."""
    if isinstance(value, Mapping):
        return {str(key): _named(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_named(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Logger) and not isinstance(value, type):
        return name_object(value, factory=True)
    if callable(value):
        return name_object(value)
    return value
