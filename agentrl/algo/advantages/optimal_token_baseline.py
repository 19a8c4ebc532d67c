"""The optimal token baseline: returns compared with a baseline per position that minimizes the variance."""

from __future__ import annotations

from typing import Literal

from agentrl.algo.entries import Estimator, Signal
from agentrl.algo.late import Tensor, torch
from agentrl.algo.parameters import Named
from agentrl.algo.returns import Rows, index_in_sequence, return_to_go
from agentrl.algo.segments import num_segments, segment_sum
from agentrl.algo.siblings import has_siblings
from agentrl.algo.step_data import Advantages, StepData, given


class OptimalTokenBaseline(Named):
    """Return - a baseline per position that minimizes the variance.

    Source: Li et al. 2026, "The optimal token baseline".
    """

    name: Literal["optimal_token_baseline"] = "optimal_token_baseline"
    zero_tail: bool = True
    """Use no baseline at positions that only the longest episode of a group reaches."""


def optimal_token_baseline(step: StepData, config: OptimalTokenBaseline) -> Advantages:
    """The advantage of each token."""
    return Advantages(
        optimal_token_advantages(
            step.token_rewards(),
            step.sequence_N,
            step.group_E,
            given(step.old_logprobs_N),
            given(step.sum_pi_squared_N),
            correction_N=step.correction_N,
            zero_tail=config.zero_tail,
        )
    )


def optimal_token_advantages(
    rewards_N: Tensor,
    sequence_N: Tensor,
    group_E: Tensor,
    old_logprobs_N: Tensor,
    sum_pi_squared_N: Tensor,
    *,
    correction_N: Tensor | None = None,
    position_N: Tensor | None = None,
    zero_tail: bool = True,
    eps: float = 1e-8,
) -> Tensor:
    """[N] return to go minus a baseline per position, weighted by how much each episode's gradient varies.

    At each position the baseline is sum(W G) / sum(W) over the siblings that reach it, with G the return to
    go and W the sum over the tokens so far of 1 - 2 pi + sum(pi^2), the expected squared norm of the
    gradient of the logits (times the squared correction weight).

    Args:
        sum_pi_squared_N: [N] sum over the vocabulary of the squared probabilities at each token.
        correction_N: [N] importance weights between sampler and learner.
        position_N: [N] which tokens of siblings are compared; by default the index among trained tokens.
        zero_tail: beyond the end of the second longest sibling the longest one would be compared with itself; its
            baseline is 0 there instead of its own return.

    An episode alone in its group gets 0.
    """
    index_N = index_in_sequence(sequence_N) if position_N is None else position_N
    gradient_N = 1 - 2 * old_logprobs_N.exp() + sum_pi_squared_N
    if correction_N is not None:
        gradient_N = gradient_N * correction_N.square()
    rows = Rows(sequence_N, group_E.numel())
    weight_N = rows.flat(rows.pad(gradient_N).cumsum(1))
    return_N = return_to_go(rewards_N, sequence_N)
    width = int(index_N.max()) + 1 if index_N.numel() else 1
    cell_N = group_E[sequence_N] * width + index_N
    total = segment_sum(weight_N, cell_N)
    baseline_N = (segment_sum(weight_N * return_N, cell_N) / (total + eps))[cell_N]
    if zero_tail:
        baseline_N = torch.where(_beyond_siblings(rows.length_E, group_E, sequence_N, index_N), 0.0, baseline_N)
    advantage_N = return_N - baseline_N
    return torch.where(has_siblings(group_E)[sequence_N], advantage_N, torch.zeros_like(advantage_N))


def _beyond_siblings(length_E: Tensor, group_E: Tensor, sequence_N: Tensor, index_N: Tensor) -> Tensor:
    """[N] bool: tokens of the one longest episode of a group at or beyond the length of the second longest."""
    second_E = length_E.clone()
    for group in range(num_segments(group_E)):
        members = (group_E == group).nonzero().squeeze(-1)
        if members.numel() > 1:
            second_E[members] = length_E[members].sort().values[-2]
    return (length_E > second_E)[sequence_N] & (index_N >= second_E[sequence_N])


_NEEDS = ("old_logprobs_N", "sum_pi_squared_N")
ENTRIES = {
    "optimal_token_baseline": Estimator(
        optimal_token_baseline, OptimalTokenBaseline, _NEEDS, signal=lambda config: Signal("turns")
    )
}
