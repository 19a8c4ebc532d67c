"""Groups whose episodes all scored the same count wherever the objective counts them, unless dropped by name.

The reference is plain PyTorch: the padded model of transformers and the objective as verl and TRL write it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.run import LearnerConfig, OptimConfig
from agentrl.trainer.algorithm import Algorithm
from agentrl.trainer.samples import Scores
from agentrl.types import Sample
from tests.learner.direct import DirectLearner
from tests.learner.train_models import gradients, make_batch, padded_logprobs, plain_model, relative, write_model

KL, ENTROPY, BETA = 0.05, 0.02, 0.1


@pytest.fixture(scope="module")
def small_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("zero_policy"), seed=3, layers=1)


@pytest.fixture(scope="module")
def other_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("zero_reference"), seed=4, layers=1)


def make(policy: Path, reference: Path | None = None, *, tokens: int = 16384, **algorithm: Any) -> DirectLearner:
    learner = DirectLearner(
        policy,
        algorithm=AlgorithmConfig(
            **{"kl": {"coef": KL, "kind": "k3"} if reference else {"coef": 0.0}} | algorithm
        ),
        optim=OptimConfig(lr=1e-3, warmup_steps=0, max_grad_norm=1e9),
        config=LearnerConfig(device="cpu", tokens_per_micro_batch=tokens, logits_at_once=0),
        temperature=1.0,
        total_steps=10,
        reference_dir=reference,
    )
    for model in (learner.policy, learner.reference):
        if model is not None:
            model.double()
    return learner


def two_groups(equal: Sequence[int] = (1,), groups: int = 2) -> tuple[list[Sample], Scores]:
    """Groups of three; those of these numbers have equal rewards."""
    rows = []
    for sample in make_batch(11, groups=groups, size=3):
        n = sum(sample.loss_mask)
        columns = dict.fromkeys(("segment", "turn", "reward"), (0.0,) * n)
        rows.append(replace(sample, advantages=(0.0,) * len(sample.ids), columns=columns))
    episodes = list(dict.fromkeys(s.episode_id for s in rows))
    group_of = {s.episode_id: s.group for s in rows}
    rewards = [1.0 if group_of[e] in equal else float(e.endswith("e0")) for e in episodes]
    parts = [{"solved": r} for r in rewards]
    return rows, Scores(episodes, rewards, [group_of[e] for e in episodes], None, parts)


def found(learner: DirectLearner, step: tuple[list[Sample], Scores]) -> tuple[list[Tensor], dict[str, float]]:
    seen: list[Tensor] = []
    learner.optimizer.register_step_pre_hook(lambda *_: seen.append(gradients(learner.policy)))
    update = learner.step(*step)
    return seen, dict(update.metrics)


def expected(
    policy: Path,
    reference: Path | None,
    step: tuple[list[Sample], Scores],
    *,
    mean: str = "token-mean",
    entropy: float = 0.0,
    token_loss: Callable[[Tensor, Tensor, float], Tensor] | None = None,
    only: set[int] | None = None,
    kl_of_group: Mapping[int, float] | None = None,
) -> Tensor:
    """The gradient of mean(-A r + KL k3 - entropy H), all episodes counted, in double precision."""
    rows, scores = step
    rewards, groups = torch.tensor(scores.rewards, dtype=torch.float64), torch.tensor(scores.groups)
    advantage = {}
    for index, name in enumerate(scores.episodes):
        own = rewards[groups == groups[index]]
        advantage[name] = float((rewards[index] - own.mean()) / (own.std() + 1e-6))
    counted = [row for row in rows if only is None or row.group in only]
    model, frozen = plain_model(policy).double(), plain_model(reference or policy).double()
    logprobs = padded_logprobs(model, counted)
    with torch.no_grad():
        old = [values.detach() for values in logprobs]
        ref = padded_logprobs(frozen, counted)
    bonus = padded_entropy(model, counted) if entropy else [torch.zeros(()) for _ in counted]
    by_episode: dict[str, list[Tensor]] = {}
    for row, new_T, old_T, ref_T, entropy_T in zip(counted, logprobs, old, ref, bonus, strict=True):
        value = advantage[row.episode_id]
        loss_T = token_loss(new_T, old_T, value) if token_loss else -value * (new_T - old_T).exp()
        if reference is not None:
            coef = KL if kl_of_group is None else kl_of_group[row.group]
            loss_T = loss_T + coef * ((ref_T - new_T).exp() - 1 - (ref_T - new_T))
        by_episode.setdefault(row.episode_id, []).append(loss_T - entropy * entropy_T)
    sequences = [torch.cat(parts) for parts in by_episode.values()]
    loss = {
        "token-mean": lambda: torch.cat(sequences).mean(),
        "token-sum": lambda: torch.cat(sequences).sum(),
        "seq-mean-token-mean": lambda: torch.stack([s.mean() for s in sequences]).mean(),
        "seq-mean-token-sum": lambda: torch.stack([s.sum() for s in sequences]).mean(),
        "seq-mean-token-sum-norm": lambda: torch.stack([s.sum() for s in sequences]).mean() / 48,
    }[mean]()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def padded_entropy(model: torch.nn.Module, rows: Sequence[Sample]) -> list[Tensor]:
    out = []
    for row in rows:
        logits_LV = model(input_ids=torch.tensor([row.ids]), use_cache=False).logits[0]
        table_LV = torch.log_softmax(logits_LV, dim=-1)
        own_L = -(table_LV.exp() * table_LV).sum(-1)
        out.append(own_L[[t - 1 for t, on in enumerate(row.loss_mask) if on]])
    return out


MEANS = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("penalty", [True, False])
def test_a_group_without_signal_counts_in_every_mean(small_dir: Path, other_dir: Path, mean: str, penalty: bool):
    reference = other_dir if penalty else None
    scale = {"aggregation_scale": 48.0} if mean.endswith("norm") else {}
    wanted = expected(small_dir, reference, two_groups(), mean=mean)
    for tokens in (16384, 70):
        ((gradient,), metrics) = found(
            make(small_dir, reference, tokens=tokens, aggregation=mean, **scale), two_groups()
        )
        assert relative(gradient, wanted) < 1e-6
        assert metrics["episodes_without_advantage"] == 3


def test_a_step_without_any_signal_still_pulls_towards_the_reference(small_dir: Path, other_dir: Path):
    step = two_groups(equal=(0, 1))
    ((gradient,), _) = found(make(small_dir, other_dir), step)
    assert relative(gradient, expected(small_dir, other_dir, step)) < 1e-6
    assert gradient.norm() > 1e-3


def test_the_entropy_bonus_counts_every_episode(small_dir: Path):
    step = two_groups(equal=(0, 1))
    ((gradient,), _) = found(make(small_dir, entropy_coef=ENTROPY), step)
    assert relative(gradient, expected(small_dir, None, step, entropy=ENTROPY)) < 1e-6


def test_dro_holds_every_episode_back(small_dir: Path):
    """Off policy its quadratic has a gradient without any advantage."""

    def dro(new_T: Tensor, current_T: Tensor, advantage: float) -> Tensor:
        return -(advantage * new_T - BETA / 2 * (new_T - (current_T - 0.5)).square())

    rows, scores = two_groups()
    model = plain_model(small_dir).double()
    with torch.no_grad():
        values = padded_logprobs(model, rows)
    moved = []
    for row, own_T in zip(rows, values, strict=True):
        each = iter((own_T - 0.5).tolist())
        moved.append(replace(row, logprobs=tuple(next(each) if on else 0.0 for on in row.loss_mask)))
    learner = make(small_dir, loss={"name": "dro", "beta": BETA}, old_logprobs="sampler")
    ((gradient,), _) = found(learner, (moved, scores))
    wanted = expected(small_dir, None, two_groups(), token_loss=dro)
    assert relative(gradient, wanted) < 1e-6


@pytest.mark.parametrize("updates", [1, 2, 3])
def test_skipped_rows_change_nothing(small_dir: Path, updates: int):
    """Without penalties, rows of no advantage need no pass: the updates and the optimizer are the same."""
    step = two_groups(equal=(0, 2), groups=3)
    skips = make(small_dir, updates_per_step=updates)
    assert skips.steps.skips
    passes = make(small_dir, updates_per_step=updates)
    passes.steps.config = passes.algorithm.model_copy(update={"entropy_coef": 1e-300})
    assert not passes.steps.skips
    for _ in range(2):
        first, second = skips.step(*step), passes.step(*step)
    assert first.tokens < second.tokens
    assert first.trained == second.trained
    for name, value in skips.weights().items():
        assert torch.allclose(value, passes.weights()[name], rtol=0, atol=1e-12), name


@pytest.mark.parametrize(
    "more",
    [
        {"correction": {"reject": {"token_k1": 2.0}}},
        {"correction": {"veto": 1e-4}},
        {"correction": {"importance": "token", "normalize": True}},
        {"entropy_top": 0.5},
        {"entropy_coef": 0.01},
        {"observation_coef": 0.1},
        {"kl": {"coef": 0.1}},
        {"advantage": "gae"},
        {"loss": "dro"},
    ],
)
def test_rows_that_learn_or_affect_others_are_not_skipped(more: dict[str, Any]):
    assert Algorithm(AlgorithmConfig(kl={"coef": 0.0})).skips
    assert not Algorithm(AlgorithmConfig(**{"kl": {"coef": 0.0}} | more)).skips


def test_dropping_them_is_a_setting_with_a_metric(small_dir: Path, other_dir: Path):
    step = two_groups()
    ((gradient,), metrics) = found(make(small_dir, other_dir, drop_zero_signal_groups=True), step)
    assert metrics["dropped_groups"] == 1
    assert relative(gradient, expected(small_dir, other_dir, step, only={0})) < 1e-6
    assert relative(gradient, expected(small_dir, other_dir, step)) > 0.1


def test_high_entropy_selection_leaves_penalty_and_counts_alone(small_dir: Path, other_dir: Path):
    """As TRL has it: only the policy loss is taken on fewer tokens."""
    step = two_groups(equal=(0, 1))
    ((gradient,), _) = found(make(small_dir, other_dir, entropy_top=0.2), step)
    assert relative(gradient, expected(small_dir, other_dir, step)) < 1e-6


@pytest.mark.parametrize("tokens", [60, 16384])
def test_each_env_has_its_own_weight_of_the_kl_penalty(small_dir: Path, other_dir: Path, tokens: int):
    rows, scores = two_groups(equal=(1,))
    weights = {0: 0.3, 1: 0.0}
    step = [
        replace(row, columns={**row.columns, "kl_scale": (weights[row.group] / KL,) * sum(row.loss_mask)})
        for row in rows
    ]
    (gradient,), metrics = found(make(small_dir, other_dir, tokens=tokens), (step, scores))
    assert relative(gradient, expected(small_dir, other_dir, (rows, scores), kl_of_group=weights)) < 1e-6
    (_,), unscaled = found(make(small_dir, other_dir), (rows, scores))
    assert metrics["kl"] == pytest.approx(unscaled["kl"], rel=1e-6), "the metric is the KL, not the penalty"
