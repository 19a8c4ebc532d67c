"""The ranks of a learner, and models cut into shards over them (FSDP2).

Every rank holds 1/n of each parameter, gradient and optimizer state, along the first dimension, and gathers one
block at a time while it computes. Gradients are summed over the ranks, not averaged: the loss is normalized with
counts over all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from agentrl.config.run import LearnerConfig
from agentrl.errors import ConfigError
from agentrl.learner.apart import compute_apart, rows_apart
from agentrl.learner.attention.packed import use_attention
from agentrl.learner.sequence import SequenceRanks

M = TypeVar("M", bound=nn.Module, covariant=True)

ALIGNED = 64
"""Torch's tensors in host memory begin at multiples of so many bytes."""


class Make(Protocol[M]):
    """Makes a module with its values, or its shapes only."""

    def __call__(self, values: bool) -> M: ...


@dataclass(frozen=True, slots=True)
class World:
    """The ranks of a learner and this one's place among them; without a mesh there is one rank and no sharding.

    Attributes:
        mesh: all ranks in a line; each has a shard of the model.
        sequence: those that compute the same rows together, neighbors in that line; None if each has its own rows.
    """

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    sequence: SequenceRanks | None = None

    @classmethod
    def join(
        cls, rank: int, size: int, device: torch.device, address: str, timeout_s: float, sequence: int = 1
    ) -> World:
        """Meet the other ranks at `tcp://HOST:PORT`, where rank 0 listens; gloo on CPUs, NCCL on GPUs.

        Args:
            sequence: how many ranks compute rows together; a divisor of `size`.
        """
        options: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s), "rank": rank, "world_size": size}
        dist.init_process_group(_backend(device), init_method=address, **options)
        if sequence == 1:
            return cls(rank, size, init_device_mesh(device.type, (size,)))
        grid = init_device_mesh(device.type, (size // sequence, sequence), mesh_dim_names=("data", "sequence"))
        together = SequenceRanks(rank % sequence, sequence, grid.get_group("sequence"))
        return cls(rank, size, grid._flatten(), together)

    @classmethod
    def alone(cls, device: torch.device) -> World:
        """A single rank, sharded nevertheless: mixed precision and offloading work as with many."""
        dist.init_process_group(
            _backend(device),
            store=dist.HashStore(),  # type: ignore[attr-defined]
            rank=0,
            world_size=1,
        )
        return cls(0, 1, init_device_mesh(device.type, (1,)))

    def leave(self) -> None:
        """Leave the other ranks; idempotent."""
        if self.mesh is not None and dist.is_initialized():
            dist.destroy_process_group()

    def sum(self, value: Tensor) -> Tensor:
        """The sum of `value` over all ranks, on every rank."""
        if self.size == 1:
            return value
        total = value.detach().clone()
        dist.all_reduce(total)
        return total

    def place(self, make: Make[M], config: LearnerConfig, device: torch.device) -> M:
        """A module on the device, sharded over the ranks; without a mesh what `make(True)` gives, whole.

        Rank 0 alone makes it with its values, in host memory; the others make its shapes and are sent the values,
        one tensor at a time.

        Args:
            make: makes the module, with values or (False, called where tensors have no storage) without.
        """
        if self.mesh is None:
            module = make(True).to(device)
            _leave_file(module)
            _settle_attention(module, config, device, apart=rows_apart(module))
            return module
        values: dict[str, Tensor] = {}
        apart = torch.zeros((), device=device)
        if self.rank == 0:
            made = make(True)
            values = dict(_tensors(made))
            apart.fill_(rows_apart(made))
        dist.broadcast(apart, 0)
        with torch.device("meta"):
            module = make(False)
        _settle_attention(module, config, device, apart=bool(apart))
        aliases = _aliases(module)
        _shard(module, self.mesh, config)
        module.to_empty(device="cpu" if config.cpu_offload else device)
        for first, others in aliases.items():
            for name in others:
                _set(module, name, module.get_parameter(first))
        for name, tensor in _tensors(module):
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            if self.rank == 0:
                whole.copy_(values.pop(name).detach())
            dist.broadcast(whole, 0)
            if isinstance(tensor, DTensor):
                mine = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
                cast(DTensor, tensor.detach()).to_local().copy_(mine.to_local())
            elif isinstance(tensor, nn.Parameter):
                tensor.detach().copy_(whole)
            else:
                _set(module, name, whole)
        return module


def check_offload(config: LearnerConfig, device_type: str) -> None:
    """Raises ConfigError if there is no GPU to offload from."""
    for key in ("cpu_offload", "offload_activations"):
        if getattr(config, key) and device_type == "cpu":
            raise ConfigError(f"learner.{key} has no effect on the CPU, and there is no GPU here: remove it")


def _settle_attention(module: nn.Module, config: LearnerConfig, device: torch.device, *, apart: bool) -> None:
    """Raises ConfigError if `learner.attention` asks for what cannot be here."""
    if not apart:
        use_attention(module, config, device)
        return
    if config.attention != "auto":
        raise ConfigError(
            f"learner.attention {config.attention}: {type(module).__name__} computes each row apart, with the "
            "attention that transformers gives it; leave learner.attention at auto"
        )
    compute_apart(module)


def _leave_file(module: nn.Module) -> None:
    """Copy parameters that are mapped from a file and begin where torch would not place them.

    Kernels round by where a tensor begins, and a checkpoint is laid out otherwise than the model that training
    began with: a resumed run would not compute what an uninterrupted one does.
    """
    for parameter in module.parameters():
        if parameter.device.type == "cpu" and parameter.data_ptr() % ALIGNED:
            parameter.data = parameter.detach().clone()


def settle(module: nn.Module) -> None:
    """Release what a forward pass has gathered: parameters are then the shards that the optimizer knows."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a shard, without gradient; every rank must ask for it at the same time."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def all_finite(parameters: Iterable[Tensor]) -> bool:
    """Whether this rank's shards of the parameters have finite numbers only."""
    shards = [one.to_local() if isinstance(one := p.detach(), DTensor) else one for p in parameters]
    shards = [shard for shard in shards if shard.numel()]
    largest = torch._foreach_norm(shards, math.inf) if shards else ()
    return not largest or bool(torch.stack([one.float() for one in largest]).isfinite().all())


def collected(tensor: Tensor, world: World) -> Tensor:
    """A full tensor where many of them can be kept: in host memory, if shards were gathered for it."""
    return tensor if world.size == 1 else tensor.to("cpu")


def local_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """This rank's rows of a tensor, and the first of them in the full tensor."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor, 0
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), offset[0] if offset else 0


def _shard(module: nn.Module, mesh: DeviceMesh, config: LearnerConfig) -> None:
    """Cut every block of a model, then the rest of it, in place."""
    low = config.precision == "bfloat16"
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if low else None
    offload = CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy()
    names = getattr(module, "_no_split_modules", None) or ()
    for part in [*(m for m in module.modules() if type(m).__name__ in names), module]:
        fully_shard(part, mesh=mesh, mp_policy=mixed or MixedPrecisionPolicy(), offload_policy=offload)
        sharded = cast(FSDPModule, part)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, each under the first of its names, and buffers."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def _aliases(module: nn.Module) -> dict[str, list[str]]:
    """Tied parameters: the first name of each, and its other names."""
    first: dict[int, str] = {}
    others: dict[str, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if (known := first.setdefault(id(parameter), name)) != name:
            others.setdefault(known, []).append(name)
    return others


def _set(module: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    place = module.get_submodule(owner)
    if isinstance(tensor, nn.Parameter):
        place._parameters[leaf] = tensor
    else:
        place._buffers[leaf] = tensor


def _backend(device: torch.device) -> str:
    return "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
