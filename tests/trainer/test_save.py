"""Checkpoints that are written while the next steps run."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.config.run import CheckpointConfig
from agentrl.trainer import save
from agentrl.trainer.save import Checkpoints


async def test_one_that_fails_prints_no_traceback_when_another_error_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With the run folder gone, the records fail as well, and that error is the run's."""
    monkeypatch.setattr(save, "copy_tokenizer", lambda *_: None)
    monkeypatch.setattr(save, "save_feed", lambda *_: None)

    @contextmanager
    def checkpoint(step: int, keep: int, best: bool) -> Iterator[Path]:
        yield tmp_path

    def fails(folder: Path) -> None:
        (folder / "gone" / "learner.json").write_text("")

    async def snapshot(state: Any) -> Any:
        return fails

    said: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
    with ThreadPoolExecutor(1) as disk_thread:
        checkpoints = Checkpoints(
            CheckpointConfig(background=True),
            store=SimpleNamespace(checkpoint=checkpoint),
            learner=SimpleNamespace(snapshot=snapshot),
            algorithm=SimpleNamespace(state_dict=dict),
            admission=None,
            renderer=SimpleNamespace(hash=""),
            start=tmp_path,
            disk_thread=disk_thread,
        )
        await checkpoints.save(1)
        with pytest.raises(FileNotFoundError, match="gone"):
            await checkpoints.saved()
        await checkpoints.save(2)
        await asyncio.wait({checkpoints._saving})
    del checkpoints
    gc.collect()
    await asyncio.sleep(0)
    assert said == []
