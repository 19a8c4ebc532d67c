"""Whether GPUs can be here at all: `import torch` takes seconds, and most machines that plan a run have none."""

from __future__ import annotations

import os
from pathlib import Path

DRIVERS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")
"""What the drivers of NVIDIA (also under WSL) and AMD leave on Linux."""


def may_have_gpu() -> bool:
    """False only where PyTorch cannot find a CUDA device: no driver, or the environment hides them all."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        return False
    return any(Path(path).exists() for path in DRIVERS)


def gpus_here() -> int:
    """GPUs that PyTorch can use here; torch is imported only where there may be one."""
    if not may_have_gpu():
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def gpu_memory() -> int | None:
    """Bytes of the first GPU, None without one."""
    if not gpus_here():
        return None
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory)
