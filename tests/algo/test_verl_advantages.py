"""Advantages against verl's. Where verl is wrong we are right, and the test says where they part.

Departures (docs/differences-to-verl.md): a group of one gets 0 instead of its raw reward (verl: grpo, rloo, opo,
gpg, optimal token baselines; a ValueError for pass@k) and takes no part in whitening; gpg's alpha counts
episodes in groups without a gradient, not rewards that are 0; untrained tokens have no advantage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from agentrl.algo.advantages import ESTIMATORS, estimate
from agentrl.algo.advantages.gae import GAE
from agentrl.algo.advantages.gdpo import GDPO, gdpo_advantages
from agentrl.algo.advantages.grpo import GRPO
from agentrl.algo.advantages.grpo_passk import PassK
from agentrl.algo.advantages.optimal_token_baseline import OptimalTokenBaseline, optimal_token_advantages
from agentrl.algo.advantages.reinforce_plus_plus import ReinforcePlusPlus
from agentrl.algo.returns import whiten
from agentrl.algo.siblings import group_centered, has_siblings
from agentrl.algo.step_data import StepData
from tests.algo.algo_oracles import Case, close, parameters

ROWS, WIDTH = 12, 16
SEQUENCE_T = torch.arange(ROWS).repeat_interleave(WIDTH)


@dataclass(frozen=True)
class Read:
    """A case as our functions want it."""

    step: StepData
    mask_T: Tensor
    alone_N: Tensor
    """True on tokens of a group of one."""


def read(case: Case) -> Read:
    mask_T = case.input("response_mask").bool()
    names = case.array(case.inputs["index"]).tolist() if "index" in case.inputs else list(range(ROWS))
    group_E = torch.tensor([sorted(set(names)).index(name) for name in names])
    sequence_N = SEQUENCE_T[mask_T]
    rewards_N = components_EK = None
    if "fmt" in case.inputs:
        components_EK = torch.stack([case.input("fmt"), case.input("acc")], -1).to(getattr(torch, case.dtype))
        rewards_E = components_EK.sum(-1)
    else:
        rewards_T = case.input("token_level_rewards")
        rewards_E, rewards_N = rewards_T.view(ROWS, WIDTH).sum(-1), rewards_T[mask_T]

    def tokens(name: str) -> Tensor | None:
        return case.input(name)[mask_T] if name in case.inputs else None

    step = StepData(
        rewards_E,
        group_E,
        sequence_N,
        rewards_N=rewards_N,
        values_N=tokens("values"),
        greedy_E=case.input("reward_baselines") if "reward_baselines" in case.inputs else None,
        components_EK=components_EK,
        old_logprobs_N=tokens("old_log_probs"),
        sum_pi_squared_N=tokens("sum_pi_squared"),
        correction_N=tokens("rollout_is_weights"),
    )
    alone_E = ~has_siblings(group_E) if "index" in case.inputs else torch.zeros(ROWS, dtype=torch.bool)
    return Read(step, mask_T, alone_E[sequence_N])


def check(case: Case, got_N: Tensor, data: Read) -> None:
    """Equal to verl's on trained tokens, but for groups of one, which must be exactly 0 here."""
    expected_N = case.output("advantages")[data.mask_T]
    close(got_N[~data.alone_N], expected_N[~data.alone_N], max(case.tolerance, 5e-7), case.id)
    assert (got_N[data.alone_N] == 0).all()


def config_of(case: Case) -> tuple[str, object]:
    p = case.params
    match case.fn:
        case "gae":
            return "gae", GAE(gamma=p["gamma"], lam=p["lam"])
        case "grpo" | "grpo_vectorized":
            std = "group" if p["norm_adv_by_std_in_grpo"] else "none"
            return "grpo", GRPO(std=std, eps=p["epsilon"])
        case "grpo_passk":
            return "grpo_passk", PassK(normalize_std=p["norm_adv_by_std_in_grpo"], eps=p["epsilon"])
        case "rloo" | "rloo_vectorized":
            return "rloo", ESTIMATORS["rloo"].config()
        case "tir_optimal_token_baseline":
            return "optimal_token_baseline", OptimalTokenBaseline(zero_tail=p["handle_zero_tail"])
        case "reinforce_plus_plus":
            return "reinforce_plus_plus", ReinforcePlusPlus(gamma=p["gamma"])
        case name:
            return name, ESTIMATORS[name].config()


SPECIAL = ("gpg", "gdpo", "optimal_token_baseline", "reinforce_plus_plus_baseline")


@pytest.mark.parametrize(
    "case",
    [p for p in parameters("verl", "advantage") if not p.values[0] or p.values[0].fn not in SPECIAL],
)
def test_estimators_agree_with_verl(case: Case):
    data = read(case)
    if case.error is not None:
        assert "Pass@k requires at least 2 samples" in case.error
        got = estimate("grpo_passk", data.step, PassK()).advantages_N
        assert (got[data.alone_N] == 0).all()  # one sample of a task is no reason to stop a run
        return
    name, config = config_of(case)
    got = estimate(name, data.step, config)
    check(case, got.advantages_N, data)
    if case.fn == "gae":
        close(got.returns_N, case.output("returns")[data.mask_T], case.tolerance, "returns")


def special(fn: str) -> list:
    return [p for p in parameters("verl", "advantage") if not p.values[0] or p.values[0].fn == fn]


@pytest.mark.parametrize("case", special("gpg"))
def test_gpg_departs_in_alpha(case: Case):
    data = read(case)
    rewards_E, trained_groups = data.step.rewards_E, int(has_siblings(data.step.group_E).sum())
    got = estimate("gpg", data.step, ESTIMATORS["gpg"].config()).advantages_N
    theirs = ROWS / int(rewards_E.count_nonzero())  # verl: every reward of exactly 0 raises alpha
    ours = ROWS / trained_groups if "dense" in case.id else ROWS / 8  # sparse: group p2 has no difference
    check(case, got * (theirs / ours), data)


@pytest.mark.parametrize("case", special("reinforce_plus_plus_baseline"))
def test_reinforce_plus_plus_baseline_departs_in_groups_of_one(case: Case):
    name = "reinforce_plus_plus_baseline"
    data = read(case)
    alone_E = ~has_siblings(data.step.group_E)
    theirs_E = torch.where(alone_E, data.step.rewards_E, group_centered(data.step.rewards_E, data.step.group_E))
    close(whiten(theirs_E[data.step.sequence_N]), case.output("advantages")[data.mask_T], case.tolerance)
    got = estimate(name, data.step, ESTIMATORS[name].config()).advantages_N
    assert (got[data.alone_N] == 0).all()
    votes = got[~data.alone_N]
    close(votes.mean(), 0.0, 1e-5)
    close(votes.var(), 1.0, 1e-5)


@pytest.mark.parametrize("case", special("gdpo"))
def test_gdpo_departs_in_groups_of_one_and_whitens_episodes(case: Case):
    data = read(case)
    step = data.step
    if "fallback" in case.id:  # without reward components verl whitens GRPO's; we ask for the components
        with pytest.raises(ValueError, match="components_EK"):
            estimate("gdpo", step, GDPO())
        total = gdpo_advantages(step.rewards_E[:, None], step.group_E, whiten=False)
        theirs_E = torch.where(has_siblings(step.group_E), total, step.rewards_E)
        close(whiten(theirs_E[step.sequence_N]), case.output("advantages")[data.mask_T], 1e-6)
        return
    weights = case.params["weights"] or [1.0, 1.0]
    normalize = case.params["norm_adv_by_std_in_grpo"]
    plain_E = gdpo_advantages(
        step.components_EK, step.group_E, weights_K=torch.tensor(weights), normalize_std=normalize, whiten=False
    )
    raw_E = (step.components_EK * torch.tensor(weights, dtype=plain_E.dtype)).sum(-1)
    theirs_E = torch.where(has_siblings(step.group_E), plain_E, raw_E)
    theirs_N = whiten(theirs_E[step.sequence_N])  # verl whitens tokens: a long episode counts more
    close(theirs_N, case.output("advantages")[data.mask_T], max(case.tolerance, 1e-6))
    names = ("format", "accuracy")
    config = GDPO(weights=dict(zip(names, weights, strict=True)), normalize_std=normalize)
    step = replace(step, component_names=names)
    got_N = estimate("gdpo", step, config).advantages_N
    assert (got_N[data.alone_N] == 0).all()
    per_episode = torch.stack([got_N[step.sequence_N == e][0] for e in range(ROWS)])[has_siblings(step.group_E)]
    close(per_episode.mean(), 0.0, 1e-5)
    close(per_episode.std(), 1.0, 1e-4)


@pytest.mark.parametrize("case", special("optimal_token_baseline"))
def test_optimal_token_baseline_by_position_agrees_with_verl(case: Case):
    """verl's first form compares siblings by their position with observations counted; ours can, on request."""
    data = read(case)
    step = data.step
    got = optimal_token_advantages(
        step.rewards_N,
        step.sequence_N,
        step.group_E,
        step.old_logprobs_N,
        step.sum_pi_squared_N,
        correction_N=step.correction_N,
        position_N=torch.arange(WIDTH).repeat(ROWS)[data.mask_T],
        zero_tail=case.params["handle_zero_tail"],
    )
    check(case, got, data)
