"""The optional packages that a run needs beyond those of every training."""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.config.run import RunConfig
from agentrl.extras import require


def require_extras(config: RunConfig) -> None:
    """See that the packages are installed, without importing them.

    Raises:
        ConfigError: one is missing.
    """
    for extra, key in extras_of(config):
        require(extra, key)


def extras_of(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Each extra that a configuration needs, with a key that asks for it."""
    if config.learner.lora is not None:
        yield "lora", "learner.lora"
    if config.agent is not None:
        yield "serve", "agent"
    scorers = 0 if config.reward_model is None else config.reward_model.workers
    on_ray = {
        "learner.ranks": config.learner.ranks > 1,
        "learner.reference_ranks": config.learner.reference_ranks > 0,
        "critic.ranks": config.critic is not None and config.critic.ranks > 0,
        "rollout.workers": config.rollout.workers > 0,
        "reward_model.workers": scorers > 0,
        "engine.server.launch": config.engine.server.launch == "ray",
    }
    for key, needed in on_ray.items():
        if needed:
            yield "ray", key
