"""The statistics of evaluations against hand-computed numbers."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from statistics import NormalDist

import numpy as np
import pytest

from agentrl.eval.stats import estimate, paired, pass_all, pass_counts, wilson
from agentrl.rollout.episode_metrics import pass_at


def test_wilsons_interval():
    assert wilson(0, 0) == (0.0, 1.0)
    low, high = wilson(95, 100)
    assert (round(low, 4), round(high, 4)) == (0.8882, 0.9785)
    assert wilson(10, 10)[1] == 1.0
    for trials in range(1, 200):
        assert (wilson(0, trials)[0], wilson(trials, trials)[1]) == pytest.approx((0.0, 1.0))
        assert wilson(0, trials)[0] >= 0.0
        assert wilson(trials, trials)[1] <= 1.0


def test_pass_at_k_and_pass_all_count_subsets():
    for solved, k in itertools.product(range(6), range(1, 6)):
        subsets = list(itertools.combinations([True] * solved + [False] * (5 - solved), k))
        assert pass_at(k, 5, solved) == pytest.approx(sum(map(any, subsets)) / len(subsets))
        assert pass_all(k, 5, solved) == pytest.approx(sum(map(all, subsets)) / len(subsets))


def test_shares_have_wilsons_interval_and_other_values_the_bootstraps():
    found = estimate([1, 0, 1, 1], shares=True)
    assert (found.low, found.high) == wilson(3, 4)
    values = list(np.random.default_rng(1).normal(2.0, 1.0, size=400))
    found = estimate(values)
    spread = 1.96 * float(np.std(values)) / math.sqrt(400)
    assert found.mean == pytest.approx(float(np.mean(values)))
    assert found.low == pytest.approx(found.mean - spread, abs=0.01)
    assert found.high == pytest.approx(found.mean + spread, abs=0.01)
    assert estimate(values) == found, "the same every time"


def test_ks_of_pass_at_k_are_powers_of_two_and_all_attempts():
    assert [pass_counts(n) for n in (1, 2, 3, 4)] == [[], [2], [2, 3], [2, 4]]
    assert pass_counts(2000)[-2:] == [1024, 2000]


class TestIntervals:
    def test_equal_shares_of_a_few_tasks_are_not_certain(self):
        for share in (0.5, 0.75):
            found = estimate([share] * 4, shares=True)
            assert found.low < share - 0.1 < share + 0.1 < found.high
        one = estimate([0.5], shares=True)
        assert one.low < 0.1 < 0.9 < one.high
        assert estimate([1.0, 1.0, 1.0, 0.75], shares=True).low < estimate([1.0] * 4, shares=True).low

    def test_many_shares_have_the_interval_of_their_standard_error(self):
        values = list(np.random.default_rng(2).binomial(4, 0.6, size=2000) / 4)
        found = estimate(values, shares=True)
        spread = 1.96 * float(np.std(values)) / math.sqrt(2000)
        assert found.low == pytest.approx(found.mean - spread, abs=0.001)
        assert found.high == pytest.approx(found.mean + spread, abs=0.001)

    @pytest.mark.parametrize(("tasks", "least"), [(5, 0.88), (10, 0.92), (30, 0.92)])
    def test_intervals_of_few_rewards_contain_the_mean_as_often_as_they_say(self, tasks: int, least: float):
        rng = np.random.default_rng(4)
        found = [estimate(list(rng.normal(size=tasks))) for _ in range(300)]
        assert sum(each.low <= 0.0 <= each.high for each in found) / 300 >= least

    def test_equal_shares_count_as_many_trials_as_their_variance_is_worth(self):
        found = estimate([0.5] * 4, shares=True)  # with a 0 and a 1, the variance of 1/2 is 1/12
        assert (found.low, found.high) == pytest.approx(wilson(6, 12))

    def test_the_interval_of_ten_rewards_is_as_wide_as_students(self):
        values = [NormalDist().inv_cdf((i + 0.5) / 10) for i in range(10)]
        half = 2.262 * float(np.std(values, ddof=1)) / math.sqrt(10)
        found = estimate(values)
        assert (found.low, found.high) == (pytest.approx(-half, rel=0.03), pytest.approx(half, rel=0.03))

    def test_a_policy_that_wins_every_one_of_a_few_tasks_is_not_certainly_perfect(self):
        found = paired([0.0] * 6, [1.0] * 6, shares=True).difference
        assert (found.mean, found.high) == (1.0, pytest.approx(1.0))
        assert 0.0 < found.low < 0.5


class TestPaired:
    def test_rounding_is_no_difference(self):
        a, b = (0.1 + 0.2 + 0.3) / 3, (0.3 + 0.2 + 0.1) / 3
        assert a != b
        found = paired([a, a, a, 0.0], [b, b, b, 1.0])
        assert (found.better, found.equal, found.worse, found.exact) == (1, 3, 0, True)

    @pytest.mark.parametrize("scale", [1e-12, 1e-6, 1e20, 1e99])
    def test_p_does_not_depend_on_the_unit_of_the_reward(self, scale: float):
        rng = np.random.default_rng(3)
        a = rng.normal(size=30)
        b = a + rng.normal(0.5, 1.0, size=30)
        assert paired(list(a * scale), list(b * scale)).p == paired(list(a), list(b)).p

    def test_with_zeros_and_ones_it_is_mcnemars_exact_test(self):
        a, b = [0] * 9 + [1] * 2 + [1] * 20, [1] * 9 + [0] * 2 + [1] * 20
        found = paired(a, b)
        assert (found.better, found.equal, found.worse, found.exact) == (9, 20, 2, True)
        assert found.p == pytest.approx(2 * sum(math.comb(11, i) for i in range(3)) / 2**11)
        assert found.difference.mean == pytest.approx(7 / 31)
        assert found.difference.low < 7 / 31 < found.difference.high

    @pytest.mark.parametrize("unit", [0.25, 0.1, 1 / 3])
    def test_shares_of_several_attempts_are_counted_exactly(self, unit):
        differences = [unit * n for n in (1, 2, -1, 3, 1, 0, 2)]
        sums = [
            abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
            for signs in itertools.product((1, -1), repeat=7)
        ]
        p = sum(total >= sum(differences) - 1e-9 for total in sums) / len(sums)
        found = paired([0.0] * 7, differences)
        assert found.exact
        assert found.p == pytest.approx(p)

    @pytest.mark.parametrize("differences", [[0.5, 0.75, -0.5, 0.75, -0.75], [0.31, -0.17, 0.83, 0.29, 0.11, 0.5]])
    def test_every_flip_of_a_few_tasks_is_counted_whatever_they_differ_by(self, differences: list[float]):
        flips = itertools.product((1, -1), repeat=len(differences))
        sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in flips]
        found = paired([0.0] * len(differences), differences)
        assert found.exact
        assert found.p == sum(total >= abs(sum(differences)) - 1e-9 for total in sums) / len(sums)

    def test_the_numbers_of_a_few_tasks_may_have_had_32_bits(self):
        a, b = [1, 2, 3, 4, 5, 6, 7, 8], [2, 3, 4, 5, 6, 5, 6, 7]
        rounded = [[float(np.float32(n / 10)) for n in each] for each in (a, b)]
        assert paired(*rounded).p == paired(a, b).p == 0.7265625
        assert paired([0.0] * 3, [1e-300, 1.0, 1.0]).p == 0.5

    def test_whole_differences_of_many_tasks_are_counted_exactly(self):
        differences = [0.25, -0.25] * 6 + [0.5] * 6  # multiples of the smallest: 12 of one, 6 of two
        sums = [
            (math.comb(12, ones) * math.comb(6, twos), abs(2 * ones - 12 + 2 * (2 * twos - 6)))
            for ones in range(13)
            for twos in range(7)
        ]
        found = paired([0.0] * 18, differences)
        assert found.exact
        assert found.p == pytest.approx(sum(ways for ways, total in sums if total >= 12) / 2**18)

    def test_large_whole_scores_of_a_few_tasks_need_little_memory(self):
        tracemalloc.start()
        try:
            found = paired([0.0] * 3, [1.0, 2_000_000.0, 2_000_000.0])
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert (found.p, found.exact) == (0.25, True)
        assert peak < 1e6

    def test_other_values_are_sampled(self):
        rng = np.random.default_rng(0)
        a = rng.normal(size=60)
        same = paired(list(a), list(a + rng.normal(size=60)))
        better = paired(list(a), list(a + 0.6 + rng.normal(size=60)))
        assert not same.exact
        assert same.p > 0.05 > 0.001 > better.p > 0

    def test_p_of_sampled_flips_is_never_0(self):
        better = np.random.default_rng(5).uniform(1, 2, size=40)
        assert paired([0.0] * 40, list(better)).p == 1 / 100_001
        assert not paired([0.0] * 18, [1.0] * 9 + [1.05] * 9).exact, "they have no common unit"

    @pytest.mark.parametrize("kind", ["few", "counted", "sampled"])
    def test_p_is_two_sided(self, kind: str):
        rng = np.random.default_rng(6)
        tasks = 10 if kind == "few" else 40
        b = rng.integers(-2, 4, size=tasks) if kind == "counted" else rng.normal(0.3, 1.0, size=tasks)
        a = [0.0] * tasks
        better, worse = paired(a, list(b)), paired(list(b), a)
        assert better.exact == worse.exact == (kind != "sampled")
        assert better.p == worse.p < 1.0
        assert (better.difference.mean, better.better) == (-worse.difference.mean, worse.worse)

    def test_p_of_sampled_flips_is_near_that_of_the_normal_distribution(self):
        differences = np.random.default_rng(7).normal(0.2, 1.0, size=400)
        z = abs(differences.sum()) / math.sqrt((differences**2).sum())  # the sum of random flips is nearly normal
        found = paired([0.0] * 400, list(differences))
        assert 0.001 < found.p < 0.2
        assert found.p == pytest.approx(2 * NormalDist().cdf(-z), rel=0.05)

    def test_all_flips_of_sixteen_tasks_are_counted(self):
        differences = [1.0 + math.sqrt(n) / 10 for n in range(16)]
        found = paired([0.0] * 16, differences)
        assert (found.p, found.exact) == (2 / 2**16, True)

    def test_rounding_of_negative_rewards_is_no_difference(self):
        a, b = -(0.1 + 0.2 + 0.3) / 3, -(0.3 + 0.2 + 0.1) / 3
        assert a != b
        assert paired([a, b], [b, a]).equal == 2

    def test_nothing_differs(self):
        assert paired([1, 0], [1, 0]).p == 1.0
