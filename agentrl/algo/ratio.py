"""What policy losses share: the clipped surrogate, the ratio of a sequence, and the metrics of the ratio."""

from __future__ import annotations

from agentrl.algo.kl import bounded_exp
from agentrl.algo.late import Tensor, torch
from agentrl.algo.metrics import Metrics, max_of, mean_of
from agentrl.algo.segments import segment_mean

LossOutput = tuple[Tensor, Metrics]


def clipped_surrogate(
    ratio_N: Tensor, clipped_N: Tensor, adv_N: Tensor, dual_clip: float | None = None
) -> LossOutput:
    """[N] max(-A r, -A clipped r) for any kind of ratio, and how often each clip was active."""
    plain_N = -adv_N * ratio_N
    bound_N = -adv_N * clipped_N
    loss_N = torch.maximum(plain_N, bound_N)
    metrics = {"clip_fraction": mean_of(bound_N > plain_N)}
    if dual_clip is not None:
        ceiling_N = -adv_N * dual_clip
        dual_N = (adv_N < 0) & (loss_N > ceiling_N)
        loss_N = torch.where(dual_N, ceiling_N, loss_N)
        metrics["dual_clip_fraction"] = mean_of(dual_N)
    return loss_N, metrics


def sequence_log_ratio(new_N: Tensor, old_N: Tensor, sequence_N: Tensor) -> Tensor:
    """[N] mean log-ratio of each token's sequence in value, the token's own in gradient (GSPO-token)."""
    mean_N = segment_mean((new_N - old_N).detach(), sequence_N)[sequence_N]
    return mean_N + (new_N - new_N.detach())


def ratio_metrics(new_N: Tensor, old_N: Tensor) -> Metrics:
    """How far the policy has moved since the step began, over trained tokens."""
    log_ratio_N = (new_N - old_N).detach()
    return {
        "policy_kl": mean_of(-log_ratio_N),
        "policy_kl_k3": mean_of(bounded_exp(log_ratio_N) - 1 - log_ratio_N),
        "log_ratio_max": max_of(log_ratio_N.abs()),
    }
