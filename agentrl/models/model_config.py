"""Read a model's config.json, and reject models that agentrl cannot compute exactly."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING as IMAGE_MODELS

from agentrl.errors import ConfigError
from agentrl.models.folder import check_model_folder, refuse_adapter

NO_MODEL = (
    *(ImportError, LookupError, ValueError, TypeError, AttributeError, RuntimeError, ArithmeticError),
    *(AssertionError, StrictDataclassError),
)
"""What transformers raises where it cannot make a model: a config is inconsistent, a package is missing."""
NO_WEIGHTS = (*NO_MODEL, OSError, EOFError, SafetensorError, UnpicklingError, struct.error)
"""What it raises where it cannot load one: also, a file of weights is damaged or cut off."""


def refuse_config(config: PretrainedConfig, where: str) -> None:
    """Reject models that cannot work, judging by their config.

    Raises:
        ConfigError: the model has an encoder, quantized weights, rotary embeddings that change with the length of
            a batch, heads that cannot share keys evenly, or returns the weights of its attention.
    """
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"{where}: {kind} is an encoder-decoder model; agentrl trains decoders only")
    if quantized := getattr(config, "quantization_config", None):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else None
        raise ConfigError(
            f"{where}: the weights are quantized ({method or 'quantization_config in config.json'}), and agentrl "
            "computes with the original ones: use the model that they were made from"
        )
    if any(getattr(part, "output_attentions", False) for part in (config, config.get_text_config())):
        raise ConfigError(
            f"{where}: config.json says output_attentions: true, and attention on packed rows gives no weights: "
            "remove it"
        )
    for layer in layer_configs(config):
        heads, shared = (getattr(layer, f"num_{kind}_heads", None) for kind in ("attention", "key_value"))
        if isinstance(heads, int) and isinstance(shared, int) and shared > 0 and heads % shared:
            raise ConfigError(
                f"{where}: config.json says num_attention_heads: {heads} and num_key_value_heads: {shared}; the "
                "first must be a multiple of the second"
            )
    for section in config_sections(config):
        for rope in _rope_kinds(section.get("rope_parameters") or section.get("rope_scaling")):
            if rope in ("dynamic", "longrope", "su"):
                raise ConfigError(
                    f"{where}: rotary embeddings of type {rope!r} change with the longest sequence in "
                    "a batch, so rows would not train as they were sampled; use a model with fixed ones (default, "
                    "linear, yarn, llama3)"
                )


def read_config(directory: Path, where: str) -> PretrainedConfig:
    """Load the config of a causal language model that transformers itself implements.

    Raises:
        ConfigError: config.json cannot be read, needs custom code, or describes a kind of model that neither the
        learner nor the local engine can compute.
    """
    config = any_config(directory, where)
    refuse_config(config, where)
    refuse_class(config, where)
    return config


def any_config(directory: Path, where: str) -> PretrainedConfig:
    """Load the config of any model of transformers.

    Raises:
        ConfigError: config.json cannot be read, or needs custom code.
    """
    refuse_adapter(directory, where, "name its base as model.path and this folder as learner.lora.adapter, or ")
    check_model_folder(directory, where)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except (*NO_MODEL, OSError) as e:
        if "auto_map" in str(e) or "trust_remote_code" in str(e):
            raise ConfigError(
                f"{where}: the model is not part of transformers and brings its own "
                "code (auto_map in config.json); agentrl runs no code from model folders, because such code can "
                "neither be reviewed nor be shown to compute packed rows exactly; use a model that transformers "
                "implements"
            ) from e
        raise ConfigError(f"{where}: config.json cannot be used: {one_line(e)}") from e
    # A config.json can name kernels of the Hub here, which transformers would download and run.
    config._attn_implementation = config._experts_implementation = None
    return config


def refuse_class(config: PretrainedConfig, where: str) -> None:
    """Reject models without a causal language model in transformers.

    Raises:
        ConfigError: it has none.
    """
    if model_class(config) is None:
        for part, what in (("vision_config", "images"), ("audio_config", "sound")):
            if getattr(config, part, None) is not None:
                raise ConfigError(
                    f"{where}: {config.model_type} is a model of {what} and text ({part} in config.json) without "
                    "a text decoder that agentrl can train: use the text-only model of the family, or another one"
                )
        raise ConfigError(
            f"{where}: {config.model_type} is not a causal language model: transformers has no "
            f"AutoModelForCausalLM for it; use a decoder such as Qwen, Llama or Mistral"
        )


def reads_images(config: PretrainedConfig) -> bool:
    """Whether the model of a config reads images as well; agentrl trains its text decoder on text."""
    return getattr(config, "vision_config", None) is not None and type(config) in IMAGE_MODELS


def model_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The class in transformers with the text decoder and output layer of a config; None if there is none."""
    models: Any = IMAGE_MODELS if reads_images(config) else MODEL_FOR_CAUSAL_LM_MAPPING
    found: type[PreTrainedModel] | None = models.get(type(config), None)
    return found


def auto_class(config: PretrainedConfig) -> Any:
    """What loads and makes that class; it has no types."""
    return AutoModelForImageTextToText if reads_images(config) else AutoModelForCausalLM


def takes_attention(config: PretrainedConfig) -> bool:
    """Whether the model of a config takes its attention from transformers' AttentionInterface."""
    return bool(getattr(model_class(config), "_supports_attention_backend", False))


def freeze_senses(model: PreTrainedModel) -> PreTrainedModel:
    """Leave the parts of a model of images and text that text does not reach as they are; returns the model."""
    if reads_images(model.config):
        head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        decoder = model.get_decoder()  # type: ignore[no-untyped-call]
        trained = {id(p) for part in (decoder, head) if part is not None for p in part.parameters()}
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in trained)
    return model


def state_layers(config: PretrainedConfig) -> list[str]:
    """Return the kinds of layers that carry a state from token to token: tokens then meet outside attention, too.

    Linear attention, convolutions and state-space layers, alone or next to attention; judged by the config.
    """
    kinds = {str(kind) for kind in getattr(config.get_text_config(), "layer_types", None) or ()}
    if found := sorted(kind for kind in kinds if _STATE.search(kind)):
        return found
    model = model_class(config)
    return ["recurrent"] if getattr(model, "_is_stateful", False) and not _plain(config) else []


def unsplittable(family: str, kinds: Sequence[str], ranks: int) -> str:
    """Why the rows of a model with such layers cannot be split over ranks."""
    return (
        f"learner.sequence_ranks is {ranks}, and {family} has layers of kind {', '.join(kinds)}, which carry a "
        "state along the row: a rank with a piece of a row does not have the state before it; use a decoder whose "
        "tokens meet in attention only (Qwen3, Llama, Mistral and the like)"
    )


_STATE = re.compile(r"linear|conv|mamba|ssm|recurrent|rwkv|lstm|delta|hybrid")


def _plain(config: PretrainedConfig) -> bool:
    """Whether the config of a family that has recurrent layers says that this model has none."""
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ())
    return bool(kinds) and kinds <= {"full_attention", "sliding_attention", "attention"}


def layer_configs(config: PretrainedConfig) -> Sequence[PretrainedConfig]:
    """The config of each layer where they differ; else the one that all of them have.

    In a config with `per_layer_config` (Gemma 4, for example), transformers raises an error for a setting that is
    not the same in all layers.
    """
    text = config.get_text_config()
    found: Any = text.per_layer_config if getattr(text, "is_heterogeneous", False) else (text,)
    return tuple(found)


def config_sections(config: PretrainedConfig) -> Iterator[dict[str, Any]]:
    """Yield the attributes of a config and of its nested configs."""
    found = vars(config)
    yield found
    for value in list(found.values()):
        if isinstance(value, PretrainedConfig):
            yield from config_sections(value)


def _rope_kinds(parameters: object) -> Iterator[str]:
    """Return the kinds of rotary embeddings: of the model, or of each kind of layer."""
    if isinstance(parameters, dict):
        kind = parameters.get("rope_type", parameters.get("type"))
        if isinstance(kind, str):
            yield kind
        for value in parameters.values():
            yield from _rope_kinds(value)


def one_line(error: Exception) -> str:
    """Format an exception on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
