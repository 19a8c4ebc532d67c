"""Healthy runs, some of them odd: nothing in them deserves more than a hint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.doctor.finding import Finding
from tests.doctor.planted import BASE, ENVS, play


@dataclass(frozen=True)
class Healthy:
    """One run; see `Planted`. One with a cold start does not begin with the shared policy."""

    title: str
    env: str = "Buttons"
    changes: Mapping[str, Any] = field(default_factory=dict)

    def play(self, policy: Path, folder: Path) -> list[Finding]:
        """What the doctor says above a hint."""
        cold = "warmup" in self.changes
        return [f for f in play(policy, folder, self.env, self.changes, cold=cold) if f.severity != "hint"]


_own_start = {"warmup": BASE["warmup"]}
_TWO = {"env": None, "envs": {name: {"use": f"{ENVS}:{name}"} for name in ("Buttons", "Costly")}}
HEALTHY = (
    *(Healthy(f"buttons, seed {seed}", changes={"seed": seed, "steps": 6}) for seed in range(1, 6)),
    Healthy("a part that prices length", "Costly", {"steps": 6}),
    Healthy("solved from the first step", "Easy", {"steps": 6}),
    Healthy("a sparse reward", "Sparse", {"steps": 6, "rollout": {"group_size": 8}}),
    Healthy("no tools", "Words", {"steps": 6}),
    Healthy("two envs", changes={**_TWO, "steps": 5, "rollout": {"groups_per_step": 12}}),
    Healthy(
        "one of two envs without tools",
        changes={
            "env": None,
            "steps": 5,
            "envs": {name: {"use": f"{ENVS}:{name}"} for name in ("Buttons", "Words")},
        },
    ),
    Healthy("LoRA", changes={"steps": 6, "learner": {"lora": {"rank": 4}}, "optim": {"lr": 5e-3}}),
    Healthy("cut episodes pay", changes={"steps": 5, "rollout": {"overlong": "penalise", "max_tokens": 22}}),
    Healthy(
        "PPO", changes={"steps": 6, "algorithm": {"advantage": "gae"}, "critic": {"lr": 1e-3, "warmup_steps": 1}}
    ),
    Healthy("RLOO without KL", changes={"steps": 6, "algorithm": {"advantage": "rloo", "kl": {"coef": 0.0}}}),
    Healthy("one step off", changes={"steps": 8, "rollout": {"max_staleness": 1}}),
    Healthy(
        "asynchronous, quick updates",
        changes={"steps": 12, "rollout": {"max_staleness": 3}, "optim": {"lr": 3e-3}},
    ),
    Healthy("a cooler policy", changes={"steps": 6, "rollout": {"temperature": 0.7}}),
    Healthy("replaced groups", changes={"steps": 5, "rollout": {"refill_zero_signal": 4}}),
    Healthy("tiny groups", changes={"steps": 8, "rollout": {"groups_per_step": 4, "group_size": 2}}),
    Healthy("rewards below zero", "Negative", {"steps": 6}),
    Healthy("a judge that varies little", "Lukewarm", {"steps": 5}),
    Healthy("several epochs", "Epochs", {"steps": 8}),
    Healthy(
        "a long warmup of the learning rate",
        changes={"steps": 12, "optim": {"lr": 2e-3, "warmup_steps": 8, "schedule": "cosine"}},
    ),
    Healthy("a goal in the prompt", "Balance", {**_own_start, "steps": 4}),
    Healthy("turns without tools", "Guesses", {**_own_start, "steps": 5, "rollout": {"max_turns": 4}}),
    Healthy("a longer run", changes={"steps": 24, "optim": {"schedule": "linear"}}),
)
"""Most of them are odd."""
