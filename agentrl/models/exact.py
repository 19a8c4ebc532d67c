"""Tensors of a model that keep their own precision when the model computes in a lower one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError
from agentrl.models.folder import PLAIN_DECODERS


def exact_tensors(directory: Path) -> frozenset[str]:
    """The names of saved tensors that no precision of the model changes: buffers, and what its class lists.

    Among them are the biases by which the routers of DeepSeek-V3 and its relatives choose experts: in bfloat16,
    other experts are chosen.

    Args:
        directory: of the model, with its config.json. Of a model that transformers does not know, there are none.
    """
    given = json.loads((directory / "config.json").read_bytes())
    if not isinstance(given, dict) or given.get("model_type") in PLAIN_DECODERS:  # they have none
        return frozenset()
    import torch
    from transformers import AutoModelForCausalLM

    from agentrl.models.model_config import read_config

    auto: Any = AutoModelForCausalLM
    try:
        config = read_config(directory, str(directory))
    except ConfigError:  # a server may know it
        return frozenset()
    with torch.device("meta"):  # names without storage
        model = auto.from_config(config)
    listed = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    buffers = {name for name, _ in model.named_buffers()}
    return frozenset(
        name for name in model.state_dict() if name in buffers or any(part in name for part in listed)
    )
