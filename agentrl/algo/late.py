"""`torch`, imported on first use: the configuration reads the parameters in `algo` and must load without torch.

Modules of this package write `from agentrl.algo.late import Tensor, torch` and use both as usual, but not while
they are imported: no `torch.` in a default argument or at module level.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor as Tensor
else:

    class _Late:
        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

    torch = _Late()
    Tensor = Any
