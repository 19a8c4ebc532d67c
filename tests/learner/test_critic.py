"""The critic: where its values stand, what it learns, that nothing of it is lost on its way to disk and back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForTokenClassification

from agentrl.algo.advantages.gae import gae_advantages
from agentrl.algo.aggregate import totals_of_lengths
from agentrl.algo.returns import rewards_at_end, whiten
from agentrl.config.algorithm import AlgorithmConfig, CriticConfig
from agentrl.config.run import LearnerConfig, OptimConfig
from agentrl.errors import AgentRLError, ConfigError
from agentrl.learner.critic import load_critic
from agentrl.learner.pack import pack
from agentrl.trainer.samples import Flat
from tests.learner.direct import DirectLearner
from tests.learner.train_models import make_batch, make_sample, relative, scored, write_model


@pytest.fixture(scope="module")
def small_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("critic_policy"), seed=3, layers=1)


def make(
    policy: Path,
    *,
    tokens: int = 16384,
    critic_dir: Path | None = None,
    gae: dict[str, Any] | None = None,
    optim: dict[str, Any] | None = None,
    **critic: Any,
) -> DirectLearner:
    return DirectLearner(
        policy,
        algorithm=AlgorithmConfig(advantage={"name": "gae", **(gae or {})}, kl={"coef": 0.0}),
        optim=OptimConfig(**{"lr": 1e-3, "warmup_steps": 0, "max_grad_norm": 1e9} | (optim or {})),
        config=LearnerConfig(device="cpu", tokens_per_micro_batch=tokens),
        temperature=1.0,
        total_steps=10,
        critic=CriticConfig(**{"lr": 1e-2} | critic),
        critic_dir=critic_dir or policy,
    )


def test_it_begins_at_zero_and_stands_where_a_token_is_predicted(small_dir: Path):
    critic = make(small_dir).critic
    packed = pack(make_batch(1, groups=2, size=2))
    with torch.no_grad():
        assert bool((critic.values(packed) == 0).all())
        critic.model.score.weight.normal_()
        one = make_sample([5, 6, 7, 8], {2, 3})
        changed = make_sample([5, 6, 9, 8], {2, 3})
        before, after = critic.values(pack([one])), critic.values(pack([changed]))
    assert before[0] == after[0], "the value of a token does not see the token"
    assert before[1] != after[1]


def test_advantages_carry_values_across_observations(small_dir: Path):
    """Two turns with an observation between them: what GAE sees are the sampled tokens, one after the other."""
    learner = make(small_dir, gae={"gamma": 0.9, "lam": 0.8})
    with torch.no_grad():
        learner.critic.model.score.weight.normal_()
    samples = [make_sample(range(10, 22), {2, 3, 4, 8, 9}, episode=e, group=g) for g, e in enumerate("ab")]
    rows, scores = scored(samples)
    prepared = learner.prepared(rows, scores)
    flat = Flat.of(prepared.samples)
    rewards_N = rewards_at_end(torch.tensor(scores.rewards, dtype=torch.float64), flat.sequence_N)
    values_N = flat.column("values")
    advantages_N, returns_N = gae_advantages(rewards_N, values_N, flat.sequence_N, gamma=0.9, lam=0.8)
    assert torch.allclose(flat.trained("advantages"), whiten(advantages_N))
    assert torch.allclose(flat.column("returns"), returns_N)
    assert float(advantages_N[4]) == pytest.approx(scores.rewards[0] - float(values_N[4])), "the last token"


def test_it_learns_the_returns_while_the_policy_waits(small_dir: Path):
    learner = make(small_dir, warmup_steps=12, value_clip=None)
    before = {name: value.clone() for name, value in learner.weights().items()}
    rows, scores = scored(make_batch(1, groups=3, size=4))
    errors = [learner.step(rows, scores).metrics for _ in range(12)]
    assert errors[-1]["critic/value_error"] < 0.5 * errors[0]["critic/value_error"]
    assert errors[-1]["critic/explained_variance"] > errors[0]["critic/explained_variance"]
    assert "grad_norm" in errors[0]
    assert all(torch.equal(value, before[name]) for name, value in learner.weights().items())
    update = learner.step(rows, scores)
    assert update.metrics["grad_norm"] > 0
    assert not all(torch.equal(value, before[name]) for name, value in learner.weights().items())


def test_no_split_changes_its_gradient(small_dir: Path):
    rows, scores = scored(make_batch(2, groups=2, size=3))
    found = []
    for tokens in (16384, 70):
        learner = make(small_dir, tokens=tokens)
        for model in (learner.policy, learner.critic.model):
            model.double()
        with torch.no_grad():
            torch.manual_seed(0)
            learner.critic.model.score.weight.normal_(0, 0.1)
        learner.critic.optimizer.register_step_pre_hook(
            lambda *_, learner=learner: found.append(
                torch.cat([p.grad.flatten() for p in learner.critic.model.parameters()])
            )
        )
        learner.step(rows if tokens == 70 else rows[::-1], scores)
    assert found[0].norm() > 0
    assert relative(found[1], found[0]) < 1e-6


def test_the_value_head_and_its_optimizer_come_back_from_disk(small_dir: Path, tmp_path: Path):
    learner = make(small_dir)
    rows, scores = scored(make_batch(3, groups=2, size=3))
    for _ in range(2):
        learner.step(rows, scores)
    learner.save(tmp_path)
    other = make(tmp_path, critic_dir=tmp_path / "critic")
    other.load_optimizer(tmp_path)
    packed = pack(rows)
    with torch.no_grad():
        values_N = learner.critic.values(packed)
        assert float(values_N.abs().max()) > 0
        assert torch.equal(values_N, other.critic.values(packed))
        plain = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic", num_labels=1)
        assert torch.equal(plain.score.weight, learner.critic.model.score.weight)
    first, second = learner.step(rows, scores), other.step(rows, scores)
    assert first.metrics == second.metrics
    assert all(
        torch.equal(a, b)
        for a, b in zip(learner.critic.model.parameters(), other.critic.model.parameters(), strict=True)
    )


def test_its_rate_follows_the_policys_schedule_also_after_a_resume(small_dir: Path, tmp_path: Path):
    optim = {"warmup_steps": 4, "schedule": "linear"}
    rows, scores = scored(make_batch(3, groups=1, size=2))

    def rates(learner: DirectLearner, steps: int) -> list[float]:
        learner.critic.optimizer.register_step_pre_hook(
            lambda optimizer, *_: found.append(optimizer.param_groups[0]["lr"])
        )
        found: list[float] = []
        for _ in range(steps):
            learner.step(rows, scores)
        return found

    learner = make(small_dir, optim=optim, lr=1e-2)
    assert rates(learner, 3) == pytest.approx([0.25e-2, 0.5e-2, 0.75e-2])
    learner.save(tmp_path)
    other = make(tmp_path, critic_dir=tmp_path / "critic", optim=optim, lr=1e-2)
    other.load_optimizer(tmp_path)
    fall = [1 - 0.9 * done / 5 for done in range(6)]  # to a tenth at the tenth and last step
    assert rates(other, 7) == pytest.approx([1e-2 * share for share in (1.0, *fall)])


@pytest.mark.parametrize("scale", [None, 50.0])
def test_its_loss_has_its_own_aggregation_and_scale(small_dir: Path, scale: float | None):
    kind = "seq-mean-token-mean" if scale is None else "seq-mean-token-sum-norm"
    critic = make(small_dir, aggregation=kind, aggregation_scale=scale, value_clip=0.5).critic
    columns = (
        {"values": (0.0,), "returns": (2.0,)},
        {"values": (0.0, 0.0, 1.0), "returns": (1.0, -1.0, -0.5)},
    )
    rows = [make_sample(range(10, 16), {3}, episode="a"), make_sample(range(20, 26), {2, 4, 5}, episode="b")]
    packed = pack([replace(row, columns=own) for row, own in zip(rows, columns, strict=True)])
    loss, metrics = critic.loss(packed, totals_of_lengths([1, 3]))
    of_a, of_b = [4.0], [1.0, 1.0, 1.0]  # the values are 0, and the last counts as 0.5, to which it is clipped
    sums = sum(of_a) / 1 + sum(of_b) / 3 if scale is None else (sum(of_a) + sum(of_b)) / scale
    assert float(loss.detach()) == pytest.approx(sums / 2 / 2), "half the square, and the mean of two episodes"
    assert metrics["critic/value_clip_fraction"].value == 1


def test_weights_that_are_missing_or_become_infinite_are_said(small_dir: Path, tmp_path: Path):
    learner = make(small_dir, lr=1e39)
    rows, scores = scored(make_batch(3, groups=1, size=2))
    with pytest.raises(AgentRLError, match="step 1: the update made weights of the critic that are not finite"):
        learner.step(rows, scores)
    copytree(small_dir, tmp_path / "torn")
    file = tmp_path / "torn" / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if "q_proj" not in k}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"torn holds no weights for model\.layers\.0\.self_attn\.q_proj"):
        load_critic(tmp_path / "torn")


def test_what_cannot_be_a_critic_is_said(tmp_path: Path, small_dir: Path):
    with pytest.raises(
        ConfigError, match=r"critic: .* has no config.json, so it is not a Hugging Face model directory"
    ):
        load_critic(tmp_path)
    learner = make(small_dir)
    with torch.no_grad():
        learner.critic.model.score.weight.fill_(torch.inf)
    rows, scores = scored(make_batch(3, groups=1, size=2))
    with pytest.raises(AgentRLError, match="step 1: the critic's gradient is nan"):
        learner.step(rows, scores)
