"""The faults of the list in other clothes: milder, partial, or with another cause."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from tests.doctor.planted import (
    BASE,
    ENVS,
    Planted,
    call_not_read,
    learner_made,
    mask_shifted,
    rank_slowed,
    weights_every_other_step,
    weights_kept,
)
from tests.doctor.planted_servers import servers

_drift = {"drift_gate": {"mean_abs": None}}
_make = functools.partial
_SQLITE = Path(__file__).with_name("planted_sqlite.py")
_SHORT = {
    "steps": 2,
    "rollout": {"token_budget": 2000, "group_size": 2, "max_tokens": 16, "max_turns": 2},
    "eval": {"tasks": 8},
}
ON_SQLITE = (
    Planted(
        9,
        "duplicate tasks on sqlite",
        ("duplicate-tasks",),
        "data.train",
        f"{_SQLITE}:Repeated",
        _SHORT,
        cold=True,
    ),
    Planted(
        10, "leaked tasks on sqlite", ("held-out-leak",), "data.held_out", f"{_SQLITE}:Leaky", _SHORT, cold=True
    ),
    Planted(
        20,
        "no cold start on sqlite",
        ("never-solved", "no-tool-called"),
        "warmup",
        "agentrl.envs.sqlite:Sqlite",
        _SHORT,
        cold=True,
    ),
)
"""Faults in a shipped env. The policy has not learned to call tools, so faults in their answers cannot show."""
_own_start = {"warmup": BASE["warmup"]}


async def asks_and_crashes(task: Any, access: Any) -> None:
    """An agent with a bug behind its first request."""
    await access.client().chat.completions.create(model="any", messages=task["messages"], tools=task["tools"])
    raise KeyError("tenant")


OTHERS = (
    Planted(
        2,
        "one tool's calls are not read",
        ("tool-never-called",),
        "model.parser",
        "Latched",
        {**_own_start, "steps": 2},
        _make(call_not_read, "latch"),
        cold=True,
    ),
    Planted(
        3,
        "a tool always answers the same",
        ("tool-answers-the-same",),
        "look_up",
        "SameAnswer",
        {**_own_start, "steps": 2},
        cold=True,
    ),
    Planted(
        14,
        "temperature mismatch, tokens not recorded",
        ("sampler-learner-mismatch",),
        "engine.dtype",
        changes={"steps": 2, "log": {"tokens": "none"}, "algorithm": _drift},
        inject=_make(learner_made, temperature=0.5),
    ),
    Planted(
        19,
        "completions cut",
        ("completions-cut",),
        "rollout.max_tokens",
        changes={"steps": 2, "rollout": {"max_tokens": 2}},
    ),
    Planted(
        19,
        "turns run out",
        ("turns-run-out",),
        "rollout.max_turns",
        "Chatty",
        {"steps": 2, "rollout": {"max_turns": 1}},
    ),
    Planted(
        21,
        "tools that hang",
        ("timeouts",),
        "rollout.timeout_s",
        "Hangs",
        {"steps": 2, "rollout": {"timeout_s": 1}},
    ),
    Planted(
        21,
        "one learner rank always slow",
        ("slow-rank",),
        "learner.ranks",
        changes={"steps": 6, "learner": {"device": "cpu", "ranks": 2}},
        inject=rank_slowed,
    ),
    Planted(
        21,
        "one server always slow",
        ("slow-server",),
        "engine.server",
        changes={"steps": 6, "rollout": {"groups_per_step": 4}},
        inject=_make(servers, 0.0, 12.0),
    ),
    Planted(3, "a tool that fails now and then", ("tool-unreliable",), "press", "Unreliable", {"steps": 5}),
    Planted(6, "rewards of the episode before", ("reward-is-noise",), "solved", "Late", {"steps": 6}),
    Planted(
        6,
        "a price for length that outweighs all",
        ("reward-punishes-length",),
        "env.reward_weights.cost",
        "TooCostly",
        {"steps": 8},
    ),
    Planted(
        7,
        "a judge of one of two envs",
        ("reward-part-constant",),
        "envs.Shrug.reward_weights.judge: 0",
        changes={
            "env": None,
            "envs": {name: {"use": f"{ENVS}:{name}"} for name in ("Buttons", "Shrug")},
            "rollout": {"groups_per_step": 12},
        },
    ),
    Planted(9, "prompts without the question", ("same-prompt",), "setup", "Untold", {"steps": 6}),
    Planted(
        14,
        "sampled at temperature 3",
        ("temperature-too-high",),
        "rollout.temperature",
        changes={"steps": 2, "rollout": {"temperature": 3.0}},
    ),
    Planted(
        16,
        "an entropy bonus that outweighs all",
        ("entropy-explosion",),
        "algorithm.entropy_coef",
        changes={
            "steps": 16,
            "optim": {"lr": 3e-3},
            "algorithm": {"entropy_coef": 0.5, "kl": {"coef": 0.0}},
        },
    ),
    Planted(21, "a tool that gets slower", ("tool-slows-down",), "press", "SlowsDown", {"steps": 8}),
    Planted(
        24,
        "an agent that crashes",
        ("agent-crashes",),
        "agent",
        changes={"steps": 2, "agent": {"use": "tests.doctor.variants:asks_and_crashes"}},
    ),
)
"""Faults that the public list does not have, with findings of their own."""
EVERY_OTHER = Planted(
    1,
    "weights every other step",
    ("weights-not-reaching-sampler",),
    "engine.sync",
    changes={"optim": {"lr": 3e-3}, "algorithm": _drift, "steps": 8},
    inject=weights_every_other_step,
)
VARIANTS = (
    *ON_SQLITE,
    *OTHERS,
    EVERY_OTHER,
    Planted(
        1,
        "weights one update late",
        ("weights-not-reaching-sampler",),
        "engine.sync",
        changes={"optim": {"lr": 2e-3}, "algorithm": _drift, "steps": 8},
        inject=_make(weights_kept, 1),
    ),
    Planted(
        1,
        "weights never reach, asynchronous",
        ("weights-not-reaching-sampler",),
        "engine.sync",
        changes={"optim": {"lr": 3e-3}, "algorithm": _drift, "steps": 10, "rollout": {"max_staleness": 1}},
        inject=weights_kept,
    ),
    Planted(
        1,
        "adapter never reaches",
        ("weights-not-reaching-sampler",),
        "engine.sync",
        changes={"optim": {"lr": 1e-2}, "algorithm": _drift, "steps": 8, "learner": {"lora": {"rank": 4}}},
        inject=weights_kept,
    ),
    Planted(
        3, "two of three answers are an error text", ("tool-always-fails",), "press", "OftenBroken", {"steps": 3}
    ),
    Planted(
        1,
        "half of the weights never reach",
        ("weights-not-reaching-sampler",),
        "engine.sync",
        changes={"optim": {"lr": 5e-3}, "algorithm": _drift, "steps": 8},
        inject=_make(weights_kept, named="layers"),
    ),
    Planted(3, "errors as JSON", ("tool-always-fails",), "press", "JsonError", {"steps": 3}),
    Planted(4, "loss mask shifted by two", ("tokens-shifted",), "loss mask", inject=_make(mask_shifted, 2)),
    Planted(6, "reward is luck", ("reward-ignores-tools",), "reward", "HalfPolite", {"steps": 6}),
    Planted(7, "judge is always 0", ("reward-part-constant",), "judge", "Mute"),
    Planted(7, "judge is nearly always the same", ("reward-part-constant",), "quality", "MostlyShrug"),
    Planted(8, "a query in reach of a tool", ("answer-in-reach",), "reach", "PeekSql"),
    Planted(9, "duplicates with numbers", ("duplicate-tasks",), "data.train", "NumberedRepeats", {"steps": 3}),
    Planted(10, "leaked with other numbers", ("held-out-leak",), "data.held_out", "NumberedLeak", {"steps": 3}),
    Planted(10, "half of held-out leaked", ("held-out-leak",), "data.held_out", "HalfLeaky"),
    Planted(
        13,
        "learning rate x30",
        ("learning-rate-too-high",),
        "optim.lr",
        changes={"steps": 10, "optim": {"lr": 3e-2}},
    ),
    Planted(
        13,
        "learning rate x10, all lost at once",
        ("learning-rate-too-high",),
        "optim.lr",
        changes={"steps": 8, "optim": {"lr": 1e-2}, "algorithm": {"kl": {"coef": 0.001}}},
    ),
    Planted(
        13,
        "learning rate x10 without KL",
        ("learning-rate-too-high",),
        "optim.lr",
        changes={"steps": 8, "optim": {"lr": 1e-2}, "algorithm": {"kl": {"coef": 0.0}}},
    ),
    Planted(
        13,
        "learning rate /30",
        ("learning-rate-too-low",),
        "optim.lr",
        changes={"steps": 10, "optim": {"lr": 3e-5}},
    ),
    Planted(
        13,
        "gradients clipped to nothing",
        ("learning-rate-too-low",),
        "optim.max_grad_norm (now 1e-09",
        changes={"steps": 10, "optim": {"max_grad_norm": 1e-9}},
    ),
    Planted(
        13,
        "weight decay",
        ("weight-decay-too-high",),
        "optim.weight_decay (now 20",
        changes={"steps": 10, "optim": {"weight_decay": 20.0}},
    ),
    Planted(
        14,
        "temperature 0.8",
        ("temperature-mismatch",),
        "rollout.temperature",
        inject=_make(learner_made, temperature=0.8),
    ),
    Planted(
        14,
        "the sampler's temperature only",
        ("temperature-mismatch",),
        "rollout.temperature",
        changes={"rollout": {"temperature": 0.7}},
        inject=_make(learner_made, temperature=1.0),
    ),
    Planted(
        14,
        "temperature 1.3",
        ("temperature-mismatch",),
        "rollout.temperature",
        inject=_make(learner_made, temperature=1.3),
    ),
)
