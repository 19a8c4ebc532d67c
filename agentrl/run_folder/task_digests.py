"""Digests of a run's tasks, so that duplicates and leaks can be found without the data."""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import blake2b
from itertools import islice

from agentrl.types import Task

TASKS_FILE = "tasks.json"
MOST = 20_000
"""Tasks of each split that are recorded."""


def task_digests(train: Iterable[Task], held_out: Iterable[Task]) -> bytes:
    """The content of tasks.json: a digest of each task's row, or of its seed where it has none."""
    data = {
        "train": [_digest(task) for task in islice(train, MOST)],
        "held_out": [_digest(t) for t in islice(held_out, MOST)],
    }
    return json.dumps(data).encode()


def _digest(task: Task) -> str:
    said = json.dumps(dict(task.row), sort_keys=True, default=repr) if task.row else f"seed {task.seed} {task.id}"
    return blake2b(said.encode("utf-8", "replace"), digest_size=8).hexdigest()
