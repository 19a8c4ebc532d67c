"""The attention of the learner: rows of a packed batch are isolated, and unsupported variants are rejected.

One function replaces transformers' attention in every layer. The visible keys of a token come from the `Spans` of
the packed batch: its row, what its row shares with others, and the layer's sliding window. How it is computed,
with PyTorch's SDPA, flex attention or flash-attn, is chosen for each model if it is placed (`use_attention`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from agentrl.config.run import LearnerConfig
from agentrl.errors import ConfigError
from agentrl.learner.attention.kind import Kind, choose_attention
from agentrl.models.trial import ALONE, ENDS, SHARED, probe

NAMES: dict[Kind, str] = {"sdpa": "agentrl_packed", "flex": "agentrl_blocks", "flash": "agentrl_sequences"}
"""Names registered with transformers; they must not contain sdpa or flash, which transformers treats specially."""
PACKED_ATTENTION = NAMES["sdpa"]
"""The attention of models during loading, in host memory."""
P = TypeVar("P")


class Span(NamedTuple):
    """The flat positions of a row: its shared prefix, then its remaining tokens.

    A shared prefix is a separate row without a prefix.
    """

    prefix_at: int
    prefix: int
    at: int
    length: int

    def first_key(self, window: int | None) -> int:
        """The first place of the prefix that any own token sees."""
        return 0 if window is None else max(0, self.prefix + 1 - window)


@dataclass(slots=True)
class Spans:
    """The rows of a packed batch in flat order; together they cover every position once.

    Derived data is computed in the first layer that needs it and cached for the others.
    """

    rows: Sequence[Span]
    device: torch.device
    _plans: dict[tuple[object, int | None], object] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        """Tokens of the longest row, its prefix included."""
        return max(row.prefix + row.length for row in self.rows)

    def plan(self, make: Callable[[Spans, int | None], P], window: int | None) -> P:
        """The result of `make` for the window (None: no window), cached for all layers with this window."""
        if window is not None and window >= self.longest:
            window = None
        if (make, window) not in self._plans:
            self._plans[make, window] = make(self, window)
        return cast(P, self._plans[make, window])


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    kind: Kind,
    spans: Spans | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each row of a packed batch; equivalent to attention over each row separately.

    Args:
        module: the attention layer that calls.
        query, key, value: [1, H or H_kv, T, D] over all rows end to end.
        attention_mask: always None; causality and row borders come from the spans.
        kind: how it is computed.
        spans: the rows of the packed batch.
        scaling: factor of the scores; 1/sqrt(D) when None.
        sliding_window: maximum keys per query, including itself; None means all previous ones.
        more: other arguments of the layer.

    Returns:
        [1, T, H, D] and no weights.

    Raises:
        ConfigError: the layer uses a feature that is not supported here.
    """
    if spans is None:
        raise ConfigError(f"{type(module).__name__} is called without the keywords given to the model, {_ADVICE}")
    _refuse_unknown(module, attention_mask, more)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    attend = import_module(f"agentrl.learner.attention.{kind}").attend
    return attend(query, key, value, spans, scaling, sliding_window), None


def register_attention() -> None:
    """Make `packed_attention` known to transformers; idempotent."""
    for kind, name in NAMES.items():
        AttentionInterface.register(name, partial(packed_attention, kind=kind))
        AttentionMaskInterface.register(name, lambda *_, **__: None)


def use_attention(module: nn.Module, config: LearnerConfig, device: torch.device) -> None:
    """Have a loaded model compute its attention as `learner.attention` says, once it is on the device.

    Raises:
        ConfigError: what is asked for cannot work here.
    """
    if isinstance(module, PreTrainedModel):
        module.set_attn_implementation(NAMES[choose_attention(config, device.type, _head_dims(module.config))])


def check_attention(model: PreTrainedModel, where: str) -> None:
    """Check that the model's output on a packed batch equals its original attention on separate rows.

    Raises:
        ConfigError: it does not: its layers carry a state of another kind along the row, or change the scores in a
            way that is not computed here.
    """
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(
            f"{where}: {type(model).__name__} does not take its attention from transformers, {_ADVICE}"
        )
    vocabulary = int(model.config.get_text_config().vocab_size)
    one, two, last = len(ENDS[0]), len(ENDS[1]), len(ALONE)
    shared = len(SHARED)
    rows = [[*SHARED, *ENDS[0]], [*SHARED, *ENDS[1]], [*ALONE]]
    at = shared + one + two
    spans = [Span(0, 0, 0, shared), Span(0, shared, shared, one), Span(0, shared, shared + one, two)]
    spans.append(Span(at, 0, at, last))
    places = [*range(shared), *range(shared, shared + one), *range(shared, shared + two), *range(last)]
    device = next(model.parameters()).device

    def hidden(body: nn.Module, tokens: Sequence[int], **given: Any) -> Tensor:
        ids_1T = torch.tensor([[token % vocabulary for token in tokens]], device=device)
        found: Tensor = body(input_ids=ids_1T, use_cache=False, **given)[0][0]
        return found

    def packed(tried: PreTrainedModel) -> Tensor:
        ids = [*SHARED, *ENDS[0], *ENDS[1], *ALONE]
        positions = torch.tensor([places], device=device)
        return hidden(tried.base_model, ids, position_ids=positions, spans=Spans(spans, device))

    def alone(tried: PreTrainedModel) -> list[Tensor]:
        tried.set_attn_implementation("eager")
        found = [hidden(tried.base_model, row) for row in rows]
        tried.set_attn_implementation(PACKED_ATTENTION)
        return [found[0], found[1][shared:], found[2]]

    probe(model, packed, alone, where=where, advice=_ADVICE)


_ADVICE = (
    "so the learner would train other numbers than the engine samples; use a decoder whose layers have full or "
    "sliding-window attention (Qwen, Llama, Mistral and the like)"
)


def _refuse_unknown(module: nn.Module, attention_mask: Tensor | None, more: dict[str, Any]) -> None:
    """Raise ConfigError for unsupported features that would change the result."""
    found = [name for name in _NOT_COMPUTED if more.get(name) is not None]
    found += ["is_causal=False"] if more.get("is_causal") is False else []
    found += ["a mask of its own"] if attention_mask is not None else []
    if found:
        raise ConfigError(
            f"the learner does not compute {found[0]}, which {type(module).__name__} asks for, {_ADVICE}"
        )


_NOT_COMPUTED = ("softcap", "s_aux", "sinks", "position_bias", "indices", "block_indices")
"""What some models of transformers hand to their attention: bounded scores, sinks, biases, selected keys."""


def _head_dims(model: PretrainedConfig) -> set[int]:
    """Sizes of queries and keys, and of values."""
    text = model.get_text_config()
    own = getattr(text, "qk_head_dim", None) or getattr(text, "head_dim", None)
    queries = int(own or text.hidden_size // text.num_attention_heads)
    return {queries, int(getattr(text, "v_head_dim", None) or queries)}
