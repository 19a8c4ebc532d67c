"""Policy losses, aggregation, KL, controllers, value loss and entropy against verl's, values and gradients.

Departures (docs/differences-to-verl.md): geo_mean and sapo are weighed like every other loss (verl: a mean over
rows whatever is configured, for geo_mean over those of the micro-batch, empty ones included); correction
weights multiply tokens (verl's geo_mean: their geometric mean); clip_cov draws its tokens by a key per token and
for the whole step; where verl clamps a log-ratio at 20 or the KL at 10 and so loses the gradient, it goes on.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agentrl.algo.aggregate import Totals, aggregate, aggregation_weights, totals_of_tokens
from agentrl.algo.correction import Correction, Reject, correct
from agentrl.algo.kl import AdaptiveKL, FixedKL, kl_per_token
from agentrl.algo.losses import POLICY_LOSSES
from agentrl.algo.losses.cispo import CISPO
from agentrl.algo.losses.clip_cov import ClipCov, clip_cov, clip_cov_selection
from agentrl.algo.losses.dppo import DPPO
from agentrl.algo.losses.dro import DRO
from agentrl.algo.losses.geo_mean import GeoMean
from agentrl.algo.losses.gpg import GPG
from agentrl.algo.losses.gspo import GSPO
from agentrl.algo.losses.kl_cov import KLCov, kl_cov_selection
from agentrl.algo.losses.ppo_clip import PPOClip, ppo_clip
from agentrl.algo.losses.reinforce import Reinforce, reinforce
from agentrl.algo.losses.sapo import SAPO
from agentrl.algo.metrics import metric_values
from agentrl.algo.returns import whiten
from agentrl.algo.segments import segment_mean
from agentrl.algo.step_data import StepData, penalize_kl
from agentrl.algo.value import value_loss
from agentrl.learner.logprobs import token_columns
from tests.algo.algo_oracles import Case, close, parameters

ROWS, WIDTH = 12, 16
SEQUENCE_T = torch.arange(ROWS).repeat_interleave(WIDTH)


def weights_of(case: Case, mask_T: Tensor, kind: str | None = None) -> Tensor:
    """The weights that verl's aggregation of one batch amounts to; its default scale is the padded width."""
    p, dtype = case.params | case.params.get("global_batch_info", {}), getattr(torch, case.dtype)
    totals, world = totals_of_tokens(mask_T, SEQUENCE_T), p.get("dp_size", 1)
    if "global_batch_size" in p:
        totals = Totals(p["batch_num_tokens"], p["global_batch_size"])
    scale = p.get("loss_scale_factor") or WIDTH
    kind = kind or p["loss_agg_mode"]
    return aggregation_weights(kind, mask_T, SEQUENCE_T, totals, world_size=world, scale=scale, dtype=dtype)


def config_of(case: Case) -> tuple[str, object]:
    p = case.params
    low, high, c = p.get("clip_ratio_low", 0.2), p.get("clip_ratio_high", 0.2), p.get("clip_ratio_c", 3.0)
    match case.fn:
        case "vanilla":
            return "ppo_clip", PPOClip(clip_low=low, clip_high=high, dual_clip=c)
        case "gspo":
            return "gspo", GSPO(clip_low=low, clip_high=high)
        case "geo_mean":
            return "geo_mean", GeoMean(clip_low=low, clip_high=high)
        case "sapo":
            return "sapo", SAPO(tau_positive=p.get("tau_pos", 1.0), tau_negative=p.get("tau_neg", 1.05))
        case "cispo":
            return "cispo", CISPO(ratio_max=1 + high, ratio_min=1 - low)
        case "dro":
            return "dro", DRO(beta=p["policy_loss.dro_beta"])
        case "gpg":
            return "gpg", GPG()
        case "dppo_tv" | "dppo_kl":
            return case.fn, DPPO(divergence_low=low, divergence_high=high, ratio_max=c)
        case "clip_cov":
            bounds = p.get("policy_loss.clip_cov_lb", 1.0), p.get("policy_loss.clip_cov_ub", 5.0)
            fraction = p.get("policy_loss.clip_cov_ratio", 2e-4)
            return case.fn, ClipCov(
                clip_low=low, clip_high=high, fraction=fraction, cov_low=bounds[0], cov_high=bounds[1]
            )
        case "kl_cov":
            fraction, coef = p.get("policy_loss.kl_cov_ratio", 2e-4), p.get("policy_loss.ppo_kl_coef", 0.1)
            return case.fn, KLCov(fraction=fraction, kl_coef=coef)
    raise AssertionError(case.fn)


def check_loss(case: Case, loss: Tensor, logprobs_T: Tensor) -> None:
    loss.backward()
    close(loss, case.outputs["loss"], case.tolerance, "loss")
    close(logprobs_T.grad, case.output("grad_log_prob"), case.tolerance, "gradient")


def policy_losses(*names: str, other_than: tuple[str, ...] = ()) -> list:
    cases = parameters("verl", "policy_loss")
    return [c for c in cases if not c.values[0] or (c.values[0].fn in names) != bool(other_than)]


BYPASS = ("bypass_mode", "compute_policy_loss_reinforce")


@pytest.mark.parametrize(
    "case",
    [
        c
        for c in parameters("verl", "policy_loss")
        if not c.values[0] or c.values[0].fn not in (*BYPASS, "clip_cov")
    ],
)
def test_policy_losses_agree_with_verl(case: Case):
    if case.error is not None:
        assert "dro_beta must be a positive value" in case.error
        with pytest.raises(ValueError, match="greater than 0"):
            DRO(beta=0.0)
        return
    name, config = config_of(case)
    mask_T = case.input("response_mask").bool()
    fixed = name in ("geo_mean", "sapo")  # verl gives them seq-mean-token-mean whatever is asked for
    weights_T = weights_of(case, mask_T, "seq-mean-token-mean" if fixed else None)
    if case.id == "pl/geo_mean/empty_row":
        weights_T = weights_T * 11 / 12  # verl divides by the row without a token as well
    if "rollout_is_weights" in case.inputs:
        correction_T = case.input("rollout_is_weights")
        if name == "geo_mean":  # verl: one weight per row, the geometric mean; ours multiply tokens
            log_S = segment_mean(correction_T[mask_T].log(), SEQUENCE_T[mask_T], ROWS)
            correction_T = log_S.exp()[SEQUENCE_T]
        weights_T = weights_T * correction_T
    logprobs_T = case.input("log_prob").requires_grad_()
    old_T, advantages_T = case.input("old_log_prob"), case.input("advantages")
    extra = {}
    if name == "kl_cov":
        chosen_T = torch.zeros_like(mask_T)
        keys_N = torch.arange(int(mask_T.sum()))
        chosen_T[mask_T] = kl_cov_selection(advantages_T[mask_T], logprobs_T[mask_T], keys_N, config)
        extra["selected_T"] = chosen_T
    loss, metrics = POLICY_LOSSES[name].fn(
        logprobs_T, old_T, advantages_T, weights_T, SEQUENCE_T, mask_T, config, **extra
    )
    check_loss(case, loss, logprobs_T)
    check_metrics(case, name, metric_values(metrics), (logprobs_T - old_T)[mask_T].detach())


def check_metrics(case: Case, name: str, values: dict[str, float], log_ratio_N: Tensor) -> None:
    theirs = case.outputs["metrics"]
    if name == "geo_mean":  # verl also counts tokens outside the band that the clip leaves alone
        both = theirs["actor/pg_clipfrac"] + theirs["actor/pg_clipfrac_lower"]
        assert 0 < values["clip_fraction"] <= both + 1e-5
    elif "actor/pg_clipfrac" in theirs and name != "sapo":
        close(values["clip_fraction"], theirs["actor/pg_clipfrac"], 1e-5, "clip_fraction")
    if "actor/ppo_kl" in theirs and name not in ("kl_cov",):
        # Some of verl's losses clamp the log-ratio at 20 before they take its mean.
        kinds = {float(-log_ratio_N.mean()), float(-log_ratio_N.clamp(-20, 20).mean())}
        assert min(abs(theirs["actor/ppo_kl"] - k) for k in kinds) < 1e-5
        close(values["policy_kl"], -log_ratio_N.mean(), 1e-5, "policy_kl")


@pytest.mark.parametrize("case", policy_losses("clip_cov"))
def test_clip_cov_agrees_with_verl_on_the_tokens_it_drew(case: Case):
    """verl draws with torch's generator per micro-batch. Given its draw the loss is the same; ours is as large."""
    _, config = config_of(case)
    mask_T = case.input("response_mask").bool()
    weights_T = weights_of(case, mask_T)
    if "rollout_is_weights" in case.inputs:
        weights_T = weights_T * case.input("rollout_is_weights")
    old_T, advantages_T = case.input("old_log_prob"), case.input("advantages")

    def run(selected_T: Tensor) -> tuple[Tensor, Tensor]:
        logprobs_T = case.input("log_prob").requires_grad_()
        out, _ = clip_cov(
            logprobs_T, old_T, advantages_T, weights_T, SEQUENCE_T, mask_T, config, selected_T=selected_T
        )
        out.backward()
        return out, logprobs_T

    nothing_T = torch.zeros_like(mask_T)
    _, free_T = run(nothing_T)
    theirs_T = (case.output("grad_log_prob") == 0) & (free_T.grad != 0)
    loss, logprobs_T = run(theirs_T)
    close(loss, case.outputs["loss"], case.tolerance, "loss")
    close(logprobs_T.grad, case.output("grad_log_prob"), case.tolerance, "gradient")

    selected_N = clip_cov_selection(
        advantages_T[mask_T], logprobs_T.detach()[mask_T], torch.arange(int(mask_T.sum())), config
    )
    centred = [x[mask_T] - x[mask_T].mean() for x in (advantages_T, logprobs_T.detach())]
    inside_N = (centred[0] * centred[1] > config.cov_low) & (centred[0] * centred[1] < config.cov_high)
    assert not (selected_N & ~inside_N).any()
    assert inside_N[theirs_T[mask_T]].all()
    limit = max(int(config.fraction * inside_N.numel()), 1)
    assert int(selected_N.sum()) == min(limit, int(inside_N.sum()))
    assert int(theirs_T.sum()) <= limit


def correction_of(p: dict) -> Correction:
    """verl's rollout_correction block in our terms."""
    reject = []
    if p.get("rollout_rs"):
        thresholds = str(p["rollout_rs_threshold"]).split(",")
        for statistic, threshold in zip(p["rollout_rs"].split(","), thresholds, strict=True):
            low, high = band_of(threshold)
            reject.append(Reject(statistic, high, low))
    low, high = band_of(p.get("rollout_is_threshold", 2.0))
    return Correction(p.get("rollout_is") or "none", high, low, reject=tuple(reject))


def band_of(threshold: str | float) -> tuple[float | None, float]:
    """("0.5_2.0") is a band, a number its upper end."""
    parts = [float(x) for x in str(threshold).split("_")]
    return (None, parts[0]) if len(parts) == 1 else (parts[0], parts[1])


@pytest.mark.parametrize("case", policy_losses(*BYPASS))
def test_bypass_agrees_with_verl(case: Case):
    """The sampler's log-probabilities in the place of the old ones, with rejection by the current ratio."""
    p = dict(case.params.get("rollout_correction") or {})
    if case.fn == "bypass_mode":  # the defaults of verl's class where the case leaves them out
        p = {"rollout_is": "sequence", "rollout_is_threshold": 2.0, "loss_type": "ppo_clip"} | p
    mask_T = case.input("response_mask").bool()
    sampler_T = case.input("old_log_prob" if case.fn == "bypass_mode" else "rollout_log_prob")
    logprobs_T = case.input("log_prob").requires_grad_()
    config = correction_of(p)
    corrected = correct(logprobs_T, sampler_T, SEQUENCE_T, mask_T, config)
    keep_T = corrected.keep_T
    weights_T = weights_of(case, keep_T)
    if case.id == "pl/reinforce_fn/isw":  # weights given from outside; the record leaves the input's name out
        weights_T = weights_T * case.input("rollout_is_weights")
    if case.fn == "bypass_mode" and p["loss_type"] == "ppo_clip":
        fn, parameters_ = ppo_clip, PPOClip(clip_high=0.2)
    else:
        # Weights are made from all trained tokens, the mask is applied afterwards: what is rejected still
        # belongs to its sequence's ratio. So they multiply the weights here.
        fn, parameters_ = reinforce, Reinforce()
        weights_T = weights_T * corrected.weights_T
    args = (case.input("advantages"), weights_T, SEQUENCE_T, keep_T, parameters_)
    loss, _ = fn(logprobs_T, sampler_T, *args)
    check_loss(case, loss, logprobs_T)
    if fn is reinforce and config.importance != "none" and not config.reject:
        inner = Reinforce(importance=config.importance, high=config.high, low=config.low)
        plain_T = weights_of(case, keep_T)
        again, _ = reinforce(logprobs_T, sampler_T, args[0], plain_T, SEQUENCE_T, keep_T, inner)
        close(again, loss, 1e-6, "importance weights inside the loss")


@pytest.mark.parametrize("case", parameters("verl", "agg"))
def test_aggregation_agrees_with_verl(case: Case):
    mask_T = case.input("loss_mask").bool()
    loss = aggregate(case.input("loss_mat"), weights_of(case, mask_T), mask_T)
    close(loss, case.outputs["loss"], case.tolerance)


@pytest.mark.parametrize("case", parameters("verl", "kl"))
def test_kl_agrees_with_verl(case: Case):
    if case.fn == "compute_rewards":
        scores = case.input("token_level_scores")
        episode = torch.zeros(scores.numel(), dtype=torch.long)
        step = StepData(scores.sum()[None], torch.tensor([0]), episode, rewards_N=scores)
        got = penalize_kl(
            step, case.input("old_log_prob"), case.input("ref_log_prob"), coef=case.params["kl_ratio"]
        )
        close(got.token_rewards(), case.output("rewards"), case.tolerance)
        return
    name = case.params["kl_penalty"]
    if case.error is not None:
        assert name == "full"
        with pytest.raises(ValueError, match="unknown KL kind 'full'"):
            kl_per_token(name, torch.zeros(1), torch.zeros(1), torch.ones(1).bool())
        return
    ours = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(name.rstrip("+"), name.rstrip("+"))
    logprobs_T, ref_T = case.input("logprob").requires_grad_(), case.input("ref_logprob")
    everything_T = torch.ones_like(ref_T, dtype=torch.bool)
    value_T = kl_per_token(ours + ("+" if name.endswith("+") else ""), logprobs_T, ref_T, everything_T)
    value_T.sum().backward()
    # Departure: verl clamps k3's value at 10 and its log-ratio at 20, and the gradient vanishes there.
    near_T = value_T.detach().abs() <= 10 if ours == "k3" else everything_T
    close(value_T[near_T], case.output("value")[near_T], case.tolerance, "value")
    near_T = near_T if not name.endswith("+") else everything_T
    close(logprobs_T.grad[near_T], case.output("grad_log_prob")[near_T], case.tolerance, "gradient")
    if ours == "k3" and not name.endswith("+"):
        assert (case.output("grad_log_prob")[~near_T] == 0).all()
        assert (logprobs_T.grad[~near_T].abs() >= 0.5).all()


@pytest.mark.parametrize("case", parameters("verl", "kl_controller"))
def test_kl_controllers_agree_with_verl_and_survive_a_checkpoint(case: Case):
    p = case.params

    def make() -> FixedKL | AdaptiveKL:
        if p["type"] == "fixed":
            return FixedKL(p["kl_coef"])
        return AdaptiveKL(p["kl_coef"], target=p["target_kl"], horizon=p["horizon"])

    controller, values = make(), []
    for kl, episodes in p["updates"]:
        controller.update(kl, episodes)
        values.append(controller.coef)
        resumed = make()
        resumed.load_state_dict(controller.state_dict())
        controller = resumed
    expected = case.outputs["values"]
    expected = case.tensor(expected) if isinstance(expected, str) else torch.tensor(expected)
    close(torch.tensor(values, dtype=torch.float64), expected[-len(values) :], 1e-9)


@pytest.mark.parametrize("case", parameters("verl", "value_loss"))
def test_value_loss_agrees_with_verl(case: Case):
    mask_T, values_T = case.input("response_mask").bool(), case.input("vpreds").requires_grad_()
    config = case.params["cliprange_value"]
    loss, metrics = value_loss(
        values_T, case.input("values"), case.input("returns"), weights_of(case, mask_T), mask_T, config
    )
    loss.backward()
    close(loss, case.outputs["loss"], case.tolerance)
    close(values_T.grad, case.output("grad_vpreds"), case.tolerance)
    close(metric_values(metrics)["value_clip_fraction"], case.outputs["clipfrac"], 1e-5)


@pytest.mark.parametrize("case", parameters("verl", "entropy"))
def test_entropy_agrees_with_verl(case: Case):
    logits = case.input("logits").view(ROWS * WIDTH, -1).requires_grad_()
    ids = torch.zeros(len(logits), dtype=torch.long)
    wanted = frozenset({"entropy", "sum_pi_squared"})
    _, entropy, sum_pi_squared = token_columns(logits, ids, 1.0, wanted, entropy_gradient=True).unbind(-1)
    if case.fn == "calculate_sum_pi_squared_from_logits":
        close(sum_pi_squared, case.output("value"), case.tolerance)
    elif case.fn == "entropy_from_logits":
        close(entropy, case.output("entropy"), case.tolerance)
    else:
        mask_T = case.input("response_mask").bool()
        loss = aggregate(entropy, weights_of(case, mask_T), mask_T)
        loss.backward()
        close(loss, case.outputs["loss"], case.tolerance)
        close(logits.grad, case.output("grad_logits"), case.tolerance)


@pytest.mark.parametrize("case", parameters("verl", "stat"))
def test_whitening_agrees_with_verl(case: Case):
    values_T, mask_T = case.input("values"), case.input("mask").bool()
    if case.fn == "masked_whiten":
        got = whiten(values_T[mask_T], shift=case.params.get("shift_mean", True))
        close(got, case.output("value")[mask_T], case.tolerance)
    else:
        close(values_T[mask_T].mean(), case.outputs["mean"], case.tolerance)
        close(values_T[mask_T].var(), case.outputs["var"], case.tolerance)
