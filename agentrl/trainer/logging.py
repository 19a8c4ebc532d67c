"""The loggers of a run: made before it starts, flushed when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from agentrl.config.run import RunConfig
from agentrl.reporting.loggers.hide_secrets import without_secrets
from agentrl.reporting.loggers.log_feed import LogFeed
from agentrl.reporting.loggers.make import make_loggers
from agentrl.reporting.loggers.protocol import RunInfo
from agentrl.run_folder.store import RunStore


@contextmanager
def logging(config: RunConfig, store: RunStore, note: Callable[[str], None]) -> Iterator[LogFeed]:
    """The configured loggers, not started; what they have is flushed at the end, however the run ends.

    Raises:
        ConfigError: a logger cannot be made.
    """

    def tell(text: str) -> None:
        note(text)
        store.event(text)

    feed = LogFeed(make_loggers(config.loggers, own_metrics=config.algorithm.own_metrics), tell)
    try:
        yield feed
    finally:
        feed.finish({})


def rewind(config: RunConfig, store: RunStore, loggers: LogFeed, done: int) -> None:
    """Forget what came after the checkpoint of step `done`, and start the loggers there."""
    store.rewind(done)
    first = done + 1 if done or store.metrics() else 0
    settings = without_secrets(config.model_dump(mode="json"))
    name = config.name or store.path.name
    loggers.start(RunInfo(name, store.path / "loggers", settings, first, store.resumed))
