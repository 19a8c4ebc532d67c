"""Hugging Face ids: models that are in the local cache, found without network access."""

from __future__ import annotations

import os
import re
from pathlib import Path

_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
WEIGHTS = ("*.safetensors", "*.bin")


def is_hub_id(text: str) -> bool:
    """Whether this may be an id such as `Qwen/Qwen3-0.6B` or `Qwen/Qwen3-0.6B@main`; a path may look the same."""
    return _ID.fullmatch(text) is not None


def cached_snapshot(text: str) -> Path | None:
    """The folder of a whole model (or adapter) in the local cache; None if it is not there."""
    found = _ID.fullmatch(text)
    if found is None:
        return None
    repo = cache_folder() / ("models--" + found["repo"].replace("/", "--"))
    revision = found["revision"] or "main"
    reference = repo / "refs" / revision
    if reference.is_file():
        revision = reference.read_text(encoding="utf-8").strip()
    snapshot = repo / "snapshots" / revision
    described = any((snapshot / name).is_file() for name in ("config.json", "adapter_config.json"))
    whole = described and any(file.exists() for pattern in WEIGHTS for file in snapshot.glob(pattern))
    return snapshot if whole else None


def cache_folder() -> Path:
    """Where Hugging Face's libraries keep what they download."""
    if own := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(os.path.expanduser(own))
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    return Path(os.path.expanduser(home)) / "hub"


def how_to_get(text: str) -> str:
    """The error for an id that is not in the cache."""
    found = _ID.fullmatch(text)
    assert found is not None
    revision = f" --revision {found['revision']}" if found["revision"] else ""
    return (
        f"the Hugging Face cache {cache_folder()} has no complete {found['repo']}; agentrl downloads nothing, so "
        f"run `hf download {found['repo']}{revision}` first; or, if a folder is meant, correct its path"
    )
