"""Changes of weights: encoded by the trainer, applied inside an inference server, which imports this file alone.

Between two steps at the learning rates of reinforcement learning, 1 to 3 % of bfloat16 weights change at all. A
change is the new bit pattern of a weight; positions are stored per block of 256 weights, so that a change of a
bfloat16 weight costs three bytes. Every tensor, changed or not, comes with fingerprints of the bytes sent and of
the result, which the server checks; of a tensor that it holds in parts, it checks instead of the result that
nothing else has written the parts in between.
"""

from __future__ import annotations

import base64
import functools
import json
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

BLOCK = 256
_CHUNK = 1 << 15
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def _bits(tensor: Tensor) -> Tensor:
    """The bit patterns of a tensor, as a flat tensor of integers."""
    return tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])


def fingerprint(tensor: Tensor) -> int:
    """A 64-bit hash of a tensor's bit patterns, the same on every device."""
    found = 0
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()
    whole = raw.numel() // 8 * 8
    words = raw[:whole].view(torch.int64)
    if whole < raw.numel():
        rest = torch.zeros(8, dtype=torch.uint8, device=raw.device)
        rest[: raw.numel() - whole] = raw[whole:]
        found = int(rest.view(torch.int64)) & _MASK
    weights = _weights().to(words.device)
    for chunk in torch.split(words, _CHUNK * 64):
        full = chunk.numel() // _CHUNK * _CHUNK
        # A product carries bits upward only: alone, the highest bits of two words would cancel each other.
        chunk = (chunk >> 32).add_(chunk)
        # sums modulo 2**64: integers wrap in the same way everywhere
        parts = chunk[:full].view(-1, _CHUNK).mul_(weights).sum(1).tolist()
        parts.append(int(chunk[full:].mul_(weights[: chunk.numel() - full]).sum()))
        for part in parts:
            found = ((found ^ (part & _MASK)) * _ODD) & _MASK
    return found


@functools.cache
def _weights() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(1 << 62), 1 << 62, (_CHUNK,), generator=generator) * 2 + 1


def encode(name: str, old: Tensor, new: Tensor, base: int | None = None) -> tuple[str, Tensor]:
    """Return what changed as (a header in JSON, bytes); the bytes are empty if nothing did.

    Where the changes would be longer than the tensor, it is sent whole.

    Args:
        name: of the tensor.
        old: what the server holds.
        new: of the same shape and type.
        base: the fingerprint of `old`, if it is known.
    """
    before, after = _bits(old), _bits(new)
    where = torch.nonzero(before != after).squeeze(1)
    head: dict[str, Any] = {
        "name": name,
        "type": str(new.dtype).removeprefix("torch."),
        "shape": list(new.shape),
        "base": fingerprint(old) if base is None else base,
        "hash": fingerprint(new),
        "count": where.numel(),
    }
    if not where.numel():
        return _message(head, torch.empty(0, dtype=torch.uint8))
    blocks = -(-after.numel() // BLOCK)
    if 2 * blocks + where.numel() * (1 + new.element_size()) >= new.nbytes:
        return _message(head | {"whole": True}, after.view(torch.uint8))
    counts = torch.bincount(where // BLOCK, minlength=blocks).to(torch.int16)
    parts = [counts.view(torch.uint8), (where % BLOCK).to(torch.uint8), after[where].view(torch.uint8)]
    return _message(head, torch.cat(parts))


def _message(head: dict[str, Any], packed: Tensor) -> tuple[str, Tensor]:
    return json.dumps(head | {"packed": fingerprint(packed)}), packed.cpu()


def statement(header: str) -> tuple[str, Tensor]:
    """Return what `encode` would for a server that has just got the new weights: they are the ones to have."""
    head = json.loads(header) | {"base": None, "count": 0}
    head.pop("whole", None)
    return _message(head, torch.empty(0, dtype=torch.uint8))


def decode(head: dict[str, Any], packed: Tensor, device: torch.device | None = None) -> Tensor:
    """Return a tensor of the changed weights, with NaN for the others.

    Raises:
        RuntimeError: the bytes are not those that were sent.
    """
    dtype, shape, count = getattr(torch, head["type"]), head["shape"], int(head["count"])
    packed = packed.to(device) if device is not None else packed
    if fingerprint(packed) != head["packed"]:
        raise RuntimeError(f"{head['name']}: the changes were damaged on the way")
    if head.get("whole"):
        return packed.clone().view(dtype).view(shape)
    dense = torch.full(shape, float("nan"), dtype=dtype, device=packed.device)
    if not count:
        return dense
    flat = dense.view(-1)
    blocks = -(-flat.numel() // BLOCK)
    counts = packed[: 2 * blocks].clone().view(torch.int16).to(torch.int64)
    inner = packed[2 * blocks : 2 * blocks + count].to(torch.int64)
    values = packed[2 * blocks + count :].clone().view(dtype)
    starts = torch.arange(blocks, device=packed.device) * BLOCK
    flat[torch.repeat_interleave(starts, counts) + inner] = values
    return dense


class Overlay(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, a copy into a tensor leaves it as it is where the source is NaN.

    A model's own loader splits, fuses and shards what it gets, and ends in copies into its parameters, or fills
    them if they are single numbers.

    Attributes:
        written: what was copied into.
        before: a fingerprint of each, before the copy, if it is a part of the tensor.
    """

    def __init__(self, whole: int) -> None:
        """`whole` is the number of weights of the tensor that is loaded."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.whole = whole
        self.written: list[Tensor] = []
        self.before: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.fill_.Scalar and self.whole == args[0].numel() == 1:
            if not math.isnan(args[1]):  # loaders fill a weight of one number with its `item()`
                func(*args)
            self.written.append(args[0])
            return args[0]
        if func is not torch.ops.aten.copy_.default or not args[1].is_floating_point():
            return func(*args, **(kwargs or {}))
        target, source = args[0], args[1].to(args[0].device)
        if torch.promote_types(target.dtype, source.dtype) != target.dtype:
            raise TypeError(f"the server holds {target.dtype} where the trainer sends {source.dtype}")
        if target.numel() != self.whole:
            self.before.append(fingerprint(target))
        func(target, torch.where(torch.isnan(source), target, source.to(target.dtype)))
        self.written.append(target)
        return target


def load(model: Any, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Apply changes to a server's model (`--custom-weight-loader` of SGLang).

    Raises:
        RuntimeError: a weight is not what the trainer has; the server must get all weights again.
    """
    device = next(iter(model.parameters())).device
    parts: dict[str, tuple[int, list[int]]] = model.__dict__.setdefault("agentrl_parts", {})
    for header, packed in named_tensors:
        head = json.loads(header)
        dense = decode(head, packed, device)
        with torch.no_grad(), Overlay(dense.numel()) as overlay:
            model.load_weights([(head["name"], dense)])
        _check(head, dense, overlay, parts)


def _check(head: dict[str, Any], dense: Tensor, overlay: Overlay, parts: dict[str, tuple[int, list[int]]]) -> None:
    name, written = head["name"], overlay.written
    if not written:
        raise RuntimeError(f"{name}: the server's model has no such weight")
    if any(bool(torch.isnan(tensor).any()) for tensor in written):
        raise RuntimeError(f"{name}: a weight was read from a tensor of changes and is not a number")
    if not overlay.before:
        if any(fingerprint(tensor.to(dense.dtype)) != head["hash"] for tensor in written):
            raise RuntimeError(f"{name}: after the changes, the weight differs from the trainer's")
        return
    # Parts of the tensor cannot be compared with the whole: they must be what was left here the last time.
    trusted = head["base"] is None or head.get("whole")
    known = [(head[key], overlay.before) for key in ("base", "hash")]  # the second: a message that came twice
    if not trusted and parts.get(name) not in known:
        raise RuntimeError(f"{name}: the weight is not the one that the changes are for")
    parts[name] = head["hash"], [fingerprint(tensor) for tensor in written]


def changed(head: dict[str, Any], packed: Tensor, old: Tensor) -> Tensor:
    """Return a whole tensor with its changes.

    Raises:
        RuntimeError: the result is not what the trainer has.
    """
    dense = decode(head, packed)
    if (dense.dtype, dense.shape) != (old.dtype, old.shape):
        raise RuntimeError(
            f"{head['name']}: {dense.dtype} {tuple(dense.shape)} where {old.dtype} {tuple(old.shape)} is held"
        )
    new = torch.where(torch.isnan(dense), old, dense) if head["count"] else old
    if fingerprint(new) != head["hash"]:
        raise RuntimeError(f"{head['name']}: after the changes, the weight differs from the trainer's")
    return new


class VLLMWeights:
    """Calls of vLLM's workers (`--worker-extension-cls`): collect weights that arrive in parts, then load all.

    vLLM can hold weights in another layout than a checkpoint's (packed for a CPU, sharded, quantized), which its
    own reloading produces. Therefore changes are made to a copy of all weights in host memory, which is reloaded.
    """

    reload_weights: Callable[..., None]
    get_model: Callable[[], Any]

    def agentrl_ready(self) -> bool:
        """Show that the server was started with these calls."""
        return True

    def agentrl_take(self, payload: str) -> None:
        """Collect some of the weights."""
        self._agentrl().update(_unpacked(payload))

    def agentrl_change(self, payload: str) -> None:
        """Change some of the collected weights.

        Raises:
            RuntimeError: there are none, or the result is not what the trainer has.
        """
        held = self._agentrl()
        for header, packed in _unpacked(payload).items():
            head = json.loads(header)
            if head["name"] not in held:
                raise RuntimeError(f"{head['name']}: changes of a weight that was never sent")
            held[head["name"]] = changed(head, packed, held[head["name"]])

    def agentrl_load(self, keep: str) -> None:
        """Load the collected weights; `keep` is "yes" if changes will follow."""
        held = self._agentrl()
        self._agentrl_reload(weights_iterator=iter(held.items()))
        if keep != "yes":
            held.clear()

    def agentrl_load_folder(self, path: str) -> None:
        """Load the weights in a folder."""
        self._agentrl_reload(weights_path=path)

    def _agentrl_reload(self, **weights: Any) -> None:
        """Reload all weights.

        On a CPU, vLLM 0.32 packs experts only where they have no kernel yet, and leaves tied output layers
        unchanged. It silently skips the experts of some models (gpt-oss): a NaN in each shows which were replaced.

        Raises:
            RuntimeError: it has left experts as they were.
        """
        marked: list[Any] = []
        kernels: dict[Any, Any] = {}
        for layer in self.get_model().modules():
            weight = getattr(layer, "w13_weight", None)
            method: Any = getattr(layer, "quant_method", None)
            if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.element_size() < 2:
                continue
            weight.data[(0,) * weight.dim()] = math.nan
            marked.append(layer)
            if weight.device.type == "cpu" and getattr(method, "moe_kernel", None) is not None:
                kernels[method], method.moe_kernel = method.moe_kernel, None
        try:
            self.reload_weights(**weights)
        finally:
            for method, kernel in kernels.items():
                method.moe_kernel = method.moe_kernel or kernel
        if left := [layer for layer in marked if bool(layer.w13_weight[(0,) * layer.w13_weight.dim()].isnan())]:
            raise RuntimeError(
                f"vLLM does not load new weights of {type(left[0]).__name__}: use SGLang for this model"
            )
        for layer in self.get_model().modules():
            packed = "cpu_linear" in layer.__dict__ and getattr(layer, "weight", None) is not None
            if packed and layer.weight.numel():
                layer.quant_method.process_weights_after_loading(layer)

    def _agentrl(self) -> dict[str, Tensor]:
        held: dict[str, Tensor] = self.__dict__.setdefault("agentrl_held", {})
        return held


def _unpacked(payload: str) -> dict[str, Tensor]:
    from safetensors.torch import load

    return load(base64.b64decode(payload))
