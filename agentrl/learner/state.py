"""The learner's state on disk, in addition to the weights: safetensors and JSON, independent of the number of
ranks.

Each rank writes its rows of the optimizer state to a separate file, with the first row of each piece in the file's
header. A loader reads the rows it needs from the files that have them. docs/design/checkpoints.md explains why
this is not PyTorch's format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from agentrl.errors import CheckpointError
from agentrl.learner.optimizer import SCALE, CompactAdamW, loaded
from agentrl.learner.shard import World, collected, local_rows, settle, whole

NOTE = "learner.json"


@dataclass(frozen=True, slots=True)
class TrainingState:
    """A learner at one moment, copied to host memory: it can be written while training continues.

    Attributes:
        world: the ranks; each writes its own.
        note: counters and other small things, for learner.json.
        model: says how `weights` are written; its own values are not read.
        weights: of the whole policy, on rank 0; nothing on the others.
        optimizer: what this rank holds, by `parameter/entry`.
        offsets: the row at which each begins.
    """

    world: World
    note: Mapping[str, Any]
    model: PreTrainedModel
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    offsets: Mapping[str, str] = field(default_factory=dict)

    def write(self, directory: Path) -> None:
        """Write this rank's files; rank 0 also the policy as a Hugging Face model."""
        if self.world.rank == 0:
            self.model.save_pretrained(directory, state_dict=dict(self.weights))
            _write_index(directory)
            (directory / NOTE).write_text(json.dumps({**self.note, "ranks": self.world.size}))
        file = directory / _file("optimizer", self.world.rank, self.world.size)
        save_file(dict(self.optimizer), file, metadata=dict(self.offsets))


def _write_index(directory: Path) -> None:
    """List the weights of a model that was written in one file: without a list, SGLang and vLLM load every
    safetensors file in a directory, and fail at the optimizer's."""
    file = directory / SAFE_WEIGHTS_NAME
    if file.is_file():
        with safe_open(file, "pt") as tensors:
            names = dict.fromkeys(tensors.keys(), file.name)
        index = {"metadata": {"total_size": file.stat().st_size}, "weight_map": names}
        (directory / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=1))


def copy_state(
    model: PreTrainedModel,
    weights: Mapping[str, Tensor],
    optimizer: Optimizer,
    world: World,
    note: Mapping[str, Any],
) -> TrainingState:
    """Copy the state of a learner to host memory.

    Args:
        weights: of the whole policy by Hugging Face names, as `whole_weights` gives them.
    """
    state, offsets = _optimizer_state(model, optimizer)
    state |= {f"rng/{name}": value for name, value in _generators().items()}
    on_gpu = next(model.parameters()).is_cuda  # what is in host memory then is a copy
    copies = {k: v if on_gpu and not v.is_cuda else _copy(v) for k, v in weights.items()}
    return TrainingState(world, note, model, copies, state, offsets)


def whole_weights(model: nn.Module, world: World) -> dict[str, Tensor]:
    """All parameters and saved buffers, each once, without shards; on rank 0 only, though every rank must ask.

    Those of a single rank are the parameters themselves, which the next update changes. Shards are gathered one
    after another, into host memory: a GPU that holds a shard has no room for all of them.
    """
    found = {}
    saved = model.state_dict().keys()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in saved:
            value = whole(tensor)
            if world.rank == 0:
                found[name] = collected(value, world)
    return found


AVERAGE_FOLDER = "average"
"""Folder in a checkpoint with the average of the policy, where that is the teacher."""


def copied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in host memory."""
    return {name: _copy(value) for name, value in weights.items()}


def move_toward(average: nn.Module, policy: nn.Module, rate: float) -> None:
    """Move each parameter of the average by `rate` of its distance to the policy's; both are sharded alike.

    Each rank moves its rows.
    """
    settle(average)
    settle(policy)
    with torch.no_grad():
        for mine, other in zip(average.parameters(), policy.parameters(), strict=True):
            rows, _ = local_rows(mine)
            rows.lerp_(local_rows(other)[0].to(rows.dtype), rate)


def restore_optimizer(model: nn.Module, optimizer: Optimizer, directory: Path, world: World) -> dict[str, Any]:
    """Restore the optimizer's state from a checkpoint written by any number of ranks; returns its note.

    Raises:
        CheckpointError: the files are missing or damaged, or belong to another model.
    """
    try:
        note: dict[str, Any] = json.loads((directory / NOTE).read_text())
        ranks = int(note.get("ranks", 1))
        with ExitStack() as stack:
            files = [
                stack.enter_context(safe_open(directory / _file("optimizer", rank, ranks), framework="pt"))
                for rank in range(ranks)
            ]
            _read_optimizer(model, optimizer, files, f"checkpoint {directory}")
            if ranks == world.size:
                _restore_generators(files[world.rank])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as e:
        raise CheckpointError(f"checkpoint {directory} cannot be resumed: {e}") from e
    return note


def _read_optimizer(model: nn.Module, optimizer: Optimizer, files: list[Any], where: str) -> None:
    settle(model)
    params = dict(model.named_parameters())
    pieces: dict[str, list[tuple[int, Any]]] = {}
    for file in files:
        offsets = file.metadata() or {}
        for key in file.keys():  # noqa: SIM118
            if not key.startswith("rng/"):
                pieces.setdefault(key, []).append((int(offsets.get(key, 0)), file))
    for key, found in pieces.items():
        name, _, entry = key.rpartition("/")
        if entry.endswith(SCALE):
            continue  # read with the moment that it scales
        if name not in params:
            raise CheckpointError(f"{where}: {name} is not a parameter of this model")
        param = params[name]
        if entry == "step":
            here = "cpu" if isinstance(optimizer, CompactAdamW) else param.device
            optimizer.state[param][entry] = found[0][1].get_tensor(key).to(here)
            continue
        value = torch.zeros_like(param)
        rows, first = local_rows(value)
        filled = 0
        for offset, file in found:
            piece = file.get_slice(key)
            shape = piece.get_shape()
            if list(shape[1:]) != list(param.shape[1:]) or offset + shape[0] > param.shape[0]:
                raise CheckpointError(f"{where}: {key} does not fit this model's {name}")
            low, high = max(offset, first), min(offset + shape[0], first + len(rows))
            if low < high:
                read = {
                    name: file.get_slice(name)[low - offset : high - offset] for name in _with_scale(key, file)
                }
                rows[low - first : high - first] = loaded(read, key).to(rows.device)
                filled += high - low
        if filled != len(rows):
            raise CheckpointError(f"{where}: {key} does not fit this model's {name}")
        if isinstance(optimizer, CompactAdamW):
            optimizer.put(param, entry, rows)
        else:
            optimizer.state[param][entry] = value


def _with_scale(key: str, file: Any) -> list[str]:
    """The names of what a moment is read from."""
    return [key, key + SCALE] if file.get_slice(key).get_dtype() == "U8" else [key]


def _optimizer_state(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, str]]:
    names = {id(p): n for n, p in model.named_parameters()}
    state, offsets = {}, {}
    for param, entries in optimizer.state.items():
        for entry, value in entries.items():
            key = f"{names[id(param)]}/{entry}"
            rows, first = local_rows(value)
            if rows.dim() and not isinstance(value, DTensor):
                _, first = local_rows(param)  # a plain tensor holds the rows that this rank has of the parameter
            if rows.dim() == 0 or len(rows):
                state[key] = _copy(rows)
                offsets[key] = str(first)
    return state, offsets


def _generators() -> dict[str, Tensor]:
    found = {"cpu": torch.get_rng_state()}
    return found | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def _restore_generators(file: Any) -> None:
    saved = set(file.keys())
    if "rng/cpu" in saved:
        torch.set_rng_state(file.get_tensor("rng/cpu"))
    if "rng/cuda" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(file.get_tensor("rng/cuda"))


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _file(kind: str, rank: int, ranks: int) -> str:
    return f"{kind}.safetensors" if ranks == 1 else f"{kind}-{rank + 1:05d}-of-{ranks:05d}.safetensors"
