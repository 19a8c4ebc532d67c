"""Rows that a teacher reads with a hint: gradients against plain computations; the policy as its own teacher."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.run import LearnerConfig, OptimConfig
from agentrl.config.teacher import TeacherConfig
from agentrl.learner.pack import as_taught, in_pack_order, micro_batches, pack
from agentrl.learner.state import AVERAGE_FOLDER
from agentrl.types import HintedOpening, Sample
from tests.learner.direct import DirectLearner
from tests.learner.train_models import VOCABULARY, gradients, make_batch, padded_logprobs, plain_model, write_model

COEF = 0.7


@pytest.fixture(scope="module")
def teacher_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("teacher"), seed=5, hidden=48, layers=3)


def make_learner(
    policy: Path,
    teacher: dict[str, Any],
    *,
    kind: str = "full",
    tokens: int = 120,
    lora: bool = False,
    lr: float = 1e-3,
    **spec: Any,
) -> DirectLearner:
    kl = {"coef": COEF, "kind": kind} | ({"top": 0} if kind == "full" else {})
    return DirectLearner(
        policy,
        algorithm=AlgorithmConfig(kl=kl),
        optim=OptimConfig(lr=lr, warmup_steps=0, max_grad_norm=1e9),
        config=LearnerConfig(
            device="cpu", tokens_per_micro_batch=tokens, logits_at_once=16, lora={"rank": 2} if lora else None
        ),
        temperature=1.0,
        total_steps=10,
        reference_dir=policy,
        teacher=TeacherConfig(hint="env", **teacher),
        **spec,
    )


def hinted(samples: Sequence[Sample], *, every: int = 1) -> list[Sample]:
    """Without advantages. Episodes have hints of different lengths, which replace the end of what they share; of
    the episodes only each `every`th has one, as a run marks it."""
    rng, made = random.Random(3), {}
    for number, episode in enumerate(dict.fromkeys(s.episode_id for s in samples)):
        if number % every == 0:
            made[episode] = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 25)))
    rows = []
    for s in samples:
        first, ids = s.loss_mask.index(True), made.get(s.episode_id)
        cut = min(first, 3) - 1
        opening = None if ids is None else HintedOpening(cut, s.ids[: cut - 1] + ids)
        marks = (0.0 if ids is None else 1.0,) * sum(s.loss_mask)
        rows.append(
            replace(s, advantages=(0.0,) * len(s.ids), hinted=opening, columns={**s.columns, "taught": marks})
        )
    return rows


def step(learner: DirectLearner, samples: Sequence[Sample]) -> tuple[Tensor, dict[str, float]]:
    """The gradient of a step (without adapters), and its metrics."""
    seen: list[Tensor] = []
    if learner.config.lora is None:
        learner.optimizer.register_step_pre_hook(lambda *_: seen.append(gradients(learner.policy)))
    found = learner.step(samples)
    return seen[0] if seen else torch.zeros(1), dict(found.metrics)


def tables(model: torch.nn.Module, samples: Sequence[Sample]) -> list[Tensor]:
    """[n, V] log-probabilities in the place of each trained token, by row."""
    found = []
    for s in samples:
        table = torch.log_softmax(model(torch.tensor([s.ids]), use_cache=False).logits[0], -1)
        found.append(torch.stack([table[t - 1] for t, on in enumerate(s.loss_mask) if on]))
    return found


def wanted_full(policy_dir: Path, teacher_dir: Path, samples: Sequence[Sample]) -> tuple[Tensor, float]:
    """Gradient and mean KL of the whole distributions where a row has a hint."""
    policy, teacher = plain_model(policy_dir), plain_model(teacher_dir)
    with torch.no_grad():
        others = tables(teacher, [as_taught(s) for s in samples])
    kl = [
        (own.exp() * (own - other)).sum(-1)
        for own, other, s in zip(tables(policy, samples), others, samples, strict=True)
        if s.hinted is not None
    ]
    total = sum(sum(s.loss_mask) for s in samples)
    policy.zero_grad()
    (COEF * torch.cat(kl).sum() / total).backward()
    return gradients(policy), float(torch.cat(kl).mean().detach())


def close(gradient: Tensor, wanted: Tensor) -> bool:
    return float((gradient - wanted).norm() / wanted.norm()) < 1e-4


def test_a_taught_row_has_the_hint_and_the_same_tokens_under_the_loss():
    rows = hinted(make_batch(1))
    for row in rows:
        taught, opening = as_taught(row), row.hinted
        assert opening is not None
        assert taught.ids[: len(opening.ids)] == opening.ids
        assert taught.ids[len(opening.ids) :] == row.ids[opening.length :]
        for name in ("ids", "logprobs"):
            trained = [
                [v for v, on in zip(getattr(r, name), r.loss_mask, strict=True) if on] for r in (row, taught)
            ]
            assert trained[0] == trained[1]
        assert len({len(taught.ids), len(taught.loss_mask), len(taught.advantages), len(taught.versions)}) == 1
    assert [r.episode_id for r in in_pack_order([as_taught(r) for r in rows])] == [
        r.episode_id for r in in_pack_order(rows)
    ]


@pytest.mark.parametrize(("every", "tokens"), [(1, 90), (1, 5000), (2, 120)])
def test_full_compares_with_what_the_teacher_says_after_the_hint(
    policy_dir: Path, teacher_dir: Path, every: int, tokens: int
):
    samples = hinted(make_batch(3), every=every)
    gradient, metrics = step(make_learner(policy_dir, {"path": str(teacher_dir)}, tokens=tokens), samples)
    wanted, kl = wanted_full(policy_dir, teacher_dir, samples)
    assert metrics["kl"] == pytest.approx(kl, rel=1e-4), "of the rows with a hint alone"
    assert close(gradient, wanted)


@pytest.mark.parametrize("every", [1, 2])
def test_centered_scores_the_sampled_tokens_after_the_hint(policy_dir: Path, teacher_dir: Path, every: int):
    samples = hinted(make_batch(4), every=every)
    learner = make_learner(policy_dir, {"path": str(teacher_dir)}, kind="centered")
    gradient, _ = step(learner, samples)
    policy = plain_model(policy_dir)
    own = padded_logprobs(policy, samples)
    with torch.no_grad():
        other = padded_logprobs(plain_model(teacher_dir), [as_taught(s) for s in samples])
    sampler = [torch.tensor([p for p, on in zip(s.logprobs, s.loss_mask, strict=True) if on]) for s in samples]
    told = [n for n, s in enumerate(samples) if s.hinted is not None]
    mean = torch.cat([sampler[n] - other[n] for n in told]).mean()
    loss = torch.cat([(own[n].detach() - other[n] - mean) * own[n] for n in told]).sum()
    policy.zero_grad()
    (COEF * loss / sum(sum(s.loss_mask) for s in samples)).backward()
    assert close(gradient, gradients(policy))


@pytest.mark.parametrize("lora", [False, True])
def test_the_policy_at_the_start_teaches_itself(policy_dir: Path, lora: bool):
    samples = hinted(make_batch(5))
    learner = make_learner(policy_dir, {"policy": "initial"}, lora=lora, lr=1e-2)
    wanted, kl = wanted_full(policy_dir, policy_dir, samples)
    gradient, metrics = step(learner, samples)
    assert metrics["kl"] == pytest.approx(kl, rel=1e-4)
    assert lora or close(gradient, wanted)
    second = learner.step(samples).metrics["kl"]
    with torch.no_grad():
        other = tables(plain_model(policy_dir), [as_taught(s) for s in samples])
    learner.export(policy_dir.parent / f"moved-{lora}")
    assert second != pytest.approx(kl, rel=1e-3), "the policy has moved"
    own = tables(plain_model(policy_dir.parent / f"moved-{lora}"), samples)
    after = torch.cat([(o.exp() * (o - t)).sum(-1) for o, t in zip(own, other, strict=True)]).mean()
    third = learner.step(samples).metrics["kl"]
    assert third == pytest.approx(float(after.detach()), rel=1e-3), "the teacher has not"


@pytest.mark.parametrize("lora", [False, True])
def test_the_policy_of_the_moment_teaches_itself(policy_dir: Path, tmp_path: Path, lora: bool):
    samples = hinted(make_batch(6))
    learner = make_learner(policy_dir, {"policy": "current"}, lora=lora, lr=1e-2)
    learner.step(samples)
    learner.export(tmp_path / "now")
    wanted, kl = wanted_full(tmp_path / "now", tmp_path / "now", samples)
    gradient, metrics = step(learner, samples)
    assert metrics["kl"] == pytest.approx(kl, rel=1e-3)
    assert lora or close(gradient, wanted), "no gradient flows through the teacher"


def test_the_average_follows_the_policy_and_is_part_of_a_checkpoint(policy_dir: Path, tmp_path: Path):
    samples, rate = hinted(make_batch(7)), 0.3
    given = {"policy": "average", "rate": rate}
    learner = make_learner(policy_dir, given, lr=1e-2)
    average = {name: value.clone() for name, value in learner.weights().items()}
    for _ in range(3):
        learner.step(samples)
        for name, value in learner.weights().items():
            average[name] += rate * (value - average[name])
    assert learner.reference is not None
    for name, value in learner.reference.named_parameters():
        assert torch.allclose(value, average[name], atol=1e-6)
    saved = tmp_path / "step-3"
    saved.mkdir()
    learner.save(saved)
    again = make_learner(saved, given, lr=1e-2, average_dir=saved / AVERAGE_FOLDER)
    again.load_optimizer(saved)
    for _ in range(2):
        assert learner.step(samples).metrics == again.step(samples).metrics
    first, second = learner.weights(), again.weights()
    assert all(first[name].equal(second[name]) for name in first)


def test_micro_batches_have_room_for_hints():
    samples = make_batch(8, groups=4)
    rows = [replace(s, hinted=HintedOpening(1, (n, *[7] * 80))) for n, s in enumerate(samples)]
    for batch in micro_batches(rows, 300):
        assert len(pack([as_taught(row) for row in batch]).ids_T) <= 300
    assert len(micro_batches(rows, 300)) > len(micro_batches(samples, 300))
