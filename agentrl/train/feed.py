"""Which tasks a run plays, and where they stand in a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from agentrl.config.run import RunConfig
from agentrl.env.curriculum import TaskSampler
from agentrl.errors import CheckpointError
from agentrl.rollout.admission import Admission
from agentrl.types import Task

SAMPLER_FILE = "sampler.json"
"""In a checkpoint: where the task sampler stands, and which groups were under way."""


def make_admission(config: RunConfig, tasks: Sequence[Task], *, done: int = 0) -> Admission:
    """The groups that a configuration asks for after `done` steps; `load_feed` says where the tasks stood then."""
    data, rollout = config.data.sampler, config.rollout
    return Admission(
        TaskSampler(tasks, config.seed, data.order, data.window, data.floor),
        groups_per_step=rollout.groups_per_step,
        first_step=done + 1,
        last_step=config.steps,
        max_staleness=rollout.max_staleness,
        groups_ahead=rollout.groups_ahead,
        refill=rollout.refill_zero_signal,
    )


def save_feed(admission: Admission, folder: Path) -> None:
    """Write into a checkpoint folder where the tasks stand. Groups under way are played again from there: no task
    is lost, and the same draws are made with the weights of the checkpoint."""
    (folder / SAMPLER_FILE).write_text(json.dumps(admission.state()))


def load_feed(admission: Admission, folder: Path) -> None:
    """Resume where `save_feed` was called.

    A checkpoint that has no such file was written by a version that walked through the tasks in order.

    Raises:
        CheckpointError: the file is damaged, or missing where the order is not sequential.
    """
    file = folder / SAMPLER_FILE
    if not file.exists() and admission.sampler.order == "sequential":
        done = (admission.next_step - 1) * admission.groups_per_step
        admission.restore({"drawn": done, "results": {}})
        return
    try:
        admission.restore(json.loads(file.read_text()))
    except OSError as e:
        raise CheckpointError(f"{file}: cannot read where the tasks stood: {e.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(f"{file}: damaged: {e}") from None
