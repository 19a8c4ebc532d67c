"""Small random models of three architectures, saved once per test session."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.engine_models import config_of


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of seeded models by architecture."""
    paths = {}
    for seed, kind in enumerate(("qwen3", "qwen2", "llama", "mistral")):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config_of(kind))
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):  # initialised to constants, which would hide mistakes
                torch.nn.init.normal_(parameter, 0.5 if name.endswith("bias") else 1.0, 0.2)
        paths[kind] = tmp_path_factory.mktemp(kind)
        model.save_pretrained(paths[kind])
    return paths
