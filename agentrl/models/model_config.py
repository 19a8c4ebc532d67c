"""Read a model's config.json, and reject models that agentrl cannot compute exactly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from agentrl.errors import ConfigError
from agentrl.models.folder import check_model_folder, refuse_adapter


def refuse_config(config: PretrainedConfig, where: str) -> None:
    """Reject models that cannot work, judging by their config.

    Raises:
        ConfigError: the model has an encoder, or rotary embeddings that change with the length of a batch.
    """
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"{where}: {kind} is an encoder-decoder model; agentrl trains decoders only")
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
        raise ConfigError(f"{where}: config.json cannot be used: {one_line(e)}") from e
    refuse_config(config, where)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        for part, what in (("vision_config", "images"), ("audio_config", "sound")):
            if getattr(config, part, None) is not None:
                raise ConfigError(
                    f"{where}: {config.model_type} is a model of {what} and text ({part} in config.json); agentrl "
                    "trains text models: use the text-only model of the family, or another one"
                )
        raise ConfigError(
            f"{where}: {config.model_type} is not a causal language model: transformers has no "
            f"AutoModelForCausalLM for it; use a decoder such as Qwen, Llama or Mistral"
        )
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(
            f"{where}: {model.__name__} does not use transformers' AttentionInterface, so its attention on packed "
            "rows cannot be controlled; use Qwen, Llama or Mistral"
        )
    return config


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
