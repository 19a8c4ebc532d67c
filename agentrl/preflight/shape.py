"""The size of a model, from its config.json alone; no weights are read or created."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path
from typing import Any

from agentrl.config.run import OptimizerState, TinyModel
from agentrl.errors import ConfigError
from agentrl.learner.moments import moment_bytes
from agentrl.models.folder import PLAIN_DECODERS, check_model_folder

FLOAT32, BFLOAT16 = 4, 2


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder.

    Attributes:
        parameters: all of them, tied ones once.
        outer: trained parameters outside the blocks (embedding, output layer, last norm).
        linear: for LoRA: name, inputs and outputs of each linear layer in the blocks, without routers.
        named: those that get adapters only by name: the output layer, if it has its own weights, and routers.
    """

    kind: str
    parameters: int
    outer: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_context: int
    linear: tuple[tuple[str, int, int], ...] = ()
    named: tuple[tuple[str, int, int], ...] = ()
    head: int = 0
    """Parameters of the output layer, if it does not share those of the embedding."""
    routed: int = 0
    """Parameters of the experts that a router chooses from."""
    experts: tuple[int, int] = (1, 1)
    """How many experts a token passes through, and of how many."""
    latent: int = 0
    """Numbers of a token that multi-head latent attention keeps in each layer, on servers that know it; else 0."""
    value_dim: int = 0
    """Size of a head's values, where it is not `head_dim`."""
    frozen: int = 0
    """Parameters that text does not reach: of the vision tower of a model of images and text."""
    apart: str = ""
    """What it has that the learner cannot compute on packed rows, as far as the config says; empty if nothing."""

    @classmethod
    def of_directory(cls, directory: Path) -> ModelShape:
        """From the config.json of a Hugging Face model directory.

        Raises:
            ConfigError: it is missing, no JSON, or of a model that transformers does not know.
        """
        check_model_folder(directory, f"model directory {str(directory)!r}")
        if (known := _known_decoder(directory / "config.json")) is not None:
            return known
        from agentrl.models.model_config import any_config

        return cls._of(any_config(directory, f"model directory {str(directory)!r}"), str(directory))

    @classmethod
    def of_tiny(cls, tiny: TinyModel) -> ModelShape:
        """Of the model that a run makes itself; its tokenizer may end up with fewer tokens than `vocab`."""
        return _Decoder(
            kind="qwen3",
            hidden=tiny.hidden,
            intermediate=tiny.intermediate,
            layers=tiny.layers,
            heads=tiny.heads,
            kv_heads=max(1, tiny.heads // 2),
            head_dim=tiny.hidden // tiny.heads,
            vocab=tiny.vocab,
            max_context=tiny.max_context,
            tied=True,
        ).shape()

    @classmethod
    def _of(cls, config: Any, where: str) -> ModelShape:
        import torch

        from agentrl.models.linear import linear_layers, sizes_of, targeted
        from agentrl.models.model_config import (
            NO_MODEL,
            auto_class,
            freeze_senses,
            layer_configs,
            one_line,
            refuse_class,
            refuse_config,
        )

        refuse_config(config, where)
        refuse_class(config, where)
        for key in ("num_hidden_layers", "hidden_size", "vocab_size"):
            if not isinstance(getattr(layer_configs(config)[0], key, None), int):
                raise ConfigError(f"{where}: {config.model_type} has no single {key}, so it cannot be planned")
        text = max(layer_configs(config), key=_head_dim)  # layers may differ: planned are the widest heads
        for key in _AT_LEAST_ONE:
            if isinstance(size := getattr(text, key, None), int) and size < 1:
                raise ConfigError(f"{where}: config.json says {key}: {size}; it must be at least 1")
        try:
            with torch.device("meta"):  # shapes without storage
                model = freeze_senses(auto_class(config).from_config(config, trust_remote_code=False))
        except NO_MODEL as e:
            raise ConfigError(f"{where}: not a causal language model that can be planned: {one_line(e)}") from e
        heads = int(getattr(text, "num_attention_heads", 1))  # a state-space model has none
        trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
        blocks = {name: size for name, size in trained.items() if _IN_BLOCK.search(name)}
        total = sum(p.numel() for p in model.parameters())
        head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        own_head = head is not None and head.weight is not model.get_input_embeddings().weight
        linear, every = targeted(model, "all-linear"), linear_layers(model)
        return cls(
            kind=str(config.model_type),
            parameters=total,
            outer=sum(trained.values()) - sum(blocks.values()),
            frozen=total - sum(trained.values()),
            layers=int(text.num_hidden_layers),
            hidden=int(text.hidden_size),
            intermediate=_intermediate(text),
            heads=heads,
            kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
            head_dim=_head_dim(text),
            value_dim=int(getattr(text, "v_head_dim", None) or 0),
            latent=int(getattr(text, "kv_lora_rank", None) or 0) and text.kv_lora_rank + text.qk_rope_head_dim,
            vocab=int(text.vocab_size),
            max_context=int(getattr(text, "max_position_embeddings", 2**31)),
            linear=tuple((name, *sizes_of(module)) for name, module in linear.items()),
            named=tuple(
                (name, *sizes_of(module))
                for name, module in every.items()
                if name not in linear and (own_head or module is not head)
            ),
            head=head.weight.numel() if own_head else 0,
            routed=_routed(text, blocks),
            experts=_experts(text),
            apart=_apart(config, blocks),
        )

    def as_critic(self) -> ModelShape:
        """Of a value model with this body: one number for each token instead of the output layer."""
        more = self.hidden + 1 - self.head
        return replace(self, parameters=self.parameters + more, outer=self.outer + more, head=self.hidden + 1)

    @property
    def trained(self) -> int:
        """Parameters that training without adapters changes."""
        return self.parameters - self.frozen

    @property
    def active(self) -> int:
        """Parameters that each token passes through."""
        return self.touched(1)

    def touched(self, tokens: int) -> int:
        """Parameters that so many tokens pass through together, if each chooses its experts by chance."""
        chosen, of = self.experts
        return self.trained - round(self.routed * (1 - chosen / of) ** tokens)

    @property
    def block(self) -> int:
        """Parameters of one block (of the average one)."""
        return (self.trained - self.outer) // self.layers

    def kv_bytes_per_token(self, bytes_each: int, *, latent: bool = False) -> int:
        """Keys and values of one token over all layers; `latent` if the engine keeps them compressed."""
        whole = self.kv_heads * (self.head_dim + (self.value_dim or self.head_dim))
        return self.layers * (self.latent if latent and self.latent else whole) * bytes_each

    def activation_bytes_per_token(self, bytes_each: int) -> int:
        """What the backward pass of one block keeps for one token.

        Counted from the operations of a pre-norm block with gated feed-forward: inputs of norms and residuals
        (6 x hidden), queries, keys, values and their rotated and gathered copies, attention's result, and the
        feed-forward's four intermediates.
        """
        attention = (4 * self.heads + 6 * self.kv_heads) * self.head_dim
        return bytes_each * (6 * self.hidden + attention + 4 * self.intermediate)

    def heads_split(self, ranks: int) -> tuple[int, int]:
        """Heads of queries, and of keys and values, over all ranks that split rows: as `SequenceRanks.by_head`."""
        whole = ranks * -(-self.heads // ranks)
        if ranks == 1:
            return self.heads, self.kv_heads
        return (whole, lcm(self.kv_heads, ranks)) if whole == self.heads else (whole, whole)

    def moment_bytes(self, state: OptimizerState) -> int:
        """Both moments of AdamW for all trained parameters, counted as if all of them were in matrices."""
        return moment_bytes(1, self.trained, state)

    def lora_moment_bytes(self, rank: int, targets: str | list[str], state: OptimizerState) -> int:
        """Both moments of AdamW for adapters of this rank."""
        return sum(
            moment_bytes(rank, inputs, state) + moment_bytes(outputs, rank, state)
            for inputs, outputs in self._adapted(targets)
        )

    def lora_parameters(self, rank: int, targets: str | list[str]) -> int:
        """Trained parameters of adapters of this rank."""
        return sum(rank * (inputs + outputs) for inputs, outputs in self._adapted(targets))

    def _adapted(self, targets: str | list[str]) -> list[tuple[int, int]]:
        """Inputs and outputs of the layers that `learner.lora.targets` selects."""
        if targets == "all-linear":
            return [(inputs, outputs) for _, inputs, outputs in self.linear]
        return [
            (inputs, outputs)
            for name, inputs, outputs in (*self.linear, *self.named)
            if any(f".{name}".endswith(f".{target}") for target in targets)
        ]


_AT_LEAST_ONE = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "max_position_embeddings",
)  # fmt: skip
_IN_BLOCK = re.compile(r"\.[0-9]+\.")
"""The name of what is in one of several blocks, `model.layers.0.` or `transformer.h.0.`."""
_FIXED_ROTATIONS = ("default", "linear", "yarn", "llama3")
KNOWN = PLAIN_DECODERS
"""Families that are counted by arithmetic: transformers, which counts all others, takes seconds to import."""


@dataclass(frozen=True, slots=True)
class _Decoder:
    """A decoder of one of the known families: pre-norm blocks with grouped-query attention and a gated MLP."""

    kind: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_context: int
    tied: bool
    attention_bias: bool = False
    mlp_bias: bool = False

    def shape(self) -> ModelShape:
        """Its parameters, as transformers makes them."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        linear = (
            ("self_attn.q_proj", self.hidden, queries),
            ("self_attn.k_proj", self.hidden, keys),
            ("self_attn.v_proj", self.hidden, keys),
            ("self_attn.o_proj", queries, self.hidden),
            ("mlp.gate_proj", self.hidden, self.intermediate),
            ("mlp.up_proj", self.hidden, self.intermediate),
            ("mlp.down_proj", self.intermediate, self.hidden),
        )
        block = sum(inputs * outputs for _, inputs, outputs in linear) + 2 * self.hidden  # and two norms
        if self.kind == "qwen3":
            block += 2 * self.head_dim  # norms of queries and keys
        if self.kind == "qwen2":
            block += queries + 2 * keys
        elif self.attention_bias:
            block += queries + 2 * keys + self.hidden
        if self.mlp_bias:
            block += 2 * self.intermediate + self.hidden
        outer = self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden
        return ModelShape(
            kind=self.kind,
            parameters=outer + self.layers * block,
            outer=outer,
            layers=self.layers,
            hidden=self.hidden,
            intermediate=self.intermediate,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab=self.vocab,
            max_context=self.max_context,
            linear=tuple(
                (f"model.layers.{layer}.{name}", inputs, outputs)
                for layer in range(self.layers)
                for name, inputs, outputs in linear
            ),
            named=() if self.tied else (("lm_head", self.hidden, self.vocab),),
            head=0 if self.tied else self.vocab * self.hidden,
        )


def _known_decoder(file: Path) -> ModelShape | None:
    """The shape of a model of a known family whose config.json gives every size; None leaves it to transformers.

    What transformers would fill in or refuse is not guessed here.
    """
    try:
        given = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(given, dict) or given.get("model_type") not in KNOWN or "quantization_config" in given:
        return None
    kind, rope = given["model_type"], given.get("rope_parameters") or given.get("rope_scaling") or {}
    if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type", "default")) not in _FIXED_ROTATIONS:
        return None
    keys = {
        "hidden": "hidden_size",
        "intermediate": "intermediate_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "vocab": "vocab_size",
        "max_context": "max_position_embeddings",
    }
    sizes = {name: _size(given.get(key)) for name, key in keys.items()}
    if 0 in sizes.values() or sizes["hidden"] % sizes["heads"] or sizes["heads"] % sizes["kv_heads"]:
        return None
    per_head = given.get("head_dim")
    if per_head is None and kind != "qwen3":
        per_head = sizes["hidden"] // sizes["heads"]
    sizes["head_dim"] = _size(per_head)
    flags = {
        "tied": given.get("tie_word_embeddings", False),
        "attention_bias": given.get("attention_bias", False) if kind in ("llama", "qwen3") else False,
        "mlp_bias": given.get("mlp_bias", False) if kind == "llama" else False,
    }
    if sizes["head_dim"] == 0 or any(type(flag) is not bool for flag in flags.values()):
        return None
    tied, attention, mlp = flags.values()
    return _Decoder(kind, **sizes, tied=tied, attention_bias=attention, mlp_bias=mlp).shape()


def _size(value: object) -> int:
    """A positive whole number; 0 for anything else."""
    return value if type(value) is int and value > 0 else 0


def _head_dim(text: Any) -> int:
    """Size of a head's queries and keys; of a state-space model, the width."""
    own = getattr(text, "qk_head_dim", None) or getattr(text, "head_dim", None)
    return int(own or text.hidden_size // int(getattr(text, "num_attention_heads", 1)))


def _intermediate(text: Any) -> int:
    """Width of the feed-forward part that a token passes through: of all its experts together, if it has any."""
    width = _widest(getattr(text, "intermediate_size", 0)) or 4 * text.hidden_size
    chosen, of = _experts(text)
    if of == 1:
        return width
    each = _widest(getattr(text, "moe_intermediate_size", 0)) or width
    shared = int(getattr(text, "shared_expert_intermediate_size", 0) or 0)
    return chosen * each + shared + each * int(getattr(text, "n_shared_experts", 0) or 0)


def _widest(sizes: int | list[int] | None) -> int:
    """Of a size that some families give for each layer or modality, the largest."""
    return max(sizes, default=0) if isinstance(sizes, list | tuple) else int(sizes or 0)


def _apart(config: Any, blocks: Mapping[str, int]) -> str:
    """See `ModelShape.apart`."""
    from agentrl.models.model_config import state_layers, takes_attention

    if kinds := state_layers(config):
        return f"layers of kind {', '.join(kinds)}, which carry a state along the row"
    if any(name.endswith(".sinks") for name in blocks):
        return "attention with sinks"
    return "" if takes_attention(config) else "attention that cannot be replaced"


def _experts(text: Any) -> tuple[int, int]:
    """How many experts the router chooses, and of how many; (1, 1) without one."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((found for name in names if (found := getattr(text, name, None))), None)
    chosen = getattr(text, "num_experts_per_tok", None)
    return (min(int(chosen), int(experts)), int(experts)) if experts and chosen else (1, 1)


def _routed(text: Any, blocks: Mapping[str, int]) -> int:
    """Parameters of the experts that a router chooses from."""
    return sum(n for name, n in blocks.items() if ".experts." in name) if _experts(text) != (1, 1) else 0


def classifier_parameters(directory: Path) -> int:
    """Parameters of a sequence-classification model, from the config.json of its directory.

    Raises:
        ConfigError: it is missing, no JSON, or of a model that has no such head.
    """
    import torch
    from transformers import AutoModelForSequenceClassification

    from agentrl.models.model_config import NO_MODEL, any_config, one_line

    config = any_config(directory, f"reward_model.path {directory}")
    auto: Any = AutoModelForSequenceClassification
    try:
        with torch.device("meta"):  # shapes without storage
            model = auto.from_config(config, trust_remote_code=False)
    except (*NO_MODEL, OSError) as e:
        raise ConfigError(
            f"reward_model.path {directory}: not a classifier that can be planned: {one_line(e)}"
        ) from e
    return sum(p.numel() for p in model.parameters())
