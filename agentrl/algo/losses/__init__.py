"""Policy losses: one file each, with its parameters; pure functions of flat tokens.

Every loss has the same signature and returns `sum(weights_T * token_loss_T)` with its metrics:

    fn(logprobs_T, old_logprobs_T, advantages_T, weights_T, sequence_T, loss_mask_T, config)
        -> (loss, metrics)

    logprobs_T      [T] log-probabilities under the policy being trained; gradients flow into them
    old_logprobs_T  [T] under the policy at the start of the step (bypass: under the sampler)
    advantages_T    [T] advantage of each token
    weights_T       [T] from `aggregation_weights`, times correction weights where sampler and learner differ
    sequence_T      [T] long, the episode of each token
    loss_mask_T     [T] bool, True on trained tokens: elsewhere nothing is read and the gradient is exactly 0

All trained tokens of an episode are in one micro-batch, in however many rows, so a loss may take the ratio of a
whole sequence. Ratios are exp() of a log-ratio, continued by the tangent beyond 20 (5e8): loss and gradient stay
finite.
The two covariance losses also take `selected_T`, chosen once for the whole step by the entry's `select`.
"""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.algo.entries import PolicyLoss, entries_in

POLICY_LOSSES: Mapping[str, PolicyLoss] = entries_in(__name__, __path__, PolicyLoss)
"""Every loss by its name. A new one is a file in this folder."""
