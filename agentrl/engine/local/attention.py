"""One attention function for transformers models, computing on flat token batches.

A model loaded with `attn_implementation=ATTENTION` is called with `input_ids` and `position_ids` of shape (1, N):
the tokens of many sequences, concatenated without padding. The plan, passed with the call as the keyword
`attention_plan`, determines which tokens each token attends to; everything else is the model's own code, so engine
and learner compute the same numbers from the same weights.

Shapes: N tokens of all sequences, H query heads, K key-value heads (H is a multiple of K), D head size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from agentrl.errors import ConfigError
from agentrl.models.trial import unusual_layers

ATTENTION = "agentrl"
"""Name of the function in transformers after `register_attention()`."""


class AttentionPlan(Protocol):
    """Which keys each query of a flat batch attends to, and where they are stored."""

    def attend(
        self,
        layer: int,
        query_NHD: Tensor,
        key_NKD: Tensor,
        value_NKD: Tensor,
        *,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        """Compute the attention output (N, H, D) of one layer; `window` is the number of keys per query, itself
        included."""
        ...

    def keep_routes(self, routes_NLk: Tensor) -> None:
        """Keep the experts that the routers chose for each token, where keys and values are kept."""
        ...


def register_attention() -> None:
    """Register `attn_implementation=ATTENTION` with transformers. Idempotent.

    No mask function is registered under that name, so transformers builds no mask.
    """
    AttentionInterface.register(ATTENTION, _planned_attention)


def check_attention_support(model: PreTrainedModel) -> None:
    """Raise ConfigError if attention cannot be replaced, or keeps state other than keys and values."""
    name = type(model).__name__
    if kinds := unusual_layers(model.config):
        raise ConfigError(
            f"{name} has layers of kind {', '.join(kinds)}; the local engine runs full_attention and "
            "sliding_attention layers only, with a key-value cache and nothing else; use engine sglang or vllm"
        )
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(
            f"{name} does not take its attention from transformers' AttentionInterface, so the local engine "
            "cannot run it; use engine sglang or vllm, or a Qwen, Llama, Mistral or similar decoder model"
        )


def _planned_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    attention_plan: AttentionPlan | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in each layer: query (1, H, N, D), key and value (1, K, N, D)."""
    if attention_plan is None:
        raise ConfigError(f"{type(module).__name__} is called without the keywords that were given to the model")
    for unsupported in ("softcap", "s_aux"):
        if more.get(unsupported) is not None:
            raise ConfigError(
                f"{type(module).__name__} uses {unsupported}, which the local engine does not compute"
            )
    out_NHD = attention_plan.attend(
        int(module.layer_idx),  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
    )
    return out_NHD[None], None


class PackedAttention:
    """Plan for whole sequences without a cache: sequence i is the i-th run of `lengths[i]` tokens, causal.

    Differentiable. `shapes` records (K, D of keys, D of values) of each layer that has run, `calls` the number of
    calls.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        self.shapes: dict[int, tuple[int, int, int]] = {}
        self.calls: Counter[int] = Counter()

    def attend(
        self,
        layer: int,
        query_NHD: Tensor,
        key_NKD: Tensor,
        value_NKD: Tensor,
        *,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        self.calls[layer] += 1
        self.shapes[layer] = (key_NKD.shape[1], key_NKD.shape[2], value_NKD.shape[2])
        queries, keys, values = (torch.split(tensor, self.lengths) for tensor in (query_NHD, key_NKD, value_NKD))
        parts = zip(queries, keys, values, strict=True)
        return torch.cat([self._one(q, k, v, scaling, window) for q, k, v in parts])

    def keep_routes(self, routes_NLk: Tensor) -> None:
        """Nothing is kept."""

    @staticmethod
    def _one(q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, scaling: float, window: int | None) -> Tensor:
        length = q_LHD.shape[0]
        mask = None
        if window is not None and length > window:
            mask = torch.ones(length, length, dtype=torch.bool, device=q_LHD.device).tril().triu(1 - window)
        out = F.scaled_dot_product_attention(
            q_LHD.transpose(0, 1)[None],
            k_LKD.transpose(0, 1)[None],
            v_LKD.transpose(0, 1)[None],
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=q_LHD.shape[1] != k_LKD.shape[1],
        )
        return out[0].transpose(0, 1)
