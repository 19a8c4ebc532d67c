"""The policy as the learner has it: a Hugging Face model in float32, with packed attention if it can have that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agentrl.errors import ConfigError
from agentrl.learner.apart import settle_rows
from agentrl.learner.attention.packed import PACKED_ATTENTION, register_attention
from agentrl.models.loading import load_causal_lm
from agentrl.models.model_config import any_config, auto_class, freeze_senses, takes_attention


def load_policy(directory: Path, device: torch.device) -> PreTrainedModel:
    """Load a Hugging Face causal language model in float32, which computes several rows packed if it can.

    Raises:
        ConfigError: the directory is missing or holds no model, or one that computes rows together otherwise than
            each alone.
    """
    where = f"model directory {directory}"
    register_attention()
    model = load_causal_lm(directory, where, dtype=torch.float32, attention=PACKED_ATTENTION)
    settle_rows(model, where)
    model.to(device)  # type: ignore[arg-type]
    return model


def empty_policy(directory: Path) -> PreTrainedModel:
    """The same model without its values; call it where tensors have no storage (`torch.device("meta")`)."""
    register_attention()
    config = any_config(directory, str(directory))
    model: PreTrainedModel = (
        auto_class(config)
        .from_config(
            config,
            dtype=torch.float32,
            attn_implementation=PACKED_ATTENTION if takes_attention(config) else None,
            trust_remote_code=False,
        )
        .eval()
    )
    return freeze_senses(model)


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Keep only the input of each block and recompute the rest in the backward pass, without dropout.

    Raises:
        ConfigError: the model's family cannot do that.
    """
    if not model.supports_gradient_checkpointing:
        raise ConfigError(
            f"learner.checkpoint_activations: transformers cannot recompute the blocks of {type(model).__name__}; "
            "leave it out"
        )
    options: Any = {"use_reentrant": False}
    enable: Any = getattr(model, "activation_checkpointing_enable", None)
    if enable is not None:
        enable(activation_checkpointing_kwargs=options)
    else:  # transformers before it had a new name
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)  # type: ignore[no-untyped-call]
    # transformers checkpoints a block in training mode only, in which some families also sample: dropout, noise on
    # the router. So the blocks alone are put into it, and what is in them computes as in the engine.
    for block in model.modules():
        if isinstance(block, GradientCheckpointingLayer):
            block.training = True
            for name, value in vars(block).items():
                if "drop" in name and isinstance(value, float):
                    setattr(block, name, 0.0)
