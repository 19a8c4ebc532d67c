"""The size of AdamW's moments in memory and in checkpoints; without torch, so that `agentrl plan` stays fast."""

from __future__ import annotations

from agentrl.config.run import OptimizerState

BLOCK = 256
"""Numbers that share a scale in 8 bits, at most."""
SMALLEST = 4096
"""Tensors of fewer numbers stay in float32."""


def moment_bytes(rows: int, width: int, state: OptimizerState) -> int:
    """Bytes of both moments of a matrix."""
    numbers = rows * width
    if state == "float32" or numbers < SMALLEST:
        return 2 * 4 * numbers
    return 2 * (2 * numbers if state == "bfloat16" else numbers + 4 * rows * scales_per_row(width))


def scales_per_row(width: int) -> int:
    """Blocks of a row."""
    return -(-width // BLOCK)
