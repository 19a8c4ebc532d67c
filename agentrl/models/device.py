"""Choose the device that a model runs on."""

from __future__ import annotations

import gc

import torch

from agentrl.errors import ConfigError


def pick_device(name: str) -> torch.device:
    """Return the device; `auto` is CUDA if available."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r}: PyTorch sees no CUDA device here; use `cpu` or `auto`")
    return torch.device(name)


def use_device(device: torch.device) -> None:
    """Have CUDA work on this device in this thread where no device is named, as in a `DeviceMesh`, which warns if
    none was chosen."""
    if device.type == "cuda":
        torch.cuda.set_device(torch.cuda.current_device() if device.index is None else device)


def release_gpu_memory() -> None:
    """Return the GPU memory that PyTorch keeps for later tensors; other processes can use it then."""
    gc.collect()  # tensors in reference cycles hold theirs
    torch.cuda.empty_cache()  # nothing happens where CUDA is not in use
