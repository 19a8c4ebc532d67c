"""Stands in for SGLang's compiled kernels on a CPU without AMX, where no wheel of `sgl_kernel` loads.

With `--attention-backend torch_native` a dense text model runs in SGLang's own layers written in PyTorch. What is
left of the kernels are names that are imported and the one function below that is called. Every other name is a
placeholder that raises when it is called, so that nothing is computed wrongly in silence.
"""

import importlib.machinery
import sys
import types

__version__ = "0.0.0"


def assign_req_to_token_pool_cpu(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len
):
    """Write where the new tokens of each request lie: row i gets its slice of `out_cache_loc` at [start, end)."""
    done = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        places = out_cache_loc[done : done + end - start]
        req_to_token[row, start:end] = places.to(req_to_token.dtype)
        done += end - start


class _Absent:
    """A kernel that is not here: may be imported and looked into, not called."""

    def __init__(self, name):
        self.__name__ = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{self.__name__} has no stand-in for a CPU")


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Absent(name)


class _Submodules:
    """`sgl_kernel.anything` is a module of placeholders."""

    def find_spec(self, name, path=None, target=None):
        found = name.startswith("sgl_kernel.")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = __getattr__
        return module

    def exec_module(self, module):
        pass


__path__ = []
sys.meta_path.append(_Submodules())
