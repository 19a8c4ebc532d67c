"""Small models on a CPU: their operations are so short that a second torch thread hardly speeds one up."""

from __future__ import annotations

from torch import nn

SMALL = 20_000_000
"""Parameters from which on a model is not small."""
PLAIN_DECODERS = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM")
"""Families whose forward pass is known operation by operation, and leaves nothing behind in the modules."""


def is_small(model: nn.Module) -> bool:
    """Whether a model is better computed on several cores in parts of its batch than operation by operation."""
    return sum(parameter.numel() for parameter in model.parameters()) < SMALL
