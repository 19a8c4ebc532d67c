"""Check before loading that every episode fits into a micro-batch."""

from __future__ import annotations

import json
from pathlib import Path

from agentrl.config.run import RunConfig


def too_long(config: RunConfig) -> str:
    """The error if an episode, which is never cut, may be larger than a micro-batch; else empty."""
    budget, room = longest_episode(config), config.learner.micro_batch_tokens
    if longest_episode(config, _context(config)) <= room:
        return ""
    return (
        f"an episode may have {budget:,} tokens (rollout.token_budget), a micro-batch takes {room:,} "
        "(learner.tokens_per_micro_batch x learner.sequence_ranks), and episodes are never cut: "
        f"{room_for(config, budget)}"
    )


def longest_episode(config: RunConfig, context: int | None = None) -> int:
    """Maximum number of tokens of an episode, of whichever env.

    Args:
        context: what the model takes. It bounds an episode that cannot have several contexts.
    """
    views = config.by_env.values()
    budget = max(view.rollout.token_budget for view in views)
    several = any(view.rollout.compact or view.model.history == "fork" or view.agent for view in views)
    return budget if context is None or several else min(budget, context)


def room_for(config: RunConfig, tokens: int) -> str:
    """What to change so that a micro-batch takes an episode of so many tokens."""
    ranks = -(-tokens // config.learner.tokens_per_micro_batch)
    return (
        f"raise learner.tokens_per_micro_batch, set learner.sequence_ranks to {ranks} or more (that many "
        "ranks then compute each row together), or lower rollout.token_budget"
    )


def _context(config: RunConfig) -> int | None:
    """The model's maximum context, if its config has one."""
    if config.model.tiny is not None:
        return config.model.tiny.max_context
    try:
        found = json.loads((Path(config.model.path or "") / "config.json").read_text(encoding="utf-8"))
        length = found.get("max_position_embeddings", found.get("text_config", {}).get("max_position_embeddings"))
    except (OSError, ValueError, AttributeError):  # reported when the model is loaded
        return None
    return length if isinstance(length, int) else None
