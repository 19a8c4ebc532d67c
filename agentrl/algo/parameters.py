"""The choices and ranges of algorithm parameters, shared by `agentrl.algo` and the configuration; no torch."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

NonNegative = Annotated[float, Field(ge=0)]
Above0 = Annotated[float, Field(gt=0)]
Discount = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]
ClipLow = Annotated[float, Field(gt=0, lt=1)]
DualClip = Annotated[float, Field(gt=1)]

Aggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]
"""How token losses are aggregated into one number."""
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)

KLKind = Literal["unbiased", "centered", "k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"]
"""Estimates of the KL divergence per token; see `agentrl.algo.kl`."""
KL_KINDS: tuple[str, ...] = get_args(KLKind)

Level = Literal["none", "token", "sequence"]
"""What importance weights are taken of."""

Statistic = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
]
"""Statistics of the difference between sampler and learner that tokens or sequences are rejected by."""
STATISTICS: tuple[str, ...] = get_args(Statistic)


class Parameters(BaseModel):
    """Named numbers and switches with their defaults: frozen, and unknown names are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Named(Parameters):
    """The parameters of one loss or estimator, chosen by its name."""

    name: str
    """Which one."""


def check_band(low: float | None, high: float) -> None:
    """Raises ValueError unless [low, high] is a band of ratios."""
    if low is not None and not 0 < low < high:
        raise ValueError(f"low = {low} must be above 0 and below high = {high}")
