"""Numbers to log that can be merged over micro-batches and ranks without changing their meaning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, get_args

from agentrl.algo.late import Tensor, torch

Kind = Literal["mean", "sum", "max", "min"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Metric(NamedTuple):
    """One number in a form that adds up: a mean is its sum and its count.

    `value` and `num` are detached 0-d tensors on the device of the loss, or floats after `to_host`.
    """

    kind: Kind
    value: Tensor | float
    num: Tensor | float = 1.0


Metrics = dict[str, Metric]


def mean_of(values_N: Tensor) -> Metric:
    """The mean of these values (and of all others merged with it); no values count as nothing."""
    values_N = values_N.detach()
    if not values_N.is_floating_point():
        values_N = values_N.float()
    return Metric("mean", values_N.sum(), torch.full_like(values_N.sum(), values_N.numel()))


def max_of(values_N: Tensor) -> Metric:
    """The largest of these values; -inf for none."""
    values_N = values_N.detach()
    return Metric("max", values_N.max() if values_N.numel() else values_N.new_tensor(-torch.inf))


def min_of(values_N: Tensor) -> Metric:
    """The smallest of these values; inf for none."""
    values_N = values_N.detach()
    return Metric("min", values_N.min() if values_N.numel() else values_N.new_tensor(torch.inf))


def sum_of(values_N: Tensor) -> Metric:
    """The sum of these values."""
    return Metric("sum", values_N.detach().sum())


def to_host(metrics: Mapping[str, Metric]) -> Metrics:
    """The same metrics with Python floats in them: picklable and free of the device."""
    return {name: Metric(m.kind, float(m.value), float(m.num)) for name, m in metrics.items()}


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> Metrics:
    """Merge the metrics of several micro-batches or ranks; a name missing in a part adds nothing.

    Raises:
        ValueError: the same name stands for metrics of different kinds.
    """
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            seen = merged.get(name)
            merged[name] = metric if seen is None else _merge(name, seen, metric)
    return merged


def metric_values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The values by name; means and extremes of no values are left out."""
    values: dict[str, float] = {}
    for name, (kind, value, num) in to_host(metrics).items():
        if kind == "mean" and num == 0:
            continue
        number = float(value) / float(num) if kind == "mean" else float(value)
        if kind in ("max", "min") and number in (float("inf"), float("-inf")):
            continue
        values[name] = number
    return values


def _merge(name: str, a: Metric, b: Metric) -> Metric:
    if a.kind != b.kind:
        raise ValueError(f"metric {name!r} is a {a.kind} in one part and a {b.kind} in another")
    if a.kind in ("mean", "sum"):
        return Metric(a.kind, a.value + b.value, a.num + b.num)
    # A nan (of either part) must win, so that trouble is seen: compare in a way that keeps it.
    pick_b = bool(b.value > a.value) if a.kind == "max" else bool(b.value < a.value)
    return b if pick_b or bool(b.value != b.value) else a
