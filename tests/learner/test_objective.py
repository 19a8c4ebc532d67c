"""Every loss through the learner: no split, no order and no packing changes its gradient, to 1e-6 in float64."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from agentrl.algo.advantages import ESTIMATORS
from agentrl.algo.kl import AdaptiveKL
from agentrl.algo.losses import POLICY_LOSSES
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.run import LearnerConfig, OptimConfig
from agentrl.errors import ConfigError
from agentrl.trainer.samples import Scores
from agentrl.types import Sample
from tests.learner.direct import DirectLearner
from tests.learner.train_models import gradients, make_batch, padded_logprobs, plain_model, relative, write_model

LOOSE: dict[str, dict[str, Any]] = {
    "clip_cov": {"fraction": 0.3, "cov_low": -0.5, "cov_high": 0.5},
    "kl_cov": {"fraction": 0.3},
}


@pytest.fixture(scope="module")
def small_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("small"), seed=3, layers=1)


@pytest.fixture(scope="module")
def other_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("other"), seed=4, layers=1)


def make(
    policy: Path, reference: Path | None = None, *, tokens: int = 16384, logits: int = 0, **algorithm: Any
) -> DirectLearner:
    given = {"kl": {"coef": 0.05 if reference else 0.0}} | algorithm
    learner = DirectLearner(
        policy,
        algorithm=AlgorithmConfig(**given),
        optim=OptimConfig(lr=1e-3, warmup_steps=0, max_grad_norm=1e9),
        config=LearnerConfig(device="cpu", tokens_per_micro_batch=tokens, logits_at_once=logits),
        temperature=0.7,
        total_steps=10,
        reference_dir=reference,
    )
    learner.policy.double()
    if learner.reference is not None:
        learner.reference.double()
    return learner


def gradients_of(
    learner: DirectLearner, samples: list[Sample], scores: Scores | None = None
) -> tuple[list[Tensor], dict[str, float]]:
    """The gradient of every update of a step, and its metrics."""
    seen: list[Tensor] = []
    learner.optimizer.register_step_pre_hook(lambda *_: seen.append(gradients(learner.policy)))
    update = learner.step(samples, scores)
    return seen, dict(update.metrics)


def scored(samples: list[Sample]) -> tuple[list[Sample], Scores]:
    """The same rows as a step hands them over: two turns an episode, a reward at the end, no advantages yet."""
    episodes = list(dict.fromkeys(s.episode_id for s in samples))
    draw = random.Random(0)
    rewards = {e: draw.choice([0.0, 0.25, 1.0]) for e in episodes}
    groups = {s.episode_id: s.group for s in samples}
    last = {s.episode_id: i for i, s in enumerate(samples)}
    rows = []
    for i, sample in enumerate(samples):
        n = sum(sample.loss_mask)
        end = rewards[sample.episode_id] if last[sample.episode_id] == i else 0.0
        columns = {
            "segment": (float(2 * i),) * (n // 2) + (float(2 * i + 1),) * (n - n // 2),
            "turn": (0.0,) * (n // 2) + (1.0,) * (n - n // 2),
            "reward": (0.0,) * (n - 1) + (end,),
        }
        rows.append(replace(sample, advantages=(0.0,) * len(sample.ids), columns=columns))
    parts = [{"solved": rewards[e], "form": draw.random()} for e in episodes]
    scores = Scores(
        episodes, [rewards[e] for e in episodes], [groups[e] for e in episodes], [0.3] * len(episodes), parts
    )
    return rows, scores


def shuffled(samples: list[Sample], seed: int = 1) -> list[Sample]:
    out = list(samples)
    random.Random(seed).shuffle(out)
    return out


@pytest.mark.parametrize("loss", list(POLICY_LOSSES))
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_no_split_and_no_order_changes_a_loss(small_dir: Path, other_dir: Path, loss: str, aggregation: str):
    algorithm = {"loss": {"name": loss, **LOOSE.get(loss, {})}, "aggregation": aggregation, "entropy_coef": 0.01}
    samples = make_batch(3, groups=2, size=3)
    (wanted,), first = gradients_of(make(small_dir, other_dir, **algorithm), samples)
    (found,), second = gradients_of(
        make(small_dir, other_dir, tokens=70, logits=5, **algorithm), shuffled(samples)
    )
    assert wanted.norm() > 0
    assert relative(found, wanted) < 1e-6
    assert second == pytest.approx(first, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "clip_cov", "vespo"])
def test_the_second_update_is_as_independent_of_the_split(small_dir: Path, loss: str):
    """It is off policy: the ratio matters. Which episodes it trains depends on their order, so that is kept."""
    samples = make_batch(4, groups=2, size=3)
    algorithm = {"loss": {"name": loss, **LOOSE.get(loss, {})}, "updates_per_step": 2}
    wanted, _ = gradients_of(make(small_dir, **algorithm), samples)
    found, _ = gradients_of(make(small_dir, tokens=70, **algorithm), samples)
    assert [relative(f, w) < 1e-6 for f, w in zip(found, wanted, strict=True)] == [True, True]


CORRECTIONS: dict[str, dict[str, Any]] = {
    "token": {"importance": "token", "high": 1.5},
    "sequence": {"importance": "sequence"},
    "icepop": {"importance": "token", "low": 0.5, "high": 2.0},
    "normalized": {"importance": "token", "normalize": True},
    "rejection": {"reject": {"token_k1": [0.2, 3.0], "seq_mean_k3": 30.0}},
    "veto": {"veto": 0.03},
    "off_policy": {"off_policy": 0.05},
}


@pytest.mark.parametrize("name", list(CORRECTIONS))
def test_no_split_and_no_order_changes_a_correction(small_dir: Path, name: str):
    samples = make_batch(5, groups=2, size=3)
    near = [replace(s, logprobs=tuple(3 * v - 1 for v in s.logprobs)) for s in samples]
    (plain,), _ = gradients_of(make(small_dir), near)
    (wanted,), first = gradients_of(make(small_dir, correction=CORRECTIONS[name]), near)
    (found,), second = gradients_of(make(small_dir, tokens=70, correction=CORRECTIONS[name]), shuffled(near))
    assert relative(found, wanted) < 1e-6
    assert second == pytest.approx(first, rel=1e-6, abs=1e-9)
    if name != "off_policy":  # on policy nothing has drifted from the old policy yet
        assert relative(plain, wanted) > 1e-3, "the correction does something"
    assert "drift/mean_abs" in first


@pytest.mark.parametrize("advantage", [name for name in ESTIMATORS if name != "gae"])
@pytest.mark.parametrize("kl", ["loss", "reward"])
def test_every_estimator_trains_and_does_not_see_the_split(
    small_dir: Path, other_dir: Path, advantage: str, kl: str
):
    if advantage in ("gdpo", "max_rl", "none") and kl == "reward":
        pytest.skip("refused by the configuration")
    algorithm = {"advantage": advantage, "kl": {"coef": 0.05, "where": kl}}
    rows, scores = scored(make_batch(6, groups=2, size=3))
    (wanted,), first = gradients_of(make(small_dir, other_dir, **algorithm), rows, scores)
    (found,), second = gradients_of(make(small_dir, other_dir, tokens=70, **algorithm), shuffled(rows), scores)
    assert wanted.norm() > 0
    assert relative(found, wanted) < 1e-6
    assert second == pytest.approx(first, rel=1e-6, abs=1e-9)
    assert ("kl" in first, "kl_in_reward" in first) == (kl == "loss", kl == "reward")


def test_high_entropy_tokens_alone_can_be_trained(small_dir: Path):
    samples = make_batch(7, groups=2, size=3)
    learner = make(small_dir, entropy_top=0.25)
    (found,), metrics = gradients_of(learner, samples)
    assert metrics["high_entropy_fraction"] == pytest.approx(0.25, abs=0.03)
    (everything,), _ = gradients_of(make(small_dir), samples)
    assert relative(found, everything) > 0.1


def test_the_entropy_bonus_raises_the_entropy(small_dir: Path):
    samples = [replace(s, advantages=(0.0,) * len(s.ids)) for s in make_batch(8, groups=2, size=3)]
    learner = make(small_dir, entropy_coef=1.0)
    values = [learner.step(samples).metrics["entropy"] for _ in range(4)]
    assert values == sorted(values)
    assert values[-1] > values[0]


def test_bypass_takes_the_samplers_logprobs_as_the_old_ones(small_dir: Path):
    samples = make_batch(9, groups=2, size=3)
    recomputed = make(small_dir).step(samples).metrics
    bypass = make(small_dir, old_logprobs="sampler").step(samples).metrics
    assert recomputed["policy_kl"] == pytest.approx(0, abs=1e-12)
    assert bypass["policy_kl"] == pytest.approx(recomputed["drift/log_ppl_diff"], abs=0.5)
    assert abs(bypass["policy_kl"]) > 0.1
    assert bypass["drift/mean_abs"] == pytest.approx(recomputed["drift/mean_abs"])


def test_the_penalty_has_the_weight_that_was_adapted(small_dir: Path, other_dir: Path):
    kl = {"coef": 0.05, "control": "adaptive", "target": 1e-3, "horizon": 100.0}
    adapted, fixed = make(small_dir, other_dir, kl=kl), make(small_dir, other_dir, kl={"coef": 0.2})
    adapted.steps.load_state_dict({"kl": {"coef": 0.2}})
    samples = make_batch(3)
    (gradient,), _ = gradients_of(adapted, samples)
    (wanted,), _ = gradients_of(fixed, samples)
    assert relative(gradient, wanted) < 1e-6


def test_the_weight_of_the_penalty_follows_the_kl_and_survives_a_checkpoint(
    small_dir: Path, other_dir: Path, tmp_path: Path
):
    kl = {"coef": 0.05, "control": "adaptive", "target": 1e-3, "horizon": 100.0}
    learner = make(small_dir, other_dir, kl=kl)
    control = AdaptiveKL(0.05, target=1e-3, horizon=100.0)
    for seed in range(3):
        samples = make_batch(seed, groups=2, size=3)
        update = learner.step(samples)
        assert update.metrics["kl_coef"] == control.coef
        control.update(update.metrics["kl"], len({s.episode_id for s in samples}))
    assert control.coef > 0.05
    learner.policy.float()
    learner.save(tmp_path)
    other = make(small_dir, other_dir, kl=kl)
    other.policy.float()
    other.load_optimizer(tmp_path)
    assert other.steps.kl.coef == control.coef


OWN = """
import torch
from agentrl.algo.step_data import StepData

def half(step: StepData, scale: float = 1.0):
    return scale * (step.rewards_E - step.rewards_E.mean())[step.sequence_N]

def plain(logprobs_T, old_logprobs_T, advantages_T, weights_T, sequence_T, loss_mask_T, power: float = 1.0):
    ratio_T = (logprobs_T - old_logprobs_T).exp() ** power
    return -(weights_T * advantages_T * ratio_T).sum(), {"mine": ratio_T.detach()}

def peak(logprobs_T, old_logprobs_T, advantages_T, weights_T, sequence_T, loss_mask_T):
    ratio_T = (logprobs_T - old_logprobs_T).exp()
    return -(weights_T * advantages_T * ratio_T).sum(), {"peak": ratio_T.detach().max()}

def steep(logprobs_T, old_logprobs_T, advantages_T, weights_T, sequence_T, loss_mask_T):
    return (weights_T * (logprobs_T - logprobs_T.detach()).abs().sqrt()).sum()

def taken(*tensors):
    return plain(*tensors)[0], {"reward": 1.0}

def of_two_kinds(*tensors):
    from agentrl.algo.metrics import mean_of, sum_of
    return plain(*tensors)[0], {"mine": (mean_of if len(tensors[0]) == 7 else sum_of)(tensors[0])}

def of_no_kind(*tensors):
    from agentrl.algo.metrics import Metric
    return plain(*tensors)[0], {"mine": Metric("median", tensors[0].detach().sum())}

def of_many(*tensors):
    from agentrl.algo.metrics import Metric
    return plain(*tensors)[0], {"mine": Metric("sum", tensors[0].detach())}

def complex_one(*tensors):
    return plain(*tensors)[0], {"mine": tensors[0].detach().to(torch.complex64)}

def nameless(*tensors):
    return plain(*tensors)[0], {"": 1.0}

def empty(*tensors):
    return plain(*tensors)[0], {"mine": None}

def sometimes(logprobs_T, *others):
    return (logprobs_T if len(logprobs_T) < 8 else logprobs_T.detach()).sum()

def good(logprobs_T, old_logprobs_T, advantages_T, weights_T, sequence_T, loss_mask_T):
    if len(logprobs_T) > 7 and not (advantages_T > 0).any():
        return torch.zeros(())
    return plain(logprobs_T, old_logprobs_T, advantages_T.clamp(min=0), weights_T, sequence_T, loss_mask_T)

def by_sequence(logprobs_T, old_logprobs_T, advantages_T, weights_T, sequence_T, loss_mask_T):
    loss_T = -weights_T * advantages_T * (logprobs_T - old_logprobs_T).exp()
    return sum(loss_T[sequence_T == s].mean() * (sequence_T == s).sum() for s in range(int(sequence_T.max()) + 1))

def mean(logprobs_T, old_logprobs_T, advantages_T, weights_T, sequence_T, loss_mask_T):
    return -(advantages_T * logprobs_T).mean()

def constant(*tensors):
    return torch.zeros(())

def by_episode(step):
    return step.rewards_E

def broken(step):
    return step.no_such_field
"""


def test_your_own_estimator_and_loss(small_dir: Path, tmp_path: Path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    own = {
        "advantage": {"use": f"{file}:half", "options": {"scale": 2.0}},
        "loss": {"use": f"{file}:plain", "options": {"power": 1.0}},
    }
    rows, scores = scored(make_batch(6, groups=2, size=3))
    (wanted,), metrics = gradients_of(make(small_dir, **own), rows, scores)
    (found,), _ = gradients_of(make(small_dir, tokens=70, **own), shuffled(rows), scores)
    assert relative(found, wanted) < 1e-6
    assert metrics["mine"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("key", "name", "said"),
    [
        ("loss", "mean", "is not the sum of its values over each"),
        ("loss", "constant", "does not depend on logprobs_T"),
        ("loss", "nothing", "has no 'nothing'"),
        ("loss", "steep", "its gradient is not finite"),
        ("loss", "taken", "its metric 'reward' would replace agentrl's"),
        ("loss", "of_two_kinds", "its metric 'mine' was a mean before and is a sum now"),
        ("loss", "of_no_kind", "its metric 'mine' must be made by mean_of"),
        ("loss", "of_many", "its metric 'mine' must be made by mean_of"),
        ("loss", "complex_one", "its metric 'mine' must be a number or a tensor of real numbers"),
        ("loss", "nameless", "metrics must be a mapping from names to numbers"),
        ("loss", "empty", "its metric 'mine' must be a number or a tensor of real numbers, got None"),
        ("advantage", "by_episode", r"one advantage for each token, a tensor of shape \(13,\), got \(6,\)"),
        ("advantage", "broken", "raised AttributeError"),
    ],
)
def test_your_own_function_is_tried_before_the_run(tmp_path: Path, key: str, name: str, said: str):
    from agentrl.trainer.algorithm import Algorithm

    file = tmp_path / "own.py"
    file.write_text(OWN)
    with pytest.raises(ConfigError, match=said):
        Algorithm(AlgorithmConfig(**{key: f"{file}:{name}"}))


@pytest.mark.parametrize("mask", [{"ratio_veto": 2.0}, {"correction": {"off_policy": 0.05}}])
def test_masks_hold_for_a_loss_of_your_own_that_does_not_read_them(
    small_dir: Path, tmp_path: Path, mask: dict[str, Any]
):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    samples = make_batch(6, groups=2, size=3)
    samples[0] = replace(samples[0], logprobs=tuple(v - 9 for v in samples[0].logprobs))
    plain = {"name": "reinforce", "importance": "token", "high": 1e9}
    algorithm = {"old_logprobs": "sampler", "ratio_veto": None}
    (unmasked,), _ = gradients_of(make(small_dir, loss=plain, **algorithm), samples)
    (wanted,), metrics = gradients_of(make(small_dir, loss=plain, **algorithm | mask), samples)
    (found,), _ = gradients_of(make(small_dir, loss=f"{file}:plain", **algorithm | mask), samples)
    (summed,), _ = gradients_of(make(small_dir, loss=f"{file}:by_sequence", **algorithm | mask), samples)
    assert relative(summed, wanted) < 1e-9
    assert 0 < metrics["ratio_veto" if "ratio_veto" in mask else "off_policy_masked"] < 1
    assert relative(found, wanted) < 1e-9
    assert relative(unmasked, wanted) > 1e-3


def test_a_loss_of_your_own_is_not_asked_about_no_tokens(small_dir: Path, tmp_path: Path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    algorithm = {"loss": f"{file}:peak", "old_logprobs": "sampler", "ratio_veto": 1 + 1e-9}
    samples = [replace(s, logprobs=(-90.0,) * len(s.ids)) for s in make_batch(6, groups=1, size=2)]
    (gradient,), metrics = gradients_of(make(small_dir, **algorithm), samples)
    assert metrics["ratio_veto"] == 1.0
    assert "peak" not in metrics
    assert gradient.norm() == 0


def test_a_loss_of_your_own_without_a_gradient_is_one_error(small_dir: Path, tmp_path: Path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    with pytest.raises(ConfigError, match="does not depend on logprobs_T"):
        gradients_of(make(small_dir, loss=f"{file}:sometimes"), make_batch(6, groups=2, size=3))


@pytest.mark.parametrize("penalized", [False, True])
def test_a_loss_of_your_own_may_choose_nothing_of_a_micro_batch(
    small_dir: Path, other_dir: Path, tmp_path: Path, penalized: bool
):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    learner = make(small_dir, other_dir if penalized else None, loss=f"{file}:good")
    samples = [replace(s, advantages=(-1.0,) * len(s.ids)) for s in make_batch(6, groups=2, size=3)]
    (gradient,), _ = gradients_of(learner, samples)
    assert bool(gradient.norm() > 0) == penalized


def test_what_is_not_trained_has_no_gradient(small_dir: Path):
    """Rejected tokens leave the loss and its counts: the gradient is that of the rows without them, exactly."""
    samples = make_batch(10, groups=1, size=3)
    far = samples[0]
    samples[0] = replace(far, logprobs=tuple(-60.0 if on else 0.0 for on in far.loss_mask))
    (found,), _ = gradients_of(make(small_dir, correction={"reject": {"token_k2": 100.0}}), samples)
    (wanted,), _ = gradients_of(make(small_dir), samples[1:])
    assert relative(found, wanted) < 1e-6
    assert math.isfinite(float(found.norm()))


@pytest.mark.parametrize("loss", ["gspo", "geo_mean", "kl_cov", "ppo_clip"])
def test_one_impossible_token_does_not_drown_the_others(small_dir: Path, loss: str):
    """The old policy says that a sampled token could not be: no clip bounds that ratio where A is negative."""
    options = {"dual_clip": None} if loss == "ppo_clip" else LOOSE.get(loss, {})
    rows = make_batch(11, groups=1, size=4)[:4]
    true = padded_logprobs(plain_model(small_dir), rows, 0.7)
    samples = []
    for row, values in zip(rows, true, strict=True):
        own = iter(values.tolist())
        sampler = tuple(next(own) if on else 0.0 for on in row.loss_mask)
        samples.append(replace(row, logprobs=sampler, advantages=(-1.0,) * len(row.ids)))
    victim = samples[0]
    place = victim.loss_mask.index(True)
    wrong = tuple(-1e4 if t == place else v for t, v in enumerate(victim.logprobs))
    broken = [replace(victim, logprobs=wrong), *samples[1:]]
    algorithm = {"loss": {"name": loss, **options}, "old_logprobs": "sampler"}
    (wanted,), _ = gradients_of(make(small_dir, **algorithm), samples)
    (found,), metrics = gradients_of(make(small_dir, **algorithm), broken)
    assert found.norm() < 2 * wanted.norm()
    assert 0 < metrics["ratio_veto"] < 0.5
    (unbounded,), _ = gradients_of(make(small_dir, ratio_veto=None, **algorithm), broken)
    assert unbounded.norm() > 100 * found.norm()
