"""Load the causal language model from a folder."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

from agentrl.errors import ConfigError
from agentrl.models.model_config import (
    NO_WEIGHTS,
    auto_class,
    freeze_senses,
    one_line,
    read_config,
    takes_attention,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


LOADING = threading.RLock()
"""Held while transformers makes or loads a model: it patches PyTorch for that, in all threads."""


class LoadingReport(TypedDict):
    """The loading report that transformers returns for the weights."""

    missing_keys: set[str]
    mismatched_keys: set[tuple[str, tuple[int, ...], tuple[int, ...]]]


def load_causal_lm(directory: Path, where: str, *, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """Load the causal language model of a folder on the CPU, with all weights present.

    Args:
        where: names the folder in errors.
        attention: the attention that it computes with, as registered in transformers, if its family can.

    Raises:
        ConfigError: the folder contains no such model, or its weights do not match its config.json.
    """
    from transformers.utils import logging

    config = read_config(directory, where)
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with LOADING:
            loaded: object = auto_class(config).from_pretrained(
                directory,
                config=config,
                dtype=dtype,
                attn_implementation=attention if takes_attention(config) else None,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below, in one line
            )
    except NO_WEIGHTS as e:
        raise ConfigError(f"{where}: cannot load a causal language model: {one_line(e)}") from e
    finally:
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    model, report = cast("tuple[PreTrainedModel, LoadingReport]", loaded)
    if absent := sorted(report["missing_keys"]):
        more = f" and {len(absent) - 3} others" if absent[3:] else ""
        raise ConfigError(
            f"{where} holds no weights for {', '.join(map(repr, absent[:3]))}{more}: config.json and weights are "
            "not of the same model, or a file is missing"
        )
    if report["mismatched_keys"]:
        name, found, wanted = sorted(report["mismatched_keys"])[0]
        raise ConfigError(
            f"{where} is inconsistent: {name} has shape {list(found)}, but config.json requires {list(wanted)}"
        )
    return freeze_senses(model)
