"""A step's gradient against the formula of its paper, written with loops over episodes, in float64."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForTokenClassification, PreTrainedModel

from agentrl.config.algorithm import AlgorithmConfig, CriticConfig
from agentrl.config.run import LearnerConfig, OptimConfig
from agentrl.trainer.algorithm import Algorithm
from agentrl.trainer.samples import Scores, penalized
from agentrl.types import Episode, Group, Message, Sample, Segment, StopReason, Task, Turn
from tests.learner.direct import DirectLearner
from tests.learner.train_models import (
    VOCABULARY,
    gradients,
    make_batch,
    padded_logprobs,
    plain_model,
    relative,
    scored,
    write_model,
)

Terms = Callable[[Tensor, Tensor, float], Tensor]
"""The objective of the tokens of one episode: log-probabilities, old ones and the advantage."""


@pytest.fixture(scope="module")
def small_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("formula"), seed=5, layers=1)


def make(policy: Path, *, critic: CriticConfig | None = None, **algorithm: Any) -> DirectLearner:
    learner = DirectLearner(
        policy,
        algorithm=AlgorithmConfig(kl={"coef": 0.0}, **algorithm),
        optim=OptimConfig(lr=1e-3, warmup_steps=0, max_grad_norm=1e9),
        config=LearnerConfig(device="cpu", tokens_per_micro_batch=90, logits_at_once=0),
        temperature=1.0,
        total_steps=10,
        critic=critic,
        critic_dir=policy if critic else None,
    )
    learner.policy.double()
    return learner


def gradient(learner: DirectLearner, samples: list[Sample], scores: Scores | None = None) -> Tensor:
    """The gradient of the step's only update."""
    seen: list[Tensor] = []
    learner.optimizer.register_step_pre_hook(lambda *_: seen.append(gradients(learner.policy)))
    learner.step(samples, scores)
    (found,) = seen
    return found


def drifted(policy: Path, seed: int, *, groups: int = 2) -> list[Sample]:
    """Rows that a policy sampled whose log-probabilities were up to 1 away from this one's."""
    rows, draw = make_batch(seed, groups=groups, size=3), random.Random(seed)
    with torch.no_grad():
        true = padded_logprobs(plain_model(policy), rows)
    out = []
    for row, values in zip(rows, true, strict=True):
        own = iter(values.tolist())
        old = tuple(next(own) + draw.uniform(-1, 1) if on else 0.0 for on in row.loss_mask)
        out.append(replace(row, logprobs=old))
    return out


def by_episode(model: PreTrainedModel, rows: list[Sample]) -> dict[str, tuple[Tensor, Tensor, float]]:
    """New and old log-probabilities of each episode's tokens, all its rows together, and its advantage."""
    new = padded_logprobs(model, rows)
    found: dict[str, tuple[Tensor, Tensor, float]] = {}
    for name in dict.fromkeys(row.episode_id for row in rows):
        own = [i for i, row in enumerate(rows) if row.episode_id == name]
        old = [v for i in own for v, on in zip(rows[i].logprobs, rows[i].loss_mask, strict=True) if on]
        joined = torch.cat([new[i] for i in own])
        found[name] = joined, torch.tensor(old, dtype=joined.dtype), rows[own[0]].advantages[0]
    return found


def descended(model: PreTrainedModel, objective: Tensor) -> Tensor:
    (-objective).backward()
    return gradients(model)


def cispo_terms(low: float, high: float) -> Terms:
    """MiniMax-M1, equation 4: sg(clip(r, 1 - e_low, 1 + e_high)) A log pi."""

    def terms(new_N: Tensor, old_N: Tensor, advantage: float) -> Tensor:
        ratios = [
            min(max(math.exp(float(n) - float(o)), low), high) for n, o in zip(new_N.detach(), old_N, strict=True)
        ]
        return torch.tensor(ratios, dtype=new_N.dtype) * advantage * new_N

    return terms


def dro_terms(beta: float) -> Terms:
    """Direct reward optimization, its policy by token: A log pi - tau / 2 (log pi - log pi_old)^2."""
    return lambda new_N, old_N, advantage: advantage * new_N - beta / 2 * (new_N - old_N) ** 2


@pytest.mark.parametrize(
    ("loss", "terms"),
    [
        ({"name": "cispo"}, cispo_terms(0.0, 5.0)),
        ({"name": "cispo", "ratio_min": 0.8, "ratio_max": 1.3}, cispo_terms(0.8, 1.3)),
        ({"name": "dro"}, dro_terms(0.1)),
        ({"name": "dro", "beta": 0.7}, dro_terms(0.7)),
    ],
    ids=["cispo", "cispo_band", "dro", "dro_beta"],
)
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "token-sum"])
def test_a_loss_by_token(small_dir: Path, loss: dict[str, Any], terms: Terms, aggregation: str):
    rows = drifted(small_dir, 1)
    learner = make(small_dir, loss=loss, aggregation=aggregation, old_logprobs="sampler")
    found = gradient(learner, rows)
    model = plain_model(small_dir).double()
    parts = [terms(*episode) for episode in by_episode(model, rows).values()]
    objective = {
        "token-mean": sum(p.sum() for p in parts) / sum(len(p) for p in parts),
        "seq-mean-token-mean": sum(p.mean() for p in parts) / len(parts),
        "token-sum": sum(p.sum() for p in parts),
    }[aggregation]
    assert relative(found, descended(model, objective)) < 1e-6


@pytest.mark.parametrize(("low", "high"), [(0.4, 0.4), (0.1, 0.3)])
def test_geo_mean(small_dir: Path, low: float, high: float):
    """GMPO, equation 4: the geometric mean over tokens of min(r^s, clip(r)^s)^s with s the sign of A, times A."""
    rows = drifted(small_dir, 2)
    loss = {"name": "geo_mean", "clip_low": low, "clip_high": high}
    learner = make(small_dir, loss=loss, aggregation="seq-mean-token-mean", old_logprobs="sampler")
    found = gradient(learner, rows)
    model = plain_model(small_dir).double()
    episodes, objective = by_episode(model, rows), torch.zeros((), dtype=torch.float64)
    for new_N, old_N, advantage in episodes.values():
        sign, product = (1 if advantage > 0 else -1), torch.ones((), dtype=torch.float64)
        for new, old in zip(new_N, old_N, strict=True):
            ratio = (new - old).exp()
            clipped = ratio.clamp(math.exp(-low), math.exp(high))
            product = product * torch.minimum(ratio**sign, clipped**sign) ** sign
        objective = objective + advantage * product ** (1 / len(new_N)) / len(episodes)
    assert {a > 0 for _, _, a in episodes.values()} == {True, False}
    assert relative(found, descended(model, objective)) < 1e-6


PARTS = (
    ({"solved": 1.0, "short": 0.2}, {"solved": 0.0, "short": 0.9}, {"solved": 1.0, "short": 0.4}),
    ({"solved": 0.0, "short": 0.1}, {"solved": 0.0, "short": 0.5}, {"solved": 1.0}),
)
TURN_REWARDS = (((0.5, 1.0), (0.0, 0.0), (0.25, 0.0)), ((0.0, 1.0), (1.0, 0.5), (0.75, 0.25)))
END_REWARDS = ((1.0, 0.0, 0.5), (0.0, 1.0, 0.0))


def played(
    name: str, *, turns: tuple[float, ...] = (0.0, 0.0), end: float = 0.0, parts: dict[str, float] | None = None
) -> Episode:
    """An episode of sampled turns with an observation between them."""
    draw = random.Random(name)
    segments, messages, taken = [], [], []
    for reward in turns:
        for origin in ("prompt", "sampled"):
            ids = tuple(draw.randrange(VOCABULARY) for _ in range(draw.randint(2, 7)))
            extra = ((-1.0,) * len(ids), (0,) * len(ids)) if origin == "sampled" else ()
            segments.append(Segment(ids, origin, len(segments) - 1, len(messages), *extra))
            messages.append(Message("user" if origin == "prompt" else "assistant", "x"))
        taken.append(Turn(messages[-1], (), reward, "stop", len(ids), 0.0, 0.0))
    total = end + sum(turns)
    return Episode(
        name, Task("t"), tuple(messages), tuple(taken), tuple(segments), StopReason.ANSWERED, total, parts or {}
    )


def step_gradient(policy: Path, groups: list[Group], *, overlong: str = "train", **algorithm: Any) -> Tensor:
    """From groups to the gradient, as a run's step goes."""
    learner = make(policy, loss="gpg", **algorithm)
    learner.steps = Algorithm(learner.steps.config, overlong=overlong)
    rows = learner.steps.rows(groups)
    return gradient(learner, list(rows.samples), rows.scores)


def token_mean_gradient(policy: Path, weighed: list[tuple[Episode, tuple[float, ...]]]) -> Tensor:
    """Of A log pi over all sampled tokens, with the advantage of each turn."""
    model, total, count = plain_model(policy).double(), torch.zeros((), dtype=torch.float64), 0
    for episode, by_turn in weighed:
        ids = torch.tensor([i for segment in episode.segments for i in segment.ids])
        table = torch.log_softmax(model(input_ids=ids[None]).logits[0], -1)
        place = 0
        for number, segment in enumerate(episode.segments):
            for token in segment.ids:
                if segment.origin == "sampled":
                    total, count = total + by_turn[number // 2] * table[place - 1, token], count + 1
                place += 1
    return descended(model, total / count)


def standardized(values: list[float]) -> list[float]:
    return [(v - fmean(values)) / (stdev(values) + 1e-6) for v in values]


@pytest.mark.parametrize("weights", [{}, {"short": 0.3}, {"solved": 2.0, "short": -1.0}, {"solved": 0.0}])
def test_gdpo_with_weights(small_dir: Path, weights: dict[str, float]):
    """GDPO: each reward standardized in its group, the weighted sum standardized over the batch."""
    groups = [
        Group(Task("t"), tuple(played(f"{g}{i}", end=sum(p.values()), parts=p) for i, p in enumerate(parts)))
        for g, parts in enumerate(PARTS)
    ]
    found = step_gradient(small_dir, groups, advantage={"name": "gdpo", "weights": weights})
    sums = []
    for parts in PARTS:
        columns = {name: standardized([p.get(name, 0.0) for p in parts]) for name in ("solved", "short")}
        sums += [sum(weights.get(n, 1.0) * columns[n][i] for n in columns) for i in range(len(parts))]
    episodes = [episode for group in groups for episode in group.episodes]
    wanted = [(e, (a, a)) for e, a in zip(episodes, standardized(sums), strict=True)]
    assert relative(found, token_mean_gradient(small_dir, wanted)) < 1e-6


@pytest.mark.parametrize("baseline", ["turn", "group"])
@pytest.mark.parametrize(("gamma", "by_std"), [(1.0, False), (0.5, False), (0.9, True)])
def test_turn_level(small_dir: Path, baseline: Literal["turn", "group"], gamma: float, by_std: bool):
    """The advantage of a turn is its own plus the discounted later ones (MT-GRPO's A_turn + lambda A_outcome where
    the baseline is per turn); with a pooled baseline, its return against all turns of the group."""
    groups, wanted = [], []
    for g, (rewards, ends) in enumerate(zip(TURN_REWARDS, END_REWARDS, strict=True)):
        episodes = [played(f"{g}{i}", turns=t, end=e) for i, (t, e) in enumerate(zip(rewards, ends, strict=True))]
        groups.append(Group(Task("t"), tuple(episodes)))
        last = [t[1] + e for t, e in zip(rewards, ends, strict=True)]
        first = [t[0] + gamma * later for t, later in zip(rewards, last, strict=True)]
        pools = (first, last) if baseline == "turn" else (first + last, first + last)
        scales = [stdev(pool) + 1e-6 if by_std else 1.0 for pool in pools]
        for i, episode in enumerate(episodes):
            values = (first[i], last[i])
            by_turn = [(v - fmean(p)) / s for v, p, s in zip(values, pools, scales, strict=True)]
            if baseline == "turn" and not by_std:
                own = rewards[i][0] - fmean(r[0] for r in rewards)
                assert by_turn[0] == pytest.approx(own + gamma * (last[i] - fmean(last)))
            wanted.append((episode, tuple(by_turn)))
    advantage = {"name": "turn_level", "baseline": baseline, "gamma": gamma, "normalize_std": by_std}
    found = step_gradient(small_dir, groups, advantage=advantage)
    assert relative(found, token_mean_gradient(small_dir, wanted)) < 1e-6


@pytest.mark.parametrize("overlong", ["train", "mask", "penalise"])
def test_overlong(small_dir: Path, overlong: str):
    """DAPO's overlong filter: what was cut counts in its group and leaves the loss and its mean; or it pays."""
    rewards = (1.0, 0.5, 0.0, 0.0)
    whole = [played(f"e{i}", end=r) for i, r in enumerate(rewards)]
    episodes = [whole[0], *(replace(e, stop_reason=StopReason.MAX_TURNS) for e in whole[1:3]), whole[3]]
    groups = [Group(Task("t"), tuple(episodes))]
    if overlong == "penalise":
        groups, rewards = penalized(groups, 0.25), (1.0, 0.25, -0.25, 0.0)
    found = step_gradient(small_dir, groups, overlong=overlong)
    kept = [0, 3] if overlong == "mask" else [0, 1, 2, 3]
    advantages = standardized(list(rewards))
    wanted = [(whole[i], (advantages[i], advantages[i])) for i in kept]
    assert relative(found, token_mean_gradient(small_dir, wanted)) < 1e-6


def plain_values(model: PreTrainedModel, rows: list[Sample]) -> dict[str, list[Tensor]]:
    """The values before each sampled token, by episode, row after row."""
    found: dict[str, list[Tensor]] = {}
    for row in rows:
        values = model(input_ids=torch.tensor(row.ids)[None]).logits[0, :, 0]
        found.setdefault(row.episode_id, []).extend(values[t - 1] for t, on in enumerate(row.loss_mask) if on)
    return found


AGGREGATIONS = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("clip", [0.02, None])
def test_the_critics_second_pass(small_dir: Path, aggregation: str, clip: float | None):
    """PPO's value loss, 1/2 max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2), where values have moved."""
    scale = {"aggregation_scale": 50.0} if aggregation == "seq-mean-token-sum-norm" else {}
    settings = CriticConfig(
        lr=1e-2, value_clip=clip, epochs=2, aggregation=aggregation, max_grad_norm=1e9, **scale
    )
    learner = make(small_dir, critic=settings, advantage="gae")
    learner.critic.model.double()
    with torch.no_grad():
        learner.critic.model.score.weight.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
    states, seen = [], []

    def note(*_: Any) -> None:
        states.append({name: value.clone() for name, value in learner.critic.model.state_dict().items()})
        seen.append(gradients(learner.critic.model))

    learner.critic.optimizer.register_step_pre_hook(note)
    rows, scores = scored(make_batch(3, groups=2, size=3))
    learner.step(rows, scores)
    plain = AutoModelForTokenClassification.from_pretrained(
        small_dir, num_labels=1, dtype=torch.float64, attn_implementation="sdpa"
    )
    plain.load_state_dict(states[0])
    with torch.no_grad():
        old = plain_values(plain, rows)
    reward = dict(zip(scores.episodes, scores.rewards, strict=True))
    plain.load_state_dict(states[1])
    parts, clipped = [], 0
    for name, values in plain_values(plain, rows).items():
        errors = []
        for value, before in zip(values, old[name], strict=True):
            error = (value - reward[name]) ** 2  # gamma and lambda are 1: every return is the episode's reward
            if clip is not None:
                near = (value.clamp(before - clip, before + clip) - reward[name]) ** 2
                clipped += int(near > error)
                error = torch.maximum(error, near)
            errors.append(error / 2)
        parts.append(torch.stack(errors))
    loss = {
        "token-mean": torch.cat(parts).mean(),
        "token-sum": torch.cat(parts).sum(),
        "seq-mean-token-sum": sum(p.sum() for p in parts) / len(parts),
        "seq-mean-token-mean": sum(p.mean() for p in parts) / len(parts),
        "seq-mean-token-sum-norm": sum(p.sum() for p in parts) / len(parts) / 50.0,
    }[aggregation]
    loss.backward()
    assert (clipped > 0) == (clip is not None)
    assert len(seen) == 2
    assert relative(seen[1], gradients(plain)) < 1e-6
