"""Several passes over a step's episodes: a plain PyTorch loop does the same, on any split, and after a resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForTokenClassification, PreTrainedModel

from agentrl.algo.advantages.gae import gae_advantages
from agentrl.algo.returns import rewards_at_end, whiten
from agentrl.config.algorithm import AlgorithmConfig, CriticConfig
from agentrl.config.run import LearnerConfig, OptimConfig
from agentrl.learner.split import Passes
from agentrl.trainer.algorithm import Algorithm
from agentrl.trainer.samples import Scores
from agentrl.types import Sample
from tests.learner.direct import DirectLearner
from tests.learner.train_models import double, make_batch, padded_logprobs, plain_model, scored, write_model

KL, LR, CRITIC_LR, CLIP, SEED = 0.05, 2e-3, 1e-2, (0.2, 0.28, 3.0), 7
OPTIM: dict[str, Any] = {"betas": (0.9, 0.99), "weight_decay": 0.1}


@pytest.fixture(scope="module")
def small_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("epochs_policy"), seed=3, layers=1)


@pytest.fixture(scope="module")
def other_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("epochs_reference"), seed=4, layers=1)


def make(
    policy: Path, reference: Path, *, tokens: int = 16384, exact: bool = True, **algorithm: Any
) -> DirectLearner:
    critic = CriticConfig(lr=CRITIC_LR, **algorithm.pop("critic", {})) if "critic" in algorithm else None
    learner = DirectLearner(
        policy,
        algorithm=AlgorithmConfig(kl={"coef": KL, "kind": "k3"}, **algorithm),
        optim=OptimConfig(lr=LR, warmup_steps=0, max_grad_norm=0.5, **OPTIM),
        config=LearnerConfig(device="cpu", tokens_per_micro_batch=tokens, logits_at_once=0),
        temperature=1.0,
        total_steps=10,
        reference_dir=reference,
        critic=critic,
        critic_dir=policy if critic else None,
        seed=SEED,
    )
    for model in (learner.policy, learner.reference, learner.critic and learner.critic.model):
        if model is not None and exact:
            double(model)
    return learner


def plain_optimizer(model: PreTrainedModel, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, **OPTIM)


def clipped_step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, loss: Tensor, norm: float) -> None:
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
    optimizer.step()


def surrogate(new_N: Tensor, old_N: Tensor, ref_N: Tensor, adv_N: Tensor) -> Tensor:
    """PPO's loss with the dual clip, and the k3 penalty."""
    low, high, dual = CLIP
    ratio_N = (new_N - old_N).exp()
    loss_N = torch.maximum(-adv_N * ratio_N, -adv_N * ratio_N.clamp(1 - low, 1 + high))
    loss_N = torch.where(adv_N < 0, torch.minimum(loss_N, -adv_N * dual), loss_N)
    return (loss_N + KL * ((ref_N - new_N).exp() - 1 - (ref_N - new_N))).mean()


def by_row(model: PreTrainedModel, rows: list[Sample]) -> dict[int, Tensor]:
    return dict(zip(map(id, rows), padded_logprobs(model, rows), strict=True))


def plain_loop(
    policy: Path, reference: Path, rows: list[Sample], advantages: dict[int, Tensor], passes: Passes
) -> PreTrainedModel:
    """Epochs times mini-batches of PPO, as any textbook has it."""
    model, frozen = double(plain_model(policy)), double(plain_model(reference))
    optimizer = plain_optimizer(model, LR)
    with torch.no_grad():
        old, ref = by_row(model, rows), by_row(frozen, rows)
    for episodes in passes.mini_batches(list(dict.fromkeys(row.episode_id for row in rows))):
        part = [row for row in rows if row.episode_id in episodes]
        new = by_row(model, part)
        columns = [torch.cat([column[id(row)] for row in part]) for column in (new, old, ref, advantages)]
        clipped_step(model, optimizer, surrogate(*columns), 0.5)
    return model


def same_weights(learner: DirectLearner, model: PreTrainedModel, tolerance: float = 1e-6) -> None:
    wanted = dict(model.named_parameters())
    for name, value in learner.policy.named_parameters():
        assert float((value - wanted[name]).detach().abs().max()) < tolerance, name


def grouped(rows: list[Sample], scores: Scores) -> dict[int, Tensor]:
    rewards, groups = torch.tensor(scores.rewards, dtype=torch.float64), torch.tensor(scores.groups)
    value = {}
    for index, name in enumerate(scores.episodes):
        own = rewards[groups == groups[index]]
        value[name] = float((rewards[index] - own.mean()) / (own.std() + 1e-6))
    return {id(row): torch.full((sum(row.loss_mask),), value[row.episode_id]).double() for row in rows}


@pytest.mark.parametrize("tokens", [16384, 90])
def test_grpo_of_four_epochs_of_four_mini_batches_is_a_plain_loop(small_dir: Path, other_dir: Path, tokens: int):
    rows, scores = scored(make_batch(1))
    learner = make(small_dir, other_dir, tokens=tokens, epochs=4, updates_per_step=4)
    metrics = learner.step(rows, scores).metrics
    same_weights(learner, plain_loop(small_dir, other_dir, rows, grouped(rows, scores), Passes(4, 4, SEED)))
    assert metrics["update/1/policy_kl"] == pytest.approx(0, abs=1e-12), "the first is on policy"
    assert metrics["update/16/policy_kl"] != pytest.approx(0, abs=1e-6)
    assert metrics["update/16/clip_fraction"] > metrics["update/1/clip_fraction"] == 0
    assert {f"update/{n}/grad_norm" for n in range(1, 17)} <= metrics.keys()
    assert "update/17/loss" not in metrics


def test_ppo_of_four_epochs_of_four_mini_batches_is_a_plain_loop(small_dir: Path, other_dir: Path):
    """The critic deals the same episodes out its own way, and takes the mean over episodes."""
    rows, scores = scored(make_batch(2))
    critic = {"epochs": 2, "updates_per_step": 3, "aggregation": "seq-mean-token-mean", "value_clip": 0.1}
    learner = make(small_dir, other_dir, advantage="gae", epochs=4, updates_per_step=4, critic=critic)
    learner.step(rows, scores)

    values, returns, advantages = first_estimates(small_dir, rows, scores)
    same_weights(learner, plain_loop(small_dir, other_dir, rows, advantages, Passes(4, 4, SEED)))
    model = value_model(small_dir)
    optimizer = plain_optimizer(model, CRITIC_LR)
    for episodes in Passes(3, 2, SEED).mini_batches(scores.episodes):
        part = [row for row in rows if row.episode_id in episodes]
        new = plain_values(model, part)
        losses: dict[str, list[Tensor]] = {}
        for row in part:
            near = values[id(row)] + (new[id(row)] - values[id(row)]).clamp(-0.1, 0.1)
            wrong = torch.maximum((new[id(row)] - returns[id(row)]) ** 2, (near - returns[id(row)]) ** 2) / 2
            losses.setdefault(row.episode_id, []).append(wrong)
        mean = torch.stack([torch.cat(parts).mean() for parts in losses.values()]).mean()
        clipped_step(model, optimizer, mean, 1.0)
    assert learner.critic is not None
    wanted = dict(model.named_parameters())
    for name, value in learner.critic.model.named_parameters():
        assert float((value - wanted[name]).detach().abs().max()) < 1e-6, name


def value_model(directory: Path) -> PreTrainedModel:
    model = double(
        AutoModelForTokenClassification.from_pretrained(
            directory, num_labels=1, dtype=torch.float32, attn_implementation="sdpa"
        )
    )
    torch.nn.init.zeros_(model.score.weight)
    torch.nn.init.zeros_(model.score.bias)
    return model.eval()


def plain_values(model: PreTrainedModel, rows: list[Sample]) -> dict[int, Tensor]:
    found = {}
    for row in rows:
        logits_L = model(input_ids=torch.tensor([row.ids]), use_cache=False).logits[0, :, 0]
        found[id(row)] = logits_L[[t - 1 for t, on in enumerate(row.loss_mask) if on]]
    return found


def first_estimates(
    directory: Path, rows: list[Sample], scores: Scores
) -> tuple[dict[int, Tensor], dict[int, Tensor], dict[int, Tensor]]:
    """Values, returns and whitened advantages before the step, by row."""
    counts = [sum(row.loss_mask) for row in rows]
    number = {name: i for i, name in enumerate(scores.episodes)}
    sequence = torch.cat([torch.full((n,), number[r.episode_id]) for r, n in zip(rows, counts, strict=True)])
    with torch.no_grad():
        values = plain_values(value_model(directory), rows)
    rewards = rewards_at_end(torch.tensor(scores.rewards, dtype=torch.float64), sequence)
    flat = torch.cat(list(values.values()))
    advantages, returns = gae_advantages(rewards, flat, sequence)
    keys = list(map(id, rows))

    def split(values_N: Tensor) -> dict[int, Tensor]:
        return dict(zip(keys, torch.split(values_N, counts), strict=True))

    return values, split(returns), split(whiten(advantages))


@pytest.mark.parametrize(
    ("config", "needs"),
    [
        ({}, set()),
        ({"epochs": 2}, {"learner_logprobs"}),
        ({"updates_per_step": 2}, {"learner_logprobs"}),
        ({"epochs": 2, "updates_per_step": 2, "old_logprobs": "sampler"}, set()),
        ({"kl": {"coef": 0.1}}, set()),
        ({"kl": {"coef": 0.1}, "epochs": 2}, {"learner_logprobs", "ref_logprobs"}),
        ({"correction": {"veto": 1e-4}}, {"learner_logprobs"}),
        ({"correction": {"reject": {"token_k1": 2.0}}}, {"learner_logprobs"}),
        ({"correction": {"importance": "token", "normalize": True}}, {"learner_logprobs"}),
        ({"loss": "kl_cov"}, {"learner_logprobs"}),
        ({"entropy_top": 0.5}, {"entropy"}),
    ],
)
def test_what_later_updates_compare_with_is_measured_before_the_first(config: dict[str, Any], needs: set[str]):
    algorithm = Algorithm(AlgorithmConfig(**{"kl": {"coef": 0.0}} | config))
    assert (algorithm.loss_needs, algorithm.advantage_needs) == (needs, set())


def test_every_pass_has_its_own_order_and_all_episodes():
    names = [f"s3/g{g}/e{e}" for g in range(4) for e in range(4)]
    passes = Passes(updates=3, epochs=3, seed=1)
    batches = passes.mini_batches(names)
    assert [len(batch) for batch in batches] == [6, 5, 5] * 3
    epochs = [[name for part in batches[i : i + 3] for name in part] for i in (0, 3, 6)]
    assert all(sorted(epoch) == sorted(names) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert passes.mini_batches(names[::-1]) == batches, "it depends on names, not on the order of rows"
    assert Passes(3, 3, seed=2).mini_batches(names) != batches
    assert Passes(3, 2, seed=1).mini_batches(names) == batches[:6], "two passes are the first two of three"
    assert Passes(2).mini_batches(names) == [names[::2], names[1::2]]
    assert Passes(8).mini_batches(names[:3]) == [[n] for n in names[:3]]


def test_a_resumed_run_deals_the_episodes_out_alike(small_dir: Path, other_dir: Path, tmp_path: Path):
    settings: dict[str, Any] = {"exact": False, "epochs": 2, "updates_per_step": 2}
    learner = make(small_dir, other_dir, **settings)
    learner.step(*scored(make_batch(3)))
    learner.save(tmp_path)
    resumed = make(tmp_path, other_dir, **settings)
    resumed.load_optimizer(tmp_path)
    both: list[Callable[[], Any]] = [
        lambda m=m: m.step(*scored(make_batch(4))).metrics for m in (learner, resumed)
    ]
    assert both[0]() == both[1]()
    same_weights(resumed, learner.policy, 1e-12)
