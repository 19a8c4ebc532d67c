"""Qwen3, Qwen2 and Llama with fewer and larger operations than their modules: same weights, same numbers.

Small models on a CPU spend much of a decode step on module and small-operation overhead (figures in
docs/design/local-engine.md). Query, key and value projections become one product, gate and up projections another;
the modules' parameters become views of the stacked tensors, so nothing is stored twice and updates reach both.

Shapes: N tokens, M hidden size, H query heads, K key-value heads, D head size, k tokens kept, V vocabulary.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl.engine.local.attention import AttentionPlan
from agentrl.models.small import PLAIN_DECODERS

ROTATIONS = 1 << 20
"""Maximum number of cosines and sines that are kept in a table."""


class FusedDecoder:
    """The forward pass of a model for which `can_fuse` holds."""

    def __init__(self, model: PreTrainedModel) -> None:
        inner: Any = model.model
        self._inner = inner
        self._head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._layers = [_Layer(layer) for layer in inner.layers]
        self._norm = _Norm(inner.norm)
        positions = max(model.config.max_position_embeddings, 1024)  # the probe is longer than some tiny models
        self._rotations = _Rotations(inner.rotary_emb, positions, inner.embed_tokens.weight)

    def __call__(self, ids_N: Tensor, positions_N: Tensor, plan: AttentionPlan, keep_k: Tensor) -> Tensor:
        """Compute logits (k, V) of the tokens `keep_k` of a flat batch of N tokens."""
        x_NM: Tensor = self._inner.embed_tokens(ids_N)
        cos_N1D, sin_N1D = self._rotations(x_NM, positions_N)
        for layer in self._layers:
            x_NM = layer.attend(x_NM, cos_N1D, sin_N1D, plan)
            if layer is self._layers[-1]:
                x_NM = x_NM[keep_k]
            x_NM = layer.feed_forward(x_NM)
        logits: Tensor = self._head(self._norm(x_NM))
        return logits


def can_fuse(model: PreTrainedModel) -> bool:
    """Whether this is one of the published families, in float32, or in bfloat16 on CUDA.

    In bfloat16 the rounding differs from the modules' by about as much as either differs from float32: worth it
    where the number of kernels dominates, but not on a CPU.
    """
    return (
        type(model).__name__ in PLAIN_DECODERS
        and getattr(model.config, "hidden_act", None) == "silu"
        and all(
            parameter.dtype == torch.float32 or (parameter.dtype == torch.bfloat16 and parameter.is_cuda)
            for parameter in model.parameters()
        )
    )


class _Layer:
    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._before, self._between = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self._qkv, self._qkv_bias = _stack(attention.q_proj, attention.k_proj, attention.v_proj)
        self._gate_up, self._gate_up_bias = _stack(mlp.gate_proj, mlp.up_proj)
        self._out, self._down = attention.o_proj, mlp.down_proj
        self._index, self._dim, self._scaling = attention.layer_idx, attention.head_dim, attention.scaling
        self._heads = attention.q_proj.out_features // self._dim
        self._kv_heads = attention.k_proj.out_features // self._dim
        self._window = getattr(attention, "sliding_window", None)
        self._head_norm: _HeadNorm | None = None
        if hasattr(attention, "q_norm"):
            self._head_norm = _HeadNorm(attention, self._heads, self._kv_heads)

    def attend(self, x_NM: Tensor, cos_N1D: Tensor, sin_N1D: Tensor, plan: AttentionPlan) -> Tensor:
        both = self._heads + self._kv_heads
        qkv = F.linear(self._before(x_NM), self._qkv, self._qkv_bias).view(len(x_NM), -1, self._dim)
        qk = qkv[:, :both]
        if self._head_norm is not None:
            qk = self._head_norm(qk)
        qk = torch.addcmul(qk * cos_N1D, qk.roll(self._dim // 2, -1), sin_N1D)
        out_NHD = plan.attend(
            self._index,
            qk[:, : self._heads],
            qk[:, self._heads :],
            qkv[:, both:],
            scaling=self._scaling,
            window=self._window,
        )
        return _residual(x_NM, out_NHD.flatten(1), self._out)

    def feed_forward(self, x_NM: Tensor) -> Tensor:
        gate, up = F.linear(self._between(x_NM), self._gate_up, self._gate_up_bias).chunk(2, -1)
        return _residual(x_NM, F.silu(gate) * up, self._down)


class _HeadNorm:
    """The norms of queries and keys as one; the modules' weights become views of `_weights_2D`."""

    def __init__(self, attention: Any, heads: int, kv_heads: int) -> None:
        q_norm, k_norm = attention.q_norm, attention.k_norm
        self._eps = float(q_norm.variance_epsilon)
        with torch.no_grad():
            self._weights_2D = torch.stack([q_norm.weight, k_norm.weight])
            q_norm.weight.data, k_norm.weight.data = self._weights_2D
        self._which = torch.tensor([0] * heads + [1] * kv_heads, device=self._weights_2D.device)

    def __call__(self, qk_NHD: Tensor) -> Tensor:
        return _rms_norm(qk_NHD, None, self._eps).mul_(self._weights_2D.index_select(0, self._which))


class _Norm:
    def __init__(self, module: Any) -> None:
        self._module = module
        self._eps = float(module.variance_epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        return _rms_norm(x, self._module.weight, self._eps)


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Scale the last dimension to a mean square of 1, and then by `weight`.

    PyTorch has a kernel for it on CUDA; on a CPU it composes about ten operations, and a small batch feels each.
    """
    size = x.shape[-1]
    if x.is_cuda or x.dtype != torch.float32:
        return F.rms_norm(x, (size,), weight, eps)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    unit = x * torch.addcmul(_constant(eps), length, length, value=1 / size).rsqrt_()
    return unit if weight is None else unit.mul_(weight)


@cache
def _constant(value: float) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(value)


class _Rotations:
    """The cosines and sines of positions, from a table if it is small.

    Models in which they depend on anything else are refused when they are loaded.
    """

    def __init__(self, module: Any, positions: int, weight: Tensor) -> None:
        """For positions below `positions`, with the dtype and on the device of `weight`."""
        self._module = module
        places, one = torch.arange(positions, device=weight.device), weight[:1]
        small = positions * self._computed(one, places[:1]).numel() <= ROTATIONS
        self._table_P2D = self._computed(one, places) if small else None

    def __call__(self, x_NM: Tensor, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines (N, 1, D), and sines with the sign of the half that the rotation swaps in."""
        if self._table_P2D is None:
            found_N2D = self._computed(x_NM, positions_N)
        else:
            found_N2D = self._table_P2D.index_select(0, positions_N)
        return found_N2D[:, :1], found_N2D[:, 1:]

    @torch.no_grad()
    def _computed(self, x_NM: Tensor, positions_N: Tensor) -> Tensor:
        cos_1ND, sin_1ND = self._module(x_NM[None], positions_N[None])
        found_N2D = torch.stack([cos_1ND[0], sin_1ND[0]], 1)
        found_N2D[:, 1, : found_N2D.shape[-1] // 2].neg_()
        return found_N2D


def _residual(x_NM: Tensor, inner: Tensor, linear: nn.Linear) -> Tensor:
    out = torch.addmm(x_NM, inner, linear.weight.t())
    return out if linear.bias is None else out + linear.bias


def _stack(*linears: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Stack the weights and biases of several projections as one tensor each, and make the originals views of
    it."""
    with torch.no_grad():
        weight = torch.cat([linear.weight for linear in linears])
        sizes = [linear.out_features for linear in linears]
        for linear, part in zip(linears, torch.split(weight, sizes), strict=True):
            linear.weight.data = part
        if linears[0].bias is None:
            return weight, None
        bias = torch.cat([linear.bias for linear in linears])
        for linear, part in zip(linears, torch.split(bias, sizes), strict=True):
            linear.bias.data = part
        return weight, bias
