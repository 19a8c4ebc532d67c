"""LoRA by peft: small trained matrices next to the frozen ones of the policy.

The layers are put into the model itself, so that it computes, shards and checkpoints its activations as before.
With the adapters off it is the model that they were put into: the reference costs no second copy.

Source: Hu et al. 2021, arXiv:2106.09685.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl.config.run import LoRAConfig, RunConfig
from agentrl.errors import ConfigError
from agentrl.learner.shard import World, settle, whole
from agentrl.models.linear import ending, is_linear, linear_layers, targeted, unknown_target
from agentrl.models.model_config import NO_MODEL, auto_class, one_line, read_config
from agentrl.models.tiny import tiny_config

ADAPTER_FOLDER = "adapter"
"""In a checkpoint: the adapter alone, as peft writes it."""
_WEIGHTS = "adapter_model.safetensors"
_NAME = "default"


def add_adapter(
    model: PreTrainedModel, config: LoRAConfig, adapter: Path | None, *, values: bool
) -> PreTrainedModel:
    """Freeze the model and put adapters into it: fresh ones, which change nothing yet, or those of a folder.

    Args:
        adapter: a folder with adapter_config.json and adapter_model.safetensors, as peft writes them.
        values: False makes the shapes only.

    Raises:
        ConfigError: peft is not installed, no layer has a name of `targets`, or the folder does not fit.
    """
    peft = _import_peft()
    if adapter is not None:
        check_adapter(adapter, config)
    _refuse_unknown(model, config)
    # Within another module, peft does not see which model it is: it would put the adapters of a `gate_proj` on the
    # experts of those with fused ones, which had such layers in an earlier transformers.
    holder = nn.ModuleDict({"model": model})
    options = _options(config, target_modules=[f"model.{name}" for name in targeted(model, config.targets)])
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # about what a later transformers will call differently
        torch.manual_seed(0)
        try:
            peft.inject_adapter_in_model(options, holder, _NAME)
        except ValueError as e:
            raise ConfigError(
                f"learner.lora.targets {config.targets!r} do not fit the model: {one_line(e)}"
            ) from e
    _check_layers(model, config)
    if adapter is not None and values:
        _load_adapter(model, adapter)
    return model


def refuse_unknown_targets(config: RunConfig) -> None:
    """Check, from the config of the model alone, that it has the layers of `learner.lora.targets`.

    Raises:
        ConfigError: a target names none of its linear layers, or the config cannot be used.
    """
    lora, tiny = config.learner.lora, config.model.tiny
    if lora is None or isinstance(lora.targets, str):
        return
    found = (
        read_config(Path(config.model.path or ""), f"model.path {config.model.path}")
        if tiny is None
        else tiny_config(tiny, vocab=tiny.vocab)
    )
    try:
        with torch.device("meta"):  # names without storage
            model = auto_class(found).from_config(found, trust_remote_code=False)
    except NO_MODEL as e:
        raise ConfigError(f"model.path {config.model.path}: cannot make the model: {one_line(e)}") from e
    _refuse_unknown(model, lora)


def _refuse_unknown(model: PreTrainedModel, config: LoRAConfig) -> None:
    if not targeted(model, "all-linear"):
        raise ConfigError(
            f"learner.lora: {type(model).__name__} has no plain linear layers for adapters; remove it"
        )
    for target in config.targets if isinstance(config.targets, list) else ():
        if not targeted(model, [target]):
            raise unknown_target(target, linear_layers(model))


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within the block, the model computes without its adapters."""
    layers = list(_layers(model))
    for layer in layers:
        layer._disable_adapters = True  # peft's own switch would also change what is trained
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def merged_weights(model: nn.Module, world: World) -> dict[str, Tensor]:
    """All parameters by the names that they have without adapters, with what the adapters add; on rank 0 only.

    Every rank must ask at the same time. They are kept in host memory if the model is sharded: its GPU has no room
    for a second one.
    """
    adapted = {name: module for name, module in model.named_modules() if _is_adapted(module)}
    saved = model.state_dict().keys()
    found: dict[str, Tensor] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name not in saved or ".lora_" in name:
            continue
        value = whole(tensor)
        owner = adapted.get(name.removesuffix(".base_layer.weight"))
        if owner is not None and name.endswith(".base_layer.weight"):
            a_RI, b_OR = whole(owner.lora_A[_NAME].weight), whole(owner.lora_B[_NAME].weight)
            if world.rank == 0:
                delta = owner.scaling[_NAME] * (b_OR @ a_RI)
                value = value + (delta.T if owner.fan_in_fan_out else delta)
        if world.rank == 0:
            found[name.replace(".base_layer.", ".")] = value if world.mesh is None else value.to("cpu")
    return found


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """The adapter's own matrices in host memory, named as peft names them in a file; every rank must ask."""
    settle(model)  # a pass without a gradient leaves what it gathered, in the precision of the computation
    return {
        "base_model.model." + name.replace(f".{_NAME}.", "."): whole(tensor).to("cpu", copy=True).contiguous()
        for name, tensor in model.named_parameters()
        if ".lora_" in name
    }


def write_adapter(directory: Path, state: dict[str, Tensor], config: LoRAConfig, model: nn.Module) -> None:
    """Write an adapter that peft, vLLM and SGLang can load."""
    directory.mkdir(exist_ok=True)
    targets, weights = _targets_for_peft(model)
    _options(config, target_modules=targets, target_parameters=weights).save_pretrained(directory)
    save_file(state, directory / _WEIGHTS)


def _options(config: LoRAConfig, **layers: object) -> Any:
    return _import_peft().LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        use_rslora=config.rslora,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        **layers,
    )


def _targets_for_peft(model: nn.Module) -> tuple[list[str], list[str] | None]:
    """The layers that have adapters, by the ends of their names: modules, and weights for those peft would move.

    In models with fused experts, peft takes the module `gate_proj` for what it was in an earlier transformers, a
    part of the experts. A weight it adapts where it is.
    """
    modules = {name.replace(".base_layer", "") for name, _ in model.named_modules() if ".lora_" not in name}
    adapted = {name for name, module in model.named_modules() if _is_adapted(module)}
    others = {end for name in modules - adapted for end in _ends(name)}
    ends = sorted({next(end for end in _ends(name) if end not in others) for name in adapted})
    moved = {end for end in ends if _is_moved(model, end)}
    return [end for end in ends if end not in moved], [f"{end}.weight" for end in sorted(moved)] or None


def _is_moved(model: nn.Module, target: str) -> bool:
    """Whether peft puts an adapter of these modules elsewhere."""
    try:
        conversion = import_module("peft.utils.transformers_weight_conversion")
    except ImportError:  # a peft that moves none
        return False
    options = _import_peft().LoraConfig(target_modules=[target])
    try:
        conversion.convert_peft_config_for_transformers(options, model, None)
    except ValueError:  # it has to be moved together with another
        return True
    return target not in options.target_modules


def _ends(name: str) -> list[str]:
    """The ends of a layer's name, from the shortest that says which layer of a block it is to the whole name."""
    parts = name.split(".")
    first = len(parts) - ending(name).count(".") - 1
    return [".".join(parts[place:]) for place in range(first, -1, -1)]


def check_adapter(adapter: Path, config: LoRAConfig) -> None:
    """Check that a folder holds an adapter that would be trained exactly as peft computes it.

    Raises:
        ConfigError: it cannot be read, is of another kind, or its rank or scale is not that of the run.
    """
    file = adapter / "adapter_config.json"
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError(f"adapter {adapter} cannot be read: {str(e)[:300]}") from e
    if not isinstance(saved, dict):
        raise ConfigError(f"adapter {adapter} cannot be read: {file.name} is not a JSON object")
    kind = saved.get("peft_type", "LORA")
    if kind != "LORA":
        raise ConfigError(f"adapter {adapter} is of kind {kind}; agentrl trains LoRA adapters only: {_MERGE}")
    for key, value in saved.items():
        if key in _MATTERS_NOT or key in _COMPARED or value in _DEFAULTS.get(key, ()) or value in (None, [], {}):
            continue
        if value is False and key not in _DEFAULTS:
            continue
        raise ConfigError(f"adapter {adapter} has {key} {json.dumps(value)[:80]}, which is not trained: {_MERGE}")
    ours = {
        "r": ("rank", config.rank),
        "lora_alpha": ("alpha", config.alpha),
        "use_rslora": ("rslora", config.rslora),
    }
    for key, (name, wanted) in ours.items():
        found = saved.get(key, _COMPARED[key])
        if found != wanted:
            raise ConfigError(
                f"adapter {adapter} has {name} {json.dumps(found)}, learner.lora.{name} is {json.dumps(wanted)}: "
                "make them equal"
            )


_MERGE = "merge it into its base with peft (merge_and_unload, save_pretrained) and name the result as model.path"
_COMPARED: dict[str, object] = {"r": 8, "lora_alpha": 8, "use_rslora": False}
"""Keys of adapter_config.json that must equal those of the run, with what peft takes where one is missing."""
_DEFAULTS: dict[str, tuple[object, ...]] = {
    "bias": ("none",),
    "task_type": ("CAUSAL_LM",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
"""Values under which the loaded adapter is a plain one. Other initializations change the base weights as well."""
_MATTERS_NOT = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "eva_config", "inference_mode", "lora_dropout", "peft_type"),
        *("megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "fan_in_fan_out"),
        # Which layers: the names of the loaded matrices say it, and must be those of learner.lora.targets.
        *("exclude_modules", "layers_pattern", "layers_to_transform", "target_modules", "target_parameters"),
    }
)


def _check_layers(model: PreTrainedModel, config: LoRAConfig) -> None:
    """Refuse layers whose adapter would be trained but not used for sampling.

    Raises:
        ConfigError: one is no linear layer, or shares its weights with a layer that has no adapter.
    """
    shared = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    for name, module in model.named_modules():
        if not _is_adapted(module):
            continue
        base = module.base_layer
        if not is_linear(base) or _NAME not in module.lora_A:
            raise ConfigError(
                f"learner.lora.targets {config.targets!r}: {name} is not a linear layer "
                f"({type(base).__name__}); only those can have adapters"
            )
        if shared[id(base.weight)] > 1:
            raise ConfigError(
                f"learner.lora.targets {config.targets!r}: {name} shares its weights with another layer "
                "(tie_word_embeddings), so its adapter cannot be merged: leave it out"
            )


def _load_adapter(model: nn.Module, adapter: Path) -> None:
    try:
        state = load_file(adapter / _WEIGHTS)
    except (OSError, SafetensorError) as e:
        raise ConfigError(f"adapter {adapter} cannot be read: {str(e)[:300]}") from e
    wanted = {
        "base_model.model." + name.replace(f".{_NAME}.", "."): parameter
        for name, parameter in model.named_parameters()
        if ".lora_" in name
    }
    if differing := sorted(wanted.keys() ^ state.keys()):
        raise ConfigError(
            f"adapter {adapter} adapts other layers than learner.lora.targets: {differing[0]} is in one only"
        )
    for name, parameter in wanted.items():
        if parameter.shape != state[name].shape:
            raise ConfigError(
                f"adapter {adapter}: {name} has shape {list(state[name].shape)}, not "
                f"{list(parameter.shape)}: it belongs to another model"
            )
        if not bool(state[name].isfinite().all()):
            raise ConfigError(f"adapter {adapter}: {name} has numbers that are not finite: start from another one")
        with torch.no_grad():
            parameter.copy_(state[name])


def _layers(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if _is_adapted(module))


def _is_adapted(module: nn.Module) -> bool:
    return hasattr(module, "lora_A") and hasattr(module, "base_layer")


def _import_peft() -> Any:
    try:
        return import_module("peft")
    except ImportError:
        raise ConfigError("learner.lora needs peft: pip install 'agentrl-train[lora]', or remove it") from None
