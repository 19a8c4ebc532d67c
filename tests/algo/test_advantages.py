"""Advantages worked out by hand, and what holds for every estimator."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl.algo.advantages import ESTIMATORS, estimate
from agentrl.algo.advantages.dr_grpo import DrGRPO
from agentrl.algo.advantages.gae import GAE, gae_advantages
from agentrl.algo.advantages.gdpo import GDPO, gdpo_advantages
from agentrl.algo.advantages.gpg import gpg_advantages
from agentrl.algo.advantages.grpo import GRPO, grpo_advantages
from agentrl.algo.advantages.grpo_passk import passk_advantages
from agentrl.algo.advantages.max_rl import max_rl_advantages
from agentrl.algo.advantages.opo import opo_advantages
from agentrl.algo.advantages.optimal_token_baseline import optimal_token_advantages
from agentrl.algo.advantages.reinforce_plus_plus import ReinforcePlusPlus
from agentrl.algo.advantages.reinforce_plus_plus_baseline import ReinforcePlusPlusBaseline
from agentrl.algo.advantages.remax import ReMax
from agentrl.algo.advantages.rloo import rloo_advantages
from agentrl.algo.advantages.turn_level import TurnLevel, turn_advantages, turn_returns
from agentrl.algo.returns import index_in_sequence, return_to_go, rewards_at_end, whiten
from agentrl.algo.siblings import group_centered, has_signal
from agentrl.algo.step_data import StepData, UnsuitableRewardsError, penalize_kl

REWARDS = torch.tensor([1.0, 0.0, 0.0, 3.0, 5.0, 0.7, 2.0, 2.0], dtype=torch.float64)
GROUPS = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3])


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def same(got: Tensor, *expected: float) -> None:
    assert got.tolist() == pytest.approx(list(expected), abs=1e-9)


def test_grpo_with_each_std():
    third = math.sqrt(1 / 3)
    by_group = grpo_advantages(REWARDS, GROUPS, eps=0.0)[:5]
    same(by_group, 2 / 3 / third, -1 / 3 / third, -1 / 3 / third, -1 / math.sqrt(2), 1 / math.sqrt(2))
    none = grpo_advantages(REWARDS, GROUPS, std="none")
    same(none, 2 / 3, -1 / 3, -1 / 3, -1, 1, 0, 0, 0)
    batch = grpo_advantages(REWARDS, GROUPS, std="batch", eps=0.0)
    assert torch.allclose(batch, none / REWARDS.std())


def test_a_step_of_groups_is_scored_as_its_groups_one_by_one():
    whole = grpo_advantages(REWARDS, GROUPS)
    parts = torch.cat(
        [grpo_advantages(REWARDS[g == GROUPS], torch.zeros_like(GROUPS[g == GROUPS])) for g in range(4)]
    )
    assert torch.allclose(whole, parts)


def test_rloo_is_the_reward_against_the_mean_of_the_others():
    same(rloo_advantages(REWARDS, GROUPS), 1, -0.5, -0.5, -2, 2, 0, 0, 0)


def test_passk_credits_the_lead_of_the_best():
    same(passk_advantages(REWARDS, GROUPS, normalize_std=False), 1, 0, 0, 0, 2, 0, 0, 0)
    same(passk_advantages(REWARDS, GROUPS, eps=0.0)[:1], 1 / math.sqrt(1 / 3))


def test_opo_weighs_the_baseline_by_length():
    lengths = torch.tensor([1, 1, 2, 3, 1, 9, 4, 5])
    same(opo_advantages(REWARDS, GROUPS, lengths), 0.75, -0.25, -0.25, -0.5, 1.5, 0, 0, 0)


def test_max_rl_divides_by_the_mean_of_the_group():
    same(max_rl_advantages(tensor(1, 0, 0, 0, 0, 0, 1, 1), GROUPS), 2, -1, -1, 0, 0, 0, 0, 0)
    same(max_rl_advantages(tensor(0, 0, 1, 0.5, 1.5, 0, 2, 2), GROUPS), -1, -1, 2, -0.5, 0.5, 0, 0, 0)


def test_max_rl_follows_the_log_of_the_success_rate():
    """Over all groups that can be drawn: the gradient of sum over k <= n - 1 of pass@k / k (the paper's order)."""
    n, rate = 4, 0.3
    score = tensor((1 - rate), -rate)  # of log p(success), log p(failure) with respect to the logit
    mean = 0.0
    for number in range(2**n):
        rewards = tensor(*((number >> i) & 1 for i in range(n)))
        chance = float(torch.where(rewards == 1, rate, 1 - rate).prod())
        advantages = max_rl_advantages(rewards, torch.zeros(n, dtype=torch.long))
        mean += chance * float((advantages * torch.where(rewards == 1, score[0], score[1])).mean())
    slope = rate * (1 - rate)  # of the success rate with respect to the logit
    assert mean == pytest.approx(sum((1 - rate) ** k for k in range(n - 1)) * slope, rel=1e-6)


def test_max_rl_refuses_negative_rewards():
    with pytest.raises(UnsuitableRewardsError, match=r"rewards must be at least 0, got -0\.5"):
        max_rl_advantages(tensor(1, -0.5), torch.tensor([0, 0]))


def test_gpg_makes_up_for_groups_without_a_gradient():
    same(gpg_advantages(REWARDS, GROUPS)[:5], *(x * 8 / 5 for x in (2 / 3, -1 / 3, -1 / 3, -1, 1)))


def test_gdpo_gives_each_component_its_say():
    # The second component is 100 times smaller: after comparison within the group it counts as much.
    parts = torch.stack([tensor(1, 0, 0, 1), tensor(0, 0.01, 0, 0.01)], -1)
    group = torch.zeros(4, dtype=torch.long)
    total = gdpo_advantages(parts, group, whiten=False, eps=0.0)
    half = 0.5 / math.sqrt(1 / 3)
    same(total, 0, 0, -2 * half, 2 * half)
    same(gdpo_advantages(parts, group, eps=0.0), 0, 0, -math.sqrt(1.5), math.sqrt(1.5))
    with pytest.raises(ValueError, match="3 weights for 2 reward components"):
        gdpo_advantages(parts, group, weights_K=torch.ones(3))


def test_gdpo_leaves_out_a_component_that_does_not_apply():
    parts = torch.stack([tensor(1, 0, 1, 0), tensor(math.nan, 1, 0, 0.5)], -1)
    out = gdpo_advantages(parts, torch.zeros(4, dtype=torch.long), whiten=False, eps=0.0)
    half = 0.5 / math.sqrt(1 / 3)
    same(out, half, -half + 1, half - 1, -half)


def test_rounding_of_a_mean_is_no_signal():
    rewards, group = torch.full((7,), 0.1), torch.zeros(7, dtype=torch.long)
    assert (group_centered(rewards, group) == 0).all()
    assert not has_signal(rewards, group).any()
    for name in ("grpo", "rloo", "dr_grpo", "gpg", "opo", "grpo_passk"):
        step = StepData(rewards, group, torch.arange(7))
        assert (estimate(name, step, ESTIMATORS[name].config()).advantages_N == 0).all()


def test_gae_by_hand():
    rewards, values = tensor(0, 0, 1, 2), tensor(0.5, 0.4, 0.2, 1.0)
    sequence = torch.tensor([0, 0, 0, 1])
    advantages, returns = gae_advantages(rewards, values, sequence, gamma=0.9, lam=0.5)
    d2, d1, d0 = 1 - 0.2, 0.9 * 0.2 - 0.4, 0.9 * 0.4 - 0.5
    a1 = d1 + 0.45 * d2
    same(advantages, d0 + 0.45 * a1, a1, d2, 1.0)
    assert torch.allclose(returns, advantages + values)


@pytest.mark.parametrize("per", ["token", "turn"])
def test_discount_per_token_and_per_turn(per):
    rewards, sequence = tensor(1, 0, 2, 4), torch.zeros(4, dtype=torch.long)
    turn = torch.tensor([0, 0, 1, 1]) if per == "turn" else None
    got = return_to_go(rewards, sequence, gamma=0.5, turn_N=turn)
    if per == "turn":
        same(got, 1 + 0.5 * 6, 0.5 * 6, 6, 4)
    else:
        same(got, 1 + 0.25 * 2 + 0.125 * 4, 0.5 * 2 + 0.25 * 4, 2 + 0.5 * 4, 4)


def test_gae_per_turn_is_gae_over_turns_when_a_turn_is_one_token():
    rewards, values, sequence = tensor(1, 2, 3), tensor(0.3, 0.1, 0.7), torch.zeros(3, dtype=torch.long)
    plain = gae_advantages(rewards, values, sequence, gamma=0.9, lam=0.7)[0]
    assert torch.equal(
        plain, gae_advantages(rewards, values, sequence, gamma=0.9, lam=0.7, turn_N=torch.arange(3))[0]
    )


def test_turn_advantages_of_three_turns_by_hand():
    """Two siblings: three turns with rewards 0, 1, 2 and two turns with 1, 0; discount 1/2 per turn."""
    rewards, episode = tensor(0, 1, 2, 1, 0), torch.tensor([0, 0, 0, 1, 1])
    group = torch.tensor([0, 0])
    same(turn_returns(rewards, episode, gamma=0.5), 1, 2, 2, 1, 0)
    pooled = turn_advantages(rewards, episode, group, gamma=0.5, normalize_std=False)
    same(pooled, -0.2, 0.8, 0.8, -0.2, -1.2)
    by_turn = turn_advantages(rewards, episode, group, gamma=0.5, baseline="turn", normalize_std=False)
    same(by_turn, 0, 1, 0, 0, -1)
    std = tensor(1, 2, 2, 1, 0).std()
    assert torch.allclose(turn_advantages(rewards, episode, group, gamma=0.5, eps=0.0), pooled / std)


def test_turn_level_lands_on_the_tokens_of_each_turn():
    sequence = torch.tensor([0, 0, 0, 0, 1, 1, 1])
    turn = torch.tensor([0, 0, 1, 2, 0, 1, 1])
    rewards = tensor(0, 0, 1, 2, 1, 0, 0)
    step = StepData(tensor(3, 1), torch.tensor([0, 0]), sequence, rewards_N=rewards, turn_N=turn)
    got = estimate("turn_level", step, TurnLevel(gamma=0.5, normalize_std=False)).advantages_N
    same(got, -0.2, -0.2, 0.8, 0.8, -0.2, -1.2, -1.2)


def test_remax_takes_off_what_the_greedy_episode_got():
    step = StepData(tensor(1, 0), torch.tensor([0, 1]), torch.tensor([0, 0, 1]), greedy_E=tensor(0.25, 1))
    same(estimate("remax", step, ReMax()).advantages_N, 0.75, 0.75, -1)


def test_reinforce_plus_plus_whitens_discounted_returns():
    step = StepData(tensor(1, 0), torch.tensor([0, 1]), torch.tensor([0, 0, 1]))
    got = estimate("reinforce_plus_plus", step, ReinforcePlusPlus(gamma=0.5)).advantages_N
    returns = tensor(0.5, 1, 0)
    same(got, *((returns - 0.5) / math.sqrt(0.25 + 1e-8)).tolist())


def test_optimal_token_baseline_by_hand():
    """Two siblings of one and two tokens: at position 0 both count by their gradient, beyond it there is none."""
    sequence, group = torch.tensor([0, 1, 1]), torch.tensor([0, 0])
    logprobs, squares = tensor(0.5, 0.25, 0.5).log(), tensor(0.5, 0.375, 0.5)
    w0, w1 = 1 - 1.0 + 0.5, 1 - 0.5 + 0.375
    step_rewards = rewards_at_end(tensor(1, 0), sequence)
    got = optimal_token_advantages(step_rewards, sequence, group, logprobs, squares, eps=0.0)
    baseline = w0 * 1 / (w0 + w1)
    same(got, 1 - baseline, -baseline, 0)
    lone = optimal_token_advantages(step_rewards, sequence, torch.tensor([0, 1]), logprobs, squares)
    same(lone, 0, 0, 0)


def test_whiten_counts_only_what_takes_part():
    got = whiten(tensor(1, 3, 100), torch.tensor([True, True, False]))
    same(got, -1 / math.sqrt(2 + 1e-8), 1 / math.sqrt(2 + 1e-8), 0)
    assert whiten(tensor(5)).tolist() == [5.0]


def test_index_in_sequence_counts_along_each_episode():
    assert index_in_sequence(torch.tensor([1, 0, 1, 1, 0])).tolist() == [0, 0, 1, 2, 1]


def test_kl_in_the_reward_reaches_tokens_and_totals():
    step = StepData(tensor(1, 2), torch.tensor([0, 0]), torch.tensor([0, 0, 1]))
    logprobs, reference = tensor(-1, -2, -3), tensor(-1.5, -2, -1)
    got = penalize_kl(step, logprobs, reference, coef=0.1)
    same(got.rewards_E, 0.95, 2.2)
    same(got.token_rewards(), -0.05, 1, 2.2)


def draw_step(seed: int, episodes: int, groups: int) -> StepData:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 6, (episodes,), generator=g)
    sequence = torch.repeat_interleave(torch.arange(episodes), lengths)
    size = int(lengths.sum())

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    return StepData(
        rewards_E=torch.randint(0, 3, (episodes,), generator=g).double(),
        group_E=torch.randint(0, groups, (episodes,), generator=g),
        sequence_N=sequence,
        turn_N=index_in_sequence(sequence) // 2,
        values_N=normal(size),
        greedy_E=normal(episodes),
        components_EK=normal(episodes, 2),
        old_logprobs_N=-normal(size).abs(),
        sum_pi_squared_N=torch.rand(size, generator=g, dtype=torch.float64),
    )


def rearranged(step: StepData, seed: int) -> tuple[StepData, Tensor]:
    """Episodes renumbered, groups renamed, tokens of different episodes interleaved; and where tokens went."""
    g = torch.Generator().manual_seed(seed)
    episodes, size = step.rewards_E.numel(), step.sequence_N.numel()
    old_of_new = torch.randperm(episodes, generator=g)
    new_of_old = torch.argsort(old_of_new)
    slots = step.sequence_N[torch.randperm(size, generator=g)]  # which episode owns each place
    order = torch.empty(size, dtype=torch.long)
    for episode in range(episodes):
        order[(slots == episode).nonzero().squeeze(-1)] = (step.sequence_N == episode).nonzero().squeeze(-1)
    moved = StepData(
        rewards_E=step.rewards_E[old_of_new],
        group_E=7 - step.group_E[old_of_new],
        sequence_N=new_of_old[step.sequence_N[order]],
        turn_N=step.turn_N[order],
        values_N=step.values_N[order],
        greedy_E=step.greedy_E[old_of_new],
        components_EK=step.components_EK[old_of_new],
        old_logprobs_N=step.old_logprobs_N[order],
        sum_pi_squared_N=step.sum_pi_squared_N[order],
    )
    return moved, order


CONFIGS = {name: entry.config() for name, entry in ESTIMATORS.items()}
COMPARES_SIBLINGS = sorted(set(ESTIMATORS) - {"gae", "reinforce_plus_plus", "remax"})


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**30), episodes=st.integers(1, 9), groups=st.integers(1, 4))
def test_estimators_do_not_see_the_order(name, seed, episodes, groups):
    step = draw_step(seed, episodes, groups)
    moved, order = rearranged(step, seed + 1)
    before, after = estimate(name, step, CONFIGS[name]), estimate(name, moved, CONFIGS[name])
    assert torch.isfinite(before.advantages_N).all()
    assert torch.allclose(after.advantages_N, before.advantages_N[order], rtol=1e-9, atol=1e-9)
    if before.returns_N is not None:
        assert torch.allclose(after.returns_N, before.returns_N[order], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", COMPARES_SIBLINGS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**30))
def test_a_group_of_one_gets_exactly_zero(name, seed):
    step = draw_step(seed, 6, 2)
    group = step.group_E.clone()
    group[3] = 5
    step = StepData(**{f: getattr(step, f) for f in step.__slots__} | {"group_E": group})
    got = estimate(name, step, CONFIGS[name]).advantages_N
    assert (got[step.sequence_N == 3] == 0).all()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_empty_step_has_no_advantages(name):
    step = draw_step(0, 1, 1)
    empty = StepData(**{f: None if getattr(step, f) is None else getattr(step, f)[:0] for f in step.__slots__})
    assert estimate(name, empty, CONFIGS[name]).advantages_N.numel() == 0


def test_an_episode_without_a_trained_token_still_votes():
    step = StepData(tensor(1, 0), torch.tensor([0, 0]), torch.tensor([0, 0]))
    same(estimate("dr_grpo", step, DrGRPO()).advantages_N, 0.5, 0.5)
    same(estimate("reinforce_plus_plus_baseline", step, ReinforcePlusPlusBaseline()).advantages_N, 0, 0)


def test_what_is_missing_is_named():
    step = StepData(tensor(1, 0), torch.tensor([0, 0]), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="'gae' needs values_N"):
        estimate("gae", step, GAE())
    with pytest.raises(ValueError, match="'reinforce_plus_plus' needs turn_N"):
        estimate("reinforce_plus_plus", step, ReinforcePlusPlus(per="turn"))
    with pytest.raises(ValueError, match="unknown advantage estimator 'grop'; there are dr_grpo, gae"):
        estimate("grop", step, GRPO())
    with pytest.raises(ValueError, match="grpo takes GRPO, got GDPO"):
        estimate("grpo", step, GDPO())
    with pytest.raises(ValueError, match="unknown std 'row'"):
        grpo_advantages(tensor(1, 0), torch.tensor([0, 0]), std="row")
