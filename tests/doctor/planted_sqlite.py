"""The shipped env of SQL questions with one fault each; a policy without a cold start plays them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentrl.env.tasks import Split
from agentrl.envs.sqlite import Sqlite
from agentrl.types import Task


class Leaky(Sqlite):
    """Held-out tasks are training tasks under other ids."""

    @classmethod
    def tasks(cls, split: Split = "train", seed: int = 0, *, size: int | None = None) -> Sequence[Task]:
        return [replace(task, id=f"{split}/{task.id}") for task in Sqlite.tasks("train", 0, size=64)]


class Repeated(Sqlite):
    """Four questions under many ids."""

    @classmethod
    def tasks(cls, split: Split = "train", seed: int = 0, *, size: int | None = None) -> Sequence[Task]:
        known = Sqlite.tasks(split, seed, size=4)
        return [replace(known[n % 4], id=f"{split}/{n}") for n in range(64)]
