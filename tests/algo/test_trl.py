"""TRL's GRPOTrainer, loss types and advantages: each is one of our losses with one of our aggregations.

Departures (docs/differences-to-verl.md): the entropy bonus is aggregated like the loss (TRL: always over tokens),
and an `epsilon_high` of cispo is a largest ratio there, so that its default of 0.2 holds every ratio below 0.2.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agentrl.algo.advantages.gdpo import gdpo_advantages
from agentrl.algo.advantages.grpo import grpo_advantages
from agentrl.algo.aggregate import Totals, aggregate, aggregation_weights, totals_of_tokens
from agentrl.algo.correction import off_policy_sequences
from agentrl.algo.entropy import entropy_threshold, high_entropy_mask
from agentrl.algo.kl import kl_per_token
from agentrl.algo.losses import POLICY_LOSSES
from agentrl.algo.losses.cispo import CISPO
from agentrl.algo.losses.gspo import GSPO
from agentrl.algo.losses.ppo_clip import PPOClip
from agentrl.algo.losses.sapo import SAPO
from agentrl.algo.losses.vespo import VESPO
from tests.algo.algo_oracles import Case, close, parameters

ROWS, WIDTH = 8, 12
SEQUENCE_T = torch.arange(ROWS).repeat_interleave(WIDTH)
AGGREGATION = {
    "grpo": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "cispo": "token-mean",
    "vespo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "luspo": "seq-mean-token-sum",
}


def loss_of(case: Case) -> tuple[str, object]:
    p = case.params
    low = p.get("epsilon", 0.2)
    high, cap = p.get("epsilon_high") or low, p.get("delta")
    match p["loss_type"]:
        case "cispo":
            return "cispo", CISPO(ratio_max=high)
        case "sapo":
            level = p.get("importance_sampling_level", "token")
            return "sapo", SAPO(tau_positive=1.0, tau_negative=p.get("sapo_temperature_neg", 1.05), level=level)
        case "vespo":
            return "vespo", VESPO()
    if p.get("importance_sampling_level") == "sequence":
        return "gspo", GSPO(clip_low=low, clip_high=high, dual_clip=cap)
    return "ppo_clip", PPOClip(clip_low=low, clip_high=high, dual_clip=cap)


def policy_weights(case: Case, weights_T: Tensor, mask_T: Tensor, old_T: Tensor) -> Tensor:
    """The weights of the policy term: corrected, and 0 where one of TRL's masks takes tokens out."""
    p = case.params
    if p.get("sampling") == "sequence":
        weights_T = weights_T * case.tensor("in/is_ratio_sequence")[SEQUENCE_T]
    elif p.get("sampling") == "token" and p["loss_type"] != "vespo":
        weights_T = weights_T * case.tensor("in/is_ratio_token")
    if "off_policy_mask_threshold" in p:
        new_T, advantages_T = case.tensor("in/log_prob"), case.tensor("in/advantages")[SEQUENCE_T]
        limit = p["off_policy_mask_threshold"]
        weights_T = weights_T * off_policy_sequences(
            new_T, old_T, advantages_T, SEQUENCE_T, mask_T, threshold=limit
        )
    if "top_entropy_quantile" in p:
        entropy_T = case.tensor("in/entropy")
        threshold = entropy_threshold(entropy_T[mask_T], p["top_entropy_quantile"])
        weights_T = weights_T * high_entropy_mask(entropy_T, mask_T, threshold)
    return weights_T


@pytest.mark.parametrize("case", parameters("trl", "loss"))
def test_loss_types_are_our_losses_with_our_aggregations(case: Case):
    p = case.params
    mask_T = case.tensor("in/completion_mask").bool() & case.tensor("in/tool_mask").bool()
    logprobs_T = case.tensor("in/log_prob").requires_grad_()
    old_T = case.tensor("in/old_log_prob") if p.get("use_old", True) else logprobs_T.detach().clone()
    if p.get("sampling") == "token" and p["loss_type"] == "vespo":
        # VESPO's ratio is to the sampler: the truncated ratio of old policy and sampler is part of it.
        old_T = old_T - case.tensor("in/is_ratio_token").log()
    totals = totals_of_tokens(mask_T, SEQUENCE_T)
    steps = p.get("gas", 1)  # micro-batches of this size per update: counts of the whole update
    totals = Totals(p.get("num_items", totals.num_tokens), totals.num_sequences * steps)
    weights_T = aggregation_weights(
        AGGREGATION[p["loss_type"]],
        mask_T,
        SEQUENCE_T,
        totals,
        scale=p.get("max_completion_length", 512),
        dtype=getattr(torch, case.dtype),
    )
    name, config = loss_of(case)
    advantages_T = case.tensor("in/advantages")[SEQUENCE_T]
    taken_T = policy_weights(case, weights_T, mask_T, old_T)
    loss, _ = POLICY_LOSSES[name].fn(logprobs_T, old_T, advantages_T, taken_T, SEQUENCE_T, mask_T, config)
    if "beta" in p:
        kl_T = kl_per_token("k3", logprobs_T, case.tensor("in/ref_log_prob"), mask_T)
        if p.get("use_bias_correction_kl", True):
            kl_T = kl_T * (logprobs_T - old_T).exp()
        loss = loss + p["beta"] * aggregate(kl_T, weights_T, mask_T)
    if "entropy_coef" in p:
        over_tokens_T = aggregation_weights("token-mean", mask_T, SEQUENCE_T, totals, dtype=weights_T.dtype)
        loss = loss - p["entropy_coef"] * aggregate(case.tensor("in/entropy"), over_tokens_T, mask_T)
    loss.backward()
    close(loss, case.outputs["loss"], case.tolerance, "loss")
    close(logprobs_T.grad, case.output("grad_log_prob"), case.tolerance, "gradient")


@pytest.mark.parametrize("case", parameters("trl", "advantage"))
def test_advantages_agree(case: Case):
    p = case.params
    rewards_EK = case.tensor("in/rewards_per_func").view(-1, 2)
    scored_E = ~rewards_EK.isnan().all(-1)  # what no function scored does not vote: it is not given to us
    group_E = (torch.arange(len(rewards_EK)) // p["num_generations"])[scored_E]
    rewards_EK, expected_E = rewards_EK[scored_E], case.output("advantages")
    weights_K = torch.tensor(p["reward_weights"], dtype=rewards_EK.dtype)
    if p["multi_objective_aggregation"] == "sum_then_normalize":
        rewards_E = (rewards_EK * weights_K).nansum(-1)  # nan: this function does not apply to this sample
        got_E = grpo_advantages(rewards_E, group_E, std=p["scale_rewards"], eps=p["eps"])
    else:
        got_E = gdpo_advantages(rewards_EK, group_E, weights_K=weights_K, eps=p["eps"])
    close(got_E, expected_E[scored_E], max(case.tolerance, 1e-6))
    assert (expected_E[~scored_E] == 0).all()
