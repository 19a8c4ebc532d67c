"""The checkpoints of a run: the policy, the training state, and the position in the tasks."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from safetensors import SafetensorError

from agentrl.chat.template import Renderer
from agentrl.config.run import CheckpointConfig
from agentrl.errors import CheckpointError
from agentrl.learner.learner import Learner
from agentrl.rollout.admission import Admission
from agentrl.rollout.renderer import RENDERER_FILE
from agentrl.run_folder.checkpoints import steps_saved
from agentrl.run_folder.files import file_error, write_atomic
from agentrl.run_folder.store import RunStore
from agentrl.trainer.algorithm import Algorithm
from agentrl.trainer.feed import save_feed
from agentrl.trainer.start import copy_tokenizer


@dataclass
class Checkpoints:
    """Writes the checkpoints of a run.

    Args:
        start: the directory of the start policy, whose tokenizer is copied.
        disk_thread: where files are written.
    """

    config: CheckpointConfig
    store: RunStore
    learner: Learner
    algorithm: Algorithm
    admission: Admission
    renderer: Renderer
    start: Path
    disk_thread: Executor
    _saving: asyncio.Future[None] | None = None

    def has(self, step: int) -> bool:
        """Whether this step is saved; see `saved`."""
        return step in steps_saved(self.store.path / "checkpoints")

    async def save(self, step: int) -> None:
        """Write checkpoint `step`: a Hugging Face directory with its tokenizer, and the optimizer's state.

        It contains the current state; with `checkpoint.background` it is written while the next steps run.
        """
        await self.saved()
        with ExitStack() as stack:
            folder = stack.enter_context(self.store.checkpoint(step, self.config.keep, best=self.config.best))
            copy_tokenizer(self.start, folder)
            save_feed(self.admission, folder)
            write_atomic(folder / RENDERER_FILE, json.dumps({"hash": self.renderer.hash}).encode())
            write = await self.learner.snapshot(self.algorithm.state_dict())
            rest = stack.pop_all()

        def finish() -> None:
            try:
                with rest:
                    write(folder)
            except SafetensorError as e:
                raise file_error(e, folder) from e
            except OSError as e:
                e.filename = e.filename or str(folder)
                raise

        self._saving = asyncio.get_running_loop().run_in_executor(self.disk_thread, finish)
        self._saving.add_done_callback(_look)  # the run may end with another error, before it waits for this
        if not self.config.background:
            await self.saved()

    async def saved(self) -> None:
        """Wait for the checkpoint that is being written, if there is one.

        Raises:
            OSError: it could not be written, and was removed.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            await saving

    async def end(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """As the exit of a context: an error that ends the run, but not an abort, waits for `saved`."""
        if isinstance(error, Exception) and self._saving is not None:
            await asyncio.wait({self._saving})


def _look(saving: asyncio.Future[None]) -> None:
    """Take note of the error, so that asyncio prints no traceback if nobody waits for it."""
    if not saving.cancelled():
        saving.exception()


async def resume(learner: Learner, algorithm: Algorithm, directory: Path) -> None:
    """Restore learner and algorithm from a checkpoint, except for the weights, which the learner was loaded with.

    Raises:
        CheckpointError: the files are missing or damaged, or belong to another model.
    """
    note = await learner.load(directory)
    try:
        algorithm.load_state_dict(note)
    except (KeyError, TypeError, ValueError) as e:
        raise CheckpointError(f"checkpoint {directory} cannot be resumed: {e}") from e
