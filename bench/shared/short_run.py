"""Settings of a training run that shows that it works and teaches nothing, for `--quick`."""

from __future__ import annotations

from typing import Any

TOO_SHORT = "two small steps teach nothing"


def short_run(group_size: int) -> dict[str, dict[str, Any]]:
    """Settings to lay over a run: two groups a step, a cold start of one epoch, and a small evaluation."""
    warmup = {
        "num": 32,
        "max_epochs": 1,
        "anneal_epochs": 0,
        "at_least": 0.0,
        "probe_tasks": 2,
        "probe_samples": 1,
    }
    return {
        "rollout": {"groups_per_step": 2, "group_size": group_size},
        "warmup": warmup,
        "eval": {"every": 2, "tasks": group_size},
    }
