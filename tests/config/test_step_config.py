"""What a step is made of: settings that cannot be, or that would have no effect, are refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.run import OptimConfig, RunConfig
from agentrl.learner.micro_batch import lr_factor

PPO = {"advantage": "gae"}


def run(**given: Any) -> RunConfig:
    return RunConfig(env="agentrl.envs.calculator:Calculator", model={"tiny": {}}, **given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"rollout": {"groups_per_step": 2, "group_size": 2}, "algorithm": {"updates_per_step": 100}},
            r"algorithm.updates_per_step is 100, and a step has 4 episodes",
        ),
        (
            {
                "rollout": {"groups_per_step": 2, "group_size": 2},
                "algorithm": PPO,
                "critic": {"updates_per_step": 5},
            },
            r"critic.updates_per_step is 5, and a step has 4 episodes",
        ),
        (
            {"rollout": {"group_size": 1, "refill_zero_signal": 4}, "algorithm": PPO},
            r"rollout.group_size is 1",
        ),
        (
            {"rollout": {"refill_zero_signal": 4}, "algorithm": PPO},
            r"algorithm.advantage gae compares no siblings",
        ),
        ({"steps": 20, "optim": {"warmup_steps": 21}}, r"optim.warmup_steps is 21, and the run has 20 steps"),
        (
            {"optim": {"warmup_steps": 9, "warmup_ratio": 0.1}},
            "no effect while warmup_ratio is given",
        ),
        (
            {"algorithm": PPO, "critic": {"aggregation_scale": 64.0}},
            r"critic.aggregation_scale has no effect without critic.aggregation: seq-mean-token-sum-norm",
        ),
        (
            {"algorithm": PPO, "critic": {"aggregation": "seq-mean-token-sum-norm"}},
            r"critic.aggregation_scale is missing",
        ),
        ({"eval": {"attempts": 4}}, r"eval.attempts is 4, and greedy episodes of one task are all the same"),
        ({"eval": {"top_p": 0.9}}, r"top_p has no effect while temperature is 0"),
        ({"eval": {"top_k": 5}}, r"top_k has no effect while temperature is 0"),
        ({"eval": {"min_p": 0.1}}, r"min_p has no effect while temperature is 0"),
        (
            {"eval": {"temperature": 0.6, "top_k": 5}, "agent": {"command": ["true"]}},
            r"eval.top_p, eval.top_k and eval.min_p do not reach the completions of an `agent`",
        ),
        ({"algorithm": {**PPO, "drop_zero_signal_groups": True}}, r"drop_zero_signal_groups has no effect"),
    ],
)
def test_a_step_that_cannot_be_is_refused(given: dict[str, Any], said: str):
    with pytest.raises(ValidationError, match=said):
        run(**given)


def test_a_few_steps_need_no_warmup_of_their_own():
    assert run(steps=2).optim.warmup_steps == 5
    assert run(steps=20, optim={"warmup_steps": 20}).optim.warmup_of(20) == 20


def test_warmup_as_a_share_of_the_steps():
    by_share = OptimConfig(warmup_ratio=0.25, schedule="cosine")
    by_steps = OptimConfig(warmup_steps=2, schedule="cosine")
    assert [lr_factor(by_share, n, 11) for n in range(11)] == [lr_factor(by_steps, n, 11) for n in range(11)]
    assert lr_factor(OptimConfig(warmup_ratio=0.0), 0, 10) == 1.0


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize(("warmup", "steps"), [(0, 2), (1, 2), (1, 3), (5, 6), (5, 7), (5, 40), (39, 40)])
def test_a_decaying_rate_reaches_its_peak_and_ends_at_a_tenth(schedule: Any, warmup: int, steps: int):
    rates = [lr_factor(OptimConfig(warmup_steps=warmup, schedule=schedule), n, steps) for n in range(steps)]
    assert max(rates) == 1.0
    assert rates[-1] == pytest.approx(0.1)
    top = rates.index(1.0)
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)


def test_a_single_step_is_at_the_peak():
    assert lr_factor(OptimConfig(warmup_steps=0, schedule="linear"), 0, 1) == 1.0


@pytest.mark.parametrize(
    ("algorithm", "staleness", "wanted"),
    [
        ({"loss": {"clip_high": 0.3}}, 0, ["algorithm.loss.clip_high"]),
        ({"loss": {"clip_high": 0.3}}, 1, []),
        ({"loss": {"clip_high": 0.3}, "epochs": 2}, 0, []),
        ({"loss": {"clip_high": 0.3}, "updates_per_step": 2}, 0, []),
        ({"loss": {"clip_high": 0.3}, "old_logprobs": "sampler"}, 0, []),
        ({"loss": {"name": "clip_cov", "fraction": 0.1, "clip_low": 0.1}}, 0, ["algorithm.loss.clip_low"]),
        ({"loss": {"name": "dro", "beta": 0.2}}, 0, ["algorithm.loss.beta"]),
        ({"loss": "gpg"}, 0, []),
        ({"ratio_veto": 10}, 0, ["algorithm.ratio_veto"]),
        ({"ratio_veto": None}, 0, []),
        ({"correction": {"off_policy": 0.1}}, 0, ["algorithm.correction.off_policy"]),
        ({"correction": {"off_policy": 0.1}, "loss": "own.py:f"}, 0, ["algorithm.correction.off_policy"]),
        ({"correction": {"off_policy": 0.1}}, 1, []),
        ({}, 0, []),
    ],
)
def test_settings_of_a_ratio_that_is_always_one_are_found(algorithm: Any, staleness: int, wanted: list[str]):
    assert AlgorithmConfig(**algorithm).idle_parameters(staleness) == wanted


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"hidden": 30, "heads": 4}, "hidden = 30 cannot be split into 4 heads of an even size: set hidden to 32"),
        ({"hidden": 12, "heads": 4}, "of an even size: set hidden to"),
        ({"hidden": 80, "heads": 5}, "heads = 5 cannot share 2 key/value heads evenly"),
        ({"hidden": 2, "heads": 4}, "set hidden to 8"),
    ],
)
def test_heads_of_a_tiny_model_must_fit(sizes: dict[str, int], said: str):
    with pytest.raises(ValueError, match=said):
        RunConfig(env="agentrl.envs.calculator:Calculator", model={"tiny": sizes})
    RunConfig(env="agentrl.envs.calculator:Calculator", model={"tiny": {"hidden": 48, "heads": 3}})


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            {"learner": {"device": "cuda:1", "ranks": 2}},
            "learner.device is cuda:1, and Ray chooses",
        ),
        (
            {"engine": {"kind": "vllm", "device": "cuda:1", "server": {"launch": "ray"}}},
            "Ray chooses their GPUs",
        ),
        (
            {"engine": {"kind": "vllm", "device": "cuda:1", "server": {"urls": ["http://127.0.0.1:1"]}}},
            "those in engine.server.urls run already",
        ),
        ({"eval": {"background": True}}, "eval.background has no effect: nothing is evaluated while training"),
        (
            {"optim": {"schedule": "linear", "warmup_ratio": 1.0}},
            "linear has no effect: optim.warmup_ratio 1 ",
        ),
        (
            {"steps": 20, "optim": {"schedule": "cosine", "warmup_steps": 20}},
            "cosine has no effect: optim.warmup_steps 20 leaves no step",
        ),
        (
            {"agent": {"command": ["x"]}, "eval": {"sets": {"s": {"temperature": 1.0, "top_p": 0.9}}}},
            "eval.sets.s.top_p, eval.sets.s.top_k and eval.sets.s.min_p do not reach",
        ),
        (
            {"rollout": {"overlong": "penalise"}, "algorithm": {"advantage": "none"}, "teacher": {"path": "t"}},
            "rollout.overlong penalise has no effect with algorithm.advantage: none",
        ),
        *(
            (
                {"rollout": {"max_turns": 1}, "algorithm": {"advantage": advantage}},
                f"algorithm.advantage.{key} has no effect with rollout.max_turns 1",
            )
            for key, advantage in (
                ("gamma", {"name": "turn_level", "gamma": 0.9}),
                ("baseline", {"name": "turn_level", "baseline": "turn"}),
                ("lam", {"name": "gae", "per": "turn", "lam": 0.9}),
                ("gamma", {"name": "reinforce_plus_plus", "per": "turn", "gamma": 0.9}),
            )
        ),
    ],
)
def test_what_another_setting_makes_void_is_an_error(data: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=re.escape(said)):
        run(**data)


@pytest.mark.parametrize(
    "data",
    [
        {"eval": {"background": True, "every": 1}},
        {"eval": {"background": True, "sets": {"x": {"every": 2}}}},
        {"optim": {"schedule": "cosine", "warmup_ratio": 0.5}},
        {"optim": {"schedule": "cosine"}, "steps": 5},
        {"rollout": {"max_turns": 1}, "algorithm": {"advantage": {"name": "gae", "gamma": 0.9}}},
        {"rollout": {"max_turns": 2}, "algorithm": {"advantage": {"name": "turn_level", "gamma": 0.9}}},
        {"engine": {"kind": "sglang", "device": "cuda:1"}},
        {"learner": {"device": "cuda:1"}},
    ],
)
def test_what_has_an_effect_is_no_error(data: dict[str, Any]):
    run(**data)
