"""The loss of a micro-batch worked out by hand: three tokens of an update of eight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from agentrl.algo.aggregate import Totals
from agentrl.algo.correction import Correction, Reject
from agentrl.algo.metrics import metric_values
from agentrl.config.algorithm import AlgorithmConfig, CorrectionConfig
from agentrl.learner.logprobs import TokenStats
from agentrl.learner.pack import pack
from agentrl.learner.policy_loss import Frozen, Loss, make_correction, make_policy_loss, policy_loss
from agentrl.types import Sample

TWO = math.log(2)
TOTALS = Totals(8, 4, 10)
SAMPLER = 0.25
"""The sampler's probability of each token."""


def row(episode: str, trained: int, advantage: float, columns: dict[str, tuple[float, ...]]) -> Sample:
    size = trained + 1
    mask, logprobs = (False, *(True,) * trained), (0.0, *(math.log(SAMPLER),) * trained)
    return Sample(tuple(range(size)), mask, logprobs, (advantage,) * size, (0,) * size, episode, columns=columns)


class Found(NamedTuple):
    gradient: list[float]
    of_entropy: list[float] | None
    of_observed: list[float] | None
    metrics: dict[str, float]
    loss: Loss


def run(
    probabilities: Sequence[float], columns: dict[str, Sequence[float]] | None = None, *,
    advantages: tuple[float, float] = (1.0, -2.0), entropy: bool = False, frozen: Sequence[float] | None = None,
    observed: Sequence[float] | None = None, kl_coef: float = 0.0, first_update: bool = True, record: bool = False,
    **algorithm: Any,
) -> Found:  # fmt: skip
    """The loss and its gradients, of tokens with these probabilities: two of one episode, one of another."""
    split = [
        {name: tuple(values)[part] for name, values in (columns or {}).items()} for part in (slice(2), slice(2, 3))
    ]
    packed = pack(
        [row("a", 2, advantages[0], split[0]), row("b", 1, advantages[1], split[1])], dtype=torch.float64
    )
    new_N = leaf(probabilities).log().detach().requires_grad_()
    entropy_N = leaf([0.5, 1.0, 1.5]) if entropy else None
    observed_O = None if observed is None else leaf(observed)
    found = policy_loss(
        make_policy_loss(AlgorithmConfig(**{"kl": {"coef": 0.0}, "loss": "gpg"} | algorithm)),
        packed,
        TokenStats(new_N, entropy_N),
        TOTALS,
        frozen=None if frozen is None else Frozen(leaf(frozen).log().detach()),
        observed_O=observed_O,
        kl_coef=kl_coef,
        first_update=first_update,
        record=record,
    )
    found.value.backward()
    grads = [None if t is None or t.grad is None else t.grad.tolist() for t in (new_N, entropy_N, observed_O)]
    return Found(grads[0], *grads[1:], metric_values(found.metrics), found)  # type: ignore[arg-type]


def leaf(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def by_eight(*values: float) -> Any:
    """Approximately these numbers, by the number of tokens."""
    return pytest.approx([value / 8 for value in values], abs=1e-12)


def test_weights_are_by_the_counts_of_the_update():
    found = run([0.5, 0.25, 0.5])
    assert found.gradient == by_eight(-1, -1, 2)
    assert found.metrics["loss"] == pytest.approx((TWO + 2 * TWO - 2 * TWO) / 8)
    norm = {"aggregation": "seq-mean-token-sum-norm", "aggregation_scale": 5.0}
    assert run([0.5, 0.25, 0.5], **norm).gradient == pytest.approx([-1 / 20, -1 / 20, 2 / 20])


WEIGHTED = {"loss": {"name": "reinforce", "importance": "token", "high": 10.0}, "ratio_veto": None}


def test_the_old_policy_is_the_sampler_or_the_learner_before_the_step():
    new, before = [0.5, 0.25, 0.5], {"learner_logprobs": [-TWO, -TWO, -3 * TWO]}
    assert run(new, old_logprobs="sampler", **WEIGHTED).gradient == by_eight(-2, -1, 2 * 2)
    assert run(new, before, old_logprobs="sampler", **WEIGHTED).gradient == by_eight(-2, -1, 2 * 2)
    assert run(new, before, old_logprobs="learner", **WEIGHTED).gradient == by_eight(-1, -0.5, 4 * 2)
    assert run(new, old_logprobs="learner", **WEIGHTED).gradient == by_eight(-1, -1, 2)
    assert run(new, loss="ppo_clip").gradient == by_eight(-1, -1, 2), "no gradient through the old policy"


def test_drift_is_measured_once_with_the_weights_that_sampled():
    new = [0.5, 0.25, 0.5]
    measured = run(new).loss.drift
    assert (measured.tokens, measured.sequences) == (3, 2)
    assert measured.metrics()["mean_abs"] == pytest.approx(2 * TWO / 3)
    assert run(new, first_update=False).loss.drift.tokens == 0
    assert run(new, {"learner_logprobs": [-TWO] * 3}).loss.drift.tokens == 0


def test_columns_weigh_the_policy_loss_and_nothing_else():
    columns = {"high_entropy": [1, 0, 1], "correction": [2, 2, 0.5]}
    found = run([0.5, 0.25, 0.5], columns, entropy=True, entropy_coef=0.1)
    assert found.gradient == by_eight(-2, 0, 2 * 0.5)
    assert found.of_entropy == by_eight(-0.1, -0.1, -0.1)
    assert found.metrics["entropy"] == pytest.approx(1.0)
    kl = {"kl": {"coef": 0.4, "kind": "k2"}, "advantages": (0.0, 0.0)}
    found = run([0.5, 0.25, 0.5], columns, frozen=[0.25] * 3, kl_coef=0.4, **kl)
    assert found.gradient == by_eight(0.4 * TWO, 0, 0.4 * TWO)
    assert found.metrics["kl"] == pytest.approx(TWO**2 / 3)
    assert run([0.5, 0.25, 0.5], frozen=[0.25] * 3, kl_coef=0.0, **kl).gradient == [0, 0, 0]


def test_the_penalty_has_the_scale_of_the_env_where_there_is_a_teacher():
    kl = {"kl": {"coef": 0.4, "kind": "k2"}, "advantages": (0.0, 0.0), "frozen": [0.125] * 3, "kl_coef": 0.4}
    columns = {"kl_scale": [1, 1, 3], "taught": [1, 1, 0]}
    found = run([0.5, 0.25, 0.5], {"kl_scale": columns["kl_scale"]}, **kl)
    assert found.gradient == by_eight(0.8 * TWO, 0.4 * TWO, 3 * 0.8 * TWO)
    assert found.metrics["kl"] == pytest.approx((2 + 0.5 + 2) * TWO**2 / 3), "the metric has no scale"
    found = run([0.5, 0.25, 0.5], columns, **kl)
    assert found.gradient == by_eight(0.8 * TWO, 0.4 * TWO, 0)
    assert found.metrics["kl"] == pytest.approx((2 + 0.5) * TWO**2 / 2)


@pytest.mark.parametrize(
    ("band", "weights", "above"),
    [
        ({"high": 1.5}, (1.5, 1, 1.5), 2 / 3),
        ({"high": 1.5, "low": 0.5}, (0, 1, 0), 2 / 3),
        ({"high": 3.0}, (2, 1, 2), 0),
    ],
)
def test_importance_weights_of_a_single_update(band: dict[str, float], weights: tuple[float, ...], above: float):
    found = run([0.5, 0.25, 0.5], correction={"importance": "token", **band}, record=True)
    assert found.gradient == by_eight(-weights[0], -weights[1], 2 * weights[2])
    assert found.metrics["importance/above"] == pytest.approx(above)
    assert found.loss.tokens["weights"].tolist() == pytest.approx(weights)
    chosen = {"high_entropy": [0, 1, 1]}
    found = run([0.5, 0.25, 0.5], chosen, correction={"importance": "token", **band})
    assert found.gradient == by_eight(0, -weights[1], 2 * weights[2])


def test_sequences_that_are_masked():
    sampler = {"old_logprobs": "sampler", "ratio_veto": None}
    veto, far = {"ratio_veto": 1.5}, {"correction": {"off_policy": 0.1}}
    new = [
        0.5,
        0.25,
        0.125,
    ]  # the first episode has a ratio of 2; the other one has drifted, at a negative advantage
    assert run(new, **sampler).gradient == by_eight(-1, -1, 2)
    found = run(new, **sampler | veto)
    assert found.gradient == by_eight(0, 0, 2)
    assert found.metrics["ratio_veto"] == pytest.approx(2 / 3)
    found = run(new, **sampler | far)
    assert found.gradient == by_eight(-1, -1, 0)
    assert found.metrics["off_policy_masked"] == pytest.approx(1 / 3)
    assert run(new, **sampler | veto | far).gradient == [0, 0, 0]


def test_the_observation_loss_is_a_mean_over_the_update():
    found = run([0.5, 0.25, 0.5], observed=[-1.0, -2.0], observation_coef=0.3)
    assert found.of_observed == pytest.approx([-0.03, -0.03])
    assert found.metrics["observation_loss"] == pytest.approx(1.5)
    assert found.gradient == by_eight(-1, -1, 2)


def test_what_is_recorded_of_each_token():
    clip = {"loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.3}, "old_logprobs": "sampler"}
    found = run([0.5, 0.25, 0.5], record=True, entropy=True, frozen=[0.5] * 3, **clip).loss.tokens
    assert {name: values.tolist() for name, values in found.items()} == {
        "learner_logprobs": pytest.approx([-TWO, -2 * TWO, -TWO]),
        "ratio": pytest.approx([2, 1, 2]),
        "clipped": [True, False, False],  # upwards only where the advantage is positive
        "kept": [True, True, True],
        "advantages": [1, 1, -2],
        "entropy": [0.5, 1.0, 1.5],
        "ref_logprobs": pytest.approx([-TWO] * 3),
    }
    low = run([0.5, 0.25, 0.125], record=True, **clip).loss.tokens
    assert low["clipped"].tolist() == [True, False, True], "downwards where it is negative"
    chosen = run([0.5, 0.25, 0.5], {"high_entropy": [0, 1, 1]}, record=True, **clip).loss.tokens
    assert chosen["clipped"].tolist() == [False] * 3, "it has no weight"
    vetoed = run([0.5, 0.25, 0.5], record=True, **clip, ratio_veto=1.5).loss.tokens
    assert (vetoed["clipped"].tolist(), vetoed["kept"].tolist()) == ([False] * 3, [False] * 3)
    assert run([0.5, 0.25, 0.5]).loss.tokens == {}


def test_the_correction_is_what_is_configured():
    config = CorrectionConfig(
        importance="token", high=1.5, low=0.5, normalize=True, veto=0.03,
        reject={"token_k1": (0.2, 3.0), "seq_mean_k3": 30.0},
    )  # fmt: skip
    rules = (Reject("token_k1", 3.0, 0.2), Reject("seq_mean_k3", 30.0))
    assert make_correction(config) == Correction("token", 1.5, 0.5, True, rules, 0.03)
