"""What the tests of the learner share: a small random model, rows for it, and the plain padded computation."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from agentrl.trainer.samples import Scores
from agentrl.types import Routes, Sample

VOCABULARY = 97

M = TypeVar("M", bound=torch.nn.Module)


SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
"""Settings of a tiny model of any family."""


def write_model(directory: Path, *, seed: int, hidden: int = 32, layers: int = 2) -> Path:
    """A Qwen3 model whose every parameter matters: sharp attention, norms that are not 1."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                torch.nn.init.normal_(parameter, 1.0, 0.2)
    model.save_pretrained(directory)
    return directory


def plain_model(directory: Path) -> PreTrainedModel:
    """The same model with the attention of transformers."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")


def make_sample(
    ids: Sequence[int], trained: Sequence[int], *, episode: str = "e", group: int = 0, advantage: float = 1.0
) -> Sample:
    """A row whose tokens at the places `trained` are under the loss."""
    return Sample(
        ids=tuple(ids),
        loss_mask=tuple(t in trained for t in range(len(ids))),
        logprobs=tuple(-1.0 - t / 100 if t in trained else 0.0 for t in range(len(ids))),
        advantages=(advantage,) * len(ids),
        versions=(0,) * len(ids),
        episode_id=episode,
        group=group,
    )


def make_batch(seed: int, *, groups: int = 3, size: int = 4) -> list[Sample]:
    """Ragged rows in groups with a common beginning; in each group the last episode has a second, forked row."""
    rng = random.Random(seed)
    samples = []
    for group in range(groups):
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(3, 12))]
        for index in range(size):
            ids = prompt + [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 30))]
            trained = {len(prompt)} | {t for t in range(len(prompt), len(ids)) if rng.random() < 0.6}
            episode, advantage = f"g{group}/e{index}", rng.uniform(-2, 2)
            make = {"episode": episode, "group": group, "advantage": advantage}
            samples.append(make_sample(ids, trained, **make))
        fork = ids[: len(prompt) + 1] + [rng.randrange(VOCABULARY) for _ in range(9)]
        samples.append(make_sample(fork, {len(fork) - 2, len(fork) - 1}, **make))
    return samples


def observed(samples: Sequence[Sample]) -> list[Sample]:
    """With the tokens between sampled ones as answers of the env."""
    return [
        replace(s, observed=tuple(not on and t > s.loss_mask.index(True) for t, on in enumerate(s.loss_mask)))
        for s in samples
    ]


def routed(samples: Sequence[Sample], *, layers: int, top_k: int, experts: int) -> list[Sample]:
    """Experts for every token, the same where rows begin alike; the last token of each row has none."""
    found = []
    for sample in samples:
        table = np.full((len(sample.ids), layers, top_k), -1, np.int8)
        for place in range(len(sample.ids) - 1):
            rng = np.random.default_rng(sample.ids[: place + 1])
            table[place] = [rng.permutation(experts)[:top_k] for _ in range(layers)]
        found.append(replace(sample, routes=Routes(table.tobytes(), layers, top_k, 1)))
    return found


def scored(samples: list[Sample]) -> tuple[list[Sample], Scores]:
    """Rows and scores as a step hands them over; an episode is paid for its odd tokens."""
    episodes = list(dict.fromkeys(s.episode_id for s in samples))
    rewards = dict.fromkeys(episodes, 0.0)
    for s in samples:
        rewards[s.episode_id] += sum(i % 2 for i in s.ids) / len(s.ids)
    last = {s.episode_id: i for i, s in enumerate(samples)}
    rows = []
    for i, s in enumerate(samples):
        n = sum(s.loss_mask)
        end = rewards[s.episode_id] if last[s.episode_id] == i else 0.0
        columns = {"segment": (float(i),) * n, "turn": (0.0,) * n, "reward": (0.0,) * (n - 1) + (end,)}
        rows.append(replace(s, columns=columns))
    groups = {s.episode_id: s.group for s in samples}
    return rows, Scores(episodes, [rewards[e] for e in episodes], [groups[e] for e in episodes])


def one_by_one(model: torch.nn.Module, samples: list[Sample]) -> Tensor:
    """[N] log-probabilities of the trained tokens, each row on its own."""
    found = []
    for sample in samples:
        table_LV = model(input_ids=torch.tensor([sample.ids]), use_cache=False).logits[0].log_softmax(-1)
        found += [table_LV[t - 1, sample.ids[t]] for t, on in enumerate(sample.loss_mask) if on]
    return torch.stack(found)


def padded_logprobs(model: PreTrainedModel, samples: Sequence[Sample], temperature: float = 1.0) -> list[Tensor]:
    """Log-probabilities of the trained tokens of each row, from one right-padded batch."""
    width = max(len(s.ids) for s in samples)
    ids_BL = torch.tensor([s.ids + (0,) * (width - len(s.ids)) for s in samples])
    real_BL = torch.tensor([[t < len(s.ids) for t in range(width)] for s in samples])
    logits_BLV = model(input_ids=ids_BL, attention_mask=real_BL.long(), use_cache=False).logits
    table_BLV = torch.log_softmax(logits_BLV / temperature, dim=-1)
    found = []
    for b, sample in enumerate(samples):
        trained = [t for t, on in enumerate(sample.loss_mask) if on]
        found.append(torch.stack([table_BLV[b, t - 1, sample.ids[t]] for t in trained]))
    return found


def gradients(model: torch.nn.Module) -> Tensor:
    """All gradients end to end, in the order of the parameters."""
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def relative(found: Tensor, wanted: Tensor) -> float:
    """Distance of two vectors, relative to the second."""
    return float(((found - wanted).norm() / wanted.norm()).detach())


def double(model: M) -> M:
    """In float64 throughout: transformers' own norms compute in float32."""
    for parent in list(model.modules()):
        for name, norm in parent.named_children():
            if type(norm).__name__.endswith("RMSNorm") and hasattr(norm, "variance_epsilon"):
                exact = torch.nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon)
                exact.weight = norm.weight
                setattr(parent, name, exact)
    return model.double()
