"""Checkpoints that are written while the next steps run."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.config.run import CheckpointConfig
from agentrl.learner.learner import Learner
from agentrl.reporting.report import Silent
from agentrl.run_folder.checkpoints import steps_saved
from agentrl.trainer import save
from agentrl.trainer.save import Checkpoints
from tests.trainer.test_evaluation import settings
from tests.trainer.test_mixture import run


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


def test_an_error_that_ends_the_run_waits_for_the_checkpoint_that_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Ranks on Ray are ended with the learner, and would end what they write."""
    failed, happened, write, close = threading.Event(), list[str](), Learner._write, Learner.close

    class Fails(Silent):
        def step(self, metrics: Mapping[str, float]) -> None:
            if metrics.get("step") == 2:
                failed.set()
                raise RuntimeError("no more")

    def slowly(learner: Learner, directory: Path) -> None:
        failed.wait()
        write(learner, directory)
        happened.append("written")

    async def closed(learner: Learner) -> None:
        happened.append("closed")
        await close(learner)

    monkeypatch.setattr(Learner, "_write", slowly)
    monkeypatch.setattr(Learner, "close", closed)
    config = settings(checkpoint={"every": 1, "background": True})
    with pytest.raises(RuntimeError, match="no more"):
        run(config, tmp_path / "r", Fails())
    assert happened == ["written", "closed"]
    assert steps_saved(tmp_path / "r" / "checkpoints") == [1]
