"""The history of a run: what was changed on resuming, and where a forked run came from."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from agentrl.errors import CheckpointError
from agentrl.run_folder.files import read_bounded, write_atomic

HISTORY = "history.jsonl"
LINEAGE = "lineage.json"


@dataclass(frozen=True, slots=True)
class Lineage:
    """Where a forked run came from.

    Attributes:
        run: the folder of the other run.
        step: the step it was forked after.
        weights_only: whether only the weights were taken, so that steps count from 1 again.
    """

    run: str
    step: int
    weights_only: bool = False

    def __str__(self) -> str:
        return f"{self.run}@{self.step}" + (", weights only" if self.weights_only else "")


def add_history(run: Path, step: int, changes: Mapping[str, object]) -> None:
    """Add an entry: what was changed after this step, by key or file. A torn last line is ended first."""
    file = run / HISTORY
    torn = file.is_file() and not file.read_bytes().endswith(b"\n")
    entry = {"time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), "step": step, "changes": dict(changes)}
    with file.open("a", encoding="utf-8") as lines:
        lines.write("\n" * torn + json.dumps(entry) + "\n")
        lines.flush()
        os.fsync(lines.fileno())


def read_history(run: Path) -> Sequence[Mapping[str, object]]:
    """All entries, oldest first; lines that are not whole are skipped."""
    found: list[Mapping[str, object]] = []
    path = run / HISTORY
    for line in read_bounded(path).decode("utf-8", "replace").splitlines() if path.is_file() else ():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and isinstance(entry.get("changes"), dict):
            found.append(entry)
    return found


def told_changes(changes: Mapping[str, object]) -> Iterator[str]:
    """The changes of an entry as lines of text."""
    for key, value in changes.items():
        if key == "code":
            yield from (f"code: {line}" for line in (value if isinstance(value, list) else [value]))
        elif isinstance(value, list) and len(value) == 2:
            yield f"{key}: {value[0]} -> {value[1]}"
        elif key != "forked from":
            yield f"{key}: {value}"


def copy_history(run: Path, target: Path, step: int) -> None:
    """Copy the entries that apply to the steps up to `step`."""
    entries = [entry for entry in read_history(run) if isinstance(at := entry.get("step"), int) and at < step]
    if entries:
        write_atomic(target / HISTORY, "".join(json.dumps(entry) + "\n" for entry in entries).encode())


def write_lineage(run: Path, lineage: Lineage) -> None:
    """Record where a run came from."""
    write_atomic(run / LINEAGE, (json.dumps(asdict(lineage), indent=2) + "\n").encode())


def read_lineage(run: Path) -> Lineage | None:
    """Where a run came from; None if it was not forked.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = run / LINEAGE
    if not path.is_file():
        return None
    try:
        return Lineage(**json.loads(read_bounded(path)))
    except (ValueError, TypeError, RecursionError) as e:
        raise CheckpointError(f"{path}: damaged: {e}") from None
