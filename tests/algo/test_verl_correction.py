"""Corrections between sampler and learner against verl's rollout correction: weights, masks and figures."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agentrl.algo.correction import (
    Correction,
    Reject,
    correct,
    drift,
    normalizer,
    weight_sums,
)
from agentrl.algo.metrics import metric_values
from tests.algo.algo_oracles import FULL, Case, close, count, parameters

ROWS, WIDTH = 12, 16
SEQUENCE_T = torch.arange(ROWS).repeat_interleave(WIDTH)

PRESETS = {
    "disabled": Correction(),
    "decoupled_token_is": Correction("token", 2.0),
    "decoupled_seq_is": Correction("sequence", 2.0),
    "decoupled_token_icepop": Correction("token", 5.0, 0.5),
    "decoupled_seq_is_rs": Correction("sequence", 2.0, reject=(Reject("seq_sum_k1", 2.0, 0.5),)),
    "decoupled_geo_rs": Correction(reject=(Reject("seq_mean_k1", 1.001, 0.999),)),
    "decoupled_geo_rs_seq_tis": Correction("sequence", 2.0, reject=(Reject("seq_mean_k1", 1.001, 0.999),)),
    "decoupled_geo_rs_token_tis": Correction("token", 2.0, reject=(Reject("seq_mean_k1", 1.001, 0.999),)),
    "decoupled_k3_rs": Correction(reject=(Reject("seq_mean_k3", 0.01),)),
    "decoupled_k3_rs_seq_tis": Correction("sequence", 2.0, reject=(Reject("seq_mean_k3", 0.01),)),
    "decoupled_k3_rs_token_tis": Correction("token", 2.0, reject=(Reject("seq_mean_k3", 0.01),)),
    "bypass_ppo_clip": Correction(),
    "bypass_ppo_clip_geo_rs": Correction(reject=(Reject("seq_mean_k1", 1.001, 0.999),)),
    "bypass_ppo_clip_k3_rs": Correction(reject=(Reject("seq_mean_k3", 0.01),)),
    "bypass_pg_is": Correction("sequence", 2.0),
    "bypass_pg_geo_rs": Correction(reject=(Reject("seq_mean_k1", 1.001, 0.999),)),
    "bypass_pg_geo_rs_seq_tis": Correction("sequence", 2.0, reject=(Reject("seq_mean_k1", 1.001, 0.999),)),
    "bypass_pg_geo_rs_token_tis": Correction("token", 2.0, reject=(Reject("seq_mean_k1", 1.001, 0.999),)),
    "bypass_pg_token_icepop": Correction("token", 5.0, 0.5),
}
"""Each of verl's presets, in our words."""


def band_of(threshold: str | float) -> tuple[float | None, float]:
    """verl writes a band as "0.5_2.0" and an upper end as a number."""
    parts = [float(x) for x in str(threshold).split("_")]
    return (None, parts[0]) if len(parts) == 1 else (parts[0], parts[1])


def correction_of(case: Case) -> Correction:
    p = case.params
    if case.kind == "rollout_preset":
        return PRESETS[case.fn.rpartition(".")[2]]
    if case.kind == "rollout_is":
        low, high = band_of(p["rollout_is_threshold"])
        return Correction(p["rollout_is"], high, low, normalize=p["rollout_is_batch_normalize"])
    pairs = zip(p["rollout_rs"].split(","), str(p["rollout_rs_threshold"]).split(","), strict=True)
    bands = [(statistic, band_of(threshold)) for statistic, threshold in pairs]
    return Correction(reject=tuple(Reject(statistic, high, low) for statistic, (low, high) in bands))


def tokens(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    mask_T = case.input("response_mask").bool()
    return case.input("old_log_prob"), case.input("rollout_log_prob"), mask_T


@pytest.mark.parametrize("case", parameters("verl", "rollout_is", "rollout_rs", "rollout_preset"))
def test_weights_and_masks_agree_with_verl(case: Case):
    if case.error is not None:
        with pytest.raises(ValueError, match=r"needs 0 < low <= high|takes high only"):
            correction_of(case)
        return
    learner_T, sampler_T, mask_T = tokens(case)
    config = correction_of(case)
    out = correct(learner_T, sampler_T, SEQUENCE_T, mask_T, config)
    values = metric_values(out.metrics)
    weights_T = out.weights_T
    if config.normalize:
        sums = weight_sums(weights_T, SEQUENCE_T, mask_T, level=config.importance)
        weights_T = weights_T * normalizer([sums])
    if "weights" in case.outputs:
        close(weights_T, case.output("weights"), case.tolerance, "weights")
    else:
        assert torch.equal(weights_T, mask_T.to(weights_T.dtype))
    if "mask" in case.outputs:
        assert torch.equal(out.keep_T, case.output("mask").bool())
    figures = {k.removeprefix("rollout_corr/"): v for k, v in case.outputs["metrics"].items()}
    if config.importance != "none" and not config.normalize:
        close(values["importance/mean"], figures["rollout_is_mean"], 1e-5)
    if config.importance == "token":
        close(values["importance/above"], figures["rollout_is_ratio_fraction_high"], 1e-5)
    if config.reject:
        close(values["rejected/tokens"], figures["rollout_rs_masked_fraction"], 1e-5)
    for rule in config.reject:
        theirs = figures[f"rollout_rs_{rule.statistic}_masked_fraction"]
        close(values[f"rejected/{rule.statistic}"], theirs, 1e-5)


@pytest.mark.parametrize("case", parameters("verl", "rollout_metrics", "rollout_preset"))
def test_drift_agrees_with_verl(case: Case):
    figures = {k.removeprefix("rollout_corr/"): v for k, v in case.outputs["metrics"].items()}
    learner_T, sampler_T, mask_T = tokens(case)
    got = drift(learner_T, sampler_T, SEQUENCE_T, mask_T).metrics()
    for ours, theirs in {
        "kl": "kl",
        "k3": "k3_kl",
        "chi2": "chi2_token",
        "log_ppl_diff": "log_ppl_diff",
        "log_ppl_abs_diff": "log_ppl_abs_diff",
        "ppl_ratio": "ppl_ratio",
    }.items():
        close(got[ours], figures[theirs], 1e-5, ours)


def test_every_recorded_case_is_read_by_a_test():
    """The kinds that the tests of this folder read are all there are: 474 cases of verl, 119 of TRL."""
    if not FULL.is_dir():
        pytest.skip("the full record is not there: no folder ../shared/oracles")
    verl = ("advantage", "policy_loss", "agg", "kl", "kl_controller", "value_loss", "entropy", "stat")
    verl += ("rollout_is", "rollout_rs", "rollout_preset", "rollout_metrics")
    for peer, kinds, number in (("verl", verl, 474), ("trl", ("loss", "advantage"), 119)):
        full = [p for p in parameters(peer, *kinds) if p.id.startswith("float64-")]
        assert len(full) == count(peer) == number
