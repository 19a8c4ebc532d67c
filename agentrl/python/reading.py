"""Read a run folder."""

from __future__ import annotations

from pathlib import Path

from agentrl.errors import CheckpointError
from agentrl.run_folder import records
from agentrl.run_folder.files import at_home


def read_metrics(run: Path | str) -> list[dict[str, float]]:
    """The metrics of every step in order, each with its `step`; those of an evaluation in the background are with
    the step that it evaluates.

    Args:
        run: a run folder, also one that still trains.

    Raises:
        CheckpointError: it is not a run folder.
    """
    folder = at_home(run)
    if not (folder / "config.yaml").is_file():
        raise CheckpointError(f"{folder}: is not a run folder: it has no config.yaml")
    return [dict(values) for values in records.read_metrics(folder)]
