"""Settings that may shorten a step; each is tried in a separate plan."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from agentrl.config.engine import SERVERS
from agentrl.config.run import RunConfig
from agentrl.engine.servers.kinds import KINDS
from agentrl.errors import ConfigError

MOST = 0.9
"""The largest share of a GPU that is tried for a server."""


@dataclass(frozen=True, slots=True)
class Knob:
    """Values for some settings.

    Attributes:
        values: by key.
        effect: what they do.
        seconds: of a step with them, once it is predicted.
    """

    values: Mapping[str, object]
    effect: str
    seconds: float | None = None

    def __str__(self) -> str:
        settings = ", ".join(f"{key}: {_shown(value)}" for key, value in self.values.items())
        return f"{settings} ({self.effect})"


def changes(config: RunConfig) -> Iterator[tuple[Knob, RunConfig]]:
    """Changes that leave what is learned as it is, but for staleness, and the run with each if it is accepted."""
    for change in [*_of_learner(config), *_of_engine(config)]:
        data = config.model_dump(exclude_unset=True)
        for key, value in change.values.items():
            _set(data, key, value)
        with contextlib.suppress(ValidationError, ConfigError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield change, RunConfig.model_validate(data)


def _of_learner(config: RunConfig) -> Iterator[Knob]:
    learner = config.learner
    if config.rollout.max_staleness == 0:
        yield Knob({"rollout.max_staleness": 1}, "sample the next step during the update")
    if learner.precision == "float32":
        yield Knob({"learner.precision": "bfloat16"}, "compute the update in bfloat16")
    if config.learner_on_ray:
        yield Knob({"learner.ranks": 2 * learner.ranks}, "more GPUs for the update")
    twice = 2 * learner.tokens_per_micro_batch
    yield Knob({"learner.tokens_per_micro_batch": twice}, "gather weights less often")
    for key in ("checkpoint_activations", "offload_activations", "cpu_offload"):
        if getattr(learner, key):
            yield Knob({f"learner.{key}": False}, "there is memory for it")


def _of_engine(config: RunConfig) -> Iterator[Knob]:
    engine, server = config.engine, config.engine.server
    yield Knob({"engine.max_slots": 2 * engine.max_slots}, "more episodes at once")
    if not engine.on_servers or server.urls:
        return
    split, share = server.tensor_parallel, server.gpu_memory_utilization
    share = share or KINDS[engine.kind].memory_share
    yield Knob({"engine.server.replicas": 2 * server.replicas}, "more GPUs for sampling")
    yield Knob({"engine.server.replicas": server.replicas + 1}, "more GPUs for sampling")
    if server.replicas > 1:
        yield Knob({"engine.server.replicas": server.replicas // 2}, "send weights to fewer servers")
        values = {"engine.server.replicas": server.replicas // 2, "engine.server.tensor_parallel": 2 * split}
        yield Knob(values, "split the model over more GPUs, which leaves more memory to caches")
    if split > 1:
        values = {"engine.server.replicas": 2 * server.replicas, "engine.server.tensor_parallel": split // 2}
        yield Knob(values, "more servers, each with fewer GPUs")
    for more in (0.05, 0.1, 0.2):
        if share + more <= MOST + 1e-9:
            larger = {"engine.server.gpu_memory_utilization": round(share + more, 2)}
            yield Knob(larger, "larger caches, so more episodes at once")
    for way in SERVERS[engine.kind]:
        if way != engine.resolved_sync:
            how = "send the adapter only" if way == "lora" else "another way for the weights"
            yield Knob({"engine.sync": way}, how)


def _set(data: dict[str, Any], key: str, value: object) -> None:
    *path, last = key.split(".")
    for part in path:
        data = data.setdefault(part, {})
    data[last] = value


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
