"""How the folder of a model stores its tensors: which keep their own precision, and under which names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.errors import ConfigError
from agentrl.models.folder import PLAIN_DECODERS

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


def exact_tensors(directory: Path) -> frozenset[str]:
    """The names of saved tensors that no precision of the model changes: buffers, and what its class lists.

    Among them are the biases by which the routers of DeepSeek-V3 and its relatives choose experts: in bfloat16,
    other experts are chosen. A tensor that the model has under another name than its folder is named twice.

    Args:
        directory: of the model, with its config.json. Of a model that transformers does not know, there are none.
    """
    model = _without_values(directory)
    if model is None:
        return frozenset()
    listed = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    buffers = {name for name, _ in model.named_buffers()}
    found = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name in buffers or any(part in name for part in listed)
    }
    return frozenset({*found, *_as_saved(model, dict(found))})


def as_saved(weights: dict[str, Tensor], directory: Path) -> dict[str, Tensor]:
    """Weights of a model by the names, and in the pieces, in which transformers saves them and other programs load
    them: it computes with all experts of a layer in one tensor, and saves them one by one.

    Args:
        weights: emptied, so that the tensors of a block are freed once they are copied.
        directory: of the model, with its config.json. Of a model that transformers does not know, nothing changes.
    """
    model = _without_values(directory)
    return weights if model is None else _as_saved(model, weights)


def _as_saved(model: PreTrainedModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    saved: dict[str, Tensor] = {}
    for block in _blocks(weights):  # transformers copies most experts, so one at a time
        part = revert_weight_conversion(model, {name: weights.pop(name) for name in block})
        saved |= {name: tensor.contiguous() for name, tensor in part.items()}
    return saved


def _blocks(names: Iterable[str]) -> list[list[str]]:
    """Names of tensors by block; those outside of the blocks together."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault("".join(re.findall(r"^.*?\.[0-9]+\.", name)), []).append(name)
    return list(found.values())


@lru_cache(maxsize=1)
def _without_values(directory: Path) -> PreTrainedModel | None:
    """The model with shapes alone; None if its tensors are all stored as they are, or transformers lacks it."""
    given = json.loads((directory / "config.json").read_bytes())
    if not isinstance(given, dict) or given.get("model_type") in PLAIN_DECODERS:
        return None
    import torch

    from agentrl.models.loading import LOADING
    from agentrl.models.model_config import auto_class, read_config

    try:
        config = read_config(directory, str(directory))
    except ConfigError:  # a server may know it
        return None
    # In float32, because transformers makes the dtype of a model the default of PyTorch meanwhile, in all threads.
    with LOADING, torch.device("meta"):
        model: PreTrainedModel = auto_class(config).from_config(
            config, dtype=torch.float32, trust_remote_code=False
        )
    return model
