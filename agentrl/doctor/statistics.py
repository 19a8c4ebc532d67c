"""The few statistics that the checks use."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from agentrl.doctor.evidence import Floats


def correlation(x: Sequence[float] | Floats, y: Sequence[float] | Floats) -> float:
    """Pearson's correlation; 0 where one of them does not vary."""
    a, b = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if len(a) < 3 or a.std() < 1e-12 or b.std() < 1e-12:
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])


def slope(x: Sequence[float] | Floats, y: Sequence[float] | Floats) -> float:
    """Of the least-squares line; 0 where x does not vary."""
    a, b = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    spread = float(((a - a.mean()) ** 2).sum()) if len(a) else 0.0
    return float(((a - a.mean()) * (b - b.mean())).sum()) / spread if spread > 1e-12 else 0.0


def ends(values: Floats, share: float = 0.25) -> tuple[float, float]:
    """Means of the first and the last part of a series."""
    count = max(1, round(len(values) * share))
    return float(values[:count].mean()), float(values[-count:].mean())


def difference_is_sure(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether the means of two samples differ by more than noise would make them."""
    if len(a) < 5 or len(b) < 5:
        return False
    error = math.sqrt(float(np.var(a)) / len(a) + float(np.var(b)) / len(b))
    return abs(float(np.mean(a)) - float(np.mean(b))) > 2.0 * max(error, 1e-9)
