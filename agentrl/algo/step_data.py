"""What advantage estimators read and return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from agentrl.algo.kl import kl_per_token
from agentrl.algo.late import Tensor, torch
from agentrl.algo.returns import rewards_at_end
from agentrl.algo.segments import segment_count, segment_sum


class UnsuitableRewardsError(ValueError):
    """An estimator is not defined for the rewards of a step."""


@dataclass(frozen=True, slots=True)
class StepData:
    """The scored episodes of a step (E) and their trained tokens (N), over all ranks.

    The tokens of an episode are in the order they were sampled; episodes may be in any order.
    """

    rewards_E: Tensor
    """Total reward of each episode."""
    group_E: Tensor
    """Long: the group (task) of each episode."""
    sequence_N: Tensor
    """Long: the episode of each token, an index into E. An episode without tokens still counts in its group."""
    rewards_N: Tensor | None = None
    """Where the reward was given, if not at the end: sums to `rewards_E`."""
    turn_N: Tensor | None = None
    """Long: the turn of each token within its episode."""
    values_N: Tensor | None = None
    """The critic's values."""
    greedy_E: Tensor | None = None
    """Reward of the greedy episode of the same task."""
    components_EK: Tensor | None = None
    """The parts of the reward."""
    component_names: Sequence[str] = ()
    """Their names, K of them."""
    old_logprobs_N: Tensor | None = None
    """Log-probabilities under the policy at the start of the step."""
    sum_pi_squared_N: Tensor | None = None
    """Sum of the squared probabilities of the vocabulary at each token."""
    correction_N: Tensor | None = None
    """Importance weights between sampler and learner, if they are used."""
    length_E: Tensor | None = None
    """Sampled tokens of each episode, also of those that are kept out of the loss; by default its tokens in
    `sequence_N`."""

    def lengths(self) -> Tensor:
        """[E] the length of each episode."""
        if self.length_E is not None:
            return self.length_E
        return segment_count(self.sequence_N, self.rewards_E.numel(), dtype=self.rewards_E.dtype)

    def token_rewards(self) -> Tensor:
        """[N] the rewards where they were given; all at the last token of the episode by default."""
        if self.rewards_N is not None:
            return self.rewards_N
        return rewards_at_end(self.rewards_E, self.sequence_N)


class Advantages(NamedTuple):
    """[N] the advantage of each trained token; the critic's targets, if there is a critic."""

    advantages_N: Tensor
    returns_N: Tensor | None = None


def spread(advantages_E: Tensor, step: StepData) -> Advantages:
    """Every token of an episode gets the episode's advantage."""
    return Advantages(advantages_E[step.sequence_N])


def given(tensor: Tensor | None) -> Tensor:
    """A field that the estimator lists in its `needs`."""
    assert tensor is not None, "estimate() checks what an estimator needs"
    return tensor


def penalize_kl(
    step: StepData, logprobs_N: Tensor, ref_logprobs_N: Tensor, *, coef: float, kind: str = "k1"
) -> StepData:
    """The same step with coef times the KL estimate of each token subtracted from the rewards.

    k1 is the right kind here: the penalty is part of the return, whose gradient needs an unbiased value.

    Args:
        logprobs_N: [N] under the policy that sampled, ref_logprobs_N under the reference.
    """
    everything = torch.ones_like(step.sequence_N, dtype=torch.bool)
    penalty_N = coef * kl_per_token(kind, logprobs_N.detach(), ref_logprobs_N, everything)
    penalty_E = segment_sum(penalty_N, step.sequence_N, step.rewards_E.numel())
    return replace(step, rewards_E=step.rewards_E - penalty_E, rewards_N=step.token_rewards() - penalty_N)
