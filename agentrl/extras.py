"""Optional packages: which extra installs which module, and the one line that says so."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from agentrl.errors import ConfigError

DISTRIBUTION = "agentrl-train"

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "train": ("torch", "transformers", "tokenizers", "safetensors", "matplotlib", "huggingface_hub"),
    "serve": ("starlette", "uvicorn", "prometheus_client", "llguidance", "h11"),
    "ray": ("ray",),
    "lora": ("peft",),
    "docker": ("docker",),
    "mcp": ("mcp",),
    "openenv": ("websockets",),
    "hf": ("datasets",),
    "parquet": ("pyarrow",),
    "reasoning-gym": ("reasoning_gym",),
    "sglang": ("sglang",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "trackio": ("trackio",),
    "textarena": ("textarena",),
}
"""The modules that each extra of the distribution installs."""


def require(extra: str, what: str) -> None:
    """See that the packages of an extra are installed, without importing them.

    Args:
        what: what needs them, for the message.

    Raises:
        ConfigError: one is missing.
    """
    for module in EXTRAS[extra]:
        if not installed(module):
            raise ConfigError(_text(what, module, extra))


def installed(module: str) -> bool:
    """Whether a top-level package is installed, without importing it.

    A folder of that name where Python was started, such as the `wandb` that W&B writes to, is no package.
    """
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """What to say about an import that failed; None where the module belongs to no extra."""
    module = (error.name or "").partition(".")[0]
    extra = next((extra for extra, modules in EXTRAS.items() if module in modules), None)
    return None if extra is None else _text("this command", module, extra)


def _text(what: str, module: str, extra: str) -> str:
    return f"{what} needs {module}, which is not installed: pip install '{DISTRIBUTION}[{extra}]'"
