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
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from agentrl.config.run import LearnerConfig
from agentrl.errors import ConfigError
from agentrl.learner.attention.kind import Kind, choose_attention
from agentrl.learner.prefix_tree import Ids, Span, path_positions, prefix_tree
from agentrl.learner.sequence import SequenceRanks
from agentrl.models.model_config import layer_configs
from agentrl.models.trial import ALONE, ENDS, SHARED, probe

NAMES: dict[Kind, str] = {"sdpa": "agentrl_packed", "flex": "agentrl_blocks", "flash": "agentrl_sequences"}
"""Names registered with transformers; they must not contain sdpa or flash, which transformers treats specially."""
PACKED_ATTENTION = NAMES["sdpa"]
"""The attention of models during loading, in host memory."""
P = TypeVar("P")


@dataclass(slots=True)
class Spans:
    """The tree of a packed batch in flat order; together its spans cover every position once.

    Derived data is computed in the first layer that needs it and cached for the others.

    Attributes:
        sequence: the ranks that each compute a piece of the batch; None if one computes all of it.
    """

    rows: Sequence[Span]
    device: torch.device
    sequence: SequenceRanks | None = None
    _plans: dict[tuple[object, int | None], object] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        """Tokens of the longest path."""
        return max(row.prefix + row.length for row in self.rows)

    @property
    def tokens(self) -> int:
        """Tokens of the batch."""
        return sum(row.length for row in self.rows)

    def places(self) -> Tensor:
        """[T] the place of each flat position in its rows, counted from 0."""
        lengths = torch.tensor([row.length for row in self.rows])
        before = torch.tensor([row.prefix - row.at for row in self.rows])
        total = int(lengths.sum())
        return (torch.arange(total) + torch.repeat_interleave(before, lengths)).to(self.device)

    def path(self, number: int, first: int) -> Ids:
        """The flat positions before a span on its path, from the place `first` on."""
        parent = self.rows[number].parent
        return path_positions(self.rows, parent)[first:] if parent >= 0 else np.zeros(0, np.int64)

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
        query, key, value: [1, H or H_kv, T, D] over all rows end to end, or this rank's piece of them.
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
    if (ranks := spans.sequence) is None:
        return attend(query, key, value, spans, scaling, sliding_window), None
    q_1HTD, k_1HTD, v_1HTD = ranks.by_head(query, key, value, spans.tokens)
    found = attend(q_1HTD, k_1HTD, v_1HTD, spans, scaling, sliding_window)
    return ranks.by_token(found, query.shape[1]), None


def register_attention() -> None:
    """Make `packed_attention` known to transformers; idempotent."""
    for kind, name in NAMES.items():
        AttentionInterface.register(name, partial(packed_attention, kind=kind))
        AttentionMaskInterface.register(name, lambda *_, **__: None)


def use_attention(module: nn.Module, config: LearnerConfig, device: torch.device) -> None:
    """Use the attention chosen by `learner.attention` in a loaded model that is on its device and packs its rows.

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
    wanted = [(*SHARED, *ENDS[0]), (*SHARED, *ENDS[1]), (*SHARED, *ENDS[1], *ENDS[0]), ALONE]
    rows = [tuple(token % vocabulary for token in row) for row in wanted]
    tree = prefix_tree(rows)
    device = next(model.parameters()).device

    def hidden(body: nn.Module, tokens: Tensor, **given: Any) -> Tensor:
        found: Tensor = body(input_ids=tokens[None].to(device), use_cache=False, **given)[0][0]
        return found

    def packed(tried: PreTrainedModel) -> Tensor:
        spans, ids_T = Spans(tree.spans, device), torch.from_numpy(tree.ids_T)
        found = hidden(tried.base_model, ids_T, position_ids=spans.places()[None], spans=spans)
        return torch.cat([found[tree.positions(row)] for row in range(len(rows))])

    def alone(tried: PreTrainedModel) -> list[Tensor]:
        tried.set_attn_implementation("eager")
        found = [hidden(tried.base_model, torch.tensor(row)) for row in rows]
        tried.set_attn_implementation(PACKED_ATTENTION)
        return found

    probe(model, packed, alone, where=where, advice=_ADVICE)


_ADVICE = (
    "so the learner's log-probabilities would differ from the sampler's; use a decoder whose layers have full or "
    "sliding-window attention, such as Qwen, Llama or Mistral"
)


def _refuse_unknown(module: nn.Module, attention_mask: Tensor | None, more: dict[str, Any]) -> None:
    """Raise ConfigError for unsupported features that would change the result."""
    found = [name for name in _NOT_COMPUTED if more.get(name) is not None]
    found += ["is_causal=False"] if more.get("is_causal") is False else []
    found += ["a custom attention mask"] if attention_mask is not None else []
    if found:
        raise ConfigError(
            f"the learner does not support {found[0]}, which {type(module).__name__} uses, {_ADVICE}"
        )


_NOT_COMPUTED = ("softcap", "s_aux", "sinks", "position_bias", "indices", "block_indices")
"""What some models of transformers hand to their attention: bounded scores, sinks, biases, selected keys."""


def _head_dims(model: PretrainedConfig) -> set[int]:
    """Sizes of queries and keys, and of values."""
    found = set()
    for layer in layer_configs(model):
        own = getattr(layer, "qk_head_dim", None) or getattr(layer, "head_dim", None)
        queries = int(own or layer.hidden_size // layer.num_attention_heads)
        found |= {queries, int(getattr(layer, "v_head_dim", None) or queries)}
    return found
