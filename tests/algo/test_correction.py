"""Corrections and the drift gate, worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from agentrl.algo.correction import (
    Correction,
    DriftGate,
    LogprobDrift,
    Reject,
    believed_sequences,
    correct,
    drift,
    normalizer,
    off_policy_sequences,
    weight_sums,
)
from agentrl.algo.metrics import metric_values

SAMPLER = torch.zeros(5, dtype=torch.float64)
LEARNER = torch.tensor([3.0, 0.5, 1.0, 0.25, 1.0], dtype=torch.float64).log()
"""Ratios learner / sampler: two of the first episode, three of the second."""
SEQUENCE = torch.tensor([0, 0, 1, 1, 1])
MASK = torch.ones(5, dtype=torch.bool)


def run(config: Correction):
    return correct(LEARNER, SAMPLER, SEQUENCE, MASK, config)


def close(got: Tensor, expected: list[float]) -> None:
    assert got.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Correction(), [1, 1, 1, 1, 1]),
        (Correction("token", 2.0), [2, 0.5, 1, 0.25, 1]),
        (Correction("token", 2.0, 0.4), [0, 0.5, 1, 0, 1]),
        (Correction("sequence", 2.0), [1.5, 1.5, 0.25, 0.25, 0.25]),
        (Correction("sequence", 2.0, 0.5), [1.5, 1.5, 0, 0, 0]),
    ],
    ids=["none", "token", "token band", "sequence", "sequence band"],
)
def test_importance_weights(config, expected):
    out = run(config)
    close(out.weights_T, expected)
    assert out.keep_T.all()


def test_figures_of_the_weights():
    values = metric_values(run(Correction("token", 2.0, 0.4)).metrics)
    assert values["importance/mean"] == pytest.approx(0.5)
    assert values["importance/max"] == pytest.approx(1.0)
    assert values["importance/above"] == pytest.approx(0.2)
    assert values["importance/below"] == pytest.approx(0.2)


def test_figures_of_the_weights_of_sequences_are_those_of_their_ratio():
    values = metric_values(run(Correction("sequence", 1.2, 0.5)).metrics)  # the ratios are 1.5 and 0.25
    assert values["importance/above"] == pytest.approx(2 / 5)
    assert values["importance/below"] == pytest.approx(3 / 5)
    values = metric_values(run(Correction("sequence", 1.2)).metrics)
    assert values["importance/mean"] == pytest.approx((2 * 1.2 + 3 * 0.25) / 5)
    assert values["importance/max"] == pytest.approx(1.2)
    assert values["importance/min"] == pytest.approx(0.25)
    assert "importance/below" not in values


@pytest.mark.parametrize(("level", "mean"), [("token", 4.75 / 5), ("sequence", (1.5 + 0.25) / 2)])
def test_normalised_weights_have_mean_one(level, mean):
    weights = run(Correction(level, 2.0)).weights_T
    parts = [weight_sums(weights[s], SEQUENCE[s], MASK[s], level=level) for s in (slice(0, 2), slice(2, 5))]
    assert normalizer(parts) == pytest.approx(1 / mean)
    assert normalizer([weight_sums(weights, 2 * SEQUENCE, MASK, level=level)]) == pytest.approx(1 / mean)
    assert normalizer([]) == 1.0
    assert normalizer([(0.0, 4.0)]) == 1.0


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        (Reject("token_k1", 2.0), [0, 1, 1, 0, 1]),
        (Reject("token_k1", 5.0, 0.4), [0, 1, 1, 1, 1]),  # sampler / learner of the first token is 1 / 3
        (Reject("token_k2", 0.5), [0, 1, 1, 0, 1]),
        (Reject("token_k3", 0.7), [0, 1, 1, 1, 1]),
        (Reject("seq_sum_k1", 2.0), [1, 1, 0, 0, 0]),
        (Reject("seq_mean_k1", 1.3), [1, 1, 0, 0, 0]),  # geometric mean ratios: 1.22 and 0.63
        (Reject("seq_mean_k1", 1.2), [0, 0, 0, 0, 0]),
        (Reject("seq_sum_k2", 0.9), [1, 1, 0, 0, 0]),
        (Reject("seq_max_k2", 0.7), [1, 1, 0, 0, 0]),
        (Reject("seq_mean_k3", 0.4), [0, 0, 1, 1, 1]),
        (Reject("seq_max_k3", 0.7), [0, 0, 1, 1, 1]),
    ],
    ids=lambda value: f"{value.statistic} {value.high}" if isinstance(value, Reject) else "",
)
def test_rejection(rule, kept):
    out = run(Correction(reject=(rule,)))
    assert out.keep_T.int().tolist() == kept
    assert metric_values(out.metrics)["rejected/tokens"] == pytest.approx(1 - sum(kept) / 5)


def test_rules_add_up_and_touched_sequences_are_counted():
    out = run(Correction(reject=(Reject("token_k1", 2.5), Reject("token_k2", 0.7))))
    assert out.keep_T.int().tolist() == [0, 1, 1, 0, 1]
    assert metric_values(out.metrics)["rejected/sequences_touched"] == 1.0


def test_veto_takes_the_whole_sequence():
    assert run(Correction(veto=0.3)).keep_T.int().tolist() == [1, 1, 0, 0, 0]
    assert run(Correction(veto=0.2)).keep_T.all()

    assert run(Correction(veto=0.25)).keep_T.all(), "a ratio of exactly 0.25 is not below it"


def test_rules_and_a_veto_add_up_and_each_is_counted():
    config = Correction(reject=(Reject("token_k1", 2.5),), veto=0.3)
    for sequence in (SEQUENCE, 2 * SEQUENCE):  # numbers may have gaps
        out = correct(LEARNER, SAMPLER, sequence, MASK, config)
        assert out.keep_T.int().tolist() == [0, 1, 0, 0, 0]
        assert metric_values(out.metrics) == pytest.approx(
            {
                "rejected/token_k1": 0.4,
                "rejected/veto": 0.6,
                "rejected/tokens": 0.8,
                "rejected/sequences_touched": 1.0,
            }
        )
    out = run(Correction(veto=0.3))
    assert metric_values(out.metrics)["rejected/sequences_touched"] == 0.5


def test_drift_of_sequences_by_hand():
    learner, sampler = torch.tensor([-1.0, -1.0, -2.0]), torch.tensor([-1.5, -1.0, -1.0])
    measured = drift(learner, sampler, torch.tensor([0, 0, 2]), torch.ones(3).bool())  # mean d: 0.25 and -1
    values = measured.metrics()
    assert values["log_ppl_diff"] == pytest.approx((-0.25 + 1) / 2)
    assert values["log_ppl_abs_diff"] == pytest.approx((0.25 + 1) / 2)
    assert values["ppl_ratio"] == pytest.approx((math.exp(-0.25) + math.exp(1)) / 2)
    assert values["chi2"] == pytest.approx((math.exp(1) + 1 + math.exp(-2)) / 3 - 1)


def test_untrained_tokens_have_no_say_and_no_weight():
    mask = torch.tensor([1, 1, 1, 0, 1]).bool()
    out = correct(LEARNER, SAMPLER, SEQUENCE, mask, Correction("sequence", 2.0, veto=0.3))
    close(out.weights_T, [1.5, 1.5, 1, 0, 1])
    assert out.keep_T.equal(mask)


def test_off_policy_sequences_lose_their_negative_tokens():
    advantages = torch.tensor([1.0, -1.0, -1.0, -1.0, 1.0])
    kept = off_policy_sequences(LEARNER, SAMPLER, advantages, SEQUENCE, MASK, threshold=0.4)
    assert kept.int().tolist() == [1, 1, 0, 0, 1]  # mean of sampler - learner: -0.2 and 0.46
    assert off_policy_sequences(LEARNER, SAMPLER, advantages, SEQUENCE, MASK, threshold=0.5).all()


def test_the_gate_names_what_is_passed():
    measured = drift(LEARNER, SAMPLER, SEQUENCE, MASK)
    assert DriftGate(mean_abs=None).exceeded(measured.metrics()) is None
    assert DriftGate().exceeded(measured.metrics()) is not None
    assert DriftGate(mean_abs=1.0, max_abs=2.0, k3=1.0, ess=0.5).exceeded(measured.metrics()) is None
    at_its_limits = {"mean_abs": 0.5, "max_abs": 2.0, "k3": 0.25, "ess": 0.75}
    assert DriftGate(**at_its_limits).exceeded(at_its_limits) is None
    text = DriftGate(mean_abs=0.1, max_abs=1.0, ess=0.9).exceeded(measured.metrics())
    assert text is not None
    assert "mean_abs 0.6356 is above the limit 0.1" in text
    assert "max_abs 1.386 is above the limit 1" in text
    assert "ess 0.5845 is below the limit 0.9" in text


def test_only_negative_advantages_of_drifted_sequences_and_only_large_ratios_are_masked():
    mask_T, sequence_T = torch.ones(4, dtype=torch.bool), torch.tensor([0, 0, 1, 1])
    old_T, new_T = torch.full((4,), -1.0), torch.tensor([-1.0, -1.0, -9.0, -9.0])
    advantages_T = torch.tensor([-1.0, 1.0, -1.0, 0.0])
    kept_T = off_policy_sequences(new_T, old_T, advantages_T, sequence_T, mask_T, threshold=1.0)
    assert kept_T.tolist() == [True, True, False, True]
    at_it_T = off_policy_sequences(new_T, old_T, advantages_T, sequence_T, mask_T, threshold=8.0)
    assert at_it_T.all(), "the mean is 8, which is not above it"
    assert believed_sequences(old_T, old_T, sequence_T, mask_T, limit=1.0).all(), "a ratio of 1 is not above 1"
    assert believed_sequences(new_T, old_T, sequence_T, mask_T, limit=10.0).tolist() == [True] * 4
    assert believed_sequences(old_T, new_T, sequence_T, mask_T, limit=10.0).tolist() == [True, True, False, False]


def test_a_drift_that_is_no_number_passes_every_limit():
    broken = drift(torch.tensor([math.nan, 0.0]), torch.zeros(2), torch.tensor([0, 0]), torch.ones(2).bool())
    assert DriftGate(mean_abs=None, max_abs=100.0).exceeded(broken.metrics()) is not None
    assert DriftGate(mean_abs=None, max_abs=100.0).exceeded((LogprobDrift() + broken).metrics()) is not None
    assert DriftGate(ess=0.0).exceeded(broken.metrics()) is not None
    assert DriftGate(max_abs=1.0).exceeded(LogprobDrift().metrics()) is None  # nothing was trained


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Reject("token_k4", 1.0), "unknown statistic 'token_k4'; there are token_k1"),
        (lambda: Reject("seq_mean_k3", 0.0), "seq_mean_k3: high must be above 0, got 0"),
        (lambda: Reject("token_k1", 0.5), "needs 0 < low <= high"),
        (lambda: Reject("seq_max_k3", 1.0, 0.5), "takes high only, got low=0.5"),
        (lambda: Correction("tokens"), "unknown level of importance weights 'tokens'"),
        (lambda: Correction("token", 2.0, 2.0), "0 < low < high"),
        (lambda: Correction(veto=1.0), r"veto must be in \(0, 1\), got 1.0"),
    ],
)
def test_impossible_parameters_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_weight_of_a_long_sequence_that_ran_away_is_finite():
    learner, sampler = torch.zeros(10), torch.full((10,), -50.0)
    sequence, mask = torch.zeros(10, dtype=torch.long), torch.ones(10, dtype=torch.bool)
    wide = Correction("sequence", high=1e30)
    up = correct(learner, sampler, sequence, mask, wide).weights_T
    assert up.tolist() == pytest.approx([math.exp(20)] * 10, rel=1e-5)
    down = correct(sampler, learner, sequence, mask, wide).weights_T
    assert down.tolist() == pytest.approx([math.exp(-20)] * 10, rel=1e-5)
