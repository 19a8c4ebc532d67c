"""Settings that would lose a run or silently change its objective: refused, or stopped before a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.algo.advantages import ESTIMATORS
from agentrl.algo.advantages.gdpo import GDPO
from agentrl.algo.entries import Signal
from agentrl.algo.step_data import StepData
from agentrl.config.run import AlgorithmConfig, RunConfig
from agentrl.errors import AgentRLError, ConfigError
from agentrl.reporting.report import Silent
from agentrl.rollout.content import check_held_out, load_content
from agentrl.rollout.episode_metrics import group_has_signal
from agentrl.run_folder.store import RunStore
from agentrl.trainer.algorithm import algorithm_of
from agentrl.trainer.estimator import NamedEstimator, make_estimator
from agentrl.trainer.run import train_run
from agentrl.trainer.samples import with_constant
from agentrl.types import Group, Message, Sample, Task
from tests.env.test_toolenv import episode_of
from tests.trainer.test_run import ENVS
from tests.trainer.test_samples import group as scores

FUNCTIONS = """
from agentrl.algo.advantages.gae import gae_advantages
from agentrl.algo.step_data import Advantages


def spread(step):
    return step.rewards_E[step.sequence_N]


def greedy(step):
    return spread(step)


greedy.needs = ["greedy_E"]


def corrected(step):
    return spread(step) * step.correction_N


corrected.needs = ["correction_N"]


def odd_needs(step):
    return spread(step)


odd_needs.needs = [["x"]]


def undeclared(step):
    return spread(step) + step.sum_pi_squared_N


def undeclared_old(step):
    return spread(step) + step.old_logprobs_N


def of_turns(step):
    names = dict(zip(step.component_names, step.components_EK.T, strict=True))
    last_E = step.rewards_E / step.length_E + names.get("solved", 0)
    return step.rewards_N + step.turn_N + last_E[step.sequence_N]


def by_name(step):
    return step.components_EK[:, step.component_names.index("solved")][step.sequence_N]


def by_another_name(step):
    return step.components_EK[:, step.component_names.index("first_try")][step.sequence_N]


def short_returns(step):
    return Advantages(spread(step), returns_N=spread(step)[:3])


def complex_ones(step):
    return spread(step).to(dtype=__import__("torch").complex64)


def valued(step):
    return Advantages(*gae_advantages(step.rewards_N, step.values_N, step.sequence_N, lam=0.9))


valued.needs = ["values_N"]


def without_returns(step):
    return step.values_N


without_returns.needs = ["values_N"]


def fails_later(step):
    if len(step.rewards_E) != 4 or step.turn_N.max() == 0:
        raise KeyError("later")
    return spread(step)


def nan_later(logprobs_T, old_T, advantages_T, weights_T, sequence_T, mask_T):
    value = -(weights_T * advantages_T * logprobs_T).sum()
    return value if len(logprobs_T) <= 7 else value * float("nan")


def odd_metrics(logprobs_T, old_T, advantages_T, weights_T, sequence_T, mask_T):
    return -(weights_T * advantages_T * logprobs_T).sum(), {3: 1.0}


def no_metrics(logprobs_T, old_T, advantages_T, weights_T, sequence_T, mask_T):
    return -(weights_T * advantages_T * logprobs_T).sum(), None
"""


def words(folder: Path, **changes: Any) -> RunConfig:
    """Two steps of saying a color."""
    (folder / "envs.py").write_text(ENVS)
    (folder / "functions.py").write_text(FUNCTIONS)
    return RunConfig.model_validate(
        {
            "name": "words",
            "steps": 2,
            "env": f"{folder}/envs.py:Words",
            "model": {"tiny": {"hidden": 16, "layers": 1, "heads": 2, "intermediate": 32, "vocab": 300}},
            "rollout": {"groups_per_step": 2, "group_size": 2, "max_tokens": 8, "token_budget": 400},
            "eval": {"tasks": 2},
            **changes,
        }
    )


def trained(config: RunConfig, folder: Path) -> None:
    with RunStore.open(config, folder) as store:
        train_run(config, store, Silent())


@pytest.mark.parametrize("optim", [{"lr": 1e308}, {"weight_decay": 1e308, "lr": 1.0}])
def test_an_update_that_is_not_finite_never_replaces_a_checkpoint(tmp_path: Path, optim: Mapping[str, float]):
    save = {"every": 1, "keep": 1}
    trained(words(tmp_path, steps=1, checkpoint=save), tmp_path / "run")
    diverging = words(tmp_path, steps=3, checkpoint=save, optim=optim, algorithm={"entropy_coef": 1.0})
    for _ in range(2):
        with pytest.raises(AgentRLError, match=r"step 2: .*(not finite|nan|inf).*lower optim\.lr"):
            trained(diverging, tmp_path / "run")
        with RunStore.open(diverging, tmp_path / "run") as store:
            checkpoint = store.latest_checkpoint()
            assert checkpoint is not None
            assert checkpoint.step == 1
    trained(words(tmp_path, steps=2, checkpoint=save), tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("greedy", "greedy_E with remax"),
        ("corrected", r"algorithm\.correction\.importance only"),
        ("odd_needs", "`needs` must list fields"),
        ("undeclared", "undeclared"),
        ("short_returns", "returns_N has one return for each token"),
        ("complex_ones", r"got torch\.complex64"),
        ("fails_later", "raised KeyError: 'later'"),
        ("by_another_name", "raised ValueError: tuple"),
    ],
)
def test_an_advantage_of_your_own_fails_in_one_error(tmp_path: Path, name: str, said: str):
    config = words(tmp_path, algorithm={"advantage": f"{tmp_path}/functions.py:{name}"})
    with pytest.raises(ConfigError, match=said):
        trained(config, tmp_path / "run")


def test_an_advantage_of_your_own_reads_the_values_of_a_critic(tmp_path: Path):
    def scored(advantage: object) -> list[Sample]:
        algorithm = algorithm_of(
            words(tmp_path, algorithm={"advantage": advantage}, critic={}), False, None, record=False
        )
        rows = algorithm.rows([scores(1.0, 0.0), scores(0.5, 2.0, name="y")])
        samples = [with_constant(row, "values", 0.1 * number) for number, row in enumerate(rows.samples)]
        return list(algorithm.advantages(replace(rows, samples=samples)).samples)

    found = scored(f"{tmp_path}/functions.py:valued")
    assert found == scored({"name": "gae", "lam": 0.9, "whiten": False})
    assert all(any(row.columns["returns"]) for row in found if any(row.advantages))


@pytest.mark.parametrize(
    ("advantage", "critic", "said"),
    [
        ("valued", {}, "needs values_N, which a critic gives: add the section `critic`"),
        ("of_turns", {"critic": {}}, "does not list values_N in its `needs`"),
        ("without_returns", {"critic": {}}, r"must return Advantages\(advantages_N, returns_N\)"),
    ],
)
def test_a_critic_and_an_advantage_of_your_own_need_each_other(
    tmp_path: Path, advantage: str, critic: dict[str, object], said: str
):
    config = words(tmp_path, algorithm={"advantage": f"{tmp_path}/functions.py:{advantage}"}, **critic)
    with pytest.raises(ConfigError, match=said):
        algorithm_of(config, False, None, record=False)


@pytest.mark.parametrize(
    ("of_run", "of_env", "said"),
    [
        ({}, "valued", "needs values_N, unlike algorithm.advantage: a critic learns from all episodes"),
        ({"critic": {}}, "grpo", "does not need values_N, unlike algorithm.advantage: a critic learns"),
    ],
)
def test_the_critic_of_an_advantage_of_your_own_learns_from_every_env(
    tmp_path: Path, of_run: dict[str, object], of_env: str, said: str
):
    own, use = f"{tmp_path}/functions.py:valued", f"{tmp_path}/envs.py:Words"
    env = {"use": use, "algorithm": {"advantage": own if of_env == "valued" else of_env}}
    advantage = own if of_run else "grpo"
    config = words(tmp_path, env=None, envs={"a": use, "b": env}, algorithm={"advantage": advantage}, **of_run)
    with pytest.raises(ConfigError, match=f"envs.b.algorithm.advantage {said}"):
        algorithm_of(config, False, None, record=False)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nan_later", "must return a finite scalar tensor"),
        ("odd_metrics", "metrics must be a mapping from names to numbers"),
        ("no_metrics", "metrics must be a mapping from names to numbers, got None"),
    ],
)
def test_a_loss_of_your_own_fails_in_one_error(tmp_path: Path, name: str, said: str):
    config = words(tmp_path, algorithm={"loss": f"{tmp_path}/functions.py:{name}"})
    with pytest.raises(ConfigError, match=said):
        trained(config, tmp_path / "run")


@pytest.mark.parametrize("name", ["of_turns", "by_name"])
def test_what_every_step_has_needs_no_declaration(tmp_path: Path, name: str):
    own = {"advantage": f"{tmp_path}/functions.py:{name}"}
    trained(words(tmp_path, steps=1, algorithm=own), tmp_path / "run")


def test_an_advantage_of_your_own_that_reads_what_it_did_not_declare_starts_no_run(tmp_path: Path):
    own = {"advantage": f"{tmp_path}/functions.py:undeclared_old"}
    words(tmp_path)
    with pytest.raises(ConfigError, match="NoneType"):
        make_estimator(AlgorithmConfig.model_validate(own))


def test_an_advantage_of_your_own_takes_groups_of_equal_rewards_and_needs_none_of_one(tmp_path: Path):
    text = """
def compared(step, unbiased, eps):
    out = step.rewards_E.clone()
    for group in step.group_E.unique():
        r = step.rewards_E[step.group_E == group]
        out[step.group_E == group] = (r - r.mean()) / (r.std(unbiased=unbiased) + eps)
    return out[step.sequence_N]
"""
    (tmp_path / "own.py").write_text(text)

    def estimator(unbiased: bool, eps: float) -> NamedEstimator:
        own = {"use": f"{tmp_path}/own.py:compared", "options": {"unbiased": unbiased, "eps": eps}}
        return make_estimator(AlgorithmConfig.model_validate({"advantage": own}))

    with pytest.raises(ConfigError, match=r"some are not finite, first in a group with the rewards 0\.5, 0\.5$"):
        estimator(False, 0.0)
    assert estimator(True, 1e-6), "whose divisor is 0 for a group of one"


def test_a_weight_that_was_asked_for_is_there(tmp_path: Path):
    own = {"advantage": f"{tmp_path}/functions.py:corrected", "correction": {"importance": "token"}}
    trained(words(tmp_path, steps=1, algorithm=own), tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollout": {"temperature": 1e-300}}, "temperature"),
        ({"rollout": {"temperature": 1e308}}, "temperature"),
        ({"eval": {"temperature": 1e-6}}, "must be 0, which is greedy, or at least 1e-05"),
        ({"algorithm": {"correction": {"reject": {"token_k1": 0.5}}}}, "token_k1 alone means from 1/0.5 to 0.5"),
        ({"warmup": {"until_pass": 0.2, "at_least": 0.5}}, "ends the cold start below at_least"),
        (
            {"algorithm": {"advantage": "gae"}, "critic": {"warmup_steps": 2}},
            "none would train the policy",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_the_run(tmp_path: Path, changes: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        words(tmp_path, **changes)


def test_a_penalty_that_an_env_would_lose_is_refused(tmp_path: Path):
    use = f"{tmp_path}/envs.py:Words"
    envs = {"x": {"use": use, "algorithm": {"advantage": "gdpo"}}, "y": {"use": use}}
    with pytest.raises(ValueError, match=r"envs\.x: algorithm\.kl\.where has no effect without another advantage"):
        words(tmp_path, env=None, envs=envs, algorithm={"kl": {"where": "reward", "coef": 5.0}})


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"eval": {"temperature": 1.0, "attempts": 2}}, "eval.attempts"),
        ({"eval": {"before_training": False}}, "eval.before_training"),
        ({"eval": {}, "checkpoint": {"best": True}}, "checkpoint.best"),
    ],
)
def test_settings_of_an_evaluation_without_tasks_are_refused(tmp_path: Path, changes: dict[str, Any], key: str):
    (tmp_path / "rows.jsonl").write_text('{"number": 1}\n{"number": 2}\n')
    config = words(tmp_path, data={"train": f"{tmp_path}/rows.jsonl"}, **changes)
    with pytest.raises(ConfigError, match=f"{key} is .*, and there are no held-out tasks"):
        trained(config, tmp_path / "run")


def test_the_evaluation_of_an_env_without_tasks_is_refused(tmp_path: Path):
    rows, use = tmp_path / "rows.jsonl", f"{tmp_path}/envs.py:Words"
    rows.write_text('{"number": 1}\n{"number": 2}\n')
    with_tasks = {"use": use, "data": {"train": str(rows), "held_out": str(rows)}}
    without = {"use": use, "data": {"train": str(rows)}, "eval": {"temperature": 1.0}}
    config = words(tmp_path, env=None, envs={"x": with_tasks, "y": without})
    said = r"envs\.y\.eval\.temperature is 1\.0, and there are no held-out tasks: .* envs\.y\.data\.held_out"
    with pytest.raises(ConfigError, match=said):
        check_held_out(config, load_content(config))


def group(*episodes: Mapping[str, Any]) -> Group:
    plain = episode_of(Message("assistant", "hello"))
    return Group(Task("t"), tuple(replace(plain, **changes) for changes in episodes))


def test_a_signal_is_what_the_advantage_compares():
    same = group(
        {"reward": 1.0, "rewards": {"a": 1.0, "b": 0.0}}, {"reward": 1.0, "rewards": {"a": 0.0, "b": 1.0}}
    )
    assert [group_has_signal(same, Signal(kind)) for kind in ("sum", "parts", "turns")] == [False, True, False]
    equal = group({"reward": 1.0, "rewards": {"a": 1.0}}, {"reward": 1.0, "rewards": {"a": 1.0}})
    assert [group_has_signal(equal, Signal(kind)) for kind in ("sum", "parts", "turns")] == [False, False, False]
    absent = group({"reward": 1.0, "rewards": {"a": 1.0}}, {"reward": 1.0, "rewards": {"a": 1.0, "b": 0.0}})
    assert not group_has_signal(absent, Signal("parts")), "a missing part counts as 0"
    turn = episode_of(Message("assistant", "hello")).turns[0]
    named = group(
        *(
            {
                "reward": 1.0,
                "turns": (replace(turn, reward=1.0, rewards={name: 1.0}),),
                "metrics": {f"reward/{name}": 1.0},
            }
            for name in ("a", "b")
        )
    )
    assert not group_has_signal(named, Signal("parts")), "all rewards of turns are one part"
    logged = group(*({"reward": 1.0 + b, "rewards": {"a": 1.0, "b": b}} for b in (0.1, 0.7)))
    gdpo = [AlgorithmConfig(advantage=GDPO(weights={"b": weight})).signal for weight in (0.5, 0.0)]
    assert [group_has_signal(logged, signal) for signal in gdpo] == [True, False], "b is only logged"
    assert group_has_signal(same, gdpo[1]), "a differs, too"
    other = group({"reward": 1.0}, {"reward": 0.0})
    assert group_has_signal(other, gdpo[1])
    assert [group_has_signal(other, Signal(kind)) for kind in ("sum", "parts", "turns")] == [True, True, True]


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_estimators_say_which_equal_rewards_have_a_signal(name: str):
    """Two episodes of the same length and reward: in one, it came in the first turn, in the other in the last."""
    entry = ESTIMATORS[name]
    if not entry.compares or name == "gdpo":
        pytest.skip("it compares no sums of rewards")
    sequence_N, turn_N = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])
    step = StepData(
        rewards_E=torch.ones(2, dtype=torch.float64),
        group_E=torch.zeros(2, dtype=torch.long),
        sequence_N=sequence_N,
        rewards_N=torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64),
        turn_N=turn_N,
        greedy_E=torch.zeros(2, dtype=torch.float64),
        components_EK=torch.ones(2, 1, dtype=torch.float64),
        component_names=("a",),
        old_logprobs_N=torch.full((4,), -1.0, dtype=torch.float64),
        sum_pi_squared_N=torch.full((4,), 0.5, dtype=torch.float64),
    )
    found = entry.fn(step, entry.config()).advantages_N
    assert bool(found.any()) == (entry.signal(entry.config()).of == "turns"), found


@pytest.mark.parametrize(
    ("advantage", "said"),
    [
        ({"name": "grpo", "std": "none", "eps": 0.1}, "advantage.eps has no effect"),
        ({"name": "grpo_passk", "normalize_std": False, "eps": 0.1}, "advantage.eps has no effect"),
        ({"name": "turn_level", "normalize_std": False, "eps": 0.1}, "advantage.eps has no effect"),
        ({"name": "reinforce_plus_plus", "per": "turn"}, "advantage.per has no effect with gamma"),
        ({"name": "gae", "per": "turn"}, "advantage.per has no effect with gamma: 1.0 and lam: 1.0"),
        ({"name": "gae", "per": "turn", "lam": 0.9}, ""),
        ({"name": "grpo", "std": "none"}, ""),
        ({"name": "grpo", "eps": 0.1}, ""),
        ({"name": "gdpo", "normalize_std": False, "eps": 0.1}, ""),
        ({"name": "reinforce_plus_plus", "per": "turn", "gamma": 0.9}, ""),
    ],
)
def test_a_parameter_that_another_disables_is_refused(tmp_path: Path, advantage: dict[str, Any], said: str):
    if not said:
        words(tmp_path, algorithm={"advantage": advantage})
        return
    with pytest.raises(ValueError, match=said):
        words(tmp_path, algorithm={"advantage": advantage})


@pytest.mark.parametrize(
    ("own", "run", "said"),
    [
        ({"rollout": {"max_turns": 2}}, {"rollout": {"max_turns": 3}}, "rollout.max_turns has no effect"),
        (
            {"algorithm": {"advantage": "rloo"}},
            {"algorithm": {"advantage": {"name": "grpo", "std": "batch"}}},
            "algorithm.advantage has no effect",
        ),
        ({"algorithm": {"kl_coef": 0.0}}, {"algorithm": {"kl": {"coef": 0.1}}}, "algorithm.kl.coef has no effect"),
    ],
)
def test_a_setting_of_the_run_that_every_env_replaces_is_refused(
    tmp_path: Path, own: dict[str, Any], run: dict[str, Any], said: str
):
    use = f"{tmp_path}/envs.py:Words"
    with pytest.raises(ValueError, match=said):
        words(tmp_path, env=None, envs={"x": {"use": use, **own}, "y": {"use": use, **own}}, **run)
    words(tmp_path, env=None, envs={"x": {"use": use, **own}, "y": {"use": use}}, **run)
