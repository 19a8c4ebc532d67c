"""Whether a model computes on packed rows what it computes on each row alone, also beyond every boundary it has.

Sliding windows, attention chunks, scales that grow with the position and selections of the best keys change
nothing on shorter rows, and real ones are thousands of tokens long. So a model is tried twice: as it is, and
with the same weights and all boundaries of its config brought down to a few tokens, on rows that go past them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from agentrl.errors import ConfigError
from agentrl.models.folder import check_model_folder

NEAR = 8
"""Tokens at which the boundaries lie in the second try."""
SHARED = (5, 3, 9, 4, 7, 12, 2, 10, 6, 8, 1)
ENDS = ((8, 2, 6, 11, 3, 5, 13, 4, 9), (1, 3, 7))
ALONE = (6, 11, 2, 12, 4, 9, 1, 13, 5, 8, 3, 10, 7, 2, 6, 14, 11, 4, 9)
"""What the rows are made of: two that begin alike and one by itself; all go past `NEAR`."""

Packed = Callable[[PreTrainedModel], Tensor]
"""Numbers of the tokens of all rows, computed together: (N, M)."""
Alone = Callable[[PreTrainedModel], Sequence[Tensor]]
"""The same computed by transformers itself, row by row."""


def probe(model: PreTrainedModel, packed: Packed, alone: Alone, *, where: str, advice: str) -> None:
    """See that both ways agree, with the boundaries of the config where they are and near the first token.

    Raises:
        ConfigError: they differ, or the model cannot be computed like this at all; one line that says why.
    """
    name = type(model).__name__
    refuse_config(model.config, where)
    kinds = unusual_layers(model.config)
    why = f"; it has layers of kind {', '.join(kinds)}" if kinds else ""
    tries = [(model, "")]
    with torch.no_grad():
        if far := boundaries(model.config):
            listed = ", ".join(f"{key} {value:,}" for key, value in sorted(far.items()))
            try:
                tries.append((with_near_boundaries(model), f" beyond {listed}"))
            except Exception as e:  # whatever a family's constructor may raise
                raise ConfigError(
                    f"{where}: {name} cannot be tried beyond {listed}: {_reason(e)}; {advice}"
                ) from e
        for tried, beyond in tries:
            try:
                found = packed(tried)
            except ConfigError as e:
                raise ConfigError(f"{where}: {e}") from e
            except Exception as e:  # families fail in many ways where their own mask or cache is missing
                raise ConfigError(
                    f"{where}: {name} cannot be computed on rows that lie end to end ({_reason(e)}){why}; {advice}"
                ) from e
            wanted = torch.cat(list(alone(tried)))
            gap = relative_gap(found, wanted)
            if not gap < tolerance(tried) and bool(wanted.isfinite().all()):  # else the first gradient tells
                raise ConfigError(
                    f"{where}: {name} does not compute the same on rows that lie end to end as on each by itself"
                    f"{beyond} (relative difference {gap:.1e}){why}; {advice}"
                )


def unusual_layers(config: PretrainedConfig) -> list[str]:
    """Kinds of layers that are neither full nor sliding-window attention, where the config names them."""
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ())
    return sorted(kinds - {"full_attention", "sliding_attention", "attention"})


def relative_gap(found: Tensor, wanted: Tensor) -> float:
    """The largest distance of a token's numbers, relative to their norm."""
    found, wanted = found.float(), wanted.float()
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-6)).max())


def tolerance(model: PreTrainedModel) -> float:
    """What rounding explains: it grows with the depth."""
    if model.dtype != torch.float32:
        return 0.1
    return 2e-5 * (1 + int(getattr(model.config.get_text_config(), "num_hidden_layers", 32)))


def refuse_config(config: PretrainedConfig, where: str) -> None:
    """Refuse what a look at the config tells.

    Raises:
        ConfigError: the model has an encoder, or rotations that change with the length of a batch.
    """
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"{where}: {kind} is an encoder-decoder model; agentrl trains decoders only")
    for section in _sections(config):
        for rope in _ropes(section.get("rope_parameters") or section.get("rope_scaling")):
            if rope in ("dynamic", "longrope", "su"):
                raise ConfigError(
                    f"{where}: rotary embeddings of type {rope!r} change with the longest sequence in "
                    "a batch, so rows would not train as they were sampled; use a model with fixed ones (default, "
                    "linear, yarn, llama3)"
                )


def read_config(directory: Path, where: str) -> PretrainedConfig:
    """The config of a causal language model that transformers itself implements.

    Raises:
        ConfigError: config.json cannot be read, needs code of its own, or is of a kind of model that neither the
            learner nor the local engine can compute.
    """
    refuse_adapter(directory, where, "name its base as model.path and this folder as learner.lora.adapter, or ")
    check_model_folder(directory, where)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError) as e:
        if "auto_map" in str(e) or "trust_remote_code" in str(e):
            raise ConfigError(
                f"{where}: the model is not part of transformers and brings its own "
                "code (auto_map in config.json); agentrl runs no code from model folders, because such code can "
                "neither be reviewed nor be shown to compute packed rows exactly; use a model that transformers "
                "implements"
            ) from e
        raise ConfigError(f"{where}: config.json cannot be used: {_reason(e)}") from e
    refuse_config(config, where)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        for part, what in (("vision_config", "images"), ("audio_config", "sound")):
            if getattr(config, part, None) is not None:
                raise ConfigError(
                    f"{where}: {config.model_type} is a model of {what} and text ({part} in config.json); agentrl "
                    "trains text models: use the text-only model of the family, or another one"
                )
        raise ConfigError(
            f"{where}: {config.model_type} is no causal language model: transformers has no "
            f"AutoModelForCausalLM for it; use a decoder such as Qwen, Llama or Mistral"
        )
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(
            f"{where}: {model.__name__} does not take its attention from transformers' AttentionInterface, so "
            "what it computes on packed rows cannot be controlled; use Qwen, Llama or Mistral"
        )
    return config


def refuse_adapter(directory: Path, where: str, instead: str = "") -> None:
    """Refuse a folder whose weights are those of an adapter: transformers would look for its base elsewhere.

    Raises:
        ConfigError: the folder has an adapter_config.json.
    """
    if (Path(directory) / "adapter_config.json").is_file():
        raise ConfigError(
            f"{where}: holds an adapter (adapter_config.json), not a model: {instead}merge the adapter into its "
            "base with peft (merge_and_unload, save_pretrained) and name the result"
        )


def boundaries(config: PretrainedConfig) -> dict[str, int]:
    """Everything in a config that begins to matter at some number of tokens beyond `NEAR`, by its key."""
    return {
        key: value
        for section in _sections(config)
        for key, value in _numbers(section)
        if _BOUNDARY.search(key) and not _COUNT.search(key) and value > NEAR
    }


_BOUNDARY = re.compile(
    r"window|chunk|floor|capacity|local_attention|index_topk|index_block|topk_block|sparse_block|"
    r"original_max_position|attention_block"
)
_COUNT = re.compile(r"^(num|n|max)_|layers|_layer")


def with_near_boundaries(model: PreTrainedModel) -> PreTrainedModel:
    """The same model, weights shared, with every boundary of its config at `NEAR` tokens."""
    config = copy.deepcopy(model.config)
    for section in _sections(config):
        _bring_near(section)
    device, dtype = model.device, torch.get_default_dtype()
    try:
        torch.set_default_dtype(model.dtype)
        with no_init_weights():
            near: PreTrainedModel = type(model)(config)
    finally:
        torch.set_default_dtype(dtype)
    near.load_state_dict(model.state_dict(), strict=False, assign=True)
    near.to(device)  # type: ignore[arg-type]  # buffers: the parameters are there
    near.set_attn_implementation(model.config._attn_implementation)
    near.train(False)
    near.requires_grad_(False)
    return near


def _bring_near(section: dict[str, Any]) -> None:
    for key, value in list(section.items()):
        if isinstance(value, dict):
            _bring_near(value)
        elif _is_number(value) and _BOUNDARY.search(key) and not _COUNT.search(key) and value > NEAR:
            section[key] = type(value)(NEAR)


def _sections(config: PretrainedConfig) -> Iterator[dict[str, Any]]:
    """The attributes of a config and of the configs in it."""
    found = vars(config)
    yield found
    for value in list(found.values()):
        if isinstance(value, PretrainedConfig):
            yield from _sections(value)


def _numbers(section: dict[str, Any]) -> Iterator[tuple[str, int]]:
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _numbers(value)
        elif _is_number(value):
            yield key, int(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _ropes(parameters: object) -> Iterator[str]:
    """The kinds of rotations: of the model, or of each kind of layer."""
    if isinstance(parameters, dict):
        kind = parameters.get("rope_type", parameters.get("type"))
        if isinstance(kind, str):
            yield kind
        for value in parameters.values():
            yield from _ropes(value)


def _reason(error: Exception) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
