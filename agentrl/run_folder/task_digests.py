"""Digests of a run's tasks, so that duplicates and leaks can be found without the data."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from agentrl.clean import first_reason
from agentrl.errors import CheckpointError
from agentrl.run_folder.files import read_bounded
from agentrl.types import Task

TASKS_FILE = "tasks.json"
MOST, MOST_GENERATED = 20_000, 4_000
"""Tasks of each split that are recorded: of all envs, and of each env that generates its tasks."""


_NUMBERING = re.compile(r"(.*[_-])?(id|idx|index|uid|uuid|guid)|split", re.IGNORECASE)
"""Names of columns that number the rows, or name their split."""


def task_digests(train: Iterable[Task], held_out: Iterable[Task]) -> bytes:
    """The content of tasks.json: digests of the tasks of each split.

    `train` and `held_out` have those of whole rows, or of the seeds of tasks without one; `train_content` and
    `held_out_content` those of the env and the row without the columns that number it.
    """
    splits = {"train": list(islice(train, MOST)), "held_out": list(islice(held_out, MOST))}
    data = {split: [task_digest(task) for task in tasks] for split, tasks in splits.items()}
    data |= {f"{split}_content": [_content_digest(task) for task in tasks] for split, tasks in splits.items()}
    return json.dumps(data).encode()


def read_task_digests(path: Path) -> Mapping[str, Sequence[str]]:
    """The digests of each split. Raises CheckpointError if the file is missing or damaged."""
    try:
        return _DIGESTS.validate_json(read_bounded(path))
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read: {e.strerror}") from None
    except ValidationError as e:
        raise CheckpointError(f"{path}: damaged: {first_reason(e)}") from None


_DIGESTS: TypeAdapter[dict[str, list[str]]] = TypeAdapter(dict[str, list[str]])


def without_numbering(row: Any) -> Any:
    """A row without the columns that number it, those inside of objects included."""
    if not isinstance(row, dict):
        return row
    return {key: without_numbering(value) for key, value in row.items() if not _NUMBERING.fullmatch(str(key))}


def task_digest(task: Task) -> str:
    """Of the row of a task, or of the seed and the id of one without a row."""
    return _short(_said(dict(task.row)) if task.row else f"seed {task.seed} {task.id}")


def _content_digest(task: Task) -> str:
    content = without_numbering(dict(task.row))
    return _short(f"{task.env} {_said(content)}") if content else task_digest(task)


def _said(row: Any) -> str:
    return json.dumps(row, sort_keys=True, default=repr)


def _short(text: str) -> str:
    return blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()
