"""What the tests of the engine share: small architectures, transformers' own answers, a test of distributions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 300
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
}


def config_of(kind: str) -> PretrainedConfig:
    """Each differs from the others in what matters: tied or not, biases, head size, layers, sliding window."""
    if kind == "qwen3":
        return Qwen3Config(**_SHAPE, num_hidden_layers=3, head_dim=32, tie_word_embeddings=True)
    if kind == "qwen2":
        window = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
        return Qwen2Config(**_SHAPE, num_hidden_layers=2, tie_word_embeddings=False, **window)
    if kind == "mistral":
        return MistralConfig(**_SHAPE, num_hidden_layers=2, sliding_window=8, tie_word_embeddings=False)
    assert kind == "llama"
    return LlamaConfig(
        **_SHAPE | {"num_key_value_heads": 4}, num_hidden_layers=2, attention_bias=True, mlp_bias=True
    )


def reference(path: Path) -> PreTrainedModel:
    """The same model as transformers runs it."""
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa").eval()


def logprobs_of(model: torch.nn.Module, prompt: list[int], completion: tuple[int, ...]) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(completion)[:, None])[:, 0].tolist()


def assert_follows(ids: np.ndarray, probs: np.ndarray) -> None:
    """Pearson's test at about 1e-4 (Wilson-Hilferty quantile), after merging cells that expect fewer than five."""
    counts, wanted = np.bincount(ids, minlength=len(probs)).astype(float), probs * len(ids)
    assert not counts[probs == 0].any(), "a filtered token was drawn"
    small = wanted < 5
    cells = [*zip(counts[~small], wanted[~small], strict=True)]
    if wanted[small].sum() >= 5:
        cells.append((counts[small].sum(), wanted[small].sum()))
    statistic = sum((seen - want) ** 2 / want for seen, want in cells)
    freedom = len(cells) - 1
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3
