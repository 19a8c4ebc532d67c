"""Lets PyPI's torchvision be imported beside a CPU build of PyTorch. Imported by a .pth line at interpreter start.

The wheel's compiled operators link against CUDA and do not load, so that torchvision fails at import when it adds
shape functions to operators nobody declared. SGLang imports it for image models; a text model never calls it. The
declarations alone are made here, at the moment torchvision asks for that module.
"""

import sys

_ASKS_FOR_THEM = "torchvision._meta_registrations"
_OPERATORS = ("nms", "qnms")
_kept = []


class _Declare:
    """A finder that finds nothing; it is told of every import."""

    def find_spec(self, name, path=None, target=None):
        if name == _ASKS_FOR_THEM and not _kept:
            import torch

            library = torch.library.Library("torchvision", "FRAGMENT")
            _kept.append(library)  # the declarations go when it does
            for operator in _OPERATORS:
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


sys.meta_path.insert(0, _Declare())
