"""The statistics of an evaluation: tasks are the sampling unit, and attempts at one task are clustered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

RESAMPLES = 10_000
"""Bootstrap resamples."""
FLIPS = 100_000
"""Random sign flips, where not all of them can be counted."""
FEW = 16
"""Of so many differing tasks at most, all sign flips are made one by one, whatever the sizes."""
ROUNDING = 1e-9
"""Values that differ by less than this share of their size are equal: the means of the same numbers in another
order differ by rounding."""
Z = 1.96
"""The normal distribution's quantile for 95 % confidence."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks; `low` and `high` bound it with 95 % confidence."""

    mean: float
    low: float
    high: float


def wilson(successes: float, trials: float) -> tuple[float, float]:
    """Wilson's interval for a share of successes, (0, 1) without trials.

    Source: E. B. Wilson, Journal of the American Statistical Association 22 (1927), 209-212.
    """
    if trials == 0:
        return 0.0, 1.0
    share, spread = successes / trials, Z * Z / trials
    middle = (share + spread / 2) / (1 + spread)
    half = Z / (1 + spread) * math.sqrt(share * (1 - share) / trials + spread / (4 * trials))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def pass_all(k: int, attempts: int, solved: int) -> float:
    """pass^k of one task: the chance that k attempts, drawn from those made, all solved it.

    Source: Yao et al., tau-bench, arXiv:2406.12045, section 4.
    """
    return math.comb(solved, k) / math.comb(attempts, k)


def pass_counts(attempts: int) -> list[int]:
    """The k of the pass@k and pass^k that are estimated from so many attempts: powers of two, and all of them."""
    return [*(2**n for n in range(1, attempts.bit_length()) if 2**n < attempts), *([attempts] * (attempts > 1))]


def estimate(values_T: Sequence[float], *, shares: bool = False) -> Estimate:
    """The mean of one value per task, with an interval over tasks.

    The interval is Wilson's for shares, else the bootstrap's percentiles.

    Args:
        values_T: [T] one value for each task.
        shares: each value is a share or a probability, so none outside of 0 to 1 is possible.
    """
    if not values_T:
        return Estimate(0.0, 0.0, 0.0)
    values = np.asarray(values_T, dtype=float)
    return Estimate(float(values.mean()), *(_wilson_of_shares(values) if shares else _bootstrap(values)))


def _wilson_of_shares(values: np.ndarray) -> tuple[float, float]:
    """Wilson's interval for the mean of values from 0 to 1, with as many trials as their variance is worth.

    So many independent trials would have the same standard error; at least one for each task. A 0 and a 1 are
    added to estimate the variance: equal values of a few tasks do not prove that it is 0.

    Source: Korn and Graubard, Survey Methodology 24 (1998), 193-201, on the effective sample size of clusters.
    """
    tasks, mean = len(values), min(max(float(values.mean()), 0.0), 1.0)
    variance = float(np.append(values, (0.0, 1.0)).var())
    trials = max(float(tasks), mean * (1 - mean) / variance * tasks)
    return wilson(mean * trials, trials)


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


def paired(a_T: Sequence[float], b_T: Sequence[float], *, shares: bool = False) -> Paired:
    """Compare two policies by their values on the same tasks.

    The interval is computed as in `estimate`, and `p` by the two-sided paired sign-flip permutation test: if the
    policies were equally good, each task's difference could just as well have the other sign. For values of 0 and
    1, this is McNemar's exact test.

    Args:
        a_T: [T] one value for each task, of the first policy.
        b_T: [T] of the second, in the same order.
        shares: see `estimate`.

    Source: Good, Permutation, Parametric, and Bootstrap Tests of Hypotheses (2005), section 3.2.
    """
    a, b = np.asarray(a_T, dtype=float), np.asarray(b_T, dtype=float)
    differences = differences_of(a, b)
    p, exact = _sign_flip(differences)
    mean = float(differences.mean()) if len(differences) else 0.0
    low, high = 0.0, 0.0
    if shares and len(differences):
        low, high = (2 * bound - 1 for bound in _wilson_of_shares((differences + 1) / 2))
    elif len(differences):
        low, high = _bootstrap(differences)
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


def differences_of(a_T: np.ndarray, b_T: np.ndarray) -> np.ndarray:
    """[T] B minus A; 0 where the two differ by rounding only."""
    differences: np.ndarray = np.subtract(b_T, a_T, dtype=float)
    differences[np.abs(differences) <= ROUNDING * np.maximum(np.abs(a_T), np.abs(b_T))] = 0.0
    return differences


def _bootstrap(values: np.ndarray) -> tuple[float, float]:
    """Percentiles of the means of seeded resamples, further out for few values, as Student's t is.

    Source: Hesterberg, What Teachers Should Know About the Bootstrap, arXiv:1411.5279 (the expanded percentile
    interval).
    """
    rng = np.random.default_rng(0)
    rows = max(1, 2_000_000 // len(values))  # resamples at once, so that memory stays small
    means: list[np.ndarray] = []
    for first in range(0, RESAMPLES, rows):
        picks = rng.integers(0, len(values), size=(min(rows, RESAMPLES - first), len(values)))
        means.append(values[picks].mean(axis=1))
    free = max(1, len(values) - 1)
    tail = 100 * NormalDist().cdf(-math.sqrt(len(values) / free) * _student(free))
    low, high = np.percentile(np.concatenate(means), [tail, 100 - tail])
    return float(low), float(high)


def _student(free: int) -> float:
    """Student's t for 95 % confidence with so many degrees of freedom, in Fisher and Cornish's expansion."""
    terms = (
        (Z**3 + Z) / 4,
        (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96,
        (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384,
    )
    return Z + terms[0] / free + terms[1] / free**2 + terms[2] / free**3


def _sign_flip(differences: np.ndarray) -> tuple[float, bool]:
    """(p, whether every flip was counted) for the sum of the differences."""
    sizes = np.abs(differences[differences != 0])
    observed = abs(float(differences.sum()))
    if len(sizes) == 0:
        return 1.0, True
    units = sizes / sizes.min()
    whole = np.rint(units)
    common = units.sum() < 2**53 and np.allclose(units, whole, rtol=0.0, atol=1e-6)
    if common:  # equal sums are equal, also of numbers that had 32 bits
        sizes, observed = whole, float(round(observed / float(sizes.min())))
    least = observed - ROUNDING * float(sizes.sum())
    if len(sizes) <= FEW:
        negative = np.arange(1 << len(sizes))[:, None] >> np.arange(len(sizes)) & 1
        return float((np.abs((1 - 2 * negative) @ sizes) >= least).mean()), True
    if common and sizes.sum() * len(sizes) <= 50_000_000:
        return _count_flips(sizes.astype(int), int(observed)), True
    rng, hits, done = np.random.default_rng(0), 0, 0
    rows = max(1, 2_000_000 // len(sizes))
    while done < FLIPS:
        signs = rng.choice((-1.0, 1.0), size=(min(rows, FLIPS - done), len(sizes)))
        hits += int((np.abs(signs @ sizes) >= least).sum())
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
