"""A second device for machines without one: its tensors say that they are there, and their values are on the CPU.

An operation that mixes them with tensors on the CPU fails as it does with CUDA, so a run that works on this device
puts everything where it belongs. The device is PyTorch's PrivateUse1. `install` loads agentrl's modules with the
word cuda replaced, so that the branches for GPUs are taken. What it does not show: CUDA graphs, NCCL, pinned
memory, the order of streams, and kernels.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import re
import sys
import types
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "pretended"
aten = torch.ops.aten
COPIES = {aten.copy_.default, aten._to_copy.default}
PICKS = {aten.index.Tensor, aten._unsafe_index.Tensor}
PUTS = {aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


class Pretended(torch.Tensor):
    """On the second device; `inner` has the values."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, requires_grad: bool = False) -> Pretended:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=torch.device(NAME, 0),
            requires_grad=requires_grad,
        )
        made.inner = inner
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, new: Pretended) -> None:
        self.inner = new.inner
        torch.Tensor.data.__set__(self, new)

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert a tensor on the second device to numpy")

    __array__ = numpy

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = Pretended(self.inner.clone())
        memo[id(self)] = torch.nn.Parameter(copied, self.requires_grad) if _is_parameter(self) else copied
        return memo[id(self)]

    @classmethod
    def __torch_dispatch__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        ours = [x for x in tensors if isinstance(x, cls)]
        _refuse_mixed(func, args, [x for x in tensors if not isinstance(x, cls) and x.dim() > 0], bool(ours))
        there = bool(ours)
        if kwargs.get("device") is not None:
            there = torch.device(kwargs["device"]).type == NAME
            kwargs["device"] = torch.device("cpu")
        kwargs |= {"pin_memory": False} if kwargs.get("pin_memory") else {}
        plain, options = pytree.tree_map(_inner, (args, kwargs))
        with torch.no_grad():
            found = func(*plain, **options)
        if func is aten._to_copy.default and any(found is x for x in plain):
            found = found.clone()
        known = {id(x.inner): x for x in ours}  # what is changed in place stays the same tensor

        def wrapped(x: Any) -> Any:
            if not isinstance(x, torch.Tensor) or id(x) in known:
                return known.get(id(x), x)
            return cls(x) if there else x

        return pytree.tree_map(wrapped, found)


def _refuse_mixed(func: Any, args: Any, on_cpu: list[torch.Tensor], ours: bool) -> None:
    """As CUDA does: scalars may be on the CPU, and so may the indices of a tensor that is not."""
    if func in COPIES or not (on_cpu and ours):
        return
    indices = {id(x) for x in pytree.tree_leaves(args[1])} if func in PICKS | PUTS else set()
    if not all(id(x) in indices for x in on_cpu):
        raise RuntimeError(f"{func}: tensors of shapes {[tuple(x.shape) for x in on_cpu]} are on the CPU")


def _inner(x: Any) -> Any:
    return x.inner if isinstance(x, Pretended) else x


def _is_parameter(x: torch.Tensor) -> bool:
    return isinstance(x, torch.nn.Parameter)


class _Stream:
    """A stream or an event; all is done at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_: _Stream()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def elapsed_time(self, _: Any) -> float:
        return 1.0


class _Module(_DummyBackendModule):
    """What is `torch.cuda` for CUDA."""

    Stream = Event = _Stream

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        return 4 << 30, 8 << 30

    def get_device_capability(self, *_: Any) -> tuple[int, int]:
        return 9, 0

    def get_device_properties(self, *_: Any) -> Any:
        return types.SimpleNamespace(total_memory=8 << 30, name=NAME, major=9, minor=0)

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: Any) -> None:
        torch.set_rng_state(state)

    def current_stream(self, *_: Any) -> _Stream:
        return _Stream()

    def stream(self, *_: Any) -> Any:
        return contextlib.nullcontext()

    def set_device(self, *_: Any) -> None:
        pass

    synchronize = empty_cache = manual_seed_all = set_device


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        return compile(_replaced(self.get_data(self.path).decode()), self.path, "exec", dont_inherit=True)


def _replaced(source: str) -> str:
    source = re.sub(r"""(['"])cuda(['":])""", rf"\1{NAME}\2", source).replace("|cuda(:", f"|{NAME}(:")
    source = source.replace("torch.cuda.", f"__import__('torch').{NAME}.").replace(".is_cuda", f".is_{NAME}")
    source = source.replace("nccl", "gloo").replace("pin_memory=", "pin_memory=False and ")
    # Tensors of inference mode have no versions, which PyTorch wants to copy to ours.
    source = source.replace("torch.inference_mode(False)", "__import__('contextlib').nullcontext()")
    source = source.replace("torch.inference_mode(", "torch.no_grad(")
    # A recorded step is computed again, with Python.
    return source.replace(
        "def cuda_capture(device", "def cuda_capture(_): return lambda run: run\ndef _graphs(device"
    )


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name.split(".")[0] == "agentrl" else None
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Make the device; call it once, before agentrl is imported."""
    assert "agentrl" not in sys.modules
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    library.impl("_copy_from", lambda x, to, wait=False: (_inner(to).copy_(_inner(x)), to)[1], "PrivateUse1")
    install.library = library  # type: ignore[attr-defined]  # its kernels go with it
    sys.meta_path.insert(0, _Finder())

    from torch.distributed.fsdp._fully_shard import _fsdp_param
    from transformers import PreTrainedModel

    _fsdp_param.free_storage = _fsdp_param.alloc_storage = lambda _: None  # ours have no storage
    move = PreTrainedModel.to

    def moved(self: Any, *args: Any, **kwargs: Any) -> Any:
        """CUDA's parameters stay tied; a subclass becomes another parameter in each module."""
        found = move(self, *args, **kwargs)
        if self.config.get_text_config().tie_word_embeddings and self.get_output_embeddings() is not None:
            self.get_output_embeddings().weight = self.get_input_embeddings().weight
        return found

    PreTrainedModel.to = moved


def _empty(size: Any, *, dtype: Any = None, **_: Any) -> torch.Tensor:
    return Pretended(torch.empty(size, dtype=dtype or torch.get_default_dtype()))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> torch.Tensor:
    return Pretended(torch.empty_strided(size, stride, dtype=dtype or torch.get_default_dtype()))
