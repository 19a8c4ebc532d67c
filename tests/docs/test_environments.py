"""The example tasks of the page about environments run, and its held-out tasks are not training tasks."""

from __future__ import annotations

import asyncio
from typing import Any

from agentrl.testing import check_env
from tests.docs.blocks import ROOT, blocks_of


def written(*names: str) -> dict[str, Any]:
    """What the blocks that define these classes leave behind, with the classes that they build on."""
    found: dict[str, Any] = {"__name__": "page"}
    for block in blocks_of(ROOT / "docs/environments.md"):
        if block.language == "python" and any(f"class {name}(" in block.text for name in names):
            exec(compile(block.text, str(block), "exec"), found)
    return found


def test_the_example_tasks_do_not_repeat_in_the_held_out_split() -> None:
    shown = written("Ledger", "Endless", "Shown")["Shown"]
    rows = {
        split: {tuple(shown.tasks(split)[n].row.values()) for n in range(2000)} for split in ("train", "held_out")
    }
    assert len(rows["train"]) > 1990
    assert len(rows["train"] & rows["held_out"]) <= 2
    asyncio.run(check_env(shown, [shown.tasks()[n] for n in range(4)], reward_range=(-1, 1)))
