"""Which attention the learner computes with: chosen without importing torch, so that `agentrl plan` stays fast."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Literal

from agentrl.config.run import LearnerConfig
from agentrl.errors import ConfigError
from agentrl.gpu import gpus_here

Kind = Literal["sdpa", "flex", "flash"]


def choose_attention(config: LearnerConfig, device_type: str, head_dims: set[int]) -> Kind:
    """Resolve `learner.attention`: `auto` picks the best available kernel for this model and precision.

    Args:
        head_dims: sizes of the heads, of queries and keys and of values.

    Raises:
        ConfigError: the requested attention does not work here.
    """
    gpu, low = device_type == "cuda", config.precision == "bfloat16"
    if config.attention == "auto":
        if not gpu:
            return "sdpa"
        if low and _fits_flash(head_dims) and _no_flash() is None:
            return "flash"
        return "flex" if find_spec("triton") and min(head_dims) >= 16 else "sdpa"
    asked = f"learner.attention {config.attention}"
    if config.attention != "sdpa" and not gpu:
        why = (
            "PyTorch has no backward pass for it on CPUs"
            if config.attention == "flex"
            else "it has GPU kernels only"
        )
        raise ConfigError(
            f"{asked} needs a GPU, and the learner computes on the {device_type.upper()}: {why}; {_LEAVE}"
        )
    if config.attention == "flash":
        if (why_not := _no_flash()) is not None:
            raise ConfigError(f"{asked} needs flash-attn{why_not}, or {_LEAVE}")
        if not low:
            raise ConfigError(f"{asked} computes in bfloat16 only: set learner.precision to bfloat16, or {_LEAVE}")
        if not _fits_flash(head_dims):
            raise ConfigError(f"{asked} cannot compute heads of size {max(head_dims)} here; {_LEAVE}")
    return config.attention


_LEAVE = "leave learner.attention at auto"


def _no_flash() -> str | None:
    """Why flash-attn's function cannot be used here, and what to do; None if it can. Imports it if it is there."""
    install = "pip install flash-attn --no-build-isolation"
    if not find_spec("flash_attn"):
        return f": {install}"
    try:
        _ = import_module("flash_attn").flash_attn_varlen_func
    except Exception as e:  # whatever a package built for another torch raises
        reason = " ".join(str(e).split())[:200]
        return f", and what is installed cannot be used ({type(e).__name__}: {reason}): {install}"
    return None


def _fits_flash(sizes: set[int]) -> bool:
    """Its kernels support a single head size, a multiple of 8 up to 256, on GPUs since Ampere."""
    return len(sizes) == 1 and max(sizes) <= 256 and max(sizes) % 8 == 0 and not _before_ampere()


def _before_ampere() -> bool:
    if not gpus_here():
        return False
    import torch

    return torch.cuda.get_device_capability()[0] < 8
