"""Each policy loss on two tokens, worked out by hand: value, gradient and figures."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from agentrl.algo.covariance import shuffle_keys
from agentrl.algo.entropy import entropy_threshold, high_entropy_mask
from agentrl.algo.losses import POLICY_LOSSES
from agentrl.algo.losses.cispo import CISPO
from agentrl.algo.losses.clip_cov import ClipCov, clip_cov_selection
from agentrl.algo.losses.dppo import DPPO
from agentrl.algo.losses.dro import DRO
from agentrl.algo.losses.geo_mean import GeoMean
from agentrl.algo.losses.gpg import GPG
from agentrl.algo.losses.gspo import GSPO
from agentrl.algo.losses.kl_cov import KLCov, kl_cov_selection
from agentrl.algo.losses.ppo_clip import PPOClip
from agentrl.algo.losses.reinforce import Reinforce
from agentrl.algo.losses.sapo import SAPO
from agentrl.algo.losses.vespo import VESPO
from agentrl.algo.metrics import metric_values
from agentrl.algo.value import value_loss


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def run(name, config, ratios, advantages, weights=None, sequence=None, old=None, **extra):
    """(loss, gradient by the log-probabilities, figures) of tokens with these ratios to the old policy."""
    old_T = tensor(*(old or [math.log(0.25)] * len(ratios)))
    new_T = (old_T + tensor(*ratios).log()).requires_grad_()
    size = len(ratios)
    loss, metrics = POLICY_LOSSES[name].fn(
        new_T,
        old_T,
        tensor(*advantages),
        tensor(*(weights or [1.0] * size)),
        torch.tensor(sequence or [0] * size),
        torch.ones(size, dtype=torch.bool),
        config,
        **extra,
    )
    loss.backward()
    return loss.item(), new_T.grad.tolist(), metric_values(metrics)


def close(values, expected):
    assert list(values) == pytest.approx(list(expected), abs=1e-12)


def test_gspo_gives_each_token_the_ratio_of_its_sequence():
    ratio = math.sqrt(1.2 * 1.3)
    config = GSPO(clip_low=0.2, clip_high=0.3)
    loss, gradient, figures = run("gspo", config, [1.2, 1.3], [2.0, 2.0], weights=[0.5, 0.5])
    assert loss == pytest.approx(-2 * ratio)
    close(gradient, [-ratio, -ratio])
    assert figures["clip_fraction"] == 0
    tight = GSPO(clip_low=0.2, clip_high=0.2)
    loss, gradient, figures = run("gspo", tight, [1.2, 1.3], [2.0, 2.0], weights=[0.5, 0.5])
    assert loss == pytest.approx(-2 * 1.2)
    close(gradient, [0, 0])
    assert figures["clip_fraction"] == 1


def test_gspo_of_two_sequences_of_one_token_is_ppo():
    ratios, advantages = [1.5, 0.6], [1.0, -1.0]
    one = run("gspo", GSPO(clip_low=0.2, clip_high=0.2), ratios, advantages, sequence=[0, 1])
    other = run(
        "ppo_clip",
        PPOClip(clip_low=0.2, clip_high=0.2, dual_clip=None),
        ratios,
        advantages,
        sequence=[0, 1],
    )
    assert one[0] == pytest.approx(other[0])
    close(one[1], other[1])


def test_gspo_bounds_the_loss_of_a_negative_advantage_where_a_dual_clip_is_set():
    config = GSPO(clip_low=0.2, clip_high=0.2, dual_clip=2.0)
    loss, gradient, figures = run("gspo", config, [4.0, 4.0, 1.5], [-1.0, -1.0, -1.0], sequence=[0, 0, 1])
    assert loss == pytest.approx(2 + 2 + 1.5)
    close(gradient, [0, 0, 1.5])
    assert figures["dual_clip_fraction"] == pytest.approx(2 / 3)


def test_geo_mean_clips_the_log_ratio_on_the_side_that_the_advantage_pushes():
    config = GeoMean(clip_low=0.1, clip_high=0.1)
    up, down = math.log(1.5), math.log(0.5)
    ratio = math.exp((0.1 + down) / 2)  # advantage above 0: the high one is clipped, the low one is not
    loss, gradient, figures = run("geo_mean", config, [1.5, 0.5], [1.0, 3.0], weights=[0.5, 0.5])
    assert loss == pytest.approx(-2 * ratio)
    close(gradient, [0, -2 * ratio / 2])
    assert figures["clip_fraction"] == 0.5
    ratio = math.exp((up - 0.1) / 2)
    loss, gradient, _ = run("geo_mean", config, [1.5, 0.5], [-2.0, -2.0], weights=[0.5, 0.5])
    assert loss == pytest.approx(2 * ratio)
    close(gradient, [2 * ratio / 2, 0])


def test_geo_mean_leaves_a_token_without_an_advantage_out_of_the_ratio():
    config = GeoMean(clip_low=0.4, clip_high=0.4)
    loss, gradient, figures = run("geo_mean", config, [1.3, 1.2], [0.0, 2.0], weights=[0.5, 0.5])
    ratio = math.sqrt(1.2)
    assert loss == pytest.approx(-ratio)
    close(gradient, [0, -ratio / 2])
    assert figures["clip_fraction"] == 0


@pytest.mark.parametrize(("low", "high"), [(0.1, 0.3), (0.3, 0.1)])
def test_geo_mean_has_a_bound_for_each_sign_of_the_advantage(low, high):
    config = GeoMean(clip_low=low, clip_high=high)
    far = [math.exp(0.5), math.exp(-0.5)]
    loss, gradient, figures = run("geo_mean", config, far, [1.0, -1.0], sequence=[0, 1])
    assert loss == pytest.approx(-math.exp(high) + math.exp(-low))
    close(gradient, [0, 0])
    assert figures["clip_fraction"] == 1


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    loss, gradient, figures = run("cispo", CISPO(ratio_max=2.0), [3.0, 0.1], [1.0, -1.0])
    close(gradient, [-2.0, 0.1])
    assert loss == pytest.approx(-2 * math.log(0.75) + 0.1 * math.log(0.025))
    assert figures["clip_fraction"] == 0.5


def test_sapo_at_and_off_the_old_policy():
    loss, gradient, _ = run("sapo", SAPO(tau_positive=1.0, tau_negative=2.0), [1.0, 1.0], [1.0, -1.0])
    assert loss == pytest.approx(-2 + 1)
    close(gradient, [-1.0, 1.0])  # 4 / tau * tau / 4: on policy it is the plain policy gradient
    _, gradient, _ = run("sapo", SAPO(tau_positive=1.0, tau_negative=2.0), [2.0], [1.0])
    gate = 1 / (1 + math.exp(-1.0))
    close(gradient, [-4 * gate * (1 - gate) * 2])


def test_sapo_of_sequences_gates_their_geometric_mean():
    _, gradient, _ = run("sapo", SAPO(level="sequence"), [2.0, 0.5], [1.0, 1.0])
    close(gradient, [-1.0, -1.0])
    with pytest.raises(ValueError, match="'token' or 'sequence'"):
        SAPO(level="turn")


def test_how_far_the_policy_has_moved_by_hand():
    _, _, figures = run("gpg", GPG(), [2.0, 0.5, 0.25], [1.0, 1.0, 1.0])
    two = math.log(2)
    assert figures["policy_kl"] == pytest.approx(2 * two / 3)
    assert figures["policy_kl_k3"] == pytest.approx(((1 - two) + (-0.5 + two) + (-0.75 + 2 * two)) / 3)
    assert figures["log_ratio_max"] == pytest.approx(2 * two)


def test_gpg_is_the_plain_policy_gradient():
    loss, gradient, _ = run("gpg", GPG(), [2.0, 1.0], [1.0, -3.0])
    close(gradient, [-1.0, 3.0])
    assert loss == pytest.approx(-math.log(0.5) + 3 * math.log(0.25))


@pytest.mark.parametrize(
    ("config", "weights"),
    [
        (Reinforce(), [1.0, 1.0, 1.0]),
        (Reinforce(importance="token", high=2.0), [2.0, 0.5, 1.5]),
        (Reinforce(importance="token", high=2.0, low=0.6), [0.0, 0.0, 1.5]),
        (Reinforce(importance="sequence", high=2.0), [1.5, 1.5, 1.5]),
        (Reinforce(importance="sequence", high=1.4, low=0.5), [0.0, 0.0, 0.0]),
    ],
    ids=["none", "token", "token band", "sequence", "sequence band"],
)
def test_reinforce_with_each_importance(config, weights):
    share = [0.5, 0.25, 0.25]
    _, gradient, figures = run("reinforce", config, [3.0, 0.5, 1.5], [1.0, 1.0, -1.0], share, sequence=[0, 0, 1])
    close(gradient, [-0.5 * weights[0], -0.25 * weights[1], 0.25 * weights[2]])
    if config.importance != "none":
        assert figures["importance_weight"] == pytest.approx(sum(weights) / 3)


def test_dro_is_held_back_by_a_quadratic():
    loss, gradient, _ = run("dro", DRO(beta=0.5), [2.0], [1.0])
    assert loss == pytest.approx(-(math.log(0.5) - 0.25 * math.log(2) ** 2))
    close(gradient, [-1 + 0.5 * math.log(2)])


def test_dppo_stops_at_a_change_of_probability_not_of_ratio():
    config = DPPO(divergence_low=0.1, divergence_high=0.1, ratio_max=2.0)
    # 0.25 -> 0.5 has moved by 0.25: stopped; 0.01 -> 0.05 is a larger ratio and a smaller move: goes on.
    old = [math.log(0.25), math.log(0.01), math.log(0.25), math.log(0.25)]
    advantages = [1.0, 1.0, -1.0, -1.0]  # 0.25 -> 0.5 against the advantage goes on, 0.25 -> 0.05 with it stops
    _, gradient, figures = run("dppo_tv", config, [2.0, 5.0, 2.0, 0.2], advantages, old=old)
    close(gradient, [0, -2.0, 2.0, 0])
    assert figures["clip_fraction"] == 0.5


@pytest.mark.parametrize(("low", "high", "wanted"), [(0.1, 0.3, [-2.0, 0.0]), (0.3, 0.1, [0.0, 0.2])])
def test_dppo_has_a_bound_for_each_direction(low, high, wanted):
    config = DPPO(divergence_low=low, divergence_high=high)  # 0.25 -> 0.5 moves by 0.25, 0.25 -> 0.05 by 0.2
    _, gradient, figures = run("dppo_tv", config, [2.0, 0.2], [1.0, -1.0])
    close(gradient, wanted)
    assert figures["clip_fraction"] == 0.5


def test_dppo_kl_by_hand():
    was, now = 0.25, 0.5
    divergence = was * math.log(was / now) + (1 - was) * math.log((1 - was) / (1 - now))
    near = DPPO(divergence_high=divergence * 1.001)
    far = DPPO(divergence_high=divergence * 0.999)
    close(run("dppo_kl", near, [2.0], [1.0])[1], [-2.0])
    close(run("dppo_kl", far, [2.0], [1.0])[1], [0.0])


def test_dppo_kl_of_a_certain_token():
    _, gradient, _ = run("dppo_kl", DPPO(), [1.0, 0.5], [1.0, -1.0], old=[0.0, 0.0])
    assert all(math.isfinite(g) for g in gradient)


@pytest.mark.parametrize(("was", "goes_on"), [(0.9999, True), (0.25, False)])
def test_dppo_kl_of_a_token_that_became_certain(was, goes_on):
    """With the smallest float64 for the rest, 0.9999 -> 1 diverges by 1e-4 log(1e-4 / 2e-308) = 0.07, 0.25 -> 1
    by 500."""
    new_T, old_T, one_T = tensor(0.0).requires_grad_(), tensor(math.log(was)), tensor(1.0)
    rest = torch.zeros(1, dtype=torch.long), torch.ones(1, dtype=torch.bool), DPPO()
    loss, _ = POLICY_LOSSES["dppo_kl"].fn(new_T, old_T, one_T, one_T, *rest)
    loss.backward()
    assert new_T.grad.tolist() == pytest.approx([-1 / was if goes_on else 0])


def test_vespo_weighs_by_the_full_ratio_of_the_sequence():
    config = VESPO(k_positive=2.0, lambda_positive=3.0, k_negative=1.0, lambda_negative=0.5)
    w = 1.5 * 0.8
    up, down = w**2 * math.exp(3 * (1 - w)), w * math.exp(0.5 * (1 - w))
    _, gradient, figures = run("vespo", config, [1.5, 0.8], [1.0, -1.0])
    close(gradient, [-up, down])
    assert figures["gradient_weight"] == pytest.approx((up + down) / 2)


@pytest.mark.parametrize("way", [1, -1])
def test_vespo_holds_the_ratio_of_a_sequence_within_exp_20(way):
    config = VESPO(k_positive=1.0, lambda_positive=0.0)  # without lambda the weight is the ratio
    _, gradient, _ = run("vespo", config, [math.exp(13 * way), math.exp(12 * way)], [1.0, 1.0])
    assert gradient == pytest.approx([-math.exp(20 * way)] * 2)
    _, gradient, _ = run("vespo", VESPO(lambda_positive=0.0), [math.exp(500)] * 2, [1.0, 1.0])
    assert gradient == pytest.approx([-math.exp(40)] * 2)


def test_clip_cov_takes_the_gradient_of_the_selected_tokens():
    selected = torch.tensor([False, True])
    loss, gradient, figures = run("clip_cov", ClipCov(), [1.1, 1.1], [1.0, 1.0], selected_T=selected)
    assert loss == pytest.approx(-1.1)
    close(gradient, [-1.1, 0])
    assert figures["selected_fraction"] == 0.5


def test_clip_cov_has_a_bound_for_each_direction():
    none = torch.tensor([False] * 3)
    config = ClipCov(clip_low=0.1, clip_high=0.3)
    loss, gradient, figures = run("clip_cov", config, [1.2, 1.4, 0.85], [1.0, 1.0, -1.0], selected_T=none)
    assert loss == pytest.approx(-1.2 - 1.3 + 0.9)
    close(gradient, [-1.2, 0, 0])
    assert figures["clip_fraction"] == pytest.approx(2 / 3)


def test_kl_cov_penalises_the_selected_tokens():
    selected = torch.tensor([False, True])
    loss, gradient, _ = run("kl_cov", KLCov(kl_coef=0.5), [0.9, 0.9], [1.0, 1.0], selected_T=selected)
    assert loss == pytest.approx(-1.8 + 0.5 * -math.log(0.9))
    close(gradient, [-0.9, -0.9 - 0.5])


def draw(size: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(size, generator=g), -torch.rand(size, generator=g), torch.arange(size) * 7919


def test_clip_cov_draws_inside_the_band_and_another_seed_draws_others():
    advantages, logprobs, keys = draw(2000)
    config = ClipCov(fraction=0.05, cov_low=0.05, cov_high=0.5)
    chosen = clip_cov_selection(advantages, logprobs, keys, config)
    covariance = (advantages - advantages.mean()) * (logprobs - logprobs.mean())
    assert int(chosen.sum()) == 100
    assert ((covariance > 0.05) & (covariance < 0.5))[chosen].all()
    other = clip_cov_selection(advantages, logprobs, keys, config, seed=1)
    assert 0 < int((chosen & other).sum()) < 60
    nowhere = ClipCov(cov_low=50.0, cov_high=60.0)
    assert not clip_cov_selection(advantages, logprobs, keys, nowhere).any()


def test_the_number_of_tokens_is_rounded_down_and_the_band_leaves_its_edges_out():
    advantages, logprobs, keys = draw(39)
    wide = ClipCov(fraction=0.05, cov_low=-100.0, cov_high=100.0)  # 5% of 39 tokens are 1.95
    assert int(clip_cov_selection(advantages, logprobs, keys, wide).sum()) == 1
    assert int(kl_cov_selection(advantages, logprobs, keys, KLCov(fraction=0.05)).sum()) == 1
    edge = tensor(1.0, -1.0), tensor(-1.0, -3.0), torch.arange(2)  # both have a covariance of 1
    for low, high in ((1.0, 2.0), (0.0, 1.0)):
        assert not clip_cov_selection(*edge, ClipCov(cov_low=low, cov_high=high)).any()
    assert int(clip_cov_selection(*edge, ClipCov(cov_low=0.5, cov_high=1.5)).sum()) == 1


def test_kl_cov_takes_the_largest():
    advantages, logprobs, keys = draw(2000)
    chosen = kl_cov_selection(advantages, logprobs, keys, KLCov(fraction=0.01))
    covariance = (advantages - advantages.mean()) * (logprobs - logprobs.mean())
    assert int(chosen.sum()) == 20
    assert covariance[chosen].min() > covariance[~chosen].max()


def test_kl_cov_does_not_follow_rounding():
    """Before the first change, log-ratios are rounding errors, which must not reach the gradient."""
    old_T = torch.full((4,), -1.5)
    noise_T = torch.tensor([1e-6, -1e-6, 3e-5, 0.2])
    new_T = (old_T + noise_T).requires_grad_()
    ones_T, chosen_T = torch.ones(4), torch.ones(4, dtype=torch.bool)
    args = (torch.zeros(4), ones_T, torch.arange(4), chosen_T, KLCov(kl_coef=2.0))
    loss, _ = POLICY_LOSSES["kl_cov"].fn(new_T, old_T, *args, selected_T=chosen_T)
    loss.backward()
    assert new_T.grad is not None
    assert new_T.grad.tolist() == [0.0, 0.0, 0.0, 2.0]


def test_of_equal_covariances_the_keys_decide():
    keys = torch.arange(64)
    flat = torch.ones(64)
    chosen = kl_cov_selection(flat, flat, keys, KLCov(fraction=0.25))
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    again = kl_cov_selection(flat, flat, keys[order], KLCov(fraction=0.25))
    assert torch.equal(again, chosen[order])
    assert int(chosen.sum()) == 16


def test_keys_are_mixed_well():
    """Every bit of 20000 neighbouring keys is set about half the time, and none collide."""
    mixed = shuffle_keys(torch.arange(20_000), 0)
    assert mixed.unique().numel() == 20_000
    assert (mixed >= 0).all()
    for bit in range(63):
        share = float(((mixed >> bit) & 1).double().mean())
        assert abs(share - 0.5) < 0.02


def test_splitmix64_of_zero_is_what_its_authors_give():
    """The first output for the state 0 is 0xE220A8397B1DCDAF; ours drops the sign bit."""
    assert int(shuffle_keys(torch.zeros(1, dtype=torch.long), 0)) == 0xE220A8397B1DCDAF & (2**63 - 1)


def test_value_loss_by_hand():
    values = tensor(1.0, 0.2).requires_grad_()
    loss, metrics = value_loss(
        values, tensor(0.0, 0.0), tensor(2.0, 1.0), tensor(0.5, 0.5), torch.tensor([True, True]), 0.5
    )
    loss.backward()
    # The first may count only up to 0.5 from its old value: the worse of (1 - 2)^2 and (0.5 - 2)^2, no gradient.
    assert loss.item() == pytest.approx(0.5 * (0.5 * 2.25 + 0.5 * 0.64))
    close(values.grad.tolist(), [0, -0.4])
    figures = {"value_clip_fraction": 0.5, "value_error": 0.9, "value": 0.6, "return": 1.5}
    assert metric_values(metrics) == pytest.approx(figures)


def test_the_tokens_of_highest_entropy():
    entropy = torch.arange(10.0)
    mask = torch.ones(10, dtype=torch.bool)
    mask[9] = False
    threshold = entropy_threshold(entropy[mask], 0.25)
    assert threshold == pytest.approx(6.0)
    assert high_entropy_mask(entropy, mask, threshold).tolist() == [False] * 6 + [True] * 3 + [False]
    assert high_entropy_mask(entropy, mask, entropy_threshold(entropy[mask], 1.0)).equal(mask)


def test_equal_entropies_are_kept_together_whatever_their_last_digits():
    entropy = torch.tensor([1.0, 2.0 - 3e-7, 2.0, 2.0 + 3e-7, 3.0])
    mask = torch.ones(5, dtype=torch.bool)
    threshold = entropy_threshold(entropy, 0.4)
    assert high_entropy_mask(entropy, mask, threshold).tolist() == [False, True, True, True, True]


def test_the_threshold_is_the_quantile():
    values = torch.randn(1001, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for fraction in (0.1, 0.2, 0.55):
        expected = float(torch.quantile(values, 1 - fraction))
        assert entropy_threshold(values, fraction) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PPOClip(clip_low=1.5), r"clip_low\n.*less than 1"),
        (lambda: PPOClip(clip_high=-0.1), r"clip_high\n.*greater than 0"),
        (lambda: PPOClip(dual_clip=0.9), r"dual_clip\n.*greater than 1"),
        (lambda: PPOClip(clip_high=float("nan")), r"clip_high\n.*finite number"),
        (lambda: GSPO(clip_low=-1), r"clip_low\n.*greater than 0"),
        (lambda: GeoMean(clip_low=-1), r"clip_low\n.*greater than 0"),
        (lambda: CISPO(ratio_min=5.0), "ratio_min = 5.0 must be below ratio_max = 5.0"),
        (lambda: SAPO(tau_positive=0), r"tau_positive\n.*greater than 0"),
        (lambda: DRO(beta=-1), r"beta\n.*greater than 0"),
        (lambda: DPPO(ratio_max=0.5), r"ratio_max\n.*greater than or equal to 1"),
        (lambda: VESPO(k_positive=-1), r"k_positive\n.*greater than or equal to 0"),
        (lambda: ClipCov(fraction=0), r"fraction\n.*greater than 0"),
        (lambda: ClipCov(cov_low=5), "cov_low = 5.0 must be below cov_high = 5.0"),
        (lambda: KLCov(kl_coef=-1), r"kl_coef\n.*greater than or equal to 0"),
        (lambda: Reinforce(importance="turn"), r"importance\n.*'none', 'token' or 'sequence'"),
        (
            lambda: Reinforce(importance="token", high=2.0, low=3.0),
            "low = 3.0 must be above 0 and below high = 2.0",
        ),
        (lambda: entropy_threshold(torch.ones(2), 0.0), "top_fraction must be in"),
    ],
)
def test_impossible_parameters_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
