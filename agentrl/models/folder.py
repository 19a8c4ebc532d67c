"""Check folders of Hugging Face models: whether one exists, and whether it contains a whole model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl.errors import ConfigError

PLAIN_DECODERS = ("llama", "mistral", "qwen2", "qwen3")
"""Model types (config.json) without experts, buffers that are saved, or layers other than attention and MLP."""


def check_model_folder(directory: str | Path, where: str) -> None:
    """Check that a folder contains a model; `where` names it in errors.

    Raises:
        ConfigError: the folder does not exist, or has no config.json.
    """
    if not Path(directory).is_dir():
        raise ConfigError(
            f"{where} does not exist; give the path of a Hugging Face model directory (config.json, "
            "model.safetensors, tokenizer files); agentrl.models.tiny makes a small one"
        )
    if not (Path(directory) / "config.json").is_file():
        raise ConfigError(
            f"{where}: has no config.json, so it is not a Hugging Face model directory; give the folder of a model"
        )


def refuse_adapter(directory: Path, where: str, instead: str = "") -> None:
    """Reject a folder with adapter weights: transformers would look for the base model elsewhere.

    Raises:
        ConfigError: the folder contains an adapter_config.json.
    """
    if (Path(directory) / "adapter_config.json").is_file():
        raise ConfigError(
            f"{where}: holds an adapter (adapter_config.json), not a model: {instead}merge the adapter into its "
            "base with peft (merge_and_unload, save_pretrained) and name the result"
        )


def refuse_unlisted_optimizer(directory: Path, where: str) -> None:
    """Reject a checkpoint of an earlier agentrl, which has no index of the weights.

    SGLang and vLLM read every safetensors file in such a directory, and fail at the optimizer's.

    Raises:
        ConfigError: the folder contains an optimizer, and no model.safetensors.index.json.
    """
    optimizer = next(directory.glob("optimizer*.safetensors"), None)
    if optimizer is not None and not (directory / "model.safetensors.index.json").is_file():
        raise ConfigError(
            f"{where}: a checkpoint of an earlier agentrl, without model.safetensors.index.json; servers would "
            f"read {optimizer.name} as weights: copy the folder without optimizer*.safetensors, and name the copy"
        )


@contextmanager
def reading_tensors(file: Path) -> Iterator[None]:
    """Raise ConfigError, with the name of the file, where safetensors cannot read it: it is damaged or cut off."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as e:
        raise ConfigError(f"{file} cannot be read: {str(e)[:300]}") from e
