"""One step of the learner against plain padded computations, and what it keeps on disk."""

from __future__ import annotations

import asyncio
import json
import math
import random
import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentrl.config.algorithm import CriticConfig
from agentrl.config.run import AlgorithmConfig, LearnerConfig, OptimConfig
from agentrl.engine.local.flat_model import load_model
from agentrl.errors import AgentRLError, CheckpointError, ConfigError
from agentrl.learner import policy_rank
from agentrl.learner.critic import Critic
from agentrl.learner.learner import Learner
from agentrl.learner.policy_model import load_policy
from agentrl.learner.policy_rank import LocalPolicyRank
from agentrl.learner.rank import InProcess, LearnerSpec
from agentrl.learner.reference import Reference
from agentrl.learner.shard import World
from agentrl.models.device import use_device
from agentrl.preflight.shape import ModelShape
from agentrl.types import Sample
from tests.learner.direct import DirectLearner
from tests.learner.train_models import (
    gradients,
    make_batch,
    make_sample,
    padded_logprobs,
    plain_model,
    relative,
    write_model,
)

TEMPERATURE = 0.7
KL = 0.05
NO_CLIP = 1e9


def make_learner(
    policy: Path,
    reference: Path | None = None,
    *,
    algorithm: AlgorithmConfig | None = None,
    tokens: int = 16384,
    total_steps: int = 100,
    **optim: object,
) -> DirectLearner:
    return DirectLearner(
        policy,
        algorithm=algorithm or AlgorithmConfig(kl={"coef": 0.0 if reference is None else KL}),
        optim=OptimConfig(**{"lr": 1e-3, "warmup_steps": 0, "max_grad_norm": NO_CLIP} | optim),
        config=LearnerConfig(device="cpu", tokens_per_micro_batch=tokens),
        temperature=TEMPERATURE,
        total_steps=total_steps,
        reference_dir=reference,
    )


def record(learner: DirectLearner) -> list[tuple[Tensor, list[Tensor]]]:
    """Collects (gradient, parameters) as they are right before each optimizer update."""
    seen: list[tuple[Tensor, list[Tensor]]] = []

    def look(*_: object) -> None:
        seen.append((gradients(learner.policy), [p.detach().clone() for p in learner.policy.parameters()]))

    learner.optimizer.register_step_pre_hook(look)
    return seen


def token_weights(kind: str, samples: Sequence[Sample]) -> list[float]:
    """The weight of each row's tokens in the loss, from the definition of the aggregation."""
    lengths: dict[str, int] = {}
    for s in samples:
        lengths[s.episode_id] = lengths.get(s.episode_id, 0) + sum(s.loss_mask)
    by_kind = {
        "token-mean": lambda s: 1 / sum(lengths.values()),
        "token-sum": lambda s: 1.0,
        "seq-mean-token-sum": lambda s: 1 / len(lengths),
        "seq-mean-token-mean": lambda s: 1 / len(lengths) / lengths[s.episode_id],
    }
    return [by_kind[kind](s) for s in samples]


def padded_gradient(
    model: PreTrainedModel,
    reference: PreTrainedModel | None,
    samples: Sequence[Sample],
    *,
    kind: str = "token-mean",
    old: Sequence[Tensor] | None = None,
    low: float = 0.2,
    high: float = 0.28,
) -> Tensor:
    """The gradient of the clipped surrogate plus KL penalty, from one right-padded batch."""
    model.zero_grad()
    new = padded_logprobs(model, samples, TEMPERATURE)
    with torch.no_grad():
        ref = padded_logprobs(reference, samples, TEMPERATURE) if reference else None
    loss = torch.zeros(())
    for row, (sample, weight) in enumerate(zip(samples, token_weights(kind, samples), strict=True)):
        advantage = sample.advantages[0]
        ratio = (new[row] - (new[row].detach() if old is None else old[row])).exp()
        surrogate = torch.minimum(advantage * ratio, advantage * ratio.clamp(1 - low, 1 + high))
        loss = loss - weight * surrogate.clamp(min=3.0 * min(advantage, 0.0)).sum()  # dual clip
        if ref is not None:  # d^2 / 2 has the unbiased gradient of the KL
            loss = loss + KL * weight * ((new[row] - ref[row]) ** 2 / 2).sum()
    loss.backward()
    return gradients(model)


class TestGradient:
    @pytest.mark.parametrize("kind", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"])
    def test_it_is_that_of_the_padded_loss(self, policy_dir: Path, reference_dir: Path, kind: str):
        samples = make_batch(2)
        learner = make_learner(
            policy_dir, reference_dir, algorithm=AlgorithmConfig(aggregation=kind, kl={"coef": KL}), tokens=120
        )
        seen = record(learner)
        update = learner.step(samples)
        wanted = padded_gradient(plain_model(policy_dir), plain_model(reference_dir), samples, kind=kind)
        assert relative(seen[0][0], wanted) < 1e-5
        assert update.metrics["grad_norm"] == pytest.approx(float(wanted.norm()), rel=1e-5)
        assert update.trained == sum(sum(s.loss_mask) for s in samples)

    @pytest.mark.parametrize("kind", ["token-mean", "seq-mean-token-mean"])
    @pytest.mark.parametrize("tokens", [60, 100, 250, 16384])
    def test_no_split_and_no_order_changes_it(self, policy_dir: Path, reference_dir: Path, kind: str, tokens: int):
        algorithm = AlgorithmConfig(aggregation=kind, kl={"coef": KL})
        found = []
        for order, budget in ((None, 16384), (tokens, tokens)):
            samples = make_batch(3)
            if order is not None:
                random.Random(order).shuffle(samples)
            learner = make_learner(policy_dir, reference_dir, algorithm=algorithm, tokens=budget)
            seen = record(learner)
            found.append((learner.step(samples), seen[0][0]))
        (first, gradient), (second, other) = found
        assert relative(other, gradient) < 1e-5
        assert second.metrics == pytest.approx(first.metrics, rel=1e-4, abs=1e-6)

    def test_on_policy_it_is_minus_advantage_times_the_score(self, policy_dir: Path):
        """The clip does nothing where the ratio is 1, whatever the sampler said."""
        samples = make_batch(4)
        learner = make_learner(policy_dir)
        seen = record(learner)
        update = learner.step(samples)
        model = plain_model(policy_dir)
        scores = padded_logprobs(model, samples, TEMPERATURE)
        trained = sum(len(row) for row in scores)
        total = sum(s.advantages[0] * row.sum() for s, row in zip(samples, scores, strict=True))
        (-total / trained).backward()
        assert relative(seen[0][0], gradients(model)) < 1e-5
        assert update.metrics["clip_fraction"] == 0.0

    def test_the_penalty_pulls_towards_the_reference(self, policy_dir: Path, reference_dir: Path):
        """Without advantages only the KL term is left: its value is k3 and a small step down makes it smaller."""
        samples = [make_sample(s.ids, _trained(s), episode=s.episode_id, advantage=0.0) for s in make_batch(5)]
        learner = make_learner(policy_dir, reference_dir, lr=1e-4)
        values = [learner.step(samples).metrics["kl"] for _ in range(4)]
        with torch.no_grad():
            new = torch.cat(padded_logprobs(plain_model(policy_dir), samples, TEMPERATURE))
            ref = torch.cat(padded_logprobs(plain_model(reference_dir), samples, TEMPERATURE))
        assert values[0] == pytest.approx(float(((ref - new).exp() - 1 - (ref - new)).mean()), rel=1e-4)
        assert values[3] < values[0]
        assert all(not p.requires_grad for p in learner.reference.parameters())

    def test_the_policy_is_its_own_reference_at_the_start(self, policy_dir: Path):
        assert make_learner(policy_dir, policy_dir).step(make_batch(6)).metrics["kl"] == pytest.approx(0, abs=1e-9)

    def test_it_is_scaled_down_to_the_norm(self, policy_dir: Path):
        learner = make_learner(policy_dir, max_grad_norm=0.01)
        seen = record(learner)
        update = learner.step(make_batch(2))
        assert float(seen[0][0].norm()) == pytest.approx(0.01, rel=1e-3)
        assert update.metrics["grad_norm"] > 0.1

    def test_drift_is_against_the_samplers_logprobs(self, policy_dir: Path):
        samples = make_batch(7)
        with torch.no_grad():
            own = torch.cat(padded_logprobs(plain_model(policy_dir), samples, TEMPERATURE))
        sampler = torch.tensor([v for s in samples for v, on in zip(s.logprobs, s.loss_mask, strict=True) if on])
        metrics = make_learner(policy_dir, tokens=100).step(samples).metrics
        assert metrics["drift/mean_abs"] == pytest.approx(float((own - sampler).abs().mean()), rel=1e-5)
        assert metrics["drift/max_abs"] == pytest.approx(float((own - sampler).abs().max()), rel=1e-5)


def _trained(sample: Sample) -> set[int]:
    return {t for t, on in enumerate(sample.loss_mask) if on}


class TestUpdates:
    def test_the_second_update_is_off_policy_against_before_the_first(self, policy_dir: Path):
        samples = make_batch(8)
        episodes = list(dict.fromkeys(s.episode_id for s in samples))
        second = [s for s in samples if episodes.index(s.episode_id) % 2 == 1]
        algorithm = AlgorithmConfig(kl={"coef": 0.0}, updates_per_step=2)
        learner = make_learner(policy_dir, algorithm=algorithm, lr=2e-3, tokens=100)
        seen = record(learner)
        update = learner.step(samples)
        assert len(seen) == 2
        assert update.metrics["clip_fraction"] > 0, "the first update moves the policy out of the clip"

        model = plain_model(policy_dir)
        with torch.no_grad():
            old = padded_logprobs(model, second, TEMPERATURE)
            for parameter, value in zip(model.parameters(), seen[1][1], strict=True):
                parameter.copy_(value)
        assert relative(seen[1][0], padded_gradient(model, None, second, old=old)) < 1e-4
        assert relative(seen[1][0], padded_gradient(model, None, second)) > 0.05

    def test_the_norm_of_a_step_is_that_of_its_largest_update(self, policy_dir: Path):
        algorithm = AlgorithmConfig(kl={"coef": 0.0}, updates_per_step=4)
        learner = make_learner(policy_dir, algorithm=algorithm, lr=2e-3)
        seen = record(learner)
        found = learner.step(make_batch(8)).metrics["grad_norm"]
        norms = [float(torch.stack([g.norm() for g in gradient]).norm()) for gradient, _ in seen]
        assert len(norms) == 4
        assert max(norms) > 1.05 * min(norms)
        assert found == pytest.approx(max(norms), rel=1e-4)

    @pytest.mark.parametrize("lr", [0.0, 1e-4, 3e-3])
    def test_imitation_takes_the_rate_that_it_is_given(self, policy_dir: Path, lr: float):
        learner = make_learner(policy_dir, lr=1e-3)
        before = [p.detach().clone() for p in learner.policy.parameters()]
        learner.imitate(make_batch(4), lr)
        after = [p.detach() for p in learner.policy.parameters()]
        moved = max(float((p - q).abs().max()) for p, q in zip(after, before, strict=True))
        assert moved == pytest.approx(lr, rel=0.01, abs=1e-7), "Adam's first step is the rate"

    def test_episodes_are_dealt_out_whole(self, policy_dir: Path):
        samples = [make_sample([1, 2, 3, 4], {2, 3}, episode=e) for e in ("a", "b", "c", "a")]
        learner = make_learner(policy_dir, algorithm=AlgorithmConfig(kl={"coef": 0.0}, updates_per_step=8))
        seen = record(learner)
        assert learner.step(samples).trained == 8
        assert len(seen) == 3, "no more updates than episodes"

    @pytest.mark.parametrize(
        ("schedule", "wanted"),
        [
            ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
            ("linear", [0.5, 1.0, 1.0, 0.775, 0.55, 0.325, 0.1]),
            ("cosine", [0.5, 1.0, 1.0, 0.868198, 0.55, 0.231802, 0.1]),
        ],
    )
    def test_the_learning_rate_rises_and_falls_to_a_tenth_at_the_last_step(self, policy_dir, schedule, wanted):
        learner = make_learner(policy_dir, total_steps=7, lr=0.01, warmup_steps=2, schedule=schedule)
        rates = [learner.step([]).metrics["lr"] for _ in range(7)]
        assert [rate / 0.01 for rate in rates] == pytest.approx(wanted, abs=1e-6)

    def test_a_step_without_signal_changes_nothing(self, policy_dir: Path):
        learner = make_learner(policy_dir, weight_decay=0.1)
        before = {name: value.clone() for name, value in learner.weights().items()}
        update = learner.step([])
        assert (update.tokens, update.trained, update.metrics["grad_norm"]) == (0, 0, 0.0)
        assert all(torch.equal(value, before[name]) for name, value in learner.weights().items())

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_a_gradient_that_is_not_finite_stops_and_harms_nothing(self, policy_dir: Path, bad: float):
        learner = make_learner(policy_dir)
        before = {name: value.clone() for name, value in learner.weights().items()}
        samples = make_batch(2)
        samples[1] = make_sample(samples[1].ids, _trained(samples[1]), episode="bad", advantage=bad)
        with pytest.raises(AgentRLError, match=r"step 1: the gradient is (nan|inf); lower optim\.lr \(0\.001\)"):
            learner.step(samples)
        assert all(torch.equal(value, before[name]) for name, value in learner.weights().items())
        learner.step(make_batch(2))
        assert all(value.isfinite().all() for value in learner.weights().values())

    def test_imitation_is_the_mean_over_the_tokens_and_stops_likewise(self, policy_dir: Path):
        samples = make_batch(9)
        learner = make_learner(policy_dir, tokens=100)
        with torch.no_grad():
            rows = torch.cat(padded_logprobs(plain_model(policy_dir), samples))
        first = learner.imitate(samples, lr=1e-3)
        assert first == pytest.approx(-float(rows.mean()), rel=1e-5)
        assert learner.imitate(samples, lr=1e-3) < first
        with torch.no_grad():
            next(learner.policy.parameters()).fill_(math.inf)
        with pytest.raises(AgentRLError, match="gradient is"):
            learner.imitate(samples, lr=1e-3)


class TestSaving:
    @pytest.fixture
    def saved(self, policy_dir: Path, reference_dir: Path, tmp_path: Path) -> tuple[DirectLearner, Path]:
        learner = make_learner(policy_dir, reference_dir, schedule="linear")
        for seed in range(2):
            learner.step(make_batch(seed))
        folder = tmp_path / "step-2"
        folder.mkdir()
        learner.save(folder)
        return learner, folder

    def test_going_on_is_the_same_to_the_bit(self, saved: tuple[DirectLearner, Path], reference_dir: Path):
        learner, folder = saved
        other = make_learner(folder, reference_dir, schedule="linear")
        other.load_optimizer(folder)
        for seed in (2, 3):
            assert learner.step(make_batch(seed)).metrics == other.step(make_batch(seed)).metrics
        ours, theirs = learner.weights(), other.weights()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        without = make_learner(folder, reference_dir, schedule="linear")
        without.step(make_batch(2))
        assert not torch.equal(without.weights()["model.norm.weight"], ours["model.norm.weight"])

    def test_what_is_saved_is_a_model_of_transformers(self, saved: tuple[DirectLearner, Path]):
        learner, folder = saved
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.config.architectures == ["Qwen3ForCausalLM"]
        assert "agentrl" not in (folder / "config.json").read_text()
        ids = torch.tensor([make_batch(5)[0].ids])
        with torch.no_grad():
            found = torch.log_softmax(model(ids).logits[0, :-1] / TEMPERATURE, -1)
        sample = make_sample(ids[0].tolist(), set(range(1, ids.shape[1])))
        from agentrl.learner.pack import pack

        with torch.no_grad():
            ours = learner._stats(learner.policy, pack([sample])).logprobs_N
        assert torch.allclose(ours, found.gather(1, ids[0, 1:, None])[:, 0], atol=1e-5)

    def test_a_checkpoint_of_another_model_is_refused(self, saved: tuple[DirectLearner, Path], tmp_path: Path):
        _, folder = saved
        for other, said in (
            (write_model(tmp_path / "small", seed=0, layers=1), "is not a parameter of this model"),
            (write_model(tmp_path / "wide", seed=0, hidden=48), "does not fit"),
        ):
            with pytest.raises(CheckpointError, match=said):
                make_learner(other).load_optimizer(folder)

    @pytest.mark.parametrize("missing", [False, True])
    @pytest.mark.parametrize("name", ["learner.json", "optimizer.safetensors"])
    def test_a_damaged_checkpoint_is_named(
        self, saved: tuple[DirectLearner, Path], policy_dir: Path, name: str, missing: bool
    ):
        _, folder = saved
        if missing:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes((folder / name).read_bytes()[:10])
        with pytest.raises(CheckpointError, match="step-2 cannot be resumed: "):
            make_learner(policy_dir).load_optimizer(folder)


class TestLoading:
    @pytest.mark.parametrize(
        "damage",
        [
            "missing",
            "no config",
            "config is no JSON",
            "another kind of model",
            "no weights",
            "weights cut short",
            "weights of another shape",
            "weights are missing",
            "asks for weights of the attention",
        ],
    )
    def test_a_model_that_cannot_be_used_is_one_clear_error(self, policy_dir: Path, tmp_path: Path, damage: str):
        folder = tmp_path / "model"
        if damage != "missing":
            shutil.copytree(policy_dir, folder)
        config, weights = folder / "config.json", folder / "model.safetensors"
        match damage:
            case "no config":
                config.unlink()
            case "config is no JSON":
                config.write_text("{")
            case "another kind of model":
                config.write_text('{"model_type": "clip"}')
            case "no weights":
                weights.unlink()
            case "weights cut short":
                weights.write_bytes(weights.read_bytes()[:-100])
            case "weights of another shape":
                shutil.copyfile(write_model(tmp_path / "wide", seed=0, hidden=48) / weights.name, weights)
            case "weights are missing":
                shutil.copyfile(write_model(tmp_path / "small", seed=0, layers=1) / weights.name, weights)
            case "asks for weights of the attention":
                config.write_text(json.dumps(json.loads(config.read_text()) | {"output_attentions": True}))
        with pytest.raises(ConfigError) as caught:
            load_policy(folder, torch.device("cpu"))
        assert str(caught.value).startswith(f"model directory {folder}")
        assert len(str(caught.value)) < 600

    @pytest.mark.parametrize("load", ["learner", "engine"])
    def test_rotations_that_change_with_the_batch_are_refused(self, policy_dir: Path, tmp_path: Path, load: str):
        folder = tmp_path / "model"
        shutil.copytree(policy_dir, folder)
        config = json.loads((folder / "config.json").read_text())
        config["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ConfigError, match="rotary embeddings of type 'dynamic'"):
            load_policy(folder, torch.device("cpu")) if load == "learner" else load_model(
                folder, dtype="float32", device="cpu"
            )

    def test_heads_that_cannot_share_keys_evenly_are_refused(self, policy_dir: Path, tmp_path: Path):
        folder = tmp_path / "model"
        shutil.copytree(policy_dir, folder)
        config = json.loads((folder / "config.json").read_text()) | {
            "num_attention_heads": 4,
            "num_key_value_heads": 3,
        }
        (folder / "config.json").write_text(json.dumps(config))
        for load in (lambda: load_policy(folder, torch.device("cpu")), lambda: ModelShape.of_directory(folder)):
            with pytest.raises(ConfigError, match="num_attention_heads: 4 and num_key_value_heads: 3; the first"):
                load()

    def test_the_engine_refuses_missing_weights_too(self, policy_dir: Path, tmp_path: Path):
        folder = tmp_path / "model"
        shutil.copytree(policy_dir, folder)
        small = write_model(tmp_path / "small", seed=0, layers=1) / "model.safetensors"
        shutil.copyfile(small, folder / "model.safetensors")
        with pytest.raises(ConfigError, match="holds no weights for 'model"):
            load_model(folder, dtype="float32", device="cpu")


def test_all_ranks_return_the_gpu_memory_that_they_keep(policy_dir: Path, monkeypatch: pytest.MonkeyPatch):
    freed: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(threading.current_thread().name))
    spec = LearnerSpec(
        policy_dir,
        algorithm=AlgorithmConfig(),
        optim=OptimConfig(),
        config=LearnerConfig(device="cpu"),
        temperature=1.0,
        total_steps=1,
        reference_dir=policy_dir,
        critic=CriticConfig(),
        critic_dir=policy_dir,
    )
    policy = LocalPolicyRank(replace(spec, reference_dir=None, critic_dir=None))
    reference, critic = Reference(spec, World()), Critic(spec, World())
    learner = Learner(
        spec,
        InProcess(policy, policy),
        reference=InProcess(reference, reference),
        critic=InProcess(critic, critic),
    )
    asyncio.run(learner.release())
    asyncio.run(learner.close())
    assert len(freed) == 3
    assert {name.partition("_")[0] for name in freed} == {"agentrl-learner"}


def test_the_learners_device_is_that_of_every_thread_that_computes(
    policy_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    used: list[tuple[str, str]] = []
    monkeypatch.setattr(
        policy_rank, "use_device", lambda device: used.append((threading.current_thread().name, device.type))
    )
    learner = policy_rank.local_learner(
        LearnerSpec(policy_dir, AlgorithmConfig(), OptimConfig(), LearnerConfig(device="cpu"), 1.0, 1)
    )
    asyncio.run(learner.probe([make_sample([1, 2, 3], [1, 2])]))
    asyncio.run(learner.close())
    assert used == [(threading.current_thread().name, "cpu"), ("agentrl-learner_0", "cpu")]


def test_a_device_with_or_without_number_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch):
    chosen: list[torch.device | int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    for name in ("cpu", "cuda", "cuda:1"):
        use_device(torch.device(name))
    assert chosen == [2, torch.device("cuda:1")], "a DeviceMesh warns where no device was chosen"
