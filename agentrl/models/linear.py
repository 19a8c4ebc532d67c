"""The linear layers of a model: which of them adapters can be put on, and which `all-linear` means."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from agentrl.errors import ConfigError
from agentrl.models.model_config import reads_images
from agentrl.suggest import did_you_mean

_IN_ROUTER = re.compile(r"\.router(\.|$)|\.gate\.")
"""The name of a linear layer that is (part of) a router: `mlp.router.classifier`, `mlp.gate.wg`."""


_READ = re.compile(r"\.dt_proj$")
"""The name of a linear layer whose weight a state-space layer reads without calling it (Mamba, Jamba): an adapter
on it would not be computed."""


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a plain linear layer; the routers of Phi-3.5-MoE are a subclass that returns experts."""
    return type(module).forward in (nn.Linear.forward, Conv1D.forward)


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """All linear layers of a model that adapters can be put on, by name; of a model of images and text those that
    text reaches."""
    frozen = frozenset[nn.Module]()
    if reads_images(model.config):
        head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        decoder = model.get_decoder()  # type: ignore[no-untyped-call]
        reached = {part for text in (decoder, head) if text is not None for part in text.modules()}
        frozen = frozenset(model.modules()) - reached
    return {
        name: part
        for name, part in model.named_modules()
        if is_linear(part) and part not in frozen and not _READ.search(name)
    }


def targeted(model: PreTrainedModel, targets: str | list[str]) -> dict[str, nn.Module]:
    """The linear layers that adapters are put on, by name.

    Args:
        targets: `all-linear` for those of the blocks without routers, or the ends of names.
    """
    found, head = linear_layers(model), model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if targets == "all-linear":
        return {n: module for n, module in found.items() if module is not head and not _IN_ROUTER.search(n)}
    return {n: module for n, module in found.items() if any(f".{n}".endswith(f".{t}") for t in targets)}


def ending(name: str) -> str:
    """The end of a layer's name that says which it is: `q_proj`, or `ffn.2`, since `2` would be a block too."""
    return re.sub(r"^.*\.(?=\D)", "", name)


def unknown_target(target: str, names: Iterable[str]) -> ConfigError:
    """The error for an entry of `learner.lora.targets` that fits none of these linear layers."""
    known = sorted({ending(name) for name in names})
    near = did_you_mean(target, known)
    return ConfigError(
        f"learner.lora.targets: the model has no linear layer {target!r}{'; ' * bool(near)}{near}; its linear "
        f"layers are {', '.join(known)}"
    )


def sizes_of(module: nn.Module) -> tuple[int, int]:
    """Inputs and outputs of a linear layer."""
    assert isinstance(module.weight, nn.Parameter)
    first, second = module.weight.shape
    return (first, second) if isinstance(module, Conv1D) else (second, first)
