"""Which files hold the rows of a dataset: a file, a list, a pattern, a folder, a name in the local cache."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

from agentrl.errors import ConfigError

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
SAVED = "dataset_info.json"
"""In a folder written by `Dataset.save_to_disk`."""
_NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]+)(?::(?P<pattern>\S+))?")
_WORDS = {"train": ("train",), "held_out": ("test", "validation", "valid", "val", "dev", "eval")}
_NO_ROWS = frozenset({"dataset_infos.json", "dataset_dict.json", "state.json", "config.json"})


def is_dataset_name(text: str, folder: Path | None = None) -> bool:
    """Whether `text` names a Hub dataset (`owner/name`, `owner/name:files`) rather than a local file."""
    match = _NAME.fullmatch(text)
    if match is None or match["name"].endswith(SUFFIXES) or glob.has_magic(match["name"]):
        return False
    return not ((folder or Path.cwd()) / text).exists()


def data_files(spec: str | Sequence[str], split: Literal["train", "held_out"] = "train") -> list[Path]:
    """The files (and saved datasets) that `spec` matches, in a stable order and without duplicates.

    Args:
        spec: a path, a pattern with `*`, `?` or `[...]` (`**` for any depth), a folder, or `owner/name[:files]`
            of a dataset in the local Hugging Face cache; or a list of these.
        split: selects files of a folder or dataset by name.

    Raises:
        ConfigError: nothing matches, or the files of a folder or dataset are ambiguous.
    """
    found: list[Path] = []
    for text in [spec] if isinstance(spec, str) else spec:
        try:
            files = _files(text, split)
        except OSError as e:  # the name is too long, a folder may not be listed
            where = "" if e.filename in (None, text) else f"{e.filename:.200}: "
            raise ConfigError(f"{text:.200} cannot be read: {where}{e.strerror or e}") from None
        found += [path for path in files if path not in found]
    if not found:
        raise ConfigError("the list of files is empty")
    return found


def _files(text: str, split: str) -> list[Path]:
    if not text:
        raise ConfigError("the name of the file is empty")
    path = Path(os.path.expanduser(text))
    if path.is_file() or (path / SAVED).is_file():
        return [path]
    if path.is_dir():
        return _in_folder(path, text, split, None)
    if is_dataset_name(text):
        match = _NAME.fullmatch(text)
        assert match is not None
        return _in_folder(_cached(match["name"]), text, split, match["pattern"])
    if glob.has_magic(text):
        matches = [Path(p) for p in sorted(glob.glob(str(path), recursive=True))]
        matches = [p for p in matches if p.is_file() or (p / SAVED).is_file()]
        if not matches:
            raise ConfigError(f"no file matches {text}")
        return matches
    raise ConfigError(f"{text} is neither a file nor a folder" if path.exists() else f"there is no file {text}")


def _cached(name: str) -> Path:
    download = f"to download it: hf download {name} --repo-type dataset"
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError:
        raise ConfigError(
            f"there is no file {name}, and datasets of the hub need huggingface_hub: "
            "pip install 'agentrl-train[hf]'"
        ) from None
    try:
        return Path(snapshot_download(name, repo_type="dataset", local_files_only=True))
    except (LocalEntryNotFoundError, ValueError, OSError):
        raise ConfigError(
            f"there is no file {name}, and no dataset of that name in the Hugging Face cache; {download}"
        ) from None


def _in_folder(folder: Path, text: str, split: str, pattern: str | None) -> list[Path]:
    """The files of a folder (or the saved datasets, as in a saved `DatasetDict`) that hold the rows of `split`."""
    closed: list[PermissionError] = []

    def skip(error: OSError) -> None:
        """Pass over a folder that was removed meanwhile, or that may not be listed, such as `lost+found`."""
        if isinstance(error, PermissionError):
            closed.append(error)
        elif not isinstance(error, FileNotFoundError):
            raise error

    everything = (Path(inside, name) for inside, _, names in os.walk(folder, onerror=skip) for name in names)
    files = [
        p.parent if p.name == SAVED else p
        for p in sorted(p for p in everything if p.suffix in SUFFIXES and p.name not in _NO_ROWS)
        if p.is_file()
    ]
    names = {p: p.relative_to(folder).as_posix() for p in files}
    if pattern is not None:
        chosen = [p for p in files if fnmatch(names[p], pattern) or names[p].startswith(f"{pattern}/")]
    else:
        chosen = files if len(files) == 1 and split == "train" else []
        for word in () if chosen else _WORDS[split]:
            chosen = chosen or [p for p in files if re.search(rf"(^|[^a-z]){word}([^a-z]|$)", names[p].lower())]
    listed = (
        ", ".join(names.values()) if len(names) <= 6 else f"{len(names)} files, {next(iter(names.values()))} first"
    )
    if closed and not chosen:
        raise closed[0]
    if not chosen:
        wanted = f"matching {pattern}" if pattern else f"of the split {split}"
        raise ConfigError(
            f"{text}: no .jsonl, .json or .parquet file {wanted} in {folder} (there are: {listed or 'none'})"
        )
    places = {p.parent for p in chosen}
    if pattern is None and len(places) > 1:
        shown = sorted(p.relative_to(folder).as_posix() for p in places)
        more = ", ..." if len(shown) > 6 else ""
        raise ConfigError(
            f"{text}: rows of the split {split} are in {len(places)} folders ({', '.join(shown[:6])}{more}): name "
            "the files"
        )
    return chosen
