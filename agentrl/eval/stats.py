"""The statistics of an evaluation: tasks are the sampling unit, and attempts at one task are clustered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
"""Bootstrap resamples."""
FLIPS = 100_000
"""Random sign flips, where not all of them can be counted."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks; `low` and `high` bound it with 95 % confidence."""

    mean: float
    low: float
    high: float


def wilson(successes: float, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval for a share of successes, (0, 1) without trials.

    Source: E. B. Wilson, Journal of the American Statistical Association 22 (1927), 209-212.
    """
    if trials == 0:
        return 0.0, 1.0
    share, spread = successes / trials, z * z / trials
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / trials + spread / (4 * trials))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def pass_all(k: int, attempts: int, solved: int) -> float:
    """pass^k of one task: the chance that k attempts, drawn from those made, all solved it.

    Source: Yao et al., tau-bench, arXiv:2406.12045, section 4.
    """
    return math.comb(solved, k) / math.comb(attempts, k)


def estimate(values_T: Sequence[float]) -> Estimate:
    """The mean of one value per task: Wilson's interval where all are 0 or 1, else the bootstrap's percentiles.

    Args:
        values_T: [T] one value for each task.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13.
    """
    if not values_T:
        return Estimate(0.0, 0.0, 0.0)
    values = np.asarray(values_T, dtype=float)
    mean = float(values.mean())
    if all(value in (0.0, 1.0) for value in values_T):
        return Estimate(mean, *wilson(float(values.sum()), len(values)))
    return Estimate(mean, *_bootstrap(values))


@dataclass(frozen=True, slots=True)
class Paired:
    """Two policies on the same tasks: `difference` is B minus A, `p` how often chance alone gives as large a one.

    `better`, `equal` and `worse` count the tasks on which B did better than A, as well, or worse. `exact` says
    that `p` counts every sign flip instead of a random sample of them.
    """

    a: float
    b: float
    difference: Estimate
    p: float
    exact: bool
    better: int
    equal: int
    worse: int


def paired(a_T: Sequence[float], b_T: Sequence[float]) -> Paired:
    """Compare two policies by their values on the same tasks.

    The interval is a bootstrap over tasks. `p` is of the two-sided paired sign-flip permutation test: if the two
    were alike, each task's difference could as well have had the other sign. With values of 0 and 1 it is
    McNemar's exact test.

    Args:
        a_T: [T] one value for each task, of the first policy.
        b_T: [T] of the second, in the same order.

    Source: Good, Permutation, Parametric, and Bootstrap Tests of Hypotheses (2005), section 3.2.
    """
    a, b = np.asarray(a_T, dtype=float), np.asarray(b_T, dtype=float)
    differences = b - a
    p, exact = _sign_flip(differences)
    mean = float(differences.mean()) if len(differences) else 0.0
    low, high = _bootstrap(differences) if len(differences) else (0.0, 0.0)
    return Paired(
        float(a.mean()) if len(a) else 0.0,
        float(b.mean()) if len(b) else 0.0,
        Estimate(mean, low, high),
        p,
        exact,
        int((differences > 0).sum()),
        int((differences == 0).sum()),
        int((differences < 0).sum()),
    )


def _bootstrap(values: np.ndarray) -> tuple[float, float]:
    """The 2.5 and 97.5 percentiles of the means of seeded resamples."""
    rng = np.random.default_rng(0)
    rows = max(1, 2_000_000 // len(values))  # resamples at once, so that memory stays small
    means: list[np.ndarray] = []
    for first in range(0, RESAMPLES, rows):
        picks = rng.integers(0, len(values), size=(min(rows, RESAMPLES - first), len(values)))
        means.append(values[picks].mean(axis=1))
    low, high = np.percentile(np.concatenate(means), [2.5, 97.5])
    return float(low), float(high)


def _sign_flip(differences: np.ndarray) -> tuple[float, bool]:
    """(p, whether every flip was counted) for the sum of the differences."""
    sizes = np.abs(differences[differences != 0])
    observed = abs(float(differences.sum()))
    if len(sizes) == 0:
        return 1.0, True
    units = sizes / sizes.min()
    whole = np.rint(units)
    if np.allclose(units, whole, atol=1e-6) and whole.sum() * len(sizes) <= 50_000_000:
        return _count_flips(whole.astype(int), round(observed / float(sizes.min()))), True
    rng = np.random.default_rng(0)
    hits, done = 0, 0
    rows = max(1, 2_000_000 // len(sizes))
    while done < FLIPS:
        signs = rng.choice((-1.0, 1.0), size=(min(rows, FLIPS - done), len(sizes)))
        hits += int((np.abs(signs @ sizes) >= observed - 1e-9).sum())
        done += len(signs)
    return (hits + 1) / (done + 1), False


def _count_flips(sizes: np.ndarray, observed: int) -> float:
    """The share of all sign flips whose sum is at least as far from zero, by counting sums one size at a time."""
    total = int(sizes.sum())
    chances = np.zeros(2 * total + 1)
    chances[total] = 1.0
    for size in sizes:
        up, down = np.zeros_like(chances), np.zeros_like(chances)
        up[size:], down[:-size] = chances[:-size], chances[size:]
        chances = (up + down) / 2
    sums = np.abs(np.arange(-total, total + 1))
    return float(min(1.0, chances[sums >= observed].sum()))
