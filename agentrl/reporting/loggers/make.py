"""Make the loggers that a configuration names."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Sequence

from agentrl.config.loggers import LOGGERS, LoggerConfig
from agentrl.errors import AgentRLError, ConfigError
from agentrl.extras import EXTRAS, require
from agentrl.importing import load_object
from agentrl.reporting.loggers.log_feed import Fed
from agentrl.reporting.loggers.mlflow import Mlflow
from agentrl.reporting.loggers.protocol import LOGGER_METHODS, Logger
from agentrl.reporting.loggers.tensorboard import TensorBoard
from agentrl.reporting.loggers.trackio import Trackio
from agentrl.reporting.loggers.wandb import Wandb
from agentrl.reporting.metric_docs import METRICS, describe
from agentrl.suggest import did_you_mean


def make_loggers(configs: Sequence[LoggerConfig], *, own_metrics: bool = False) -> list[Fed]:
    """All loggers, not started.

    Args:
        own_metrics: whether user code, such as a custom loss, adds metrics that agentrl does not know.

    Raises:
        ConfigError: a package is missing, or a logger of the user's own cannot be made.
    """
    check_loggers(configs, own_metrics=own_metrics)
    seen: dict[str, int] = {}
    found: list[Fed] = []
    for config in configs:
        number = seen[config.use] = seen.get(config.use, 0) + 1
        name = config.use if number == 1 else f"{config.use}-{number}"
        found.append(Fed(name, _make(config), config.series, config.samples))
    return found


def check_loggers(configs: Sequence[LoggerConfig], *, own_metrics: bool = False) -> None:
    """Check that the packages are installed, without importing them, and that the chosen series exist.

    Raises:
        ConfigError: a package is missing, or a name in `series` is not a metric.
    """
    for config in configs:
        for name in config.series if isinstance(config.series, list) else ():
            if not own_metrics and describe(name) is None:
                near = did_you_mean(name, [doc.name for doc in METRICS])
                hint = f"; {near}" if near else ""
                raise ConfigError(f"loggers: series: {name!r} is not a metric{hint} (docs/metrics.md)")
        if config.use in LOGGERS and config.use in EXTRAS:
            require(config.use, f"loggers: {config.use}")
        if config.use == "tensorboard" and importlib.util.find_spec("torch") is None:
            require("train", "loggers: tensorboard")


def _make(config: LoggerConfig) -> Logger:
    if config.use == "tensorboard":
        return TensorBoard()
    if config.use == "wandb":
        return Wandb(config.project, config.entity, config.mode)
    if config.use == "mlflow":
        return Mlflow(config.project, config.tracking_uri)
    if config.use == "trackio":
        return Trackio(config.project)
    return _own(config)


def _own(config: LoggerConfig) -> Logger:
    made = load_object(config.use)
    try:
        logger = made(**config.options)
    except AgentRLError:
        raise
    except Exception as e:
        raise ConfigError(f"loggers: {config.use} could not be made: {type(e).__name__}: {e}") from e
    if not isinstance(logger, Logger):
        missing = ", ".join(name for name in LOGGER_METHODS if not hasattr(logger, name))
        raise ConfigError(f"loggers: {config.use} is not a logger: it lacks {missing} (docs/loggers.md)")
    if waiting := [name for name in LOGGER_METHODS if inspect.iscoroutinefunction(getattr(logger, name))]:
        raise ConfigError(f"loggers: {config.use}: {waiting[0]} is async, and nothing would await it")
    return logger
