"""Lets SGLang run on a CPU build of PyTorch. Imported by a .pth line at interpreter start.

PyPI's torchvision: the wheel's compiled operators link against CUDA and do not load, so that torchvision fails at
import when it adds shape functions to operators nobody declared. SGLang imports it for image models; a text model
never calls it. The declarations alone are made here, at the moment torchvision asks for that module.

Adapters (LoRA): their code asks for pinned memory, which a machine without an accelerator does not have. Host
memory is all there is here, so the wish is dropped, in processes that load this code. So is the registration with
CUDA of the memory in which SGLang keeps the experts that it reports.
"""

import sys

_ASKS_FOR_THEM = "torchvision._meta_registrations"
_ASKS_FOR_PINNED = "sglang.srt.lora.layers"
_REGISTERS_MEMORY = "sglang.srt.state_capturer.base"
_OPERATORS = ("nms", "qnms")
_kept = []


def _without_pinning(make):
    def made(*args, pin_memory=False, **kwargs):
        return make(*args, **kwargs)

    return made


class _Declare:
    """A finder that finds nothing; it is told of every import."""

    def find_spec(self, name, path=None, target=None):
        if name == _ASKS_FOR_THEM and not _kept:
            import torch

            library = torch.library.Library("torchvision", "FRAGMENT")
            _kept.append(library)  # the declarations go when it does
            for operator in _OPERATORS:
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        if name == _ASKS_FOR_PINNED and "pinned" not in _kept:
            import torch

            _kept.append("pinned")
            if not torch.cuda.is_available():
                torch.Tensor.pin_memory = lambda self, *args: self
                for maker in ("tensor", "empty", "zeros"):
                    setattr(torch, maker, _without_pinning(getattr(torch, maker)))
        if name == _REGISTERS_MEMORY and "registered" not in _kept:
            import torch

            _kept.append("registered")
            if not torch.cuda.is_available():
                from sglang.srt.mem_cache.pool_host import common

                common._cuda_host_register = lambda *args: None
        return None


sys.meta_path.insert(0, _Declare())
