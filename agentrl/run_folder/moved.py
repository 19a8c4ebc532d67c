"""Models and files that fixed keys name: a run knows them by their content, so that they may move.

`inputs.json` has a digest for each such key.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from agentrl.config import RunConfig
from agentrl.config.changes import Change, changes_of, kind_of
from agentrl.config.facts import PathTo, facts
from agentrl.config.schema import fields
from agentrl.run_folder.files import read_bounded

INPUTS_FILE = "inputs.json"
WHOLE = 4 << 20
"""Larger files are sampled: reading the weights of a large model takes minutes."""
BLOCKS, BLOCK = 64, 1 << 16
OF_A_MODEL = {".json", ".safetensors", ".bin", ".jinja", ".txt", ".model"}


def input_digests(config: RunConfig) -> bytes:
    """The content of inputs.json."""
    found = {key: content_digest(path) for key in _keys() if (path := _path(config, key)) is not None}
    return json.dumps({key: value for key, value in found.items() if value}).encode()


def content_digest(path: Path) -> str:
    """sha256 of a file, or of the files of a model; of large ones, the size and some blocks. Empty if missing."""
    found, files = hashlib.sha256(), [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in OF_A_MODEL)
    for file in files:
        if not file.is_file():
            return ""
        name = file.name if path.is_dir() else ""
        found.update(f"{name} {file.stat().st_size}\n".encode())
        for block in _blocks(file):
            found.update(block)
    return found.hexdigest() if files else ""


def changes_of_run(run: Path, old: RunConfig, new: RunConfig) -> list[Change]:
    """Every key whose value differs, and every model that was replaced under the same path.

    A model or file that has only moved is a free change.
    """
    recorded, found = _recorded(run), []
    for change in changes_of(old, new):
        before, after = _path(old, change.key), _path(new, change.key)
        if change.kind == "fixed" and change.key in _keys() and before is not None and after is not None:
            wanted = recorded.get(change.key) or content_digest(before)
            if wanted and content_digest(after) == wanted:
                change = replace(change, kind="free")
            else:
                why = "its content differs" if wanted else "the old one is gone and its content unknown"
                change = replace(change, new=f"{change.new} ({why})")
        found.append(change)
    return found + _replaced(new, recorded, {change.key for change in found})


def _replaced(config: RunConfig, recorded: Mapping[str, str], changed: Collection[str]) -> list[Change]:
    """The models whose content differs from what was recorded, other than those whose key changed."""
    found = []
    for key, wanted in recorded.items():
        path = None if key in changed else _path(config, key)
        if path is not None and path.is_dir() and content_digest(path) not in ("", wanted):
            found.append(Change(key, repr(str(path)), f"{str(path)!r} (its content differs)", "fixed"))
    return found


def with_current_inputs(config: RunConfig, current: RunConfig) -> RunConfig:
    """An earlier configuration of a run with the models and files where they are today."""
    update: dict[str, object] = {"model": current.model, "warmup": current.warmup}
    update["learner"] = config.learner.model_copy(update={"lora": current.learner.lora})
    if config.critic is not None and current.critic is not None:
        update["critic"] = config.critic.model_copy(update={"path": current.critic.path})
    return config.model_copy(update=update)


def _keys() -> list[str]:
    """The fixed keys that name a folder or a file."""
    return [".".join(map(str, loc)) for loc, field in fields() if any(facts(field, PathTo)) and _fixed(loc)]


def _fixed(loc: tuple[str | int, ...]) -> bool:
    return kind_of([str(part) for part in loc]) == "fixed"


def _path(config: RunConfig, key: str) -> Path | None:
    """The path that a key has; None if it has none, or a word such as `chatml`."""
    value: object = config
    for part in key.split("."):
        value = getattr(value, part, None)
    return Path(value) if isinstance(value, str) and Path(value).is_absolute() else None


def _recorded(run: Path) -> dict[str, str]:
    try:
        data = json.loads(read_bounded(run / INPUTS_FILE))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _blocks(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    with file.open("rb") as data:
        if size <= WHOLE:
            yield data.read()
            return
        for number in range(BLOCKS):
            data.seek((size - BLOCK) * number // (BLOCKS - 1))
            yield data.read(BLOCK)
