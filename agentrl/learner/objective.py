"""From what the policy says of a micro-batch to its loss.

Every token's weight comes from counts over the whole update, so that the losses of its micro-batches, on however
many ranks, add up to the loss of the update.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from agentrl.algo.aggregate import Totals, aggregate, aggregation_weights
from agentrl.algo.correction import LogprobDrift, believed_sequences, correct, drift, off_policy_sequences
from agentrl.algo.kl import kl_per_token
from agentrl.algo.metrics import Metrics, mean_of, sum_of
from agentrl.learner.logprobs import TokenStats
from agentrl.learner.pack import Packed
from agentrl.train.algorithm import Algorithm


class Loss(NamedTuple):
    """A micro-batch's part of the loss, its metrics, and the drift where it was measured here."""

    value: Tensor
    metrics: Metrics
    drift: LogprobDrift


def policy_loss(
    algorithm: Algorithm,
    packed: Packed,
    stats: TokenStats,
    totals: Totals,
    *,
    ref_logprobs_N: Tensor | None = None,
    kl_coef: float = 0.0,
    first_update: bool = True,
) -> Loss:
    """The policy loss of one micro-batch with its penalties.

    Args:
        packed: its tokens; `columns` may hold learner_logprobs (before the first update; the current ones are
            taken where there are none), correction weights, and selected (see `agentrl.train.prepare`).
        stats: of the policy that is trained, with gradients.
        totals: counts of the whole update.
        ref_logprobs_N: under the reference, where the loss has a KL penalty.
        kl_coef: its weight now.
        first_update: whether the policy is still the one that the step began with.
    """
    config, columns = algorithm.config, packed.columns
    new_N, sequence_N, sampler_N = stats.logprobs_N, packed.sequence_N, packed.sampler_logprobs_N
    mask_N = torch.ones_like(packed.ids_N, dtype=torch.bool)
    evaluated_N = columns.get("learner_logprobs")
    learner_N = new_N.detach() if evaluated_N is None else evaluated_N
    old_N = sampler_N if config.old_logprobs == "sampler" else learner_N
    measured = LogprobDrift()
    if evaluated_N is None and first_update:
        measured = drift(learner_N, sampler_N, sequence_N, mask_N)
    weights_N = aggregation_weights(
        config.aggregation, mask_N, sequence_N, totals, scale=config.aggregation_scale, dtype=new_N.dtype
    )
    metrics: Metrics = {}
    loss_weights_N = weights_N * columns.get("high_entropy", 1.0)
    if "correction" in columns:
        loss_weights_N = loss_weights_N * columns["correction"]
    elif algorithm.correction.importance != "none":
        corrected = correct(learner_N, sampler_N, sequence_N, mask_N, algorithm.correction)
        loss_weights_N, metrics = loss_weights_N * corrected.weights_T, corrected.metrics
    kept_N = mask_N
    if config.ratio_veto is not None:
        kept_N = believed_sequences(new_N, old_N, sequence_N, mask_N, limit=config.ratio_veto)
        metrics = metrics | {"ratio_veto": mean_of(~kept_N)}
    if config.correction.off_policy is not None:
        near_N = off_policy_sequences(
            new_N, old_N, packed.advantages_N, sequence_N, mask_N, threshold=config.correction.off_policy
        )
        kept_N, metrics = kept_N & near_N, metrics | {"off_policy_masked": mean_of(~near_N)}
    selected = {} if algorithm.select is None else {"selected_T": columns["selected"].bool()}
    loss, found = algorithm.loss(new_N, old_N, packed.advantages_N, loss_weights_N, sequence_N, kept_N, **selected)
    metrics = metrics | found
    if ref_logprobs_N is not None and kl_coef > 0:
        kl_N = kl_per_token(config.kl.loss_kind, new_N, ref_logprobs_N, mask_N)
        loss = loss + kl_coef * aggregate(kl_N, weights_N, mask_N)
        metrics["kl"] = mean_of(kl_N)
    if stats.entropy_N is not None:
        metrics["entropy"] = mean_of(stats.entropy_N)
        if config.entropy_coef > 0:
            loss = loss - config.entropy_coef * aggregate(stats.entropy_N, weights_N, mask_N)
    metrics["loss"] = sum_of(loss)
    return Loss(loss, metrics, measured)
