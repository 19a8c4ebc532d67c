"""Check whether a model computes the same on packed rows as on each row alone, also beyond its length boundaries.

Sliding windows, attention chunks, position-dependent scales and top-key selection have no effect on shorter rows,
and real boundaries are thousands of tokens long. Therefore each model is tested twice: unchanged, and with the
same weights and all boundaries of its config reduced to a few tokens, on rows that exceed them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from agentrl.errors import ConfigError
from agentrl.models.model_config import config_sections, one_line, refuse_config

NEAR = 8
"""The length boundaries in tokens for the second test."""
SHARED = (5, 3, 9, 4, 7, 12, 2, 10, 6, 8, 1)
ENDS = ((8, 2, 6, 11, 3, 5, 13, 4, 9), (1, 3, 7))
ALONE = (6, 11, 2, 12, 4, 9, 1, 13, 5, 8, 3, 10, 7, 2, 6, 14, 11, 4, 9)
"""The test rows: two with a common beginning and a separate one; all are longer than `NEAR`."""

Packed = Callable[[PreTrainedModel], Tensor]
"""Function that computes the outputs for the tokens of all rows together: (N, M)."""
Alone = Callable[[PreTrainedModel], Sequence[Tensor]]
"""The same outputs computed by transformers itself, row by row."""


def probe(
    model: PreTrainedModel,
    packed: Packed,
    alone: Alone,
    *,
    where: str,
    advice: str,
    together: str = "on packed rows",
) -> None:
    """Check that both ways agree, with the config's own boundaries and with boundaries near the first token.

    Args:
        together: how `packed` computes the rows, for messages.

    Raises:
        ConfigError: they differ, or the model cannot be computed this way; one line that says why.
    """
    name = type(model).__name__
    refuse_config(model.config, where)
    kinds = unusual_layers(model.config)
    why = f"; it has layers of kind {', '.join(kinds)}" if kinds else ""
    tries = [(model, "")]
    with torch.no_grad():
        if far := boundaries(model.config):
            listed = ", ".join(f"{key} {value:,}" for key, value in sorted(far.items()))
            try:
                tries.append((with_near_boundaries(model), f" beyond {listed}"))
            except Exception as e:  # a model family's constructor may raise anything
                raise ConfigError(
                    f"{where}: {name} cannot be tried beyond {listed}: {one_line(e)}; {advice}"
                ) from e
        for tried, beyond in tries:
            try:
                found = packed(tried)
            except ConfigError as e:
                raise ConfigError(f"{where}: {e}") from e
            except Exception as e:  # families fail in many ways without their own mask or cache
                raise ConfigError(
                    f"{where}: {name} cannot be computed {together} ({one_line(e)}){why}; {advice}"
                ) from e
            try:
                wanted = torch.cat(list(alone(tried)))
            except Exception as e:
                raise ConfigError(
                    f"{where}: transformers cannot compute {name} with this config.json ({one_line(e)})"
                ) from e
            gap = relative_gap(found, wanted)
            if not gap < tolerance(tried) and bool(wanted.isfinite().all()):  # else the first gradient shows it
                raise ConfigError(
                    f"{where}: {name} computes different results {together} than on separate rows"
                    f"{beyond} (relative difference {gap:.1e}){why}; {advice}"
                )


def unusual_layers(config: PretrainedConfig) -> list[str]:
    """Return the kinds of layers other than full and sliding-window attention, if the config names them."""
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ())
    return sorted(kinds - {"full_attention", "sliding_attention", "attention"})


def relative_gap(found: Tensor, wanted: Tensor) -> float:
    """Return the largest distance between outputs of a token, relative to their norm."""
    found, wanted = found.float(), wanted.float()
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-6)).max())


def tolerance(model: PreTrainedModel) -> float:
    """Return the tolerance for rounding, which grows with the depth."""
    if model.dtype != torch.float32:
        return 0.1
    return 2e-5 * (1 + int(getattr(model.config.get_text_config(), "num_hidden_layers", 32)))


def boundaries(config: PretrainedConfig) -> dict[str, int]:
    """Return every config setting of the text model, by key, that takes effect only beyond `NEAR` tokens."""
    return {
        key: value
        for section in config_sections(config.get_text_config())
        for key, value in _numbers(section)
        if _BOUNDARY.search(key) and not _COUNT.search(key) and value > NEAR
    }


_BOUNDARY = re.compile(
    r"window|chunk|floor|capacity|local_attention|index_topk|index_block|topk_block|sparse_block|"
    r"original_max_position|attention_block"
)
_COUNT = re.compile(r"^(num|n|max)_|layers|_layer")


def with_near_boundaries(model: PreTrainedModel) -> PreTrainedModel:
    """Return the same model, sharing weights, with every boundary of its config set to `NEAR` tokens."""
    config = copy.deepcopy(model.config)
    for section in config_sections(config.get_text_config()):
        _bring_near(section)
    return _twin(model, config)


def with_eager_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Return the same model, sharing weights, with the attention that transformers writes out."""
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"
    return _twin(model, config)


def use_own_attention(model: PreTrainedModel) -> None:
    """Have a model compute with the attention that transformers gives it, if another one was put in its place."""
    if getattr(model, "_supports_attention_backend", False):
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")


def _twin(model: PreTrainedModel, config: PretrainedConfig) -> PreTrainedModel:
    """The same weights under another config."""
    device, dtype = model.device, torch.get_default_dtype()
    try:
        torch.set_default_dtype(model.dtype)
        with no_init_weights():
            twin: PreTrainedModel = type(model)(config)
    finally:
        torch.set_default_dtype(dtype)
    twin.load_state_dict(model.state_dict(), strict=False, assign=True)
    twin.to(device)  # type: ignore[arg-type]  # buffers: the parameters are there
    if getattr(model, "_supports_attention_backend", False):
        twin.set_attn_implementation(config._attn_implementation)
    twin.train(False)
    twin.requires_grad_(False)
    return twin


def _bring_near(section: dict[str, Any]) -> None:
    for key, value in list(section.items()):
        if isinstance(value, dict):
            _bring_near(value)
        elif _is_number(value) and _BOUNDARY.search(key) and not _COUNT.search(key) and value > NEAR:
            section[key] = type(value)(NEAR)


def _numbers(section: dict[str, Any]) -> Iterator[tuple[str, int]]:
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _numbers(value)
        elif _is_number(value):
            yield key, int(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
