"""Weights & Biases."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Literal

from agentrl.reporting.loggers.hide_secrets import has_secrets
from agentrl.reporting.loggers.protocol import RunInfo, SampleEpisode
from agentrl.reporting.loggers.sample_table import COLUMNS


class Wandb:
    """Logs to a W&B server, or into files for `wandb sync`."""

    def __init__(self, project: str, entity: str | None, mode: Literal["online", "offline"] | None) -> None:
        self._project, self._entity, self._mode = project, entity, mode

    def start(self, run: RunInfo) -> None:
        """Start the run, or continue the one of the same id."""
        import wandb

        hides = has_secrets(sys.argv[1:])  # W&B's metadata contains the command
        settings = wandb.Settings(silent=True, console="off", x_disable_meta=hides)
        wandb.setup(settings=settings)  # of the whole process: nothing may ask for a key on the terminal of a run
        if (id := run.recall("id")) is None:
            id = uuid.uuid4().hex[:12]
            run.remember("id", id)
        self._run = wandb.init(
            project=self._project,
            entity=self._entity,
            mode=self._mode,
            id=id,
            resume="allow",
            reinit="create_new",  # else W&B returns a run that this process already has open
            name=run.name,
            dir=str(run.folder),
            config=dict(run.config),
            settings=settings,
        )
        # W&B refuses to log an earlier step again, as a run does after a crash: `step` is the axis instead.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """One row."""
        self._run.log({"step": step, **values})

    def episodes(self, step: int, rows: Sequence[SampleEpisode]) -> None:
        """A table per step."""
        import wandb

        table = wandb.Table(columns=list(COLUMNS), data=[list(astuple(row)) for row in rows])
        self._run.log({"step": step, "episodes_table": table})

    def finish(self, summary: Mapping[str, object]) -> None:
        """Write the summary and wait for the upload."""
        self._run.summary.update({f"summary/{key}": value for key, value in summary.items()})
        self._run.finish(exit_code=0 if summary else 1)

    def abandon(self) -> None:
        """Let the process end at once: W&B's exit hook would wait for the upload, however long that takes."""
        import wandb

        connection = getattr(wandb.setup(), "_connection", None)  # neither attribute is part of W&B's API
        forget_hook = getattr(connection, "_cleanup", None)
        if forget_hook is not None:
            forget_hook()
