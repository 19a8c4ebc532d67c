"""The model behind the local engine: loading, one forward pass on flat tokens, weights replaced in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from agentrl.engine.attention import (
    ATTENTION,
    AttentionPlan,
    PackedAttention,
    check_attention_support,
    register_attention,
)
from agentrl.engine.cache import CacheShape
from agentrl.engine.fused import FusedDecoder, can_fuse
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(path: str | Path, *, dtype: str, device: str) -> PreTrainedModel:
    """A causal language model from a Hugging Face directory, in eval mode, with the attention of `attention.py`.

    Raises:
        ConfigError: no such directory, not a model directory, or a model the engine cannot run.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    directory = Path(path)
    if not directory.is_dir():
        raise ConfigError(
            f"model directory {str(path)!r} does not exist; give the path of a Hugging Face model directory "
            "(config.json, model.safetensors, tokenizer files); agentrl.testing.tiny_model makes a small one"
        )
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{str(path)!r} has no config.json, so it is not a Hugging Face model directory")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device is {device!r}, but torch finds no CUDA device; use device cpu")
    register_attention()
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=DTYPES[dtype],
            attn_implementation=ATTENTION,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot load a causal language model from {str(path)!r}: {error}") from error
    finally:
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    model, report = loaded
    if absent := sorted(report["missing_keys"]):
        raise ConfigError(
            f"model directory {str(path)!r} holds no weights for {_some(absent)}: config.json and weights are "
            "not of the same model, or a file is missing"
        )
    check_rope(model, str(path))
    module = cast(torch.nn.Module, model)
    return cast(PreTrainedModel, module.to(device))


def check_rope(model: PreTrainedModel, where: str) -> None:
    """See that rotations depend on the position only: rows of many lengths are computed together.

    Raises:
        ConfigError: they depend on how long the longest sequence of the call is.
    """
    for name, module in model.named_modules():
        kind = getattr(module, "rope_type", None)
        if kind in ("dynamic", "longrope"):
            raise ConfigError(
                f"model directory {where!r}: {name} has rotary embeddings of type {kind!r}, which change with the "
                "length of the longest sequence in a batch; use a model with fixed ones (default, yarn, llama3)"
            )


class FlatModel:
    """A transformers model on flat batches; construction checks that its own attention gives the same."""

    def __init__(self, model: PreTrainedModel) -> None:
        check_attention_support(model)
        register_attention()
        self.module = model
        model.train(False)
        self._fused: FusedDecoder | None = None
        self.vocabulary = int(model.config.get_text_config().vocab_size)
        self.max_positions = int(model.config.get_text_config().max_position_embeddings)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        first = next(model.parameters())
        self.device, self.dtype = first.device, first.dtype
        self.shape = self._probe()
        self._state = dict(model.state_dict())

    def __call__(self, ids_N: Tensor, positions_N: Tensor, plan: AttentionPlan, keep_k: Tensor) -> Tensor:
        """Logits (k, V) of the tokens `keep_k` of a flat batch of N tokens."""
        if self._fused is not None:
            return self._fused(ids_N, positions_N, plan, keep_k)
        out = self.module(
            input_ids=ids_N[None],
            position_ids=positions_N[None],
            use_cache=False,
            attention_plan=plan,
            logits_to_keep=keep_k,
        )
        return cast(Tensor, out.logits)[0]

    def packed(self, rows: Sequence[Sequence[int]], plan: PackedAttention | None = None) -> Tensor:
        """Logits (N, V) of whole sequences, computed without a cache."""
        lengths = [len(row) for row in rows]
        ids = torch.tensor([token for row in rows for token in row], device=self.device)
        positions = torch.cat([torch.arange(length, device=self.device) for length in lengths])
        return self(ids, positions, plan or PackedAttention(lengths), torch.arange(len(ids), device=self.device))

    def update(self, weights: Mapping[str, Tensor]) -> None:
        """Copy new values into the parameters; checks everything before it changes anything.

        Raises:
            ValueError: a name the model does not have, a wrong shape, or a parameter that is not given
                (of tied parameters one name suffices).
        """
        unknown = [name for name in weights if name not in self._state]
        if unknown:
            raise ValueError(f"the model has no parameter {_some(unknown)}; names are those of the state dict")
        for name, tensor in weights.items():
            if tensor.shape != self._state[name].shape:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}, the model's {tuple(self._state[name].shape)}"
                )
        given = {self._state[name].data_ptr() for name in weights}
        missing = [name for name, tensor in self._state.items() if tensor.data_ptr() not in given]
        if missing:
            raise ValueError(f"weights lack {_some(missing)}; an update must give every parameter")
        with torch.no_grad():
            for name, tensor in weights.items():
                self._state[name].copy_(tensor)

    @torch.no_grad()
    def _probe(self) -> CacheShape:
        """Run two short sequences with our attention and the model's own; returns what the cache must hold."""
        rows = [
            [token % self.vocabulary for token in range(1, 12)],
            [token % self.vocabulary for token in (5, 3, 9)],
        ]
        before = self.module.config._attn_implementation
        name = type(self.module).__name__
        self.module.set_attn_implementation("eager")
        own = [
            self.module(input_ids=torch.tensor([row], device=self.device), use_cache=False).logits[0]
            for row in rows
        ]
        self.module.set_attn_implementation(ATTENTION)
        if can_fuse(self.module):
            self._fused = FusedDecoder(self.module)
        plan = PackedAttention([len(row) for row in rows])
        try:
            ours = self.packed(rows, plan)
        except TypeError as error:
            self.module.set_attn_implementation(before)
            raise ConfigError(f"{name} does not hand keywords on to its attention: {error}") from error
        layers = int(self.module.config.get_text_config().num_hidden_layers)
        shapes = set(plan.shapes.values())
        reference = torch.cat(own).float()
        gap = float((ours.float() - reference).abs().max() / reference.abs().max().clamp(min=1.0))
        if (
            len(plan.shapes) != layers
            or len(shapes) != 1
            or not gap < (1e-3 if self.dtype == torch.float32 else 0.1)
        ):
            self.module.set_attn_implementation(before)
            raise ConfigError(
                f"{name} does not compute the same with the local engine's attention (relative difference "
                f"{gap:.1e}, {len(plan.shapes)} of {layers} layers with keys and values of {len(shapes)} kinds); "
                "use engine sglang"
            )
        heads, key_dim, value_dim = shapes.pop()
        return CacheShape(layers, heads, key_dim, value_dim, self.dtype, self.device)


def _some(names: Iterable[str], at_most: int = 3) -> str:
    names = list(names)
    rest = f" and {len(names) - at_most} more" if len(names) > at_most else ""
    return ", ".join(repr(name) for name in names[:at_most]) + rest
